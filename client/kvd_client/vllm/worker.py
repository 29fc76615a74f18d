"""The half of the connector in each vLLM worker: has the memory, moves the pages.

All calls come from the engine's thread, in a step's order: `begin_step` before anything is
overwritten, `load`, the forward, `end_step`. None waits for kvd, but for a save's piece that is
being copied from a block that is taken again, and for loads with `load: sync`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from kvd_client import _copiers
from kvd_client.client import Client
from kvd_client.errors import KvdError
from kvd_client.link import warn
from kvd_client.salt import read_salt
from kvd_client.vllm.cuts import Cuts, as_fp8, cut_groups
from kvd_client.vllm.identity import cache_order, describe
from kvd_client.vllm.mover import CLOSE_S, Ended, Mover
from kvd_client.vllm.pages import find_pages
from kvd_client.vllm.stats import Counts
from kvd_client.vllm.stopwatch import Stopwatch, stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvd_client.vllm.gpu_pages import GpuPages
    from kvd_client.vllm.messages import Identity, Step
    from kvd_client.vllm.options import Options
    from kvd_client.vllm.pages import Pages

GREET_S: Final = 1.0
THREADS_MAX: Final = 4
REPORT_TOKENS_MIN: Final = 256
"""Steps of fewer tokens say nothing about how fast the engine computes a prompt."""


class Worker:
    """All of one rank's worker half."""

    def __init__(self, config: Any, caches: Any, options: Options, rank: int) -> None:  # noqa: ANN401
        """Be off until `register`.

        Args:
            config: vLLM's VllmConfig.
            caches: vLLM's KVCacheConfig.
            options: The user's.
            rank: pp_rank * tp + tp_rank.
        """
        self._config = config
        self._caches = caches
        self._options = options
        self._rank = rank
        self._generation = ""
        self._pages: Pages | GpuPages | None = None
        self._client: Client | None = None
        self._mover: Mover | None = None
        self._stopwatch = Stopwatch()
        self._step_tokens = 0
        self.identity: Identity | None = None
        self.counts = Counts()

    def register(
        self,
        tensors: Mapping[str, Any],
        *,
        backend: str,
        version: str,
        writers: Callable[[Sequence[str]], Sequence[str]],
    ) -> None:
        """Find the pages and connect.

        Args:
            tensors: The view of each layer, or of each part of its state, by its name.
            backend: What writes the pages: attention back ends, and what else decides their inside.
            version: vLLM's.
            writers: Names the classes of the attention back ends of some layers.

        Raises:
            Unsupported: This engine's KV cannot be cached safely.
        """
        identity = describe(
            self._config,
            self._caches,
            tensors,
            self._options,
            backend=backend,
            version=version,
        )
        read_salt(self._options.salt_file)
        cuts: Cuts = ()
        if self._options.fp8:
            cuts = cut_groups(
                self._caches, tensors, writers, cache_order(self._config, self._caches)
            )
            identity = as_fp8(identity, cuts)
        threads = max(1, min(THREADS_MAX, os.cpu_count() or 1))
        copier = _copiers.best_copier(threads)
        self._pages = find_pages(self._caches, tensors, identity.pages, copier, cuts)
        for group, pages in zip(identity.layout.groups, self._pages.groups, strict=True):
            assert group.object_bytes == pages.object_bytes
        self._stopwatch = stopwatch(on_gpu=self._pages.on_gpu)
        self.identity = identity
        self._connect()

    def _connect(self) -> None:
        """Open this rank's session, in the current generation of the namespace."""
        assert self.identity is not None
        assert self._pages is not None
        layout, namespace = self.identity.layout, self.identity.namespace
        client = Client(
            self._options.socket,
            namespace=namespace._replace(
                salt=read_salt(self._options.salt_file), extra=namespace.extra + self._generation
            ),
            layout=layout,
            rank=self._rank,
            name=f"vllm worker {self._rank}",
            wait_s=self._options.wait_s,
        )
        if self._pages.on_gpu:
            client.map_lazily()
        try:
            client.greet(GREET_S)
        except KvdError as error:
            warn(f"{error}; the engine goes on without kvd until that changes")
        replica = all(group.kind == "mla" for group in layout.groups) and self._rank % layout.tp
        self._client = client
        events = getattr(self._config, "kv_events_config", None)
        self._mover = Mover(
            client,
            self._pages,
            self.counts,
            writes=not replica,
            tells=bool(events is not None and events.enable_kv_cache_events),
        )

    def begin_step(self, step: Step) -> None:
        """Make the blocks that this step may write to safe to write."""
        self._step_tokens = step.tokens
        self._stopwatch.begin()
        if self.identity is None:
            return
        if step.generation != self._generation:
            self.close(saves_s=0.0)
            self._generation = step.generation
            self._connect()
        assert self._mover is not None
        self._mover.fence(step.reused)

    def load(self, step: Step) -> None:
        """Begin a step's loads; those the step waits for are over when this returns."""
        if self._mover is None:
            return
        for load in step.loads:
            if load.wait:
                self._mover.load_now(load)
            else:
                self._mover.load(load)

    def end_step(self, step: Step) -> None:
        """Begin a step's saves: its forward is over. Tell how fast it was."""
        if self._mover is None:
            return
        for save in step.saves:
            self._mover.save(save)
        assert self._client is not None
        for tokens, seconds in self._stopwatch.end(self._step_tokens):
            if tokens >= REPORT_TOKENS_MIN and self._rank == 0:
                self._client.report_prefill(tokens, seconds)
        self._step_tokens = 0

    def take(self) -> Ended:
        """Return the loads that have ended."""
        return self._mover.take() if self._mover is not None else Ended(set(), set(), set())

    def kept(self) -> list[bytes]:
        """Return the chunks that kvd has taken from this rank, when vLLM publishes events."""
        return self._mover.kept() if self._mover is not None else []

    def close(self, *, saves_s: float = CLOSE_S) -> None:
        """End what is under way, and the session; saves get `saves_s`."""
        if self._mover is not None:
            self._mover.close(saves_s=saves_s)
            self._mover = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def shutdown(self) -> None:
        """End for good: the memory that copies needed goes as well."""
        self.close()
        if self._pages is not None:
            self._pages.close()
