"""What a restart keeps of host memory: no object in another's place, and every account right."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.catalog import Catalog
from kvd.entry import SlotState
from kvd.keepsake import Picture, adopt, decode, encode, objects_of, picture, slabs_to_keep, wanted
from kvd.metrics import Counters
from kvd.policies import POLICIES
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout
from kvd_client.wire import Status
from tests.cold_kit import chain

PAGE, PLACES, SLABS = 4096, 4, 12
TENANTS = (Tenant("a"), Tenant("b"))
SMALL = Layout(4, 4, "float16", (Group("full", 1, 1, 8, PAGE),))
RANKS = Layout(4, 4, "float16", (Group("full", 1, 1, 8, 2 * PAGE),), tp=2)
MIXED = Layout(
    4, 4, "float16", (Group("full", 1, 1, 8, PAGE), Group("sliding", 1, 1, 8, PAGE // 2, 8))
)
ME = OwnerId(1)
ROOT = b"n" * 32


def empty(
    slabs: int = SLABS, tenants: tuple[Tenant, ...] = TENANTS, policy: str = "lru"
) -> Catalog:
    """Make a catalog without slabs."""
    pool = SlabPool(PLACES * PAGE, dict.fromkeys(tenants, slabs // len(tenants)))
    limits = dict.fromkeys(Resource, 1 << 40)
    quota = Quota({tenant: dict(limits) for tenant in tenants})
    return Catalog(pool, quota, Counters(), policy)


def fresh() -> Catalog:
    """Make one with blank slabs."""
    made = empty()
    for number in range(SLABS):
        made.pool.add_blank(SlabId(number))
    return made


def put(catalog: Catalog, space: Any, hashes: list[bytes], rank: int = 0, first: int = 0) -> None:
    """Store a rank's objects of a chain, as far as there is room."""
    records = catalog.reserve(
        space,
        ME,
        rank,
        parent=hashes[first - 1] if first else space.namespace,
        hashes=hashes[first:],
        groups=(1 << len(space.layout.groups)) - 1,
        deadline_ns=1 << 62,
        lossy=len(hashes) % 2 == 0,
    )
    for record in records:
        if record[2] == Status.OK:
            assert catalog.publish(ME, Generation(record[6]), 1) is Status.OK


def digest(slot: Any) -> bytes:
    """Stand for the bytes of an object: what it is of, wherever it lies."""
    return b"%s/%d" % (slot.chunk.hash[:8], slot.column)


def kept_of(catalog: Catalog) -> Picture:
    """Let go of a catalog, by way of bytes."""
    slabs = slabs_to_keep(catalog)
    digests = {slot: digest(slot) for slab in slabs for slot in slab.slots.values()}
    return decode(encode(picture(catalog, digests, slabs)))


def everything(kept: Picture) -> dict[int, set[int]]:
    """Say that all of it was verified."""
    return {slab: {each.place for each in found} for slab, found in objects_of(kept).items()}


def content(catalog: Catalog) -> dict[tuple[str, bytes, bytes, int], tuple[int, int, bool]]:
    """Map every published object to its place."""
    return {
        (space.tenant, space.layout.id, chunk.hash, column): (slot.slab, slot.index, slot.lossy)
        for space in catalog.spaces.values()
        for chunk in space.chunks.values()
        for column, slot in chunk.slots.items()
        if slot.state is SlotState.PUBLISHED
    }


stores = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.sampled_from([SMALL, RANKS, MIXED]),
        st.sampled_from(["x", "y", "z"]),
        st.integers(1, 5),
        st.integers(0, 1),
    ),
    max_size=14,
)


