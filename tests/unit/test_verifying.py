"""What is watched, in what order it is summed, what a sum means, and what goes when one differs."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.catalog import Catalog
from kvd.entry import Slot, SlotEvent, SlotState
from kvd.metrics import Counters
from kvd.policies import POLICIES
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd.verifying import QUEUE_MAX, Check, Sampler, Sums, Verdict, judge, take_out
from tests.unit.test_catalog import PAGE, TENANT, Host, chain, layout_of

ME: Final = OwnerId(1)
picks = st.integers(0, 11)


def slot_of(number: int, tenant: str = "a", *, published: bool = True) -> Slot:
    """Return a slot of its own."""
    slot = Slot(
        generation=Generation(number + 1),
        tenant=Tenant(tenant),
        slab=SlabId(0),
        index=number,
        offset_bytes=number * PAGE,
        size_bytes=PAGE,
        owner=ME,
    )
    slot.step(SlotEvent.RESERVE)
    if published:
        slot.step(SlotEvent.PUBLISH)
    return slot


@pytest.mark.parametrize(("every", "watched"), [(1, 128), (64, 2)])
def test_one_of_so_many_is_watched(every: int, watched: int) -> None:
    """Of 128 objects all are watched, or every 64th."""
    sampler = Sampler(every)
    due = [sampler.due() for _ in range(128)]
    assert sum(due) == watched
    assert due[every - 1]


def test_the_first_sum_is_the_object_s_and_later_ones_are_held_against_it() -> None:
    """A first sum is kept; the same is the same, another differs, and changes nothing."""
    slot = slot_of(0)
    assert judge(slot, b"1" * 16) is Verdict.FIRST
    assert judge(slot, b"1" * 16) is Verdict.SAME
    assert judge(slot, b"2" * 16) is Verdict.DIFFERS
    assert slot.digest == b"1" * 16


def test_a_sum_says_nothing_of_another_use_of_its_place() -> None:
    """What was freed while it was summed is judged not at all (Y3)."""
    slot = slot_of(0)
    slot.digest = b"1" * 16
    slot.step(SlotEvent.EVICT)
    assert judge(slot, b"2" * 16) is Verdict.GONE


@pytest.mark.parametrize("asked", [True, False])
def test_tenants_take_turns(asked: bool) -> None:  # noqa: FBT001
    """Whoever has much to sum delays another by one batch, not by all of it."""
    sums = Sums()
    many, few = [slot_of(number) for number in range(9)], slot_of(9, "b")
    for slot in [*many, few]:
        if asked:
            sums.ask(Check([slot], lambda: None))
        else:
            assert sums.published(slot)
    batches = [sums.next(2 * PAGE) for _ in range(6)]
    assert batches == [many[:2], [few, many[2]], many[3:5], many[5:7], many[7:9], []]
    sums.check()


def test_what_somebody_waits_for_goes_first() -> None:
    """An acquire does not wait for the sums of what was published before it."""
    sums, heard = Sums(), []
    early, asked = slot_of(0), slot_of(1)
    assert sums.published(early)
    sums.ask(Check([asked], lambda: heard.append("asked")))
    assert sums.next(1) == [asked]
    assert sums.next(1) == [early]
    sums.ended(asked)
    assert heard == ["asked"]


def test_what_waits_for_its_first_sum_is_bounded() -> None:
    """Beyond the bound an object is not queued, and can still be asked for."""
    sums = Sums()
    for number in range(QUEUE_MAX):
        assert sums.published(slot_of(number))
    late = slot_of(QUEUE_MAX)
    assert not sums.published(late)
    sums.ask(Check([late], lambda: None))
    assert sums.next(1) == [late]


def test_an_answer_may_end_others_that_wait_for_the_same() -> None:
    """A session may close while one of its acquires is answered: its others leave within that, also
    those that wait for nothing else any more, and are not heard.
    """
    sums, heard = Sums(), []
    same, other = slot_of(0), slot_of(1)

    def close() -> None:
        heard.append("first")
        for check in (second, third):
            sums.leave(check)
        sums.ask(Check([same], lambda: heard.append("anew")))

    second = Check([same, other], lambda: heard.append("second"))
    third = Check([same], lambda: heard.append("third"))
    for check in (Check([same], close), second, third):
        sums.ask(check)
    assert sums.next(1) == [same]
    sums.ended(same)
    sums.check()
    assert heard == ["first"]
    assert sums.next(1 << 20) == [same]
    sums.ended(same)
    assert heard == ["first", "anew"]
    assert not len(sums)


class SumsMachine(RuleBasedStateMachine):
    """Objects are published, asked for, left, summed and freed, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self.slots = [slot_of(number) for number in range(12)]
        self.published: set[Slot] = set()
        self.under_way: list[Slot] = []
        self.waiting: dict[int, Check] = {}
        self.heard: list[int] = []
        self.asked = 0

    @rule(pick=picks)
    def publish(self, pick: int) -> None:
        """An object wants its first sum."""
        slot = self.slots[pick]
        if slot not in self.published:
            self.published.add(slot)
            assert self.sums.published(slot)

    @rule(pick=picks)
    def ask(self, pick: int) -> None:
        """Somebody waits for some, and keeps them in place."""
        there = [s for s in self.slots[pick : pick + 3] if s in self.published]
        wanted = [s for s in there if s.state is SlotState.PUBLISHED]
        if wanted:
            self.asked += 1
            number = self.asked
            self.waiting[number] = Check(wanted, lambda: self.hear(number))
            self.sums.ask(self.waiting[number])

    def hear(self, number: int) -> None:
        """A check is over: everything it asked for has been judged since."""
        assert not self.waiting.pop(number).left
        self.heard.append(number)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        """Somebody stops waiting."""
        self.sums.leave(self.waiting.pop(sorted(self.waiting)[pick % len(self.waiting)]))

    @rule()
    def begin(self) -> None:
        """A thread takes some."""
        batch = self.sums.next(2 * PAGE)
        assert not set(batch) & set(self.under_way), "Y2"
        assert all(slot.state is SlotState.PUBLISHED for slot in batch)
        self.under_way += batch

    @precondition(lambda self: self.under_way)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        """A sum is there."""
        done = self.under_way.pop(pick % len(self.under_way))
        judge(done, b"1" * 16)
        self.sums.ended(done)

    @rule(pick=picks)
    def free(self, pick: int) -> None:
        """What nobody waits for is evicted."""
        slot = self.slots[pick]
        held = any(slot in check.left for check in self.waiting.values())
        if slot in self.published and slot.state is SlotState.PUBLISHED and not held:
            slot.step(SlotEvent.EVICT)

    @invariant()
    def agrees(self) -> None:
        """Nobody hears twice, and nothing is forgotten."""
        self.sums.check()
        assert len(self.heard) == len(set(self.heard))

    def teardown(self) -> None:
        """Once all is summed nobody waits any more."""
        self.under_way += self.sums.next(1 << 40)
        for slot in self.under_way:
            self.sums.ended(slot)
        assert not len(self.sums)
        assert not self.waiting


