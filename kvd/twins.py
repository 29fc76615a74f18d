"""Copies in GPU memory of objects that have a slot in host memory: which and where. Pure.

A *twin* is a place in a slab of the GPU tier beside a host slot, with the same bytes. The tier is
inclusive: an object has a twin only while it has a host slot, so a twin that goes is never a loss,
and look-ups, leases and evictions need not know of twins. What a lease pins, it pins with its twin.

    attach            settle             drop: for room, or as its host slot goes
 -  ------> RESERVED ---------> PUBLISHED -------------------------------------> free
               (a twin also goes from RESERVED, with its host slot's reservation)

Invariants:

W1. A twin has one host slot, of the same tenant and size, and ends no later than it does. That of
    a slot that is out of use for good stays with it: somebody may be reading it.
W2. A twin is given up for room only while nobody holds, fills or moves its chunk.
W3. A twin is told to readers only when PUBLISHED: an engine filled it and published, or the
    daemon's copy into it has ended.
W4. After `freeze` no place is given out or taken back: something may still write anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.entry import SlotEvent, SlotState
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from kvd.entry import Slot
    from kvd.tiers.slab import SlabPool

EVICTIONS_MAX: Final = 64
"""Most twins given up for one that comes."""
LOOKS_MAX: Final = 256
"""Most twins looked at meanwhile."""


class Twins:
    """All twins of one GPU."""

    def __init__(self, pool: SlabPool) -> None:
        """Use a pool of the tier's own slabs."""
        self.pool = pool
        self.frozen = False
        self.evicted = 0
        self._order: dict[Slot, None] = {}  # host slots with a PUBLISHED twin, oldest use first

    def __len__(self) -> int:
        """Count the twins that readers may be told of."""
        return len(self._order)

    def attach(self, slot: Slot) -> bool:
        """Give a host slot a twin to be filled; False where there is no room."""
        assert slot.twin is None  # W1
        if self.frozen:
            return False
        twin = self.pool.take(slot.tenant, slot.size_bytes, slot.owner)
        if twin is None and self._make_room(slot):
            twin = self.pool.take(slot.tenant, slot.size_bytes, slot.owner)
        if twin is None:
            return False
        assert twin.slab >= GPU_SLABS
        slot.twin = twin
        return True

    def _make_room(self, slot: Slot) -> bool:
        """Give up twins of the slot's tenant, least lately used first, until a place is free."""
        evicted = looks = 0
        for other in list(self._order):
            looks += 1
            if looks > LOOKS_MAX or evicted >= EVICTIONS_MAX:
                break
            chunk = other.chunk
            if other.tenant != slot.tenant or chunk is None or chunk.pins or chunk.moves:
                continue  # W2
            self.drop(other)
            evicted += 1
            if self.pool.has_room(slot.tenant, slot.size_bytes):
                break
        self.evicted += evicted
        return bool(evicted)

    def settle(self, slot: Slot) -> None:
        """Say that a twin holds its object's bytes."""
        assert slot.twin is not None
        slot.twin.step(SlotEvent.PUBLISH)
        self._order[slot] = None

    def readable(self, slot: Slot) -> bool:
        """Tell whether a reader may be told of the slot's twin (W3)."""
        twin = slot.twin
        return twin is not None and twin.state is SlotState.PUBLISHED and not self.frozen

    def touch(self, slot: Slot) -> None:
        """Note a use."""
        del self._order[slot]
        self._order[slot] = None

    def drop(self, slot: Slot) -> None:
        """End a slot's twin, if it has one: for room, or because the host slot ends (W1)."""
        twin, slot.twin = slot.twin, None
        if twin is None:
            return
        self._order.pop(slot, None)
        if self.frozen:
            return  # W4
        twin.step(SlotEvent.EVICT if twin.state is SlotState.PUBLISHED else SlotEvent.ABORT)
        self.pool.give_back(twin)

    def set_aside(self, slot: Slot) -> None:
        """Tell nobody any more of the twin of a slot that is out of use for good (W1)."""
        self._order.pop(slot, None)

    def freeze(self) -> None:
        """Give nothing out and take nothing back any more (W4)."""
        self.frozen = True
        self._order.clear()

    def check(self) -> None:
        """Recount; raises AssertionError naming the invariant that does not hold."""
        self.pool.check()
        for slot in self._order:
            twin = slot.twin
            assert twin is not None, "W1"
            assert (twin.tenant, twin.size_bytes) == (slot.tenant, slot.size_bytes), "W1"
            assert twin.state is SlotState.PUBLISHED, "W3"
            assert slot.state is SlotState.PUBLISHED, "W1"
