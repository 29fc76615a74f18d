"""Leaf-first LRU. Pure.

When a leaf goes, its parent inherits its last use if that is later: a chain's recency is that of
its latest use, however its ancestors came by it.

L1. Every evictable block has an entry with its present serial in the heap; others are stale.
L2. Serials order uses: a later use has a larger one.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Generic

from kvd.policies.base import B

if TYPE_CHECKING:
    from kvd.policies.base import Request


class _Use(Generic[B]):
    """The last use of a resident block."""

    __slots__ = ("evictable", "parent", "serial", "used_ns")

    def __init__(self, parent: B | None) -> None:
        self.parent = parent
        self.serial = 0
        self.used_ns = 0
        self.evictable = False


class LeafLru(Generic[B]):
    """The evictable block used longest ago goes first."""

    SLACK = 1024
    """Stale entries allowed beyond as many as there were live ones at the last clean-up."""

    def __init__(self) -> None:
        """Start empty."""
        self._uses: dict[B, _Use[B]] = {}
        self._heap: list[tuple[int, int, B]] = []
        self._serial = 0
        self._bound = self.SLACK

    def touched(self, request: Request[B]) -> None:
        """Use the resident blocks of a chain, its tail first: the tail is to go first."""
        uses = self._uses
        for block in reversed(request.chain):
            use = uses.get(block)
            if use is not None:
                self._stamp(block, use, request.now_ns)

    def served(self, block: B) -> None:
        """Leave it where it is: the copy is the one used last."""

    def inserted(self, block: B, parent: B | None, now_ns: int) -> None:
        """Take in a block, used now."""
        assert block not in self._uses  # B2
        use = self._uses[block] = _Use(parent)
        self._stamp(block, use, now_ns)

    def _stamp(self, block: B, use: _Use[B], now_ns: int) -> None:
        self._serial += 1
        use.serial = self._serial
        use.used_ns = now_ns
        if use.evictable:
            self._push(block, use)

    def evictable(self, block: B) -> None:
        """Line a block up by its last use (L1)."""
        use = self._uses[block]
        if not use.evictable:
            use.evictable = True
            self._push(block, use)

    def held(self, block: B) -> None:
        """Take a block out of the line; its entry goes stale."""
        use = self._uses.get(block)
        if use is not None:
            use.evictable = False

    def removed(self, block: B) -> None:
        """Forget a block; its parent inherits its last use."""
        use = self._uses.pop(block)
        above = None if use.parent is None else self._uses.get(use.parent)
        if above is not None and above.serial < use.serial:
            assert not above.evictable  # B3: it had a child until now
            above.serial, above.used_ns = use.serial, use.used_ns

    def victim(self) -> B | None:
        """Return the evictable block used longest ago."""
        heap = self._heap
        while heap and not self._valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def worth(self, block: B) -> float | None:
        """Return when the block was last used, in nanoseconds."""
        use = self._uses.get(block)
        return None if use is None else float(use.used_ns)

    def _push(self, block: B, use: _Use[B]) -> None:
        self._serial += 1  # also breaks ties, so that blocks need no order of their own
        heapq.heappush(self._heap, (use.serial, self._serial, block))
        if len(self._heap) > self._bound:
            fresh = {entry[2]: entry for entry in self._heap if self._valid(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)
            self._bound = 2 * len(self._heap) + self.SLACK

    def _valid(self, entry: tuple[int, int, B]) -> bool:
        use = self._uses.get(entry[2])
        return use is not None and use.evictable and use.serial == entry[0]

    def check(self) -> None:
        """Recount L1 and L2."""
        lined_up = {entry[2] for entry in self._heap if self._valid(entry)}
        assert lined_up == {block for block, use in self._uses.items() if use.evictable}, "L1"
        serials = [use.serial for use in self._uses.values()]
        assert len(set(serials)) == len(serials), "L2"
        assert all(serial <= self._serial for serial in serials), "L2"
        assert len(self._heap) <= self._bound, "L1"