@settings(deadline=None)
@given(stores, st.sampled_from(sorted(POLICIES)), st.data())
def test_what_comes_back_is_what_went(asked: list[Any], policy: str, data: st.DataObject) -> None:
    """Every object that was verified, and whose chain is whole, is where it was; no other is.

    The accounts of the new catalog are right then, and after it was filled to the brim.
    """
    old = fresh()
    for tenant, layout, name, length, rank in asked:
        space = old.enter(tenant, ROOT, "label", layout)
        put(old, space, chain(name, length), rank if layout.tp > 1 else 0)
        old.leave(space)
    old.check()
    kept = kept_of(old)
    good = {
        slab: data.draw(st.sets(st.sampled_from(sorted(places)))) if places else set()
        for slab, places in everything(kept).items()
        if data.draw(st.booleans())
    }
    new, heard = empty(policy=policy), list[Any]()
    new.on_publish = heard.append
    taken = adopt(new, kept, good)
    assert all(slot.digest == digest(slot) for slot in heard), "its sum goes on"
    for number in set(range(SLABS)) - set(good):
        new.pool.add_blank(SlabId(number))
    new.check()
    before, after = content(old), content(new)
    assert len(heard) == len(after), "each may be watched"
    assert after.items() <= before.items()
    assert taken == sum(bool(c.mask) for s in new.spaces.values() for c in s.chunks.values())
    assert {(slab, place) for slab, place, _ in after.values()} <= {
        (slab, place) for slab, places in good.items() for place in places
    }
    for slab in good:
        assert new.pool.tenant_of(slab) == old.pool.tenant_of(slab), "Y3"
    if all(good.get(slab) == places for slab, places in everything(kept).items()):
        assert after == before
        for key, space in old.spaces.items():
            hashes = sorted(space.chunks)
            assert sorted(new.spaces[key].chunks) == hashes
    for number in range(30):  # it is used, evicted and cut anew as ever
        tenant, layout = TENANTS[number % 2], (SMALL, RANKS, MIXED)[number % 3]
        space = new.enter(tenant, ROOT, "label", layout)
        put(new, space, chain(f"later {number}", 4))
        new.leave(space)
    new.check()


def test_the_order_of_use_survives() -> None:
    """What was used longest ago goes first after a restart as well."""
    old = fresh()
    space = old.enter(TENANTS[0], ROOT, "label", SMALL)
    chains = [chain(f"c{number}", 4) for number in range(6)]
    for hashes in chains:
        put(old, space, hashes)
    old.unpin(old.hold(space, chains[0], 0))
    new = empty()
    kept = kept_of(old)
    adopt(new, kept, everything(kept))
    again = new.enter(TENANTS[0], ROOT, "label", SMALL)
    put(new, again, chain("new", 4))
    assert new.usable(again, chains[0]) == 4, "used last"
    assert new.usable(again, chains[1]) < 4, "used longest ago"
    new.check()


@pytest.mark.parametrize("how", ["pinned", "reserved", "quarantined", "moving"])
def test_a_slab_that_somebody_may_touch_is_not_kept(how: str) -> None:
    """One slot is enough; the other slabs are (Y1)."""
    catalog = fresh()
    space = catalog.enter(TENANTS[0], ROOT, "label", SMALL)
    hashes = chain("c", 2 * PLACES)
    put(catalog, space, hashes)
    assert len(slabs_to_keep(catalog)) == 2
    first = space.chunks[hashes[0]].slots[0].slab
    if how == "pinned":
        catalog.hold(space, hashes[:1], 0)
    elif how == "moving":
        catalog.begin_demotion(space.chunks[hashes[0]])
    else:
        catalog.evict(space.chunks[hashes[-1]])
        (record,) = catalog.reserve(
            space, ME, 0, parent=ROOT, hashes=chain("d", 1), groups=1, deadline_ns=9
        )
        first = SlabId(record[3])
        if how == "quarantined":
            catalog.sweep(10)
    assert first not in [slab.id for slab in slabs_to_keep(catalog)]
    assert len(slabs_to_keep(catalog)) == 1


def test_only_what_fits_is_wanted() -> None:
    """Another slab size, fewer slabs, a smaller share, a tenant that is gone."""
    old = fresh()
    for tenant in TENANTS:
        space = old.enter(tenant, ROOT, "label", SMALL)
        put(old, space, chain(tenant, 2 * PLACES))
    kept = kept_of(old)
    size, shares = PLACES * PAGE, old.pool.shares
    numbers = set(kept.slabs)
    assert len(numbers) == 4
    assert wanted(kept, size, SLABS, shares) == numbers
    assert wanted(kept, 2 * size, SLABS, shares) == set()
    assert wanted(kept, size, max(numbers), shares) == numbers - {max(numbers)}
    assert len(wanted(kept, size, SLABS, {TENANTS[0]: 1, TENANTS[1]: 5})) == 3
    assert len(wanted(kept, size, SLABS, {TENANTS[1]: 5})) == 2
    new = empty(tenants=TENANTS[1:])
    good = {n: p for n, p in everything(kept).items() if kept.slabs[n][0] == TENANTS[1]}
    assert adopt(new, kept, good) == 2 * PLACES
    new.check()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_picture_or_refused(noise: bytes) -> None:
    """Nothing else is raised."""
    try:
        decode(noise)
    except ValueError:
        return
    raise AssertionError("accepted")
