"""Slabs cut into slots: who has which place. Pure; the memory is `host.py`'s.

    blank --assign to a tenant--> empty --cut for a size--> open/full --last slot freed--> empty

Invariants:

S1. A slab belongs to one tenant from its first assignment to its end.
S2. Per slab: used + free = slots, and no place is used twice.
S3. A generation names one use of one place and rises with every use, over all slabs.
S4. A tenant holds at most its share of slabs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.entry import ALIGN_BYTES, Slot, SlotEvent, SlotState, stride_of
from kvd.types import Generation, SlabId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvd.types import OwnerId, Tenant


class Slab:
    """One slab of a tenant.

    Attributes:
        id: Its number.
        tenant: Its owner for life.
        stride_bytes: Distance of two places; 0 while it is not cut.
        count: Places.
        slots: Place to its present use.
        touched: The latest tick of a chunk with an object here.
    """

    __slots__ = ("count", "free", "id", "slots", "stride_bytes", "tenant", "touched")

    def __init__(self, slab: SlabId, tenant: Tenant) -> None:
        """Start uncut."""
        self.id = slab
        self.tenant = tenant
        self.stride_bytes = 0
        self.count = 0
        self.free: list[int] = []
        self.slots: dict[int, Slot] = {}
        self.touched = 0

    def cut(self, stride_bytes: int, slab_bytes: int) -> None:
        """Divide an empty slab into places."""
        assert not self.slots
        self.stride_bytes = stride_bytes
        self.count = slab_bytes // stride_bytes
        self.free = list(range(self.count - 1, -1, -1))


class SlabPool:
    """Every slab of one tier, by tenant and size."""

    def __init__(self, slab_bytes: int, shares: Mapping[Tenant, int]) -> None:
        """Start without slabs.

        Args:
            slab_bytes: Size of each slab.
            shares: Most slabs a tenant may hold.
        """
        assert slab_bytes % ALIGN_BYTES == 0
        self.slab_bytes = slab_bytes
        self.shares = dict(shares)
        self._blank: list[SlabId] = []
        self._slabs: dict[SlabId, Slab] = {}
        self._empty: dict[Tenant, list[Slab]] = {tenant: [] for tenant in shares}
        self._open: dict[tuple[Tenant, int], dict[SlabId, Slab]] = {}
        self._held = dict.fromkeys(shares, 0)
        self._used = dict.fromkeys(shares, 0)
        self._strides: dict[Tenant, dict[int, int]] = {tenant: {} for tenant in shares}
        self._generation = 0
        self.on_free: Callable[[Slot], None] = _nothing
        """Hears of a slot with a twin that has become free."""

    def add_blank(self, slab: SlabId) -> None:
        """Take in a slab whose memory is ready and zero."""
        self._blank.append(slab)

    def adopt(
        self,
        number: SlabId,
        tenant: Tenant,
        stride_bytes: int,
        sizes: Mapping[int, int],
        owner: OwnerId,
    ) -> list[Slot]:
        """Take in a slab of a tenant as an earlier life left it.

        Args:
            number: Not known yet.
            tenant: Whose it was, with room in its share.
            stride_bytes: Distance of two places.
            sizes: Of the objects in it, by place; without any it is empty, but the tenant's (S1).
            owner: Of the slots.

        Returns:
            The slots, published.
        """
        assert number not in self._slabs
        assert number not in self._blank
        assert self._held[tenant] < self.shares[tenant], "S4"
        slab = self._slabs[number] = Slab(number, tenant)
        self._held[tenant] += 1
        if not sizes:
            self._empty[tenant].append(slab)
            return []
        slab.cut(stride_bytes, self.slab_bytes)
        assert set(sizes) <= set(slab.free), "S2"
        slab.free = [index for index in slab.free if index not in sizes]
        strides = self._strides[tenant]
        strides[stride_bytes] = strides.get(stride_bytes, 0) + 1
        opened = self._open.setdefault((tenant, stride_bytes), {})
        if slab.free:
            opened[number] = slab
        for index, size_bytes in sizes.items():
            self._generation += 1
            slot = Slot(
                generation=Generation(self._generation),
                tenant=tenant,
                slab=number,
                index=index,
                offset_bytes=index * stride_bytes,
                size_bytes=size_bytes,
                owner=owner,
            )
            slot.step(SlotEvent.RESERVE)
            slot.step(SlotEvent.PUBLISH)
            slab.slots[index] = slot
            self._used[tenant] += size_bytes
        return list(slab.slots.values())

    def tenant_of(self, slab: int) -> Tenant | None:
        """Return the slab's tenant, None for a blank or unknown one."""
        found = self._slabs.get(SlabId(slab))
        return found.tenant if found is not None else None

    def slab(self, slab: SlabId) -> Slab:
        """Return a slab that has a tenant."""
        return self._slabs[slab]

    def slabs_of(self, tenant: Tenant) -> Iterator[Slab]:
        """Iterate over a tenant's slabs."""
        return (slab for slab in self._slabs.values() if slab.tenant == tenant)

    def take(self, tenant: Tenant, size_bytes: int, owner: OwnerId) -> Slot | None:
        """Reserve a place for an object; None when the tenant has none free."""
        stride = stride_of(size_bytes)
        opened = self._open.setdefault((tenant, stride), {})
        if opened:
            slab = next(iter(opened.values()))
        else:
            found = self._cut(tenant, stride)
            if found is None:
                return None
            slab = opened[found.id] = found
        index = slab.free.pop()
        if not slab.free:
            del opened[slab.id]
        self._generation += 1
        slot = Slot(
            generation=Generation(self._generation),
            tenant=tenant,
            slab=slab.id,
            index=index,
            offset_bytes=index * stride,
            size_bytes=size_bytes,
            owner=owner,
        )
        slot.step(SlotEvent.RESERVE)
        slab.slots[index] = slot
        self._used[tenant] += size_bytes
        return slot

    def has_room(self, tenant: Tenant, size_bytes: int) -> bool:
        """Tell whether `take` would find a place."""
        blank = bool(self._blank) and self._held[tenant] < self.shares[tenant]
        opened = self._open.get((tenant, stride_of(size_bytes)))
        return bool(opened or self._empty[tenant] or blank)

    def _cut(self, tenant: Tenant, stride: int) -> Slab | None:
        """Find an empty or blank slab and cut it."""
        if stride > self.slab_bytes:
            return None
        if self._empty[tenant]:
            slab = self._empty[tenant].pop()
        elif self._blank and self._held[tenant] < self.shares[tenant]:
            slab = Slab(self._blank.pop(), tenant)
            self._slabs[slab.id] = slab
            self._held[tenant] += 1
        else:
            return None
        slab.cut(stride, self.slab_bytes)
        strides = self._strides[tenant]
        strides[stride] = strides.get(stride, 0) + 1
        return slab

    def give_back(self, slot: Slot) -> None:
        """Make the place of a slot that has become free available again."""
        assert slot.state is SlotState.FREE
        if slot.twin is not None:
            self.on_free(slot)
        slab = self._slabs[slot.slab]
        assert slab.slots.pop(slot.index) is slot  # S2
        slab.free.append(slot.index)
        self._used[slab.tenant] -= slot.size_bytes
        opened = self._open[slab.tenant, slab.stride_bytes]
        if slab.slots:
            opened[slab.id] = slab
        else:
            opened.pop(slab.id, None)
            strides = self._strides[slab.tenant]
            strides[slab.stride_bytes] -= 1
            if not strides[slab.stride_bytes]:
                del strides[slab.stride_bytes]
            slab.stride_bytes = 0
            slab.count = 0
            slab.free = []
            self._empty[slab.tenant].append(slab)

    def others(self, tenant: Tenant, size_bytes: int) -> list[Slab]:
        """Return the tenant's slabs that are cut for another size, least lately used first."""
        stride = stride_of(size_bytes)
        if not self._strides[tenant].keys() - {stride}:
            return []  # one size only, the usual case: nothing to look through
        slabs = [s for s in self.slabs_of(tenant) if s.slots and s.stride_bytes != stride]
        return sorted(slabs, key=lambda slab: slab.touched)

    def blanks(self) -> Iterator[SlabId]:
        """Iterate over the slabs that no tenant has, in the order in which they are assigned."""
        return reversed(self._blank)

    def blank_count(self) -> int:
        """Count slabs that no tenant has."""
        return len(self._blank)

    def held_count(self, tenant: Tenant) -> int:
        """Count a tenant's slabs."""
        return self._held[tenant]

    def used_bytes(self, tenant: Tenant) -> int:
        """Return the bytes of a tenant's objects, in whatever state."""
        return self._used[tenant]

    def check(self) -> None:
        """Recount everything; raises AssertionError naming the invariant that does not hold."""
        held = dict.fromkeys(self.shares, 0)
        for slab in self._slabs.values():
            held[slab.tenant] += 1
            places = sorted([*slab.free, *slab.slots])
            assert places == list(range(slab.count)), "S2"
            for index, slot in slab.slots.items():
                assert (slot.slab, slot.index, slot.tenant) == (slab.id, index, slab.tenant), "S1"
                assert slot.state is not SlotState.FREE, "S2"
                assert slot.generation <= self._generation, "S3"
                end = slot.offset_bytes + slab.stride_bytes
                assert slot.offset_bytes % ALIGN_BYTES == 0, "S2"
                assert end <= self.slab_bytes, "S2"
            key = (slab.tenant, slab.stride_bytes)
            opened = slab.id in self._open.get(key, {})
            assert opened == bool(slab.free), "S2"
            assert (slab in self._empty[slab.tenant]) == (not slab.slots), "S2"
        assert held == self._held, "S4"
        for tenant in self.shares:
            slabs = list(self.slabs_of(tenant))
            used = sum(slot.size_bytes for slab in slabs for slot in slab.slots.values())
            assert used == self._used[tenant], "S2"
            cut = [slab.stride_bytes for slab in slabs if slab.slots]
            assert {s: cut.count(s) for s in cut} == self._strides[tenant], "S2"
        assert all(held[tenant] <= self.shares[tenant] for tenant in held), "S4"


def _nothing(slot: Slot) -> None:
    """Stand in where there is no tier above."""
