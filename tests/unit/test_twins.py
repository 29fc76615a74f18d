"""Twins: places in GPU memory beside host slots, whatever happens to those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.entry import ALIGN_BYTES, SlotEvent, SlotState
from kvd.tiers.slab import SlabPool
from kvd.twins import Twins
from kvd.types import OwnerId, SlabId, Tenant
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from kvd.entry import Slot

A, B = Tenant("a"), Tenant("b")
PLACES = 3


class FakeChunk:
    """What a twin's eviction looks at."""

    def __init__(self) -> None:
        self.pins = self.moves = 0


def pools(slabs: int = 2) -> tuple[SlabPool, Twins]:
    """Make a large host pool and a small one for twins, wired up."""
    host = SlabPool(64 * ALIGN_BYTES, {A: 8, B: 8})
    for slab in range(16):
        host.add_blank(SlabId(slab))
    twins = Twins(SlabPool(PLACES * ALIGN_BYTES, {A: slabs, B: slabs}))
    for slab in range(2 * slabs):
        twins.pool.add_blank(SlabId(GPU_SLABS + slab))
    host.on_free = twins.drop
    return host, twins


def take(host: SlabPool, tenant: Tenant = A) -> Slot:
    """Reserve a host slot with a chunk."""
    slot = host.take(tenant, ALIGN_BYTES, OwnerId(1))
    assert slot is not None
    slot.chunk = FakeChunk()  # type: ignore[assignment]
    return slot


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["attach", "settle", "touch", "free", "pin", "unpin"]),
            st.integers(0, 30),
        ),
        max_size=120,
    )
)
def test_places_are_neither_lost_nor_shared(steps: list[tuple[str, int]]) -> None:
    """Under any order: places add up, none is used twice, a pinned chunk keeps its twin."""
    host, twins = pools()
    slots: list[Slot] = []
    for action, number in steps:
        if action == "attach":
            slot = take(host, A if number % 2 else B)
            held = [s for s in slots if s.twin and s.chunk and s.chunk.pins]
            twins.attach(slot)
            slots.append(slot)
            assert all(s.twin is not None for s in held)  # W2
        elif slots:
            slot = slots[number % len(slots)]
            assert slot.chunk is not None
            reserved = slot.twin is not None and slot.twin.state is SlotState.RESERVED
            if action == "settle" and reserved:
                slot.step(SlotEvent.PUBLISH)
                twins.settle(slot)
            elif action == "touch" and twins.readable(slot):
                twins.touch(slot)
            elif action in {"pin", "unpin"}:
                slot.chunk.pins = int(action == "pin")
            elif action == "free" and not slot.chunk.pins:
                published = slot.state is SlotState.PUBLISHED
                slot.step(SlotEvent.EVICT if published else SlotEvent.ABORT)
                host.give_back(slot)
                assert slot.twin is None  # W1
                slots.remove(slot)
        twins.check()
        places = [(s.twin.slab, s.twin.index) for s in slots if s.twin is not None]
        assert len(places) == len(set(places))
        used = sum(twins.pool.used_bytes(tenant) for tenant in (A, B))
        assert used == len(places) * ALIGN_BYTES


def test_the_oldest_use_goes_first_and_only_of_the_same_tenant() -> None:
    """Room is made by the tenant's own least lately used twin."""
    host, twins = pools(1)
    other = take(host, B)
    own = [take(host) for _ in range(PLACES)]
    for slot in [other, *own]:
        assert twins.attach(slot)
        slot.step(SlotEvent.PUBLISH)
        twins.settle(slot)
    twins.touch(own[0])
    new = take(host)
    assert twins.attach(new)
    assert own[1].twin is None
    assert own[0].twin is not None
    assert other.twin is not None


def test_what_is_being_filled_is_not_readable_and_not_given_up() -> None:
    """A twin is told of only once it is settled, and stays while it is filled (W3)."""
    host, twins = pools(1)
    slots = [take(host) for _ in range(PLACES)]
    assert all(twins.attach(slot) for slot in slots)
    assert not any(twins.readable(slot) for slot in slots)
    assert not twins.attach(take(host))


def test_after_a_freeze_nothing_is_given_out_or_taken_back() -> None:
    """What a failed device may still write is used by nobody (W4)."""
    host, twins = pools(1)
    slot = take(host)
    assert twins.attach(slot)
    slot.step(SlotEvent.PUBLISH)
    twins.settle(slot)
    twins.freeze()
    assert not twins.readable(slot)
    assert not twins.attach(take(host))
    used = twins.pool.used_bytes(A)
    slot.step(SlotEvent.EVICT)
    host.give_back(slot)
    assert slot.twin is None
    assert twins.pool.used_bytes(A) == used


def test_a_slot_has_one_twin() -> None:
    """A second twin for a slot is a mistake of ours (W1)."""
    host, twins = pools(1)
    slot = take(host)
    assert twins.attach(slot)
    with pytest.raises(AssertionError):
        twins.attach(slot)
