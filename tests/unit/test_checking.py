"""Acquires that wait for a check of their bytes: answered once, in time, with what is sure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvd.config import Limits
from kvd.ipc.acquiring import WAITING_MAX
from kvd.ipc.caller import Caller
from kvd.ipc.dispatch import Dispatcher
from kvd.lease import LeaseBook
from kvd.quota import Resource
from kvd.types import OwnerId
from kvd.verifying import Check, take_out
from kvd_client import wire
from kvd_client.wire import Status
from tests.cold_kit import ME, NAMES, TENANT, TWO_RANKS, World, chain
from tests.unit.test_waiting import SECOND, Clock, Riser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.entry import Slot


class Judge:
    """Stands for the verifier: checks end when the test says so."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(self, slots: Iterable[Slot], done: Callable[[], None]) -> Check:
        """Take a check in."""
        self.checks.append(Check(slots, done))
        return self.checks[-1]

    def leave(self, check: Check) -> list[Slot]:
        """Let it go."""
        self.checks = [other for other in self.checks if other is not check]
        return list(check.left)

    def end(self, check: Check, count: int = 99) -> None:
        """Answer some of it."""
        for slot in list(check.left)[:count]:
            if check.hear(slot):
                check.end()


class Desk:
    """A dispatcher over a world with a stored, watched chain, and a caller."""

    def __init__(self, watched: Callable[[int], bool] = lambda _: True) -> None:
        self.world, self.judge, self.clock = World(slabs=4), Judge(), Clock()
        self.book, count = LeaseBook(), 0

        def watch(slot: Slot) -> None:
            nonlocal count
            slot.watched, count = watched(count), count + 1

        self.world.catalog.on_publish = watch
        self.riser = Riser(self.world)
        self.desk = Dispatcher(
            self.world.catalog,
            self.book,
            Limits(promote_s=5),
            self.clock,
            self.riser,
            verifier=self.judge,
        )
        self.space = self.world.enter(TWO_RANKS)
        for rank in (0, 1):
            assert self.world.put(self.space, NAMES, rank=rank) == 4
        self.callers = [Caller(OwnerId(ME + r), TENANT, self.space, r) for r in (0, 1)]
        self.late: list[wire.AcquireReply] = []

    def hear(self, reply: bytes) -> None:
        """Take a late reply."""
        self.late.append(wire.decode(reply, wire.REPLIES))

    def ask(self, message: Any, rank: int = 0) -> Any:
        """Ask; None when the answer comes later."""
        reply = self.desk.answer(self.callers[rank], wire.encode(message), self.hear)
        return None if reply is None else wire.decode(reply, wire.REPLIES)

    def acquire(self, request: int = 1, read: int = 1) -> wire.AcquireReply | None:
        """Acquire the chain."""
        reply: wire.AcquireReply | None = self.ask(
            wire.Acquire(request, b"".join(NAMES), 0, 30_000, read)
        )
        return reply

    def at_rest(self) -> None:
        """Nothing is held and the accounts agree."""
        quota = self.world.catalog.quota
        assert not quota.used(TENANT, Resource.PINNED_BYTES)
        assert not quota.used(TENANT, Resource.LEASES)
        assert not self.judge.checks
        self.world.catalog.check()

    def release(self) -> None:
        """End every lease."""
        for lease in list(self.book.all()):
            assert self.ask(wire.Release(9, lease.id), lease.owner - ME).status == Status.OK


def slot_of(desk: Desk, chunk: int, rank: int = 0) -> Slot:
    """Return an object's slot."""
    return desk.space.chunks[NAMES[chunk]].slots[rank]


def test_a_lease_comes_when_all_it_tells_of_is_checked() -> None:
    """The rank's own objects are checked, in order; the answer comes with the last, once."""
    desk = Desk()
    assert desk.acquire() is None
    (check,) = desk.judge.checks
    assert list(check.left) == [slot_of(desk, chunk) for chunk in range(4)]
    desk.judge.end(check, 3)
    assert not desk.late
    desk.judge.end(check)
    (reply,) = desk.late
    assert (reply.status, reply.chunks - reply.first) == (Status.OK, 4)
    desk.release()
    desk.at_rest()


