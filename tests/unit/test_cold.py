"""The cold tier over a store of the test's own: what moves, who waits, and what failures leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvd import cold as cold_module
from kvd.cold import DEMOTIONS_MAX, HINT_LOSSY, PROMOTIONS_MAX
from kvd.tiers.disk import Corrupt, NoSpace, TierFailed
from kvd.tiers.region import Bundle
from tests.cold_kit import (
    PAGE,
    PLACES,
    PLAIN,
    ROOT,
    TWO_RANKS,
    World,
    chain,
    turns,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvd.entry import Chunk, Space

    Scene = Callable[[World], Coroutine[Any, Any, None]]

NAMES = chain("a", 4)


def play(scene: Scene, **options: Any) -> None:
    """Run a scene in a world with a mover."""

    async def main() -> None:
        world = World(**options)
        async with world.running():
            await scene(world)

    asyncio.run(main())


def play_again(scene: Scene, hashes: list[bytes] = NAMES, hint: int = 0, **options: Any) -> None:
    """Run a scene in a world that finds a chain in its store."""

    async def main() -> None:
        before = World()
        before.put_cold(hashes, options.pop("layout", PLAIN), hint=hint)
        world = World(store=before.store, **options)
        async with world.running():
            await scene(world)

    asyncio.run(main())


class Waiter:
    """Waits for a promotion, with the pin that this takes."""

    def __init__(self, world: World, chunk: Chunk) -> None:
        self.world, self.chunk = world, chunk
        self.heard: list[bool] = []
        world.catalog.pin([chunk])
        self.begun = world.cold.promote(chunk, self.hear)

    def hear(self, read: bool) -> None:  # noqa: FBT001 - as the tier calls it
        self.heard.append(read)

    def leave(self) -> None:
        """Stop waiting."""
        self.world.cold.leave(self.chunk, self.hear)
        self.world.catalog.unpin([self.chunk])


def only_space(world: World) -> Space:
    """Return the one space there is."""
    (space,) = world.catalog.spaces.values()
    return space


def chunks_of(world: World, hashes: list[bytes] = NAMES) -> list[Chunk]:
    """Return a chain's chunks."""
    space = only_space(world)
    return [space.chunks[key] for key in hashes]


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


def test_no_space_is_tried_again_later() -> None:
    """A store without a free region is not asked in a loop: each place waits before it retries."""

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
        loop = asyncio.get_running_loop()
        start = loop.time()
        left = await world.cold.flush(0.3 if failing else 5.0)
        assert left == (4 * PAGE if failing else 0)
        assert loop.time() - start < 1.0
        world.store.write_gate.set()

    play(scene, write_behind=False)


def test_flush_does_not_wait_for_a_closed_tier() -> None:
    """A tier that takes nothing ends it at once."""

    async def scene(world: World) -> None:
        world.store.state = "closed: full"
        world.put(world.enter(), NAMES)
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert await world.cold.flush(5.0) == 4 * PAGE
        assert loop.time() - start < 0.5

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
        part = part._replace(raw_bytes=stored_bytes, form=cold_module.FORM_FRAME)
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


# ---------------------------------------------------------------------------------- reclaim


def test_reclaim_keeps_what_was_asked_for() -> None:
    """What was asked for and is cold only is written again; the rest is dropped and counted."""

    async def scene(world: World) -> None:
        chunks = chunks_of(world)
        world.catalog.unpin(world.catalog.hold(only_space(world), NAMES[:2], 0))
        waiter = Waiter(world, chunks[0])
        await until(lambda: bool(waiter.heard))
        waiter.leave()
        world.store.region, world.store.free_regions = 1, 1
        world.cold.wake()
        await until(lambda: world.store.free_regions > 1)
        await turns()
        assert world.store.written[4:] == [NAMES[1]]
        assert chunks[1].cold is not None
        assert chunks[1].cold[0] == 1
        assert [c.cold is not None for c in chunks] == [False, True, False, False]
        assert world.catalog.counters.cold_drops == 3
        assert chunks[0].mask == 1, "host slots are not touched"
        world.catalog.check()
        world.catalog.evict(chunks[0])

    play_again(scene, write_behind=False)


def test_a_warm_chunk_that_nobody_asked_for_has_had_its_time() -> None:
    """It is not written again after a reclaim, until somebody wants it."""

    async def scene(world: World) -> None:
        space = world.enter()
        world.put(space, NAMES)
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        world.store.region, world.store.free_regions = 1, 1
        world.cold.wake()
        await until(lambda: world.store.free_regions > 1)
        await turns()
        assert world.dirty_bytes == 0
        assert len(world.store.written) == 4
        world.catalog.unpin(world.catalog.hold(space, NAMES, 0))
        assert world.dirty_bytes == 4 * PAGE
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert len(world.store.written) == 8

    play(scene)


def test_what_was_unwanted_is_wanted_when_it_is_stored_anew() -> None:
    """Once its host slots have gone, the next copy of it begins like any other."""

    async def scene(world: World) -> None:
        space = world.enter()
        world.put(space, NAMES)
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        chunks = chunks_of(world)
        for chunk in reversed(chunks):
            world.catalog.evict(chunk)
        world.catalog.drop_cold(chunks[0])
        world.put(space, NAMES[:1])
        world.catalog.reject(chunks[0])
        world.catalog.evict(chunks[0])
        world.put(space, NAMES[:1])
        assert world.dirty_bytes == PAGE
        world.cold.wake()
        await until(lambda: chunks[0].cold is not None)

    play(scene)


