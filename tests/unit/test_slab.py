"""The slab pool: places of one tenant and size, none used twice, all given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.entry import ALIGN_BYTES, SlotEvent, stride_of
from kvd.tiers.slab import SlabPool
from kvd.types import OwnerId, SlabId, Tenant

if TYPE_CHECKING:
    from kvd.entry import Slot

A: Final = Tenant("a")
B: Final = Tenant("b")
ME: Final = OwnerId(1)
SLAB_BYTES: Final = 5 * ALIGN_BYTES


def pool_of(blank: int, shares: dict[Tenant, int]) -> SlabPool:
    """Make a pool with so many blank slabs."""
    pool = SlabPool(SLAB_BYTES, shares)
    for slab in range(blank):
        pool.add_blank(SlabId(slab))
    return pool


def free(pool: SlabPool, slot: Slot) -> None:
    """End a reservation and give its place back."""
    slot.step(SlotEvent.ABORT)
    pool.give_back(slot)


def take_all(pool: SlabPool, tenant: Tenant, size: int) -> list[Slot]:
    """Take places until there are none."""
    slots = []
    while (slot := pool.take(tenant, size, ME)) is not None:
        slots.append(slot)
        assert len(slots) < 1000
    return slots


@pytest.mark.parametrize(
    ("size", "stride"),
    [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (1 << 36, 1 << 36)],
)
def test_stride(size: int, stride: int) -> None:
    """Places are whole pages, the fewest that hold the object."""
    assert stride_of(size) == stride


@given(
    st.lists(
        st.tuples(
            st.sampled_from([A, B]),
            st.sampled_from([1, 4096, 4097, 3 * 4096, SLAB_BYTES, SLAB_BYTES + 1]),
            st.integers(0, 3),
        ),
        max_size=60,
    )
)
def test_places_never_overlap(steps: list[tuple[Tenant, int, int]]) -> None:
    """Takes and returns in any order: live places share no byte, slabs keep their tenant."""
    shares = {A: 2, B: 3}
    pool = pool_of(4, shares)
    live: list[Slot] = []
    tenant_of: dict[int, Tenant] = {}
    last = 0
    for tenant, size, which in steps:
        if which and live:
            free(pool, live.pop(which % len(live)))
        slot = pool.take(tenant, size, ME)
        pool.check()
        if slot is None:
            continue
        assert slot.generation > last, "S3"
        last = slot.generation
        begin, end = slot.offset_bytes, slot.offset_bytes + size
        assert begin % ALIGN_BYTES == 0
        assert end <= SLAB_BYTES
        for other in live:
            apart = end <= other.offset_bytes or other.offset_bytes + other.size_bytes <= begin
            assert other.slab != slot.slab or apart, "S2"
        assert tenant_of.setdefault(slot.slab, tenant) == tenant == slot.tenant, "S1"
        assert pool.tenant_of(slot.slab) == tenant
        assert list(tenant_of.values()).count(tenant) <= shares[tenant], "S4"
        live.append(slot)
    for slot in live:
        free(pool, slot)
        pool.check()
    assert len(take_all(pool, A, SLAB_BYTES)) <= 2


@pytest.mark.parametrize(
    ("size", "count"), [(4096, 5), (4097, 2), (3 * 4096, 1), (SLAB_BYTES, 1), (SLAB_BYTES + 1, 0)]
)
def test_a_slab_holds_what_fits(size: int, count: int) -> None:
    """One slab has as many places as whole strides fit; a larger object has none, ever."""
    pool = pool_of(1, {A: 1})
    assert len(take_all(pool, A, size)) == count
    pool.check()


def test_a_tenant_stays_within_its_share() -> None:
    """Blank slabs left over are another tenant's, however much one wants (S4)."""
    pool = pool_of(3, {A: 2, B: 2})
    assert len(take_all(pool, A, SLAB_BYTES)) == 2
    assert len(take_all(pool, B, SLAB_BYTES)) == 1
    assert pool.take(A, 1, ME) is None


def test_an_empty_slab_is_cut_anew_for_its_tenant_only() -> None:
    """The last place given back makes a slab usable for another size, never by another tenant."""
    pool = pool_of(1, {A: 1, B: 1})
    slots = take_all(pool, A, 4096)
    assert pool.take(A, 8192, ME) is None
    for slot in slots[1:]:
        free(pool, slot)
    assert pool.take(A, 8192, ME) is None, "one place is still used"
    free(pool, slots[0])
    assert pool.take(B, 4096, ME) is None, "S1"
    again = take_all(pool, A, 8192)
    assert [slot.slab for slot in again] == [0, 0]
    assert again[0].generation > slots[-1].generation
    pool.check()


def test_a_place_is_given_back_once_and_only_when_free() -> None:
    """Giving back a reserved place, or the same use twice, is a bug that is seen."""
    pool = pool_of(1, {A: 1})
    slot, other = pool.take(A, 1, ME), pool.take(A, 1, ME)
    assert slot is not None
    assert other is not None
    with pytest.raises(AssertionError):
        pool.give_back(slot)
    free(pool, slot)
    with pytest.raises((AssertionError, KeyError)):
        pool.give_back(slot)
    newer = pool.take(A, 1, ME)
    assert newer is not None
    assert newer.index == slot.index
    with pytest.raises(AssertionError):
        pool.give_back(slot)


def test_others_are_the_slabs_of_another_stride() -> None:
    """Slabs for another size in use, the tenant's own, coldest first; the same stride is none."""
    pool = pool_of(6, {A: 5, B: 1})
    small = [pool.take(A, 4096, ME) for _ in range(10)]
    large = pool.take(A, 8192, ME)
    assert pool.take(B, 8192, ME) is not None
    assert large is not None
    slabs = sorted({slot.slab for slot in small if slot is not None})
    assert len(slabs) == 2
    pool.slab(slabs[0]).touched = 9
    pool.slab(slabs[1]).touched = 4
    assert [slab.id for slab in pool.others(A, 5000)] == [slabs[1], slabs[0]]
    assert [slab.id for slab in pool.others(A, 1)] == [large.slab]
    free(pool, large)
    assert pool.others(A, 1) == []
    assert {slab.id for slab in pool.slabs_of(A)} == {*slabs, large.slab}


def test_blank_and_unknown_slabs_have_no_tenant() -> None:
    """A client that asks for a slab that is nobody's or not there learns nothing."""
    pool = pool_of(1, {A: 1})
    assert pool.tenant_of(0) is None
    assert pool.tenant_of(2**32 - 1) is None


@pytest.mark.parametrize("what", ["held", "free", "tenant", "generation", "empty"])
def test_check_sees_a_broken_account(what: str) -> None:
    """`check` recounts: each kind of wrong account is an AssertionError."""
    pool = pool_of(2, {A: 2, B: 1})
    slot = pool.take(A, 4096, ME)
    assert slot is not None
    pool.check()
    slab = pool.slab(slot.slab)
    match what:
        case "held":
            pool._held[A] += 1
        case "free":
            slab.free.append(slot.index)
        case "tenant":
            slot.tenant = B
        case "generation":
            slot.generation = type(slot.generation)(99)
        case _:
            pool._empty[A].append(slab)
    with pytest.raises(AssertionError):
        pool.check()