def test_what_is_not_watched_is_told_at_once() -> None:
    """An acquire without a watched object waits for nothing."""
    desk = Desk(watched=lambda _: False)
    reply = desk.acquire()
    assert reply is not None
    assert reply.status == Status.OK
    desk.release()
    desk.at_rest()


def test_a_lease_for_workers_is_checked_for_every_rank() -> None:
    """Whoever attaches is told bytes that were checked for the lease."""
    desk = Desk()
    assert desk.acquire(read=0) is None
    (check,) = desk.judge.checks
    assert len(check.left) == 8
    desk.judge.end(check)
    (reply,) = desk.late
    mine = desk.ask(wire.Attach(2, reply.token), rank=1)
    assert mine.status == Status.OK
    desk.release()
    desk.at_rest()


@pytest.mark.parametrize(("at", "status", "chunks"), [(0, Status.MISS, 0), (2, Status.OK, 2)])
def test_what_differs_ends_the_prefix(at: int, status: Status, chunks: int) -> None:
    """The lease is over what comes before the object that was taken out; none is a miss."""
    desk = Desk()
    assert desk.acquire() is None
    (check,) = desk.judge.checks
    take_out(desk.world.catalog, slot_of(desk, at))
    desk.judge.end(check)
    (reply,) = desk.late
    assert (reply.status, reply.chunks - reply.first) == (status, chunks)
    desk.release()
    desk.at_rest()


@pytest.mark.parametrize("checked", [0, 3])
def test_time_gives_what_was_checked_in_it(checked: int) -> None:
    """When its time is up an acquire gets the prefix that is sure, or a miss, and is not heard of
    again when the rest is answered.
    """
    desk = Desk()
    assert desk.acquire() is None
    (check,) = desk.judge.checks
    desk.judge.end(check, checked)
    desk.clock.ns += 5 * SECOND - 2
    desk.desk.sweep()
    assert not desk.late, "it has its time"
    desk.clock.ns += 2
    desk.desk.sweep()
    (reply,) = desk.late
    assert reply.chunks - reply.first == checked
    assert desk.world.catalog.counters.acquires_unverified == 1
    desk.judge.end(check)
    assert len(desk.late) == 1
    desk.release()
    desk.at_rest()


def test_who_leaves_is_not_answered_and_holds_nothing() -> None:
    """The pins of an acquire under check go with its session."""
    desk = Desk()
    assert desk.acquire() is None
    (check,) = desk.judge.checks
    desk.desk.leave(desk.callers[0])
    desk.judge.end(check)
    assert not desk.late
    desk.at_rest()


def test_a_drain_refuses_what_is_being_checked() -> None:
    """It does not wait for the check."""
    desk = Desk()
    assert desk.acquire() is None
    desk.desk.drain()
    assert [reply.status for reply in desk.late] == [Status.DRAINING]
    reply = desk.acquire(2)
    assert reply is not None
    assert reply.status == Status.DRAINING
    desk.at_rest()


def test_those_that_wait_are_bounded() -> None:
    """A session cannot have more acquires under check than may wait for anything."""
    desk = Desk()
    for request in range(WAITING_MAX):
        assert desk.acquire(request) is None
    reply = desk.acquire(99)
    assert reply is not None
    assert reply.status == Status.OVER_QUOTA
    desk.desk.leave(desk.callers[0])
    desk.at_rest()


