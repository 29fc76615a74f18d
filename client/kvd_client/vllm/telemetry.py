"""The connector's counts as vLLM's logger, its Prometheus page, and its event stream take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.utils import create_metric_per_engine

from kvd_client.vllm import stats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd_client.vllm.announce import Chunk


@dataclass
class KvdStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of `kvd_client.vllm.stats`, summed over ranks and halves."""

    data: dict[str, int]

    def reset(self) -> None:
        """Start anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts."""
        self.data = stats.added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a line for the log."""
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not self.data


class KvdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter `vllm:kvd_NAME` for each name of `kvd_client.vllm.stats`."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register the counters."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=f"vllm:kvd_{name}", documentation=about, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, about in stats.NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


@dataclass
class KvdKept(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler: chunks that kvd has taken, and from how many ranks."""

    kept: dict[bytes, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's."""
        assert isinstance(other, KvdKept)
        return KvdKept(stats.added(self.kept, other.kept))


def stored_event(chunk: Chunk, block_tokens: int) -> BlockStored:
    """Tell of a chunk in vLLM's words. The salt stays out of it: `extra_keys` would carry it."""
    parent = chunk.parent
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block) for block in chunk.blocks],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=list(chunk.tokens),
        block_size=block_tokens,
        lora_id=chunk.adapter[1] if chunk.adapter else None,
        medium=MEDIUM_CPU,
        lora_name=chunk.adapter[0] if chunk.adapter else None,
        locality="LOCAL",
    )
