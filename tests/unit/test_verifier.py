"""The verifier on a loop: what is written down, brought up, and what happens when a sum hangs."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import xxhash

from kvd import verifier as module
from kvd.entry import SlotState
from kvd.tiers.disk import TierError
from tests.cold_kit import (
    NAMES,
    PAGE,
    PLAIN,
    TWO_RANKS,
    Waiter,
    World,
    chunks_of,
    only_space,
    play,
    play_again,
    until,
)

if TYPE_CHECKING:
    from kvd.entry import Chunk, Slot
    from kvd.tiers.region import Bundle, Ref
    from kvd.verifier import Verifier


def verifier_of(world: World) -> Verifier:
    """Return the world's verifier."""
    assert world.verifier is not None
    return world.verifier


def scribble(world: World, slot: Slot) -> None:
    """Change a byte of an object."""
    world.memory.view(slot.slab, slot.offset_bytes, slot.size_bytes)[99] ^= 1


async def summed(world: World, count: int) -> None:
    """Wait until so many objects have a sum."""
    await until(lambda: verifier_of(world).stats()["summed"] == count)


async def is_sure(world: World, chunk: Chunk) -> bool:
    """Check a chunk's objects, as a move does."""
    try:
        await verifier_of(world).sure(list(chunk.slots.values()))
    except module.Differs:
        return False
    return True


def test_what_differs_is_not_written_down() -> None:
    """A changed object is dropped instead; the rest of its chain goes down with the right bytes."""

    async def scene(world: World) -> None:
        world.store.writable = False
        assert world.put(world.enter(), NAMES) == 4
        await summed(world, 4)
        scribble(world, chunks_of(world)[1].slots[0])
        world.store.writable = True
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        assert sorted(world.store.written) == sorted({*NAMES} - {NAMES[1]})
        assert world.catalog.counters.evictions == {"damaged": 1}
        assert world.catalog.counters.demotions_failed == 1
        assert all(world.right(chunk) for chunk in only_space(world).chunks.values())

    play(scene, verify=1)


def test_what_is_changed_while_it_is_written_is_deleted_below() -> None:
    """Raw objects are read by the write itself: what was changed meanwhile is found behind it, the
    record deleted, and the chunk has no copy below.
    """

    async def scene(world: World) -> None:
        world.store.write_gate.clear()
        assert world.put(world.enter(), NAMES[:1]) == 1
        await summed(world, 1)
        world.cold.wake()
        await until(lambda: world.store.writes == 1)
        (chunk,) = chunks_of(world, NAMES[:1])
        scribble(world, chunk.slots[0])
        world.store.write_gate.set()
        await until(lambda: bool(world.store.deleted))
        await until(lambda: not chunk.moves)
        assert not world.store.index, "a damaged copy is believed after a restart"
        assert chunk.cold is None
        assert not world.catalog.usable(only_space(world), NAMES[:1])

    play(scene, verify=1)


def test_a_record_says_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is changed before the write reads it is written with the sum of what it was: who dies
    before it is found and deleted leaves a record that nobody believes.
    """

    async def scene(world: World) -> None:
        said: list[tuple[int | None, int]] = []
        write = world.store.write

        async def changed(bundle: Bundle, *, rewrite: bool = False) -> Ref:
            (part,) = bundle.parts
            good = xxhash.xxh3_64_intdigest(part.stored)
            scribble(world, chunks_of(world, NAMES[:1])[0].slots[0])
            assert xxhash.xxh3_64_intdigest(part.stored) != good
            said.append((part.checksum, good))
            return await write(bundle, rewrite=rewrite)

        monkeypatch.setattr(world.store, "write", changed)
        assert world.put(world.enter(), NAMES[:1]) == 1
        await summed(world, 1)
        world.cold.wake()
        await until(lambda: bool(said))
        assert said[0][0] == said[0][1]
        await until(lambda: bool(world.store.deleted))

    play(scene, verify=1)


def test_a_copy_below_that_was_replaced_by_a_damaged_one_goes_with_it() -> None:
    """The row of a rank's older copy was overwritten: nothing of the chunk is believed below."""

    async def scene(world: World) -> None:
        space = world.enter(TWO_RANKS)
        assert world.put(space, NAMES[:1], rank=0) == 1
        world.cold.wake()
        await until(lambda: not world.dirty_bytes)
        (chunk,) = chunks_of(world, NAMES[:1])
        assert chunk.cold is not None
        world.store.write_gate.clear()
        writes = world.store.writes
        assert world.put(space, NAMES[:1], rank=1) == 1
        await summed(world, 2)
        world.cold.wake()
        await until(lambda: world.store.writes > writes)
        scribble(world, chunk.slots[1])
        world.store.write_gate.set()
        await until(lambda: bool(world.store.deleted) and not chunk.moves)
        assert chunk.mask == 1, "the other rank's object is as it was"
        await until(lambda: not world.dirty_bytes)
        await until(lambda: bool(world.store.index))
        assert chunk.cold_mask == 1, "it goes down again, without what differed"
        assert list(world.store.index.values()) == [chunk.cold], "and is where it is said to be"

    play(scene, verify=1)


