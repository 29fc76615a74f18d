"""The class that vLLM loads. It hands each call to one of the two halves and decides nothing.

Written for vLLM 0.32's KV connector V1. Whatever the halves raise at start keeps kvd out of the
engine, with one line that says why; the engine serves without it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.errors import Unsupported
from kvd_client.vllm.errors import log_fault
from kvd_client.vllm.options import read_options
from kvd_client.vllm.scheduler import Scheduler
from kvd_client.vllm.telemetry import KvdKept, KvdPromMetrics, KvdStats, stored_event
from kvd_client.vllm.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd_client.vllm.messages import Identity, Step

logger = logging.getLogger("kvd_client.vllm")


@dataclass
class KvdMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to worker, once a step."""

    step: Step


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once at the start: what the engine is, or why kvd stays out."""

    identity: Identity | None
    reason: str = ""


class KvdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """kvd as vLLM's KV connector."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        role: KVConnectorRole,
        kv_cache_config: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """Make the half of this role.

        Raises:
            BadOption: kv_connector_extra_config is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = read_options(transfer.kv_connector_extra_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._handshake: KvdHandshake | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(options)
            if transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    'set "kv_load_failure_policy": "recompute": with %r a load that fails,'
                    " because kvd was stopped say, fails the request",
                    transfer.kv_load_failure_policy,
                )
            return
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tensor, pipeline = get_tp_group(), get_pp_group()
        rank = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
        self._worker = Worker(vllm_config, kv_cache_config, options, rank)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what was not saved is computed again."""
        return False

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Find the pages; kvd is on from here on, or stays out."""
        assert self._worker is not None
        try:
            self._worker.register(
                kv_caches,
                backend=describe_backends(self._vllm_config, list(kv_caches)),
                version=vllm.__version__,
                writers=lambda layers: name_backends(self._vllm_config, layers),
            )
            self._handshake = KvdHandshake(self._worker.identity)
        except Unsupported as error:
            logger.error("kvd stays out of this engine: %s", error)  # noqa: TRY400
            self._handshake = KvdHandshake(None, str(error))
        except Exception:  # noqa: BLE001 - logged; an engine must not fail because of kvd
            log_fault("to describe this engine")
            self._handshake = KvdHandshake(None, "a mistake in kvd, see the worker's log")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half what this engine is."""
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Keep saves away from blocks that this step writes."""
        assert self._worker is not None
        assert isinstance(kv_connector_metadata, KvdMetadata)
        self._worker.begin_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin this step's loads."""
        assert self._worker is not None
        self._worker.load(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are over before a step needs them."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,  # noqa: ANN401 - a tensor
        attn_metadata: Any,  # noqa: ANN401 - vLLM's
        **kwargs: Any,  # noqa: ANN401 - vLLM's
    ) -> None:
        """Nothing: pages are saved once the whole step is over."""

    def wait_for_save(self) -> None:
        """Begin this step's saves."""
        assert self._worker is not None
        self._worker.end_step(self._get_connector_metadata().step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Report loads that have ended."""
        assert self._worker is not None
        ended = self._worker.take()
        self._bad_blocks = ended.bad_blocks
        single = len(self._kv_cache_config.kv_cache_groups) == 1
        return KVConnectorTransferResults(
            finished_recving=ended.loaded, failed_recving=set() if single else ended.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report blocks of failed loads; with several groups the request is named instead."""
        single = len(self._kv_cache_config.kv_cache_groups) == 1
        return self._bad_blocks if single else set()

    def get_kv_connector_stats(self) -> KvdStats | None:
        """Return what was counted since the last call, if anything."""
        half = self._worker or self._scheduler
        assert half is not None
        counts = half.counts.take()
        return KvdStats(data=counts) if counts else None

    def build_connector_worker_meta(self) -> KvdKept | None:
        """Report chunks that kvd has taken, when vLLM publishes events."""
        assert self._worker is not None
        kept = self._worker.kept()
        return KvdKept(dict.fromkeys(kept, 1)) if kept else None

    def shutdown(self) -> None:
        """End what is under way."""
        if self._worker is not None:
            self._worker.shutdown()
        elif self._scheduler is not None:
            self._scheduler.close()

    # ------------------------------------------------------------ scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Attach as what all ranks say the engine is."""
        assert self._scheduler is not None
        identities = {shake.identity for shake in metadata.values()}
        identity = identities.pop() if len(identities) == 1 else None
        if identity is None or len(metadata) != identity.layout.ranks:
            reasons = {shake.reason for shake in metadata.values() if shake.reason}
            why = "; ".join(sorted(reasons)) or "its ranks differ in what they hold"
            logger.error("kvd stays out of this engine: %s", why)
            return
        events = self._vllm_config.kv_events_config
        try:
            self._scheduler.attach(
                identity, events=events is not None and bool(events.enable_kv_cache_events)
            )
        except Unsupported as error:
            logger.error("kvd stays out of this engine: %s", error)  # noqa: TRY400

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """Say what can be loaded."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Take in a request's blocks."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """Make the step's message."""
        assert self._scheduler is not None
        return KvdMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401 - vLLM's
        """Take in which loads have ended."""
        assert self._scheduler is not None
        self._scheduler.loaded(connector_output.finished_recving or set())
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdKept):
            self._scheduler.kept(meta.kept)

    def take_events(self) -> list[Any]:
        """Tell of chunks that kvd has taken. That it has dropped one only kvd itself tells."""
        assert self._scheduler is not None
        tokens = self._scheduler.hash_tokens
        return [stored_event(chunk, tokens) for chunk in self._scheduler.take_news()]

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks go at once: a save of them is fenced when they are taken again."""
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def request_finished(
        self,
        request: Any,  # noqa: ANN401 - vLLM's
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as for all groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """Begin a new namespace: nothing saved before is found again by this engine."""
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdStats:
        """Make stats of counts that came from another process."""
        return KvdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdPromMetrics:
        """Make the counters of vLLM's metrics page."""
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def name_backends(vllm_config: Any, layers: Sequence[str]) -> list[str]:  # noqa: ANN401 - vLLM's
    """Name the classes of these layers' attention back ends, with their modules."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    backends = get_current_attn_backends(vllm_config, list(layers))
    return sorted(f"{backend.__module__}.{backend.__qualname__}" for backend in backends)


def describe_backends(vllm_config: Any, layers: list[str]) -> str:  # noqa: ANN401 - vLLM's
    """Name what writes the pages of these layers, and on what: it decides their inside."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.platforms import current_platform

    names = sorted(b.full_cls_name() for b in get_current_attn_backends(vllm_config, layers))
    text = f"{current_platform.device_type} {names}"
    if current_platform.device_type == "cpu":
        import torch

        features = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported())  # noqa: SLF001
        text += f" {current_platform.get_cpu_architecture()} {features}"
    return text
