"""What `kvd warm` does, a step at a time: chunks that lie on NVMe only come up. On the loop.

The latest used first, each after what is before it in its chain. Only free room is used: nothing
warm goes for it.

M1. A step holds a pin on each chunk that it brings up, until that has ended or the step is over.
"""

from __future__ import annotations

import asyncio
import heapq
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvd.quota import Resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.catalog import Catalog
    from kvd.entry import Chunk, Space

STEP: Final = 16
"""Chunks on their way up at once."""
SLICE: Final = 1024
CANDIDATES: Final = 16_384
"""Chunks that one `kvd warm` considers, the latest used of all."""


class Riser(Protocol):
    """What brings chunks up."""

    def promote(self, chunk: Chunk, done: Callable[[bool], None]) -> bool:
        """Begin, or join; False when there is no room."""
        ...

    def leave(self, chunk: Chunk, done: Callable[[bool], None]) -> None:
        """Stop waiting."""
        ...


class Done(NamedTuple):
    """What a step did.

    Attributes:
        chunks: Brought up.
        host_bytes: What they take in host memory.
        failed: Chunks that did not come up.
        full: Whether there was no room for more.
    """

    chunks: int = 0
    host_bytes: int = 0
    failed: int = 0
    full: bool = False


class Warming:
    """One `kvd warm` under way."""

    def __init__(self, catalog: Catalog, riser: Riser, space: Space, limit_s: float) -> None:
        """Plan; `limit_s` is what a step may take."""
        self._catalog = catalog
        self._riser = riser
        self._space = space
        self._limit_s = limit_s
        self._left: list[Chunk] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing is left to bring up."""
        return self._left is not None and not self._left

    def room_bytes(self) -> int:
        """Return what the tenant has free in host memory."""
        pool, tenant = self._catalog.pool, self._space.tenant
        return pool.shares[tenant] * pool.slab_bytes - pool.used_bytes(tenant)

    async def _choose(self) -> list[Chunk]:
        """Return the candidates, the best last."""
        best: list[tuple[int, int, Chunk]] = []
        for index, chunk in enumerate(list(self._space.chunks.values())):
            if not index % SLICE:
                await asyncio.sleep(0)
            if chunk.cold_place is not None and not chunk.ready:
                item = (chunk.tick, -index, chunk)
                if len(best) < CANDIDATES:
                    heapq.heappush(best, item)
                else:
                    heapq.heappushpop(best, item)
        return [chunk for _, _, chunk in sorted(best)]

    async def step(self, budget_bytes: int) -> Done:
        """Bring some chunks up, for at most so many bytes of host memory."""
        if self._left is None:
            self._left = await self._choose()
        chosen, full = self._next(min(budget_bytes, self.room_bytes()))
        if full:
            self._left = []
        up = await self._bring_up(chosen)
        if chosen and not up:
            self._left = []  # the disk, most likely: the next ones would fail as well
        return Done(len(up), sum(up.values()), len(chosen) - len(up), full)

    def _next(self, room_bytes: int) -> tuple[list[Chunk], bool]:
        """Take the next chunks off the list, each with those before it that are not up."""
        assert self._left is not None
        chosen: dict[Chunk, None] = {}
        left = min(room_bytes, self._catalog.quota.left(self._space.tenant, Resource.PINNED_BYTES))
        while self._left and len(chosen) < STEP:
            chain = []
            node: Chunk | None = self._left[-1]
            while node is not None and not node.ready and node not in chosen:
                chain.append(node)
                node = node.parent
            for chunk in reversed(chain):
                size = chunk.weight_bytes
                if self._space.chunks.get(chunk.hash) is not chunk or chunk.cold_place is None:
                    break  # gone, or a hole above: nothing after it could be used
                if size > left:
                    return list(chosen), True
                if len(chosen) == STEP:
                    return list(chosen), False
                left -= size
                chosen[chunk] = None
            self._left.pop()
        return list(chosen), False

    async def _bring_up(self, chunks: list[Chunk]) -> dict[Chunk, int]:
        """Promote chunks and wait for them (M1); return those that came, with their bytes."""
        up: dict[Chunk, int] = {}
        waiting: dict[Chunk, Callable[[bool], None]] = {}
        over = asyncio.Event()
        self._catalog.pin(chunks)
        try:
            for chunk in chunks:
                done = _ender(chunk, waiting, up, over)
                waiting[chunk] = done
                if not self._riser.promote(chunk, done):
                    del waiting[chunk]
                    break
            if waiting:
                async with asyncio.timeout(self._limit_s):
                    await over.wait()
        except TimeoutError:
            pass
        finally:
            for chunk, done in waiting.items():
                self._riser.leave(chunk, done)
            self._catalog.unpin(chunks)
        return up


def _ender(
    chunk: Chunk,
    waiting: dict[Chunk, Callable[[bool], None]],
    up: dict[Chunk, int],
    over: asyncio.Event,
) -> Callable[[bool], None]:
    """Return what the end of a chunk's promotion calls."""

    def done(read: bool) -> None:  # noqa: FBT001 - the riser's signature
        waiting.pop(chunk, None)
        if read:
            up[chunk] = chunk.size_bytes
        if not waiting:
            over.set()

    return done
