"""A failing, full, slow or lying disk: every call ends, in an error that says so, and no wrong hit.

A `FaultyDisk` stands between the store and real files and fails the n-th call of a kind.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvd.errors import StartError
from kvd.tiers.disk import RealDisk, aligned_memory
from kvd.tiers.nvme import (
    NoSpace,
    TierBusy,
    TierError,
    TierFailed,
)
from tests.nvme_faulty import KEYS, FaultyDisk, all_good, fill, store_on, until
from tests.nvme_kit import SPACES, Key, bundle, content, held, version_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.tiers.nvme import Ref

KINDS = ("pwritev", "preadv", "fdatasync", "fsync_dir", "open", "allocate", "rename", "unlink")


async def scene(disk: FaultyDisk, directory: Path) -> tuple[dict[Key, tuple[Ref, int]], int]:
    """Write, read, delete, reclaim, close; return what was acknowledged, and how much failed."""
    acknowledged: dict[Key, tuple[Ref, int]] = {}
    errors = 0
    store = store_on(disk, directory)
    store.open()
    for version, key in enumerate(KEYS * 3):
        try:
            ref = await store.write(bundle(key, version))
            acknowledged[key] = (ref, version)
            assert await version_of(store, key, ref, version) == version
        except TierError:
            errors += 1
    try:
        await store.delete([(SPACES[0].key, KEYS[0].chunk_hash, 0)])
        acknowledged.pop(KEYS[0], None)
        gone = set()
        for victim in store.reclaim_candidates()[:1]:
            gone = {item.chunk for item in await store.reclaim(victim.region)}
        acknowledged = {k: v for k, v in acknowledged.items() if k.chunk_hash not in gone}
        acknowledged[KEYS[1]] = (await store.write(bundle(KEYS[1], 99)), 99)
    except TierError:
        errors += 1
        acknowledged.pop(KEYS[0], None)
    disk.kind = ""
    await until(lambda: store.state == "open", store)
    await all_good(store, acknowledged)
    await store.close()
    return acknowledged, errors


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kind", KINDS)
def test_every_single_failure_is_handled(tmp_path: Path, kind: str, code: int) -> None:
    """Fail the first, second, third... call of a kind until a run has no failure.

    Each run ends in TierErrors or a StartError and nothing else; what was acknowledged is readable,
    there and after a restart without faults.
    """
    for nth in range(200):
        disk = FaultyDisk()
        disk.fail(kind, nth, code, lasting=False)
        directory = tmp_path / str(nth)
        acknowledged: dict[Key, tuple[Ref, int]] = {}
        with suppress(StartError):
            acknowledged, _ = asyncio.run(scene(disk, directory))

        async def again(directory: Path, expected: dict[Key, tuple[Ref, int]]) -> None:
            store = store_on(RealDisk(), directory)
            found = held(store.open())
            for key, place in expected.items():
                assert found[key] == place
            await all_good(store, found)
            await store.close()

        asyncio.run(again(directory, acknowledged))
        if not disk.failed:
            assert nth > 0, "no call of this kind was ever made"
            return
    pytest.fail("it never ended")


def test_a_full_file_system_closes_and_opens_again(tmp_path: Path) -> None:
    """ENOSPC in a write closes the tier to writes; reads go on; it opens when there is room."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path)
        store.open()
        acknowledged = {KEYS[0]: (await store.write(bundle(KEYS[0], 1)), 1)}
        disk.fail("pwritev", code=errno.ENOSPC, lasting=True)
        with pytest.raises(NoSpace):
            await store.write(bundle(KEYS[1], 1))
        assert store.state == "closed: No space left on device"
        with pytest.raises(TierFailed, match="closed"):
            await store.write(bundle(KEYS[1], 1))
        await all_good(store, acknowledged)
        for _ in range(20):
            store.tick()
            await asyncio.sleep(0.005)
        assert store.state.startswith("closed")
        disk.kind = ""
        await until(lambda: store.state == "open", store)
        acknowledged[KEYS[1]] = (await store.write(bundle(KEYS[1], 2)), 2)
        await all_good(store, acknowledged)
        assert (store.counters.closures, store.counters.openings) == (1, 1)
        await store.close()

    asyncio.run(main())


