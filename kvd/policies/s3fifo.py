"""S3-FIFO over the leaves of a forest. Pure.

New blocks wait in a small queue, a tenth of the tier; those used again while they wait move to the
main queue, the others go and are remembered for a while: one that comes back goes straight to
main. Main is a FIFO in which a used block is spared up to three times. A block takes its ancestors
along to main: no turn comes for them while they have children, and they would crowd the small
queue. Queue places are serials, and each queue's heap holds the evictable blocks only: a parent
whose children went has an old place and comes next.

S1. Every evictable block has an entry with its present place in its queue's heap.
S2. `_small_count` is the number of resident blocks in the small queue.
S3. A remembered block is not resident; there are at most as many as residents.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic

from kvd.policies.base import B

if TYPE_CHECKING:
    from kvd.policies.base import Request


class _Place(Generic[B]):
    """Where a resident block stands."""

    __slots__ = ("evictable", "parent", "serial", "small", "used_ns", "uses")

    def __init__(self, parent: B | None, now_ns: int) -> None:
        self.parent = parent
        self.small = True
        self.serial = 0
        self.uses = 0
        self.used_ns = now_ns
        self.evictable = False


class LeafS3Fifo(Generic[B]):
    """Quick demotion of what is not used again; nothing moves on a hit."""

    SMALL_SHARE: Final = 10
    """The small queue is one in so many residents."""
    USES_MAX: Final = 3
    SLACK = 1024
    """As `LeafLru.SLACK`."""

    def __init__(self) -> None:
        """Start empty."""
        self._places: dict[B, _Place[B]] = {}
        self._small: list[tuple[int, B]] = []
        self._main: list[tuple[int, B]] = []
        self._ghosts: OrderedDict[B, None] = OrderedDict()
        self._small_count = 0
        self._serial = 0
        self._bound = self.SLACK

    def touched(self, request: Request[B]) -> None:
        """Count a use of each resident block of a chain."""
        for block in request.chain:
            place = self._places.get(block)
            if place is not None:
                place.uses = min(place.uses + 1, self.USES_MAX)
                place.used_ns = request.now_ns

    def served(self, block: B) -> None:
        """Leave it where it is: the copy is the one used last."""

    def inserted(self, block: B, parent: B | None, now_ns: int) -> None:
        """Queue a block: in main if it is remembered, else in small."""
        assert block not in self._places  # B2
        place = self._places[block] = _Place(parent, now_ns)
        self._serial += 1
        place.serial = self._serial
        self._small_count += 1
        if block in self._ghosts:
            del self._ghosts[block]
            self._promote(block)

    def _promote(self, block: B) -> None:
        """Move a block to main, and its ancestors as far as they are in small."""
        node: B | None = block
        while node is not None:
            place = self._places.get(node)
            if place is None or not place.small:
                return
            place.small, place.uses = False, 0
            self._small_count -= 1
            self._serial += 1
            place.serial = self._serial
            if place.evictable:
                self._push(node, place)
            node = place.parent

    def evictable(self, block: B) -> None:
        """Line a block up at its place (S1)."""
        place = self._places[block]
        if not place.evictable:
            place.evictable = True
            self._push(block, place)

    def held(self, block: B) -> None:
        """Take a block out of the line; it keeps its place."""
        place = self._places.get(block)
        if place is not None:
            place.evictable = False

    def removed(self, block: B) -> None:
        """Forget a block of main, remember one of small."""
        place = self._places.pop(block)
        if place.small:
            self._small_count -= 1
            self._ghosts[block] = None
        while len(self._ghosts) > len(self._places):
            self._ghosts.popitem(last=False)

    def victim(self) -> B | None:
        """Return the first block of the queue whose turn it is that has not been used since."""
        while True:
            small = self._first(small=True)
            main = self._first(small=False)
            crowded = self._small_count * self.SMALL_SHARE > len(self._places)
            block = small if small is not None and (crowded or main is None) else main
            if block is None:
                return None
            place = self._places[block]
            if not place.uses:
                return block
            # Ends: each turn takes a use away or moves a block to main, and nothing adds any.
            if place.small:
                self._promote(block)
            else:
                place.uses -= 1
                self._serial += 1
                place.serial = self._serial
                self._push(block, place)

    def worth(self, block: B) -> float | None:
        """Return when the block was last used, in nanoseconds: queues know nothing better."""
        place = self._places.get(block)
        return None if place is None else float(place.used_ns)

    def _first(self, *, small: bool) -> B | None:
        heap = self._small if small else self._main
        while heap and not self._valid(heap[0], small=small):
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _valid(self, entry: tuple[int, B], *, small: bool) -> bool:
        place = self._places.get(entry[1])
        if place is None or not place.evictable:
            return False
        return place.serial == entry[0] and place.small == small

    def _push(self, block: B, place: _Place[B]) -> None:
        heapq.heappush(self._small if place.small else self._main, (place.serial, block))
        if len(self._small) + len(self._main) > self._bound:
            self._small = [e for e in set(self._small) if self._valid(e, small=True)]
            self._main = [e for e in set(self._main) if self._valid(e, small=False)]
            heapq.heapify(self._small)
            heapq.heapify(self._main)
            self._bound = 2 * (len(self._small) + len(self._main)) + self.SLACK

    def check(self) -> None:
        """Recount S1 to S3."""
        lined_up = {e[1] for e in self._small if self._valid(e, small=True)}
        lined_up |= {e[1] for e in self._main if self._valid(e, small=False)}
        assert lined_up == {b for b, place in self._places.items() if place.evictable}, "S1"
        assert len(self._small) + len(self._main) <= self._bound, "S1"
        assert self._small_count == sum(place.small for place in self._places.values()), "S2"
        assert not self._ghosts.keys() & self._places.keys(), "S3"
        assert len(self._ghosts) <= len(self._places), "S3"
