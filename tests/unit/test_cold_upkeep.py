"""The cold tier over a store of the test's own: reclaims, a tier that is ill, restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from kvd import cold as cold_module
from kvd.pulse import TURN_S, Pulse
from kvd.tiers.disk import Corrupt, NoSpace, TierFailed
from kvd.tiers.region import Bundle
from tests.cold_kit import (
    NAMES,
    PAGE,
    PLACES,
    PLAIN,
    ROOT,
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

# ---------------------------------------------------------------------------------- reclaim

if TYPE_CHECKING:
    import pytest


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


def test_a_chunk_that_is_written_again_stays_until_then() -> None:
    """Given up in the middle of it, its node goes when the write has ended, and not before."""

    async def scene(world: World) -> None:
        chunk, space = chunks_of(world)[3], only_space(world)
        world.catalog.unpin(world.catalog.hold(space, NAMES, 3))
        world.store.write_gate.clear()
        world.store.region, world.store.free_regions = 1, 1
        world.cold.wake()
        await until(lambda: world.store.writes > 0)
        world.catalog.drop_cold(chunk)
        assert space.chunks.get(NAMES[3]) is chunk
        world.store.write_gate.set()
        await until(lambda: NAMES[3] not in space.chunks)

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


def test_a_tier_without_room_does_not_hold_up_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open, but full for a while and with nothing to reclaim: dirty chunks may go until it is not.

    As when somebody else has filled the file system before the tier had its regions.
    """
    monkeypatch.setattr(cold_module, "FULL_S", 0.1)
    monkeypatch.setattr(cold_module, "RETRY_S", 0.05)

    async def scene(world: World) -> None:
        space = world.enter()
        world.store.write_fault, world.store.free_regions = NoSpace("full"), 1
        world.put(space, chain("b", 2 * PLACES))
        assert world.put(space, chain("c", PLACES)) == 0, "it might have room in a moment"
        await until(lambda: not world.catalog.eviction.demoting)
        newest = chain("c", PLACES)
        await until(  # what is being tried again stays for a moment
            lambda: not world.put(space, newest) and world.catalog.usable(space, newest) == PLACES
        )
        world.store.write_fault, world.store.free_regions = None, 9
        await until(lambda: not world.dirty_bytes)
        assert world.catalog.eviction.demoting
        assert not world.cold._full_since_ns, "the next time it waits anew"

    play(scene)


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


def test_a_mover_or_codec_that_hangs_is_late() -> None:
    """Each after its own limit; the mover has longer while the codec compiles."""
    pulse, hold = Pulse(), threading.Event()

    async def scene(world: World) -> None:
        world.cold.forms.workers.submit(hold.wait)
        begun_ns = time.monotonic_ns()
        world.cold.beat(pulse)
        assert pulse.late(begun_ns) == []
        assert pulse.late(begun_ns + int((TURN_S + 2) * 1e9)) == ["mover"]
        assert "codec pool" in pulse.late(begun_ns + int((cold_module.CODEC_S + 2) * 1e9))
        hold.set()

    waits = World()
    waits.cold.beat(pulse)
    now_ns = time.monotonic_ns()
    assert pulse.late(now_ns + int((cold_module.WARM_S - 5) * 1e9)) == []
    assert pulse.late(now_ns + int((cold_module.WARM_S + 1) * 1e9)) == ["mover"]
    play(scene)
