"""The slot's state machine: the table, and nothing beside it."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest

from kvd.entry import TRANSITIONS, Chunk, Slot, SlotEvent, SlotState, Space
from kvd.errors import InvariantError
from kvd.identity import rules_of
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout

LAYOUT: Final = Layout(4, 4, "float16", (Group("full", 1, 1, 8, 100),), tp=2)


def slot_of(state: SlotState) -> Slot:
    """Make a slot in a state."""
    slot = Slot(
        generation=Generation(7),
        tenant=Tenant("a"),
        slab=SlabId(0),
        index=0,
        offset_bytes=0,
        size_bytes=100,
        owner=OwnerId(1),
    )
    slot.state = state
    return slot


def space_of(layout: Layout = LAYOUT) -> Space:
    """Make a space."""
    return Space(Tenant("a"), b"n" * 32, "label", layout, rules_of(layout))


@pytest.mark.parametrize(("state", "event"), list(product(SlotState, SlotEvent)))
def test_step_follows_the_table(state: SlotState, event: SlotEvent) -> None:
    """Each pair either moves as the table says or is an InvariantError that changes nothing."""
    slot = slot_of(state)
    target = TRANSITIONS.get((state, event))
    if target is not None:
        slot.step(event)
        assert slot.state is target
        return
    with pytest.raises(InvariantError, match=f"generation 7: {event.value} in state"):
        slot.step(event)
    assert slot.state is state


def reachable(start: SlotState, *, without: set[SlotEvent]) -> set[SlotState]:
    """States that can follow a state when some events never happen."""
    found, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        for (before, event), after in TRANSITIONS.items():
            if before is state and event not in without and after not in found:
                found.add(after)
                waiting.append(after)
    return found


def test_only_publishing_makes_findable() -> None:
    """Without PUBLISH nothing is ever PUBLISHED (E1)."""
    assert SlotState.PUBLISHED not in reachable(SlotState.FREE, without={SlotEvent.PUBLISH})


def test_a_deadline_alone_frees_nothing() -> None:
    """From RESERVED, time alone leads to quarantine and stays there (E2)."""
    only_time = set(SlotEvent) - {SlotEvent.DEADLINE}
    assert reachable(SlotState.RESERVED, without=only_time) == {
        SlotState.RESERVED,
        SlotState.QUARANTINED,
    }
    said = {SlotEvent.CONFIRM, SlotEvent.HOLDER_DEAD}
    assert reachable(SlotState.QUARANTINED, without=said) == {SlotState.QUARANTINED}


def test_an_object_is_written_once() -> None:
    """PUBLISHED leads to FREE, or out of use, and nowhere else (E3)."""
    after = {new for (old, _), new in TRANSITIONS.items() if old is SlotState.PUBLISHED}
    assert after == {SlotState.FREE, SlotState.QUARANTINED}


def test_every_state_has_a_way_back_to_free() -> None:
    """No slot is lost for ever."""
    for state in SlotState:
        assert SlotState.FREE in reachable(state, without=set())


@pytest.mark.parametrize(
    ("change", "evictable"),
    [
        ({}, True),
        ({"mask": 0}, False),
        ({"pins": 1}, False),
        ({"filling": 1}, False),
        ({"moves": 1}, False),
    ],
)
def test_what_may_be_evicted(change: dict[str, int], evictable: bool) -> None:  # noqa: FBT001
    """A leaf with objects that nobody holds or fills, and nothing else (C2)."""
    chunk = Chunk(b"h" * 32, space_of(), None)
    chunk.mask = 1
    for name, value in change.items():
        setattr(chunk, name, value)
    assert chunk.evictable == evictable
    chunk.warm_children = 1
    assert not chunk.evictable


@pytest.mark.parametrize(
    ("kinds", "prefix_only"),
    [
        (("full",), True),
        (("mla", "full"), True),
        (("full", "sliding"), False),
        (("recurrent",), False),
    ],
)
def test_which_spaces_end_at_the_first_hole(kinds: tuple[str, ...], prefix_only: bool) -> None:  # noqa: FBT001
    """Only full attention and MLA do; windows and states may be legal after a hole."""
    groups = tuple(Group(kind, 1, 1, 8, 100, 8 if kind == "sliding" else 0) for kind in kinds)
    space = space_of(Layout(4, 4, "float16", groups, tp=3))
    assert space.prefix_only == prefix_only
    assert space.full_mask.bit_count() == space.layout.columns