def test_what_came_up_is_checked_as_well() -> None:
    """After the promotions the whole lease is checked, with a time of its own."""
    desk = Desk()
    catalog = desk.world.catalog
    other = chain("z", 1)
    desk.world.put(desk.space, other, rank=0)
    desk.world.put(desk.space, other, rank=1)
    chunk = desk.space.chunks[other[0]]
    catalog.set_cold(chunk, ((0, 0, 8192, 1), 3, False))
    catalog.evict(chunk)
    assert desk.ask(wire.Acquire(1, other[0], 0, 30_000, 1)) is None
    assert not desk.judge.checks
    desk.clock.ns += 4 * SECOND
    desk.riser.end(chunk)
    assert not desk.late
    (check,) = desk.judge.checks
    desk.clock.ns += 4 * SECOND
    desk.desk.sweep()
    assert not desk.late, "its time began with the check"
    desk.judge.end(check)
    assert [reply.status for reply in desk.late] == [Status.OK]
    desk.release()
    desk.at_rest()


def test_a_token_of_a_lease_that_lost_an_object_is_stale() -> None:
    """Who attaches is never told of half a chunk."""
    desk = Desk()
    assert desk.acquire(read=0) is None
    desk.judge.end(desk.judge.checks[0])
    (reply,) = desk.late
    take_out(desk.world.catalog, slot_of(desk, 3, rank=1))
    mine = desk.ask(wire.Attach(2, reply.token), rank=0)
    assert mine.status == Status.STALE
    desk.release()
    desk.at_rest()


def test_what_is_stored_again_while_it_is_checked_is_not_told() -> None:
    """An object that took the place of a damaged one meanwhile has been checked for nobody."""
    desk = Desk()
    assert desk.acquire() is None
    (check,) = desk.judge.checks
    take_out(desk.world.catalog, slot_of(desk, 2))
    assert desk.world.put(desk.space, NAMES[:3], rank=0, first=2) == 1
    desk.judge.end(check)
    (reply,) = desk.late
    assert (reply.status, reply.chunks - reply.first) == (Status.OK, 2)
    desk.release()
    desk.at_rest()


def test_a_token_of_a_lease_whose_object_was_stored_again_is_stale() -> None:
    """What came into its chunks since was not checked for it; the other rank's was."""
    desk = Desk()
    assert desk.acquire(read=0) is None
    desk.judge.end(desk.judge.checks[0])
    (reply,) = desk.late
    take_out(desk.world.catalog, slot_of(desk, 3, rank=1))
    assert desk.world.put(desk.space, NAMES, rank=1, first=3) == 1
    assert desk.ask(wire.Attach(2, reply.token), rank=1).status == Status.STALE
    assert desk.ask(wire.Attach(3, reply.token), rank=0).status == Status.OK
    desk.release()
    desk.at_rest()


def test_a_token_of_a_reader_is_good_for_the_rank_that_was_checked() -> None:
    """A lease that reads was checked for its own rank: another that attaches is told nothing."""
    desk = Desk()
    assert desk.acquire(read=1) is None
    desk.judge.end(desk.judge.checks[0])
    (reply,) = desk.late
    assert desk.ask(wire.Attach(2, reply.token), rank=1).status == Status.STALE
    mine = desk.ask(wire.Attach(3, reply.token), rank=0)
    assert mine.status == Status.OK
    assert desk.ask(wire.Attach(4, mine.token), rank=1).status == Status.STALE
    desk.release()
    desk.at_rest()


def test_a_token_of_a_lease_without_a_watched_object_is_good_until_there_is_one() -> None:
    """Sampled: all ranks attach as without verification, but not to what was stored again since
    and is watched now.
    """
    desk = Desk(watched=lambda count: count >= 8)
    reply = desk.acquire()
    assert reply is not None
    assert desk.ask(wire.Attach(2, reply.token), rank=1).status == Status.OK
    take_out(desk.world.catalog, slot_of(desk, 3, rank=1))
    assert desk.world.put(desk.space, NAMES, rank=1, first=3) == 1
    assert desk.ask(wire.Attach(3, reply.token), rank=1).status == Status.STALE
    desk.release()
    desk.at_rest()