def test_no_room_for_a_new_region_is_no_fault(tmp_path: Path) -> None:
    """When the file system cannot hold one region more, reclaimed ones are used instead."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path, regions=6, probe_s=60.0)
        store.open()
        await store.write(bundle(KEYS[0], 1))
        disk.fail("allocate", code=errno.ENOSPC, lasting=True)
        with pytest.raises(NoSpace):
            await fill(store)
        assert store.state == "open"
        assert store.free_regions == 0
        await store.reclaim(store.reclaim_candidates()[0].region)
        await store.write(bundle(KEYS[1], 1000), rewrite=True)
        store.extents.check()
        await store.close()

    asyncio.run(main())


def test_a_failed_sync_is_never_believed(tmp_path: Path) -> None:
    """After a failed fdatasync the region takes nothing more; its earlier bundles stay readable."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path)
        store.open()
        before = await store.write(bundle(KEYS[0], 1))
        disk.fail("fdatasync", lasting=False)
        with pytest.raises(TierFailed):
            await store.write(bundle(KEYS[1], 1))
        assert store.state == "open"
        assert store.counters.errors_sync == 1
        after = await store.write(bundle(KEYS[2], 1))
        assert after.region != before.region
        await all_good(store, {KEYS[0]: (before, 1), KEYS[2]: (after, 1)})
        await store.close()
        again = store_on(RealDisk(), tmp_path)
        assert held(again.open()).keys() == {KEYS[0], KEYS[2]}
        await again.close()

    asyncio.run(main())


def test_repeated_failures_close_the_tier_once(tmp_path: Path) -> None:
    """Two failures in a row close it; those that share one sync count as one."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path)
        store.open()
        await store.write(bundle(KEYS[0], 1))
        disk.fail("fdatasync", lasting=False)
        writes = [store.write(bundle(key, 2)) for key in KEYS]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert any(isinstance(result, TierFailed) for result in results)
        assert store.state == "open"
        disk.fail("pwritev", lasting=True)
        for _ in range(2):
            with pytest.raises(TierFailed):
                await store.write(bundle(KEYS[1], 3))
        assert store.state == "closed: Input/output error"
        disk.kind = ""
        await until(lambda: store.state == "open", store)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("short", [4096, 8192, 5000])
def test_short_reads_and_writes(tmp_path: Path, short: int) -> None:
    """Calls that move less than they were asked to are gone on with, by whole blocks."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path, direct=False)
        store.open()
        disk.short = short
        refs = {key: (await store.write(bundle(key, 7)), 7) for key in KEYS}
        await all_good(store, refs)
        await store.close()

    asyncio.run(main())


def test_a_stall_sheds_writes_until_it_is_over(tmp_path: Path) -> None:
    """A hung write makes the tier slow: new writes are refused at once, and it recovers."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path, slow_s=0.1)
        store.open()
        ref = await store.write(bundle(KEYS[0], 1))
        disk.gate = threading.Event()
        async with asyncio.TaskGroup() as group:
            hung = group.create_task(store.write(bundle(KEYS[1], 1)))
            await until(lambda: store.state == "slow", store)
            with pytest.raises(TierBusy, match="stalls"):
                await store.write(bundle(KEYS[2], 1))
            assert not hung.done(), "it waited for the disk"
            disk.gate.set()
            await hung
        store.tick()
        assert store.state == "open"
        assert store.counters.stalls == 1
        assert await version_of(store, KEYS[0], ref, 1) == 1
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["read", "write"])
def test_cancellation_waits_for_the_thread(tmp_path: Path, kind: str) -> None:
    """A cancelled call ends only when no thread touches its buffers any more (N4, K1)."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path)
        store.open()
        ref = await store.write(bundle(KEYS[0], 1))
        disk.gate = threading.Event()
        buffer = aligned_memory(16384)
        item = bundle(KEYS[1], 1)
        if kind == "read":
            spot = (SPACES[0], KEYS[0].chunk_hash, KEYS[0].parent)
            call: Any = store.read(ref, *spot, {0: buffer})
        else:
            call = store.write(item)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(call)
            await until(disk.at_gate.is_set, store)
            task.cancel()
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done(), "let go of a buffer under a thread"
            disk.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        size = len(content(KEYS[0], 1, 0))
        if kind == "read":
            assert bytes(buffer[:size]) == content(KEYS[0], 1, 0)
        assert all(not region.users for region in store.extents.regions.values())
        assert (store.reading.depth, store.writing.depth) == (0, 0)
        await store.write(bundle(KEYS[1], 2))
        await store.close()

    asyncio.run(main())