def test_giving_up_a_copy_wins_over_writing_it_again() -> None:
    """A copy found damaged while its region is reclaimed is not brought back by the rewrite."""

    async def scene(world: World) -> None:
        chunk = chunks_of(world)[3]
        world.catalog.unpin(world.catalog.hold(only_space(world), NAMES, 3))
        world.store.write_gate.clear()
        world.store.region, world.store.free_regions = 1, 1
        world.cold.wake()
        await until(lambda: world.store.writes > 0)
        world.store.read_fault = Corrupt("checksum")
        waiter = Waiter(world, chunk)
        await until(lambda: bool(waiter.heard))
        world.store.read_fault = None
        assert chunk.cold is None
        world.store.write_gate.set()
        await until(lambda: world.store.free_regions > 1)
        await turns()
        assert chunk.cold is None
        assert NAMES[3] not in {key for _, key in world.store.index}
        world.catalog.check()
        waiter.leave()

    play_again(scene, write_behind=False)


# ---------------------------------------------------------------------------------- health


def test_a_closed_tier_takes_nothing_in_and_is_read() -> None:
    """Closed: cold copies are still offered, dirty chunks may go; open: all is as before."""

    async def scene(world: World) -> None:
        catalog = world.catalog
        space = only_space(world)
        world.store.state = "closed: full"
        world.cold.wake()
        await until(lambda: not catalog.eviction.demoting)
        assert catalog.usable(space, NAMES) == 4
        assert world.put(space, chain("b", 3 * PLACES)) == 2 * PLACES
        assert world.put(space, chain("c", PLACES)) == PLACES
        assert catalog.counters.evictions == {"capacity": PLACES}
        assert not world.store.writes
        world.store.state = "open"
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert len(world.store.written) == 4 + 2 * PLACES

    play_again(scene)


def test_a_disk_that_fails_reads_is_not_relied_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a read that the disk failed nothing cold is offered for a while, then all again."""
    monkeypatch.setattr(cold_module, "UNREADABLE_S", 0.2)

    async def scene(world: World) -> None:
        chunk, space = chunks_of(world)[0], only_space(world)
        world.store.read_fault = TierFailed("broken")
        waiter = Waiter(world, chunk)
        await until(lambda: bool(waiter.heard))
        world.cold.tick()
        assert world.catalog.usable(space, NAMES) == 0
        world.store.read_fault = None
        await until(lambda: world.catalog.usable(space, NAMES) == 4)
        waiter.leave()

    play_again(scene)


def test_a_slow_tier_reads_but_does_not_hold_up_stores() -> None:
    """Slow: cold copies are still offered, dirty chunks may go."""

    async def scene(world: World) -> None:
        world.store.state = "slow"
        world.cold.wake()
        await until(lambda: not world.catalog.eviction.demoting)
        assert world.catalog.usable(only_space(world), NAMES) == 4
        assert world.put(only_space(world), chain("b", 3 * PLACES)) == 2 * PLACES
        assert world.put(only_space(world), chain("c", PLACES)) == PLACES

    play_again(scene)


def test_a_reclaim_that_hangs_does_not_hide_a_slow_tier() -> None:
    """The host tier takes in again as soon as the tier is known to be slow, whatever hangs."""

    async def scene(world: World) -> None:
        space = only_space(world)
        world.store.region, world.store.free_regions = 1, 1
        world.store.reclaim_gate.clear()
        world.cold.wake()
        await turns()
        world.put(space, chain("b", 2 * PLACES))
        assert world.put(space, chain("c", PLACES)) == 0
        world.store.state = "slow"
        world.cold.tick()
        assert world.put(space, chain("c", PLACES)) == PLACES
        world.store.reclaim_gate.set()

    play_again(scene, write_behind=False)


# ---------------------------------------------------------------------------------- restart


def test_a_restart_finds_what_was_written() -> None:
    """The next daemon offers it, and deletes what has lost its head."""

    async def main() -> None:
        first = World()
        first.put_cold(NAMES)
        first.put_cold(chain("b", 3))
        space_key = next(iter(first.store.spaces))
        del first.store.index[space_key, chain("b", 3)[1]]
        second = World(store=first.store)
        space = only_space(second)
        assert second.catalog.usable(space, NAMES) == 4
        assert second.catalog.usable(space, chain("b", 3)) == 1
        assert chain("b", 3)[2] not in space.chunks
        async with second.running():
            await until(lambda: bool(second.store.deleted))
            assert [key for _, key, _ in second.store.deleted] == [chain("b", 3)[2]]

    asyncio.run(main())


def test_a_restart_leaves_out_whom_it_does_not_know() -> None:
    """Rows of another tenant, or of a layout that cannot be read, are deleted and not offered."""

    async def main() -> None:
        first = World()
        first.put_cold(NAMES)
        (key,) = first.store.spaces
        kept = first.store.spaces[key]
        strangers = [
            kept._replace(tenant="nobody"),
            kept._replace(layout=b"\xc1"),
            kept._replace(layout=b"\x93\x01\x02\x03"),
            kept._replace(layout_id=b"x" * 32),
        ]
        for number, stranger in enumerate(strangers):
            bundle = first.store.records[1]
            namespace = bytes([number]) * 32
            first.store.put(
                Bundle(
                    stranger._replace(namespace=namespace), bundle.chunk, namespace, bundle.parts
                )
            )
        second = World(store=first.store)
        assert list(second.catalog.spaces) == [(kept.tenant, ROOT, PLAIN.id)]
        async with second.running():
            await until(lambda: len(second.store.deleted) == len(strangers))
        assert set(second.store.index) == {(key, name) for name in NAMES}

    asyncio.run(main())
