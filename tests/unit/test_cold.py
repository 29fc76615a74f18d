"""The cold tier over a store of the test's own: what moves down and up, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from kvd import cold as cold_module
from kvd.cold import DEMOTIONS_MAX, PROMOTIONS_MAX
from kvd.forms import FORM_FRAME
from kvd.restore import HINT_LOSSY
from kvd.tiers.disk import Corrupt, NoSpace, TierFailed
from tests.cold_kit import (
    NAMES,
    PAGE,
    PLACES,
    TWO_RANKS,
    Waiter,
    World,
    chain,
    chunks_of,
    only_space,
    play,
    play_again,
    turns,
    until,
)

# ---------------------------------------------------------------------------------- down


def test_what_is_dirty_goes_down_and_is_clean() -> None:
    """Behind the stores' back everything is written, once, and may be evicted for nothing."""

    async def scene(world: World) -> None:
        space = world.enter()
        assert world.put(space, NAMES) == 4
        assert world.dirty_bytes == 4 * PAGE
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert sorted(world.store.written) == sorted(NAMES)
        assert world.put(space, chain("b", 4 * PLACES)) == 2 * PLACES - 4 + 4
        assert world.catalog.counters.evictions == {"clean": 4}
        assert world.catalog.usable(space, NAMES) == 4

    play(scene)


def test_an_idle_disk_gets_the_heads_first_a_pressed_one_the_tails() -> None:
    """What was written before a crash is a prefix; under pressure the first to go is a leaf."""

    async def idle(world: World) -> None:
        world.put(world.enter(), NAMES)
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert world.store.written == NAMES

    async def pressed(world: World) -> None:
        world.put(world.enter(), NAMES)
        world.cold.wake()
        await until(lambda: len(world.store.written) >= len(NAMES) - 1)
        assert world.store.written[: len(NAMES) - 1] == NAMES[:0:-1]

    play(idle)
    play(pressed, dirty_share=0.0, write_behind=False)


def test_a_failed_demotion_leaves_the_chunk_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays as it was, still to be written, and is written when the tier works again."""
    monkeypatch.setattr(cold_module, "RETRY_S", 0.01)

    async def scene(world: World) -> None:
        space = world.enter()
        world.store.write_fault = TierFailed("broken")
        world.put(space, NAMES)
        world.cold.wake()
        await until(lambda: world.catalog.counters.demotions_failed >= 4)
        held = world.catalog.hold(space, NAMES, 0)
        assert len(held) == 4
        assert all(world.right(chunk) for chunk in held)
        world.catalog.unpin(held)
        assert world.dirty_bytes == 4 * PAGE
        world.store.write_fault = None
        await until(lambda: not world.dirty_bytes)

    play(scene)


def test_no_space_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without a free region is not asked in a loop: each place waits before it retries."""
    monkeypatch.setattr(cold_module, "RETRY_S", 3.0)

    async def scene(world: World) -> None:
        space = world.enter()
        world.store.write_fault = NoSpace("no region")
        world.put(space, chain("a", 2 * PLACES))
        world.cold.wake()
        await asyncio.sleep(0.3)
        assert world.store.writes == DEMOTIONS_MAX
        assert world.dirty_bytes == 2 * PLACES * PAGE
        world.store.write_fault = None
        await until(lambda: not world.dirty_bytes)

    play(scene)


def test_host_slots_stay_while_they_are_written() -> None:
    """What is being written is not evicted, whoever needs room; the record is right (K2)."""

    async def scene(world: World) -> None:
        space = world.enter()
        world.store.write_gate.clear()
        world.put(space, NAMES)
        world.cold.wake()
        await until(lambda: world.store.writes == 4)
        world.catalog.eviction.demoting = False
        assert world.put(space, chain("b", 3 * PLACES)) == 2 * PLACES - 4
        world.store.write_gate.set()
        await until(lambda: world.catalog.counters.demotions >= 4)
        for bundle in world.store.records.values():
            key, (part,) = bundle.chunk, bundle.parts
            assert part.stored == bytes(part.stored)
            assert key in NAMES or key in chain("b", 3 * PLACES)
            assert world.right(only_space(world).chunks[key])

    play(scene)


