"""The catalog recounted from scratch: in tests after every step. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.entry import SlotState
from kvd.quota import Resource

if TYPE_CHECKING:
    from kvd.catalog import Catalog


def check_catalog(catalog: Catalog) -> None:
    """Recount everything; raises AssertionError naming the invariant that does not hold."""
    catalog.pool.check()
    catalog.eviction.check(catalog.spaces.values())
    pinned = dict.fromkeys(catalog.pool.shares, 0)
    published = set()
    for (tenant, namespace, layout), space in catalog.spaces.items():
        assert (space.tenant, space.namespace, space.layout.id) == (tenant, namespace, layout)
        for key, chunk in space.chunks.items():
            assert chunk.hash == key, "T1"
            chunk.check()
            pinned[tenant] += chunk.pinned_bytes
            published |= {s for s in chunk.slots.values() if s.state is SlotState.PUBLISHED}
    filling = dict.fromkeys(catalog.pool.shares, 0)
    for slot in catalog.fillings.all():
        assert slot.state in {SlotState.RESERVED, SlotState.QUARANTINED}, "E1"
        filling[slot.tenant] += slot.size_bytes
    for tenant in catalog.pool.shares:
        dirty = [
            c.dirty_bytes
            for space in catalog.spaces.values()
            if space.tenant == tenant
            for c in space.chunks.values()
        ]
        assert sum(dirty) == catalog.eviction.dirty_bytes[tenant], "V2"
        held = {s for slab in catalog.pool.slabs_of(tenant) for s in slab.slots.values()}
        others = {*catalog.fillings.all(), *catalog.damaged}
        assert {s for s in published if s.tenant == tenant} == held - others, "C3"
        assert catalog.quota.used(tenant, Resource.PINNED_BYTES) == pinned[tenant], "C3"
        assert catalog.quota.used(tenant, Resource.FILLING_BYTES) == filling[tenant], "C3"
    for slot in catalog.damaged:
        assert slot.state is SlotState.QUARANTINED, "Y4"
        assert slot.chunk is None, "Y4"
        assert catalog.pool.slab(slot.slab).slots[slot.index] is slot, "Y4"
    quarantined = [s for s in catalog.fillings.all() if s.state is SlotState.QUARANTINED]
    assert sum(slot.size_bytes for slot in quarantined) == catalog.quarantined_bytes, "C3"
    catalog.fillings.check()
