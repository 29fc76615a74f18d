"""An order of chunks by their last use. Pure.

P1. Whoever keeps chunks here offers one again whenever it comes to satisfy `valid`, or is used
    while it does; entries with another tick, or that do not satisfy it any more, are skipped.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.entry import Chunk


class LeafLru:
    """Chunks that satisfy a condition, least lately used first."""

    SLACK = 1024
    """Stale entries allowed beyond as many as there were live ones at the last clean-up."""

    def __init__(self, valid: Callable[[Chunk], bool]) -> None:
        """Start empty.

        Args:
            valid: The condition; looked at when a chunk comes up.
        """
        self._holds = valid
        self._heap: list[tuple[int, int, Chunk]] = []
        self._serial = 0
        self._bound = self.SLACK

    def offer(self, chunk: Chunk) -> None:
        """Take in a chunk that satisfies the condition (P1)."""
        assert self._holds(chunk)  # P1
        self._serial += 1
        heapq.heappush(self._heap, (chunk.tick, self._serial, chunk))
        if len(self._heap) > self._bound:
            fresh = {id(entry[2]): entry for entry in self._heap if self._valid(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)
            self._bound = 2 * len(self._heap) + self.SLACK

    def _valid(self, entry: tuple[int, int, Chunk]) -> bool:
        tick, _, chunk = entry
        return chunk.tick == tick and self._holds(chunk)

    def has(self, chunk: Chunk) -> bool:
        """Tell whether a chunk is here as it is now; for checks, it looks at all of them."""
        return any(self._valid(entry) for entry in self._heap if entry[2] is chunk)

    def victim(self) -> Chunk | None:
        """Return the chunk used longest ago, without removing it."""
        while self._heap and not self._valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