def test_what_only_the_cold_copy_has_is_kept_by_the_next_one() -> None:
    """A rank's object that comes after its neighbour's went down joins it there (K1)."""

    async def scene(world: World) -> None:
        space = world.enter(TWO_RANKS)
        (key,) = chain("a", 1)
        world.put(space, [key], rank=0)
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        chunk = space.chunks[key]
        world.catalog.evict(chunk)
        world.put(space, [key], rank=1)
        assert world.catalog.usable(space, [key]) == 1
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert world.catalog.usable(space, [key]) == 1
        assert chunk.cold_mask == 0b11
        world.catalog.evict(chunk)
        waiter = Waiter(world, chunk)
        await until(lambda: bool(waiter.heard))
        assert waiter.heard == [True]
        assert chunk.mask == 0b11
        assert world.right(chunk)
        waiter.leave()

    play(scene)


def test_a_held_chunk_goes_down_too() -> None:
    """Whoever reads a chunk for a long time does not keep it from being written."""

    async def scene(world: World) -> None:
        space = world.enter()
        world.put(space, NAMES)
        held = world.catalog.hold(space, NAMES, 0)
        again = world.catalog.hold(space, NAMES, 0)
        assert await world.cold.flush(2.0) == 0
        world.catalog.unpin(held)
        world.catalog.unpin(again)

    play(scene)


def test_a_chunk_larger_than_a_region_is_not_asked_for_again() -> None:
    """It is not wanted below, so that it goes like a clean one."""

    async def scene(world: World) -> None:
        object.__setattr__(world.store.config, "region_bytes", PAGE - 1)
        space = world.enter()
        world.put(space, NAMES)
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert world.store.writes == 4
        assert world.catalog.counters.chunks_not_admitted == 4
        assert not world.store.written
        assert world.put(space, chain("b", 2 * PLACES)) == 2 * PLACES
        assert world.catalog.counters.evictions == {"unwanted": 4}

    play(scene)


@pytest.mark.parametrize("failing", [False, True])
def test_flush_is_bounded(failing: bool) -> None:  # noqa: FBT001 - a parameter
    """It writes all there is, or says how much is left when its time is up."""

    async def scene(world: World) -> None:
        space = world.enter()
        if failing:
            world.store.write_gate.clear()
        world.put(space, NAMES)
        async with asyncio.timeout(15):
            left = await world.cold.flush(0.3 if failing else 60.0)
        assert left == (4 * PAGE if failing else 0)
        world.store.write_gate.set()

    play(scene, write_behind=False)


def test_flush_does_not_wait_for_a_closed_tier() -> None:
    """A tier that takes nothing ends it at once."""

    async def scene(world: World) -> None:
        world.store.state = "closed: full"
        world.put(world.enter(), NAMES)
        async with asyncio.timeout(15):
            assert await world.cold.flush(60.0) == 4 * PAGE

    play(scene)


# ---------------------------------------------------------------------------------- up


def test_many_wait_for_one_read() -> None:
    """However many want a cold chunk, it is read once and all hear of it (K3)."""

    async def scene(world: World) -> None:
        world.store.read_gate.clear()
        chunk = chunks_of(world)[0]
        waiters = [Waiter(world, chunk) for _ in range(5)]
        await turns()
        waiters += [Waiter(world, chunk) for _ in range(5)]
        world.store.read_gate.set()
        await until(lambda: all(waiter.heard for waiter in waiters))
        assert world.store.reads == 1
        assert all(waiter.heard == [True] for waiter in waiters)
        assert world.right(chunk)
        assert world.cold.queued_bytes == 0
        for waiter in waiters:
            waiter.leave()

    play_again(scene)


def test_who_leaves_takes_only_itself() -> None:
    """The read goes on for the others, who hear of it; who has left does not."""

    async def scene(world: World) -> None:
        world.store.read_gate.clear()
        chunk = chunks_of(world)[0]
        first, second = Waiter(world, chunk), Waiter(world, chunk)
        await turns()
        first.leave()
        first_again = Waiter(world, chunk)
        world.store.read_gate.set()
        await until(lambda: bool(second.heard))
        assert (first.heard, second.heard, first_again.heard) == ([], [True], [True])
        second.leave()
        first_again.leave()

    play_again(scene)