def test_what_comes_up_is_watched_and_can_come_up_again() -> None:
    """A promoted object that is changed in host memory is taken out there; the copy below serves
    the next request, with the right bytes.
    """

    async def scene(world: World) -> None:
        (chunk,) = chunks_of(world, NAMES[:1])
        waiter = Waiter(world, chunk)
        await until(lambda: waiter.heard == [True])
        await summed(world, 1)
        assert await is_sure(world, chunk)
        scribble(world, chunk.slots[0])
        assert not await is_sure(world, chunk)
        assert not chunk.mask
        assert world.catalog.usable(only_space(world), NAMES) == 4, "it is below"
        waiter.leave()
        again = Waiter(world, chunk)
        await until(lambda: again.heard == [True])
        assert world.right(chunk)
        again.leave()

    play_again(scene, verify=1)


def test_a_move_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that hangs fails the move, which leaves the chunk as it was."""
    go = threading.Event()

    def slow(views: list[memoryview]) -> list[bytes]:
        go.wait(20)
        return [bytes(16) for _ in views]

    monkeypatch.setattr(module, "_sum", slow)
    monkeypatch.setattr(module, "MOVE_S", 0.05)

    async def scene(world: World) -> None:
        assert world.put(world.enter(), NAMES[:1]) == 1
        world.cold.wake()
        await until(lambda: world.catalog.counters.demotions_failed > 0)
        (chunk,) = chunks_of(world, NAMES[:1])
        assert chunk.mask == 1
        assert world.dirty_bytes == PAGE
        assert not world.store.written
        go.set()

    play(scene, verify=1)


def test_a_place_used_again_while_it_was_summed_is_nobody_s_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sum of other bytes than the object's, because its place was freed meanwhile, means nothing
    (Y3): neither to the object that was there nor to the one that is.
    """
    go, real = threading.Event(), module._sum

    def slow(views: list[memoryview]) -> list[bytes]:
        go.wait(20)
        return real(views)

    monkeypatch.setattr(module, "_sum", slow)

    async def scene(world: World) -> None:
        space = world.enter()
        world.put(space, NAMES[:1])
        await asyncio.sleep(0.01)  # its first sum is under way
        old = space.chunks[NAMES[0]].slots[0]
        await world.cold.close()
        world.catalog.evict(space.chunks[NAMES[0]])
        world.put(space, [NAMES[1]])
        new = space.chunks[NAMES[1]].slots[0]
        assert (new.slab, new.index) == (old.slab, old.index)
        go.set()
        await summed(world, 1)
        assert old.state is SlotState.FREE
        assert not old.digest
        assert await is_sure(world, space.chunks[NAMES[1]])
        assert not verifier_of(world).stats()["differed"]

    play(scene, verify=1, write_behind=False)


def test_one_of_many_is_checked_when_sampled() -> None:
    """With one of two watched, half of the objects get a sum, and only those are checked."""

    async def scene(world: World) -> None:
        world.put(world.enter(PLAIN), NAMES)
        await summed(world, 2)
        for chunk in chunks_of(world):
            scribble(world, chunk.slots[0])
        assert [await is_sure(world, chunk) for chunk in chunks_of(world)].count(False) == 2
        with pytest.raises(TierError):
            await verifier_of(world).sure([_out(world)])

    play(scene, verify=2, write_behind=False)


def _out(world: World) -> Slot:
    """Return a slot that was taken out."""
    return next(iter(world.catalog.damaged))
