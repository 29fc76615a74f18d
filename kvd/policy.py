"""Which chunk goes first: leaf-first LRU. Pure.

Only leaves of the prefix tree are candidates, so a shared ancestor outlives what depends on it.
When a leaf goes, its parent inherits its tick if that is later: a chain's recency is that of its
latest use, however its ancestors came by it.

P1. Every evictable chunk has an entry with its present tick; other entries are stale and skipped.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.entry import Chunk


class LeafLru:
    """Evictable chunks in the order of their last use."""

    SLACK = 1024
    """Stale entries allowed beyond as many as there were live ones at the last clean-up."""

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[tuple[int, int, Chunk]] = []
        self._serial = 0
        self._bound = self.SLACK

    def offer(self, chunk: Chunk) -> None:
        """Take in a chunk that has become evictable, or was used while it was (P1)."""
        assert chunk.evictable  # P1
        self._serial += 1
        heapq.heappush(self._heap, (chunk.tick, self._serial, chunk))
        if len(self._heap) > self._bound:
            fresh = {id(entry[2]): entry for entry in self._heap if self._valid(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)
            self._bound = 2 * len(self._heap) + self.SLACK

    @staticmethod
    def _valid(entry: tuple[int, int, Chunk]) -> bool:
        tick, _, chunk = entry
        return chunk.tick == tick and chunk.evictable

    def victim(self) -> Chunk | None:
        """Return the evictable chunk used longest ago, without removing it."""
        while self._heap and not self._valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None