def test_the_last_who_leaves_cancels_a_read_that_has_not_begun() -> None:
    """What nobody waits for any more is not read, and its slots are given back."""

    async def scene(world: World) -> None:
        world.store.read_gate.clear()
        hashes = chain("a", PROMOTIONS_MAX + 2)
        chunks = chunks_of(world, hashes)
        waiters = [Waiter(world, chunk) for chunk in chunks]
        await until(lambda: world.store.reads == PROMOTIONS_MAX)
        assert world.filling_bytes == (PROMOTIONS_MAX + 2) * PAGE
        waiters[-1].leave()
        waiters[-2].leave()
        waiters[-2] = Waiter(world, chunks[-2])  # in time: it is wanted after all
        waiters[0].leave()  # too late: its read has begun
        world.store.read_gate.set()
        await until(lambda: not world.filling_bytes)
        assert world.store.reads == PROMOTIONS_MAX + 1
        assert chunks[-1].mask == 0
        assert chunks[-2].mask == chunks[0].mask == 1
        assert waiters[-2].heard == [True]
        for waiter in waiters[1:-1]:
            waiter.leave()

    play_again(scene, chain("a", PROMOTIONS_MAX + 2), slabs=4)


def test_a_failed_read_is_a_miss_and_costs_nothing() -> None:
    """Those who wait hear no, slots are given back, the cold copy stays for another time (K4)."""

    async def scene(world: World) -> None:
        world.store.read_fault = TierFailed("broken")
        chunk = chunks_of(world)[0]
        waiters = [Waiter(world, chunk), Waiter(world, chunk)]
        await until(lambda: all(waiter.heard for waiter in waiters))
        assert [waiter.heard for waiter in waiters] == [[False], [False]]
        assert (chunk.mask, chunk.cold_mask, world.filling_bytes) == (0, 1, 0)
        assert not world.store.deleted
        assert world.catalog.counters.promotions_failed == 1
        world.store.read_fault = None
        again = Waiter(world, chunk)
        await until(lambda: bool(again.heard))
        assert again.heard == [True]
        for waiter in [*waiters, again]:
            waiter.leave()

    play_again(scene)


def test_a_damaged_copy_is_given_up() -> None:
    """It is a miss, forgotten, and deleted below: that copy, and no later one."""

    async def scene(world: World) -> None:
        world.store.read_fault = Corrupt("checksum")
        chunks = chunks_of(world)
        ref = chunks[3].cold
        assert ref is not None
        waiter = Waiter(world, chunks[3])
        await until(lambda: bool(waiter.heard))
        assert waiter.heard == [False]
        assert chunks[3].cold is None
        assert [key[1:] for key in world.store.deleted] == [(NAMES[3], ref[3])]
        waiter.leave()
        assert NAMES[3] not in only_space(world).chunks, "nothing is left of it"
        assert world.catalog.usable(only_space(world), NAMES) == 3

    play_again(scene)


@pytest.mark.parametrize("stored_bytes", [PAGE - 1, PAGE + 1])
def test_an_object_of_another_size_is_refused(stored_bytes: int) -> None:
    """A record whose objects are not as the layout says is as bad as a damaged one."""

    async def scene(world: World) -> None:
        chunk = chunks_of(world)[0]
        assert chunk.cold is not None
        bundle = world.store.records[chunk.cold[3]]
        (part,) = bundle.parts
        part = part._replace(raw_bytes=stored_bytes, form=FORM_FRAME)
        world.store.records[chunk.cold[3]] = bundle._replace(parts=[part])
        waiter = Waiter(world, chunk)
        await until(lambda: bool(waiter.heard))
        assert waiter.heard == [False]
        assert not chunk.cold_mask
        waiter.leave()

    play_again(scene)


def test_no_room_is_said_at_once() -> None:
    """A promotion that finds every slot held begins nothing, and wakes the mover."""

    async def scene(world: World) -> None:
        space = world.enter()
        busy = chain("busy", PLACES)
        assert world.put(space, busy) == PLACES
        held = world.catalog.hold(space, busy, 0)
        waiter = Waiter(world, chunks_of(world)[0])
        assert not waiter.begun
        assert world.filling_bytes == 0
        assert world.cold._wake.is_set()
        world.catalog.unpin(held)
        waiter.leave()
        assert waiter.heard == []

    play_again(scene, slabs=1)


def test_a_copy_given_up_during_its_read_is_still_what_it_was() -> None:
    """A lossy copy whose region is reclaimed while it is read up stays lossy up there."""

    async def scene(world: World) -> None:
        world.store.read_gate.clear()
        chunk = chunks_of(world)[3]
        waiter = Waiter(world, chunk)
        await turns()
        world.catalog.drop_cold(chunk)
        world.store.read_gate.set()
        await until(lambda: bool(waiter.heard))
        assert waiter.heard == [True]
        assert world.right(chunk)
        assert chunk.lossy_mask == 1
        waiter.leave()

    play_again(scene, hint=HINT_LOSSY, write_behind=False)
