"""Acquires that wait for the tier below: answered once, in time, whoever else comes or goes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from kvd.config import Limits
from kvd.cost import Rates
from kvd.ipc.acquiring import WAITING_MAX
from kvd.ipc.caller import Caller
from kvd.ipc.dispatch import Dispatcher
from kvd.lease import LeaseBook
from kvd.quota import Resource
from kvd_client import wire
from kvd_client.identity import Group
from kvd_client.wire import Status
from tests.cold_kit import ME, NAMES, PAGE, PLAIN, TENANT, World, chain, only_space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.entry import Chunk, Slot

SECOND = 10**9


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.ns = 1

    def now_ns(self) -> int:
        """Return the time."""
        return self.ns


class Riser:
    """Stands for the cold tier: promotions end when the test says so."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiters: dict[Chunk, list[Callable[[bool], None]]] = {}
        self.slots: dict[Chunk, list[Slot]] = {}
        self.room = 99
        self.heard: list[Sequence[bytes]] = []
        self.woken = self.asked = 0

    def promote(self, chunk: Chunk, done: Callable[[bool], None]) -> bool:
        """Begin, or join, as long as there is room."""
        self.asked += 1
        if chunk not in self.waiters:
            if not self.room:
                return False
            self.room -= 1
            slots = self.world.catalog.begin_promotion(chunk)
            assert slots is not None
            self.slots[chunk] = slots
        self.waiters.setdefault(chunk, []).append(done)
        return True

    def leave(self, chunk: Chunk, done: Callable[[bool], None]) -> None:
        """Forget who waited."""
        if done in self.waiters.get(chunk, []):
            self.waiters[chunk].remove(done)

    def end(self, chunk: Chunk, *, read: bool = True) -> None:
        """End a promotion."""
        waiters = self.waiters.pop(chunk)
        self.world.catalog.end_promotion(chunk, self.slots.pop(chunk), read=read)
        for done in waiters:
            done(read)

    def cost(self) -> Rates:
        """Know nothing."""
        return Rates(0.0, 0.0, 0.0, 0)

    def touched(self, tenant: str, hashes: Sequence[bytes]) -> None:
        """Hear of a chain."""
        assert tenant == TENANT
        self.heard.append(hashes)

    def wake(self) -> None:
        """Count."""
        self.woken += 1


class Desk:
    """A dispatcher over a world whose tier below has a chain, and a caller."""

    def __init__(self) -> None:
        before = World()
        before.put_cold(NAMES)
        self.world = World(store=before.store)
        self.riser = Riser(self.world)
        self.clock = Clock()
        self.book = LeaseBook()
        self.desk = Dispatcher(self.world.catalog, self.book, Limits(), self.clock, self.riser)
        self.space = self.world.enter()
        self.caller = Caller(ME, TENANT, self.space, 0)
        self.late: list[wire.AcquireReply] = []

    def hear(self, reply: bytes) -> None:
        """Take a late reply."""
        self.late.append(wire.decode(reply, wire.REPLIES))

    def ask(self, message: Any) -> Any:
        """Ask, as the caller; None when the answer comes later."""
        reply = self.desk.answer(self.caller, wire.encode(message), self.hear)
        return None if reply is None else wire.decode(reply, wire.REPLIES)

    def acquire(self, request: int, hashes: list[bytes] = NAMES) -> wire.AcquireReply | None:
        """Acquire a chain."""
        ask = wire.Acquire(request, b"".join(hashes), 0, 30_000, 1)
        reply: wire.AcquireReply | None = self.ask(ask)
        return reply

    def chunks(self) -> list[Chunk]:
        """Return the chain's chunks."""
        return [only_space(self.world).chunks[key] for key in NAMES]

    @property
    def pinned_bytes(self) -> int:
        """What the caller's tenant holds."""
        return self.world.catalog.quota.used(TENANT, Resource.PINNED_BYTES)


@pytest.fixture
def desk() -> Desk:
    """Make a desk; the cold tier itself plays no part."""
    return Desk()


def test_an_acquire_is_answered_when_the_last_chunk_is_up(desk: Desk) -> None:
    """Not before, once, and with all of it."""
    assert desk.acquire(7) is None
    for chunk in desk.chunks()[::-1]:
        assert desk.late == []
        desk.riser.end(chunk)
    (reply,) = desk.late
    assert (reply.request, reply.status, reply.chunks) == (7, Status.OK, 4)
    assert len(list(wire.unpack_places(reply.objects))) == 4
    assert desk.pinned_bytes == 4 * PAGE
    assert desk.ask(wire.Release(8, reply.lease)).status == Status.OK
    assert desk.pinned_bytes == 0


def test_a_failed_chunk_ends_the_prefix(desk: Desk) -> None:
    """What is before it is granted, what is after it is let go."""
    desk.acquire(7)
    for number, chunk in enumerate(desk.chunks()):
        desk.riser.end(chunk, read=number != 2)
    assert desk.late[0].chunks == 2
    assert [chunk.pins for chunk in desk.chunks()] == [1, 1, 0, 0]
    desk.world.catalog.check()


def test_no_room_for_the_first_is_a_miss_at_once(desk: Desk) -> None:
    """Nothing is waited for that would be of no use."""
    desk.riser.room = 0
    reply = desk.acquire(7)
    assert reply is not None
    assert reply.status == Status.MISS
    assert desk.pinned_bytes == 0


