"""What `kvd evict` does, a step at a time. On the loop.

Leaves go before what they hang from, so that every step leaves whole prefixes. What is leased,
pinned, being filled or moved stays, with all before it, and is counted as held.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvd.catalog import Catalog
    from kvd.entry import Chunk, Space

    Forget = Callable[[Sequence[Chunk]], Awaitable[int]]

STEP: Final = 256
"""Chunks that go in one step."""
LOOKS: Final = 16_384
"""Chunks looked at in one step."""
SLICE: Final = 1024
"""Of these, before the others on the loop have their turn."""
REASON: Final = "operator"


class Done(NamedTuple):
    """What a step did.

    Attributes:
        chunks: Given up, or that would be.
        host_bytes: Freed in host memory.
        nvme_bytes: Records given up on NVMe.
        held: Chunks that stay because somebody uses them, or what follows them.
        undeleted: Records that could not be deleted: the next start may find them again.
    """

    chunks: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    held: int = 0
    undeleted: int = 0


class Eviction:
    """One `kvd evict` under way; ends when nobody asks for its next step."""

    def __init__(
        self,
        catalog: Catalog,
        space: Space,
        *,
        old: Callable[[Chunk], bool],
        forget: Forget | None,
        host_only: bool,
        dry: bool,
    ) -> None:
        """Remember the chunks there are now.

        Args:
            catalog: Of the chunks.
            space: Whose chunks.
            old: Whether a chunk was last used long enough ago.
            forget: Gives up copies on NVMe and returns how many it could not; None without NVMe.
            host_only: Free host memory only, of chunks that have a copy on NVMe.
            dry: Change nothing.
        """
        self._catalog = catalog
        self._space = space
        self._old = old
        self._forget = forget
        self._host_only = host_only
        self._dry = dry
        self._left = list(space.chunks.values())  # taken from the end: the latest, mostly leaves
        self._blocked: list[Chunk] = []
        self._gone: set[Chunk] = set()
        self._moved_on = False

    @property
    def over(self) -> bool:
        """Whether nothing is left to look at."""
        return not self._left

    async def step(self) -> Done:
        """Look at some chunks and give up those that may go."""
        going: list[Chunk] = []
        held = looked = 0
        while self._left and looked < LOOKS and len(going) < STEP:
            looked += 1
            if not looked % SLICE:
                if going:
                    break  # what was looked at may change while the others have their turn
                await asyncio.sleep(0)
            chunk = self._left.pop()
            if self._is_meant(chunk):
                if chunk.pins or chunk.filling or chunk.moves:
                    held += 1
                elif self._is_leaf(chunk):
                    going.append(chunk)
                    self._gone.add(chunk)
                else:
                    self._blocked.append(chunk)
        done = await self._give_up(going, held)
        self._moved_on |= bool(going)
        if self._left or not self._blocked:
            return done
        if self._moved_on:  # what hung from the blocked ones may have gone meanwhile
            self._left, self._blocked, self._moved_on = self._blocked[::-1], [], False
            return done
        return done._replace(held=done.held + len(self._blocked))

    def _is_meant(self, chunk: Chunk) -> bool:
        """Whether it is there, old enough, and in the tier that is meant."""
        there = self._space.chunks.get(chunk.hash) is chunk and self._old(chunk)
        return there and (not self._host_only or bool(chunk.mask and chunk.clean))

    def _is_leaf(self, chunk: Chunk) -> bool:
        """Whether nothing hangs from it, but for what goes in this step or would have gone."""
        children = chunk.children()
        if self._host_only:
            return all(not child.warm or child in self._gone for child in children)
        return all(child in self._gone for child in children)

    async def _give_up(self, going: list[Chunk], held: int) -> Done:
        host = sum(chunk.size_bytes for chunk in going)
        cold = [] if self._host_only else [chunk for chunk in going if chunk.cold_place is not None]
        nvme = sum(chunk.cold_bytes for chunk in cold)
        undeleted = 0
        if not self._dry:
            for chunk in going:
                if chunk.mask:
                    self._catalog.evict(chunk, REASON)
            if cold and self._forget is not None:
                undeleted = await self._forget(cold)
            self._gone.clear()
        return Done(len(going), host, nvme, held, undeleted)