def test_everybody_hears_once_and_nothing_is_summed_twice_at_a_time() -> None:
    """Whoever asks hears once, when the last of its objects has been judged; who left, never; and
    one sum an object is under way (Y2).
    """
    run_state_machine_as_test(SumsMachine)


def stored(policy: str, length: int = 4, places: int = 8) -> tuple[Host, list[bytes]]:
    """Return a host with a chain."""
    host = Host(1, places)
    pool = SlabPool(places * PAGE, {TENANT: 1})
    pool.add_blank(SlabId(0))
    limits = dict.fromkeys(Resource, 1 << 40)
    host.catalog = Catalog(pool, Quota({TENANT: limits}), Counters(), policy)
    names = chain("a", length)
    host.store(host.enter(layout_of(PAGE)), names)
    return host, names


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_differs_is_a_miss_and_can_be_stored_again(policy: str, at: int) -> None:
    """The prefix ends before it, wherever in its chain it was; stored anew it gets another place,
    and its own is used by nobody, however full memory is.
    """
    host, names = stored(policy)
    catalog, (space,) = host.catalog, host.catalog.spaces.values()
    bad = space.chunks[names[at]].slots[0]
    take_out(catalog, bad)
    catalog.check()
    assert catalog.usable(space, names) == at
    assert catalog.counters.evictions == {"damaged": 1}
    host.store(space, names[: at + 1], first=at)
    catalog.check()
    assert catalog.usable(space, names) == 4
    for number in range(10):
        other = chain(f"b{number}", 4)
        host.reserve(space, other)
        for generation in host.granted:
            assert catalog.fillings.get(ME, generation).index != bad.index  # type: ignore[union-attr]
            catalog.publish(ME, generation, 0)
    catalog.check()
    assert bad.state is SlotState.QUARANTINED
    assert catalog.damaged == {bad}


def test_whoever_holds_the_chunk_goes_on() -> None:
    """A lease over an object that is taken out ends as any other: pins and charges come to none."""
    host, names = stored("lru")
    catalog, (space,) = host.catalog, host.catalog.spaces.values()
    held = catalog.hold(space, names, 0)
    take_out(catalog, space.chunks[names[1]].slots[0])
    catalog.check()
    assert catalog.usable(space, names) == 1
    catalog.unpin(held)
    catalog.check()
    assert not catalog.quota.used(TENANT, Resource.PINNED_BYTES)


def test_routers_hear_of_it() -> None:
    """What was whole in host memory and lost an object is told as removed, once, and why."""
    heard: list[tuple[str, bytes, str]] = []

    class Ear:
        def stored(self, space: object, chunk: object, tier: str) -> None:
            """Hear of nothing new."""

        def removed(self, space: object, chunk: object, tier: str, reason: str) -> None:  # noqa: ARG002
            """Take note."""
            heard.append((tier, chunk.hash, reason))  # type: ignore[attr-defined]

    host, names = stored("lru")
    host.catalog.changes.watch(Ear())
    (space,) = host.catalog.spaces.values()
    take_out(host.catalog, space.chunks[names[2]].slots[0])
    assert heard == [("host", names[2], "damaged")]