def test_no_room_for_a_later_one_shortens_the_answer(desk: Desk) -> None:
    """Those before it are waited for and granted."""
    desk.riser.room = 2
    assert desk.acquire(7) is None
    assert desk.riser.asked == 3, "what comes after it would be of no use"
    for chunk in desk.chunks()[:2]:
        desk.riser.end(chunk)
    assert desk.late[0].chunks == 2


def test_a_chunk_named_twice_is_waited_for_once(desk: Desk) -> None:
    """Hashes may repeat; every pin is ended all the same."""
    assert desk.acquire(7, [NAMES[0], NAMES[0]]) is None
    desk.riser.end(desk.chunks()[0])
    (reply,) = desk.late
    assert reply.chunks == 2
    assert desk.ask(wire.Release(8, reply.lease)).status == Status.OK
    assert desk.chunks()[0].pins == 0
    desk.world.catalog.check()


def test_a_drain_answers_who_waits_at_once(desk: Desk) -> None:
    """Nobody waits for a daemon that goes down: a refusal, which engines take for a miss."""
    desk.acquire(7)
    desk.riser.end(desk.chunks()[0])
    desk.desk.drain()
    assert [reply.status for reply in desk.late] == [Status.DRAINING]
    assert desk.pinned_bytes == 0
    assert not any(desk.riser.waiters.values())
    for chunk in desk.chunks()[1:]:
        desk.riser.end(chunk)
    assert len(desk.late) == 1
    desk.world.catalog.check()


def test_leases_are_counted_when_they_are_granted(desk: Desk) -> None:
    """Acquires that wait at the same time don't take a session past its bound together."""
    limits = dataclasses.replace(Limits(), leases_per_session=1)
    desk.desk = Dispatcher(desk.world.catalog, desk.book, limits, desk.clock, desk.riser)
    for request in (7, 8):
        assert desk.acquire(request) is None
    for chunk in desk.chunks():
        desk.riser.end(chunk)
    assert sorted(reply.status for reply in desk.late) == [Status.OK, Status.OVER_QUOTA]
    assert desk.book.count(ME) == 1
    assert [chunk.pins for chunk in desk.chunks()] == [1, 1, 1, 1]
    desk.world.catalog.check()


def test_time_answers_with_what_is_up(desk: Desk) -> None:
    """After its deadline an acquire gets what there is, and waits for nothing any more."""
    desk.acquire(7)
    desk.riser.end(desk.chunks()[0])
    desk.clock.ns += 3600 * SECOND
    desk.desk.sweep()
    assert desk.late[0].chunks == 1
    assert not any(desk.riser.waiters.values())
    for chunk in desk.chunks()[1:]:
        desk.riser.end(chunk)
    assert len(desk.late) == 1
    desk.world.catalog.check()


def test_a_session_that_ends_is_not_answered(desk: Desk) -> None:
    """It holds nothing from then on, and its promotions end without it (W2)."""
    desk.acquire(7)
    desk.acquire(8)
    desk.desk.leave(desk.caller)
    assert desk.pinned_bytes == 0
    assert not any(desk.riser.waiters.values())
    for chunk in desk.chunks():
        desk.riser.end(chunk, read=False)
    assert desk.late == []
    desk.world.catalog.check()


@pytest.mark.parametrize("how", ["sweep", "end"])
def test_an_answer_that_ends_the_session(desk: Desk, how: str) -> None:
    """A client whose ring holds rubbish goes when it is next answered: its others end just once."""

    def rubbish(_: bytes) -> None:
        desk.desk.leave(desk.caller)  # as a session does that closes

    for request in range(3):
        ask = wire.Acquire(request, b"".join(NAMES), 0, 30_000, 1)
        assert desk.desk.answer(desk.caller, wire.encode(ask), rubbish) is None
    if how == "sweep":
        desk.clock.ns += 3600 * SECOND
        desk.desk.sweep()
    else:
        for chunk in desk.chunks():
            desk.riser.end(chunk)
    assert not any(desk.riser.waiters.values())
    desk.desk.part(ME, dead=True)
    assert desk.pinned_bytes == 0


def test_only_so_many_wait(desk: Desk) -> None:
    """One more is refused at once, and holds nothing."""
    for request in range(WAITING_MAX):
        assert desk.acquire(request) is None
    reply = desk.acquire(WAITING_MAX)
    assert reply is not None
    assert reply.status == Status.OVER_QUOTA
    assert desk.chunks()[0].pins == WAITING_MAX


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
@pytest.mark.parametrize("known", [True, False])
def test_hashes_that_are_no_chain_are_worth_nothing_and_hurt_nobody(
    desk: Desk,
    kind: str,
    known: bool,  # noqa: FBT001 - a parameter
) -> None:
    """A look-up of a hash that nobody stored, before some that are there, is answered."""
    window = 6 if kind == "sliding" else 0
    group = Group(kind, 1, 0 if kind == "recurrent" else 1, 8, PAGE, window)
    layout = PLAIN._replace(groups=(group,))
    space = desk.world.enter(layout)
    desk.world.put(space, chain("w", 3))
    desk.caller.space = space
    asked = [*([] if known else chain("nobody's", 1)), *chain("w", 3)]
    reply = desk.ask(wire.Lookup(1, b"".join(asked)))
    assert reply.chunks in {0, len(asked)}
    acquired = desk.acquire(2, asked)
    assert acquired is not None
    assert (acquired.status == Status.OK) == known


def test_a_chain_is_heard_of_once(desk: Desk) -> None:
    """An engine that looks up twice before it loads has used its chain once."""
    for _ in range(2):
        desk.ask(wire.Lookup(1, b"".join(NAMES)))
    assert desk.riser.heard == [NAMES]
