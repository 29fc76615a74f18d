"""A failing, full, slow or lying disk: every call ends, in an error that says so, and no wrong hit.

`FaultyDisk` stands between the store and real files and fails the n-th call of a kind.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd.errors import StartError
from kvd.tiers.disk import RealDisk, aligned_memory
from kvd.tiers.index import IndexBroken, LmdbPlace
from kvd.tiers.nvme import (
    Bundle,
    Corrupt,
    NoSpace,
    NvmeStore,
    Part,
    TierBusy,
    TierError,
    TierFailed,
)
from tests.nvme_kit import REGION_BYTES, SPACES, Key, bundle, config, content, held, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer

    from kvd.tiers.nvme import Ref

KINDS = ("pwritev", "preadv", "fdatasync", "fsync_dir", "open", "allocate", "rename", "unlink")
KEYS = [Key(0, n) for n in range(6)]


class FaultyDisk(RealDisk):
    """Real files, and calls that fail as they are told to."""

    def __init__(self) -> None:
        self.kind = ""
        self.code = errno.EIO
        self.after = 0
        self.lasting = False
        self.failed = 0
        self.short = 0
        self.gate: threading.Event | None = None
        self._guard = threading.Lock()

    def fail(self, kind: str, after: int = 0, code: int = errno.EIO, *, lasting: bool) -> None:
        """Fail the call of a kind that comes after so many, and with `lasting` all later ones."""
        self.kind, self.after, self.code, self.lasting = kind, after, code, lasting
        self.failed = 0

    def _pass(self, kind: str) -> None:
        with self._guard:
            if kind != self.kind:
                return
            if self.after:
                self.after -= 1
                return
            if self.failed and not self.lasting:
                return
            self.failed += 1
        raise OSError(self.code, os.strerror(self.code))

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        self._pass("open")
        return super().open(path, create=create, direct=direct)

    def allocate(self, handle: int, size_bytes: int) -> None:
        self._pass("allocate")
        super().allocate(handle, size_bytes)

    def pwritev(self, handle: int, buffers: Sequence[ReadableBuffer], offset_bytes: int) -> int:
        self._pass("pwritev")
        if self.gate is not None:
            self.gate.wait(10)
        if self.short:
            buffers = [memoryview(buffers[0])[: self.short]]
        return super().pwritev(handle, buffers, offset_bytes)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        self._pass("preadv")
        if self.gate is not None:
            self.gate.wait(10)
        if self.short:
            buffers = [buffers[0][: self.short]]
        return super().preadv(handle, buffers, offset_bytes)

    def fdatasync(self, handle: int) -> None:
        self._pass("fdatasync")
        super().fdatasync(handle)

    def fsync_dir(self, path: Path) -> None:
        self._pass("fsync_dir")
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._pass("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._pass("unlink")
        super().unlink(path)


def store_on(disk: RealDisk, directory: Path, **options: object) -> NvmeStore:
    """Return a store that probes at once."""
    options.setdefault("probe_s", 0.0)
    options.setdefault("index_bytes", 16 << 20)
    return NvmeStore(
        config(directory, **options),  # type: ignore[arg-type]
        asyncio.get_running_loop(),
        disk=disk,
    )


async def until(condition: Callable[[], bool], store: NvmeStore, limit_s: float = 10.0) -> None:
    """Let the store's time pass until something holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            store.tick()
            await asyncio.sleep(0.01)


async def all_good(store: NvmeStore, acknowledged: dict[Key, tuple[Ref, int]]) -> None:
    """Read everything that was acknowledged."""
    for key, (ref, version) in acknowledged.items():
        assert await version_of(store, key, ref, version) == version
    store.extents.check()


async def fill(store: NvmeStore, refs: dict[Key, tuple[Ref, int]] | None = None) -> None:
    """Write until the store takes no more."""
    refs = {} if refs is None else refs
    for number in range(100):
        key = Key(1, number)
        refs[key] = (await store.write(bundle(key, 0)), 0)


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
@pytest.mark.timeout(120)
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
            began = asyncio.get_running_loop().time()
            with pytest.raises(TierBusy, match="stalls"):
                await store.write(bundle(KEYS[2], 1))
            assert asyncio.get_running_loop().time() - began < 0.1
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
            await asyncio.sleep(0.05)
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


def test_queues_are_bounded(tmp_path: Path) -> None:
    """One call more than configured is refused, and the others are not hurt."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path, writes_max=4, reads_max=2)
        store.open()
        items = [store.write(bundle(key, 1)) for key in KEYS]
        results = await asyncio.gather(*items, return_exceptions=True)
        assert [isinstance(result, TierBusy) for result in results] == [False] * 4 + [True] * 2
        ref: Any = results[0]
        reads = [version_of(store, KEYS[0], ref, 1) for _ in range(3)]
        read = await asyncio.gather(*reads, return_exceptions=True)
        assert [isinstance(result, TierBusy) for result in read] == [False, False, True]
        await store.close()

    asyncio.run(main())


def test_capacity_and_reclaim(tmp_path: Path) -> None:
    """A full store says so, keeps a region for rewrites, and goes on after a reclaim."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path, regions=3)
        store.open()
        refs: dict[Key, tuple[Ref, int]] = {}
        with pytest.raises(NoSpace, match="reclaim"):
            await fill(store, refs)
        assert store.free_regions == 1
        victim = store.reclaim_candidates()[0]
        live = await store.live_keys(victim.region)
        assert len(live) == victim.live_count > 0
        saved = Key(1, int.from_bytes(live[0].chunk[:4], "big"))
        refs[saved] = (await store.write(bundle(saved, 0), rewrite=True), 0)
        gone = await store.reclaim(victim.region)
        assert {item.chunk for item in gone} == {item.chunk for item in live[1:]}
        for item in gone:
            key = Key(1, int.from_bytes(item.chunk[:4], "big"))
            ref, version = refs.pop(key)
            assert await version_of(store, key, ref, version) is None
        await all_good(store, refs)
        for number in range(200, 203):
            refs[Key(1, number)] = (await store.write(bundle(Key(1, number), 0)), 0)
        await all_good(store, refs)
        await store.close()
        again = store_on(RealDisk(), tmp_path, regions=3)
        assert held(again.open()) == refs
        await all_good(again, refs)
        await again.close()

    asyncio.run(main())


def test_a_region_is_not_reused_under_a_reader(tmp_path: Path) -> None:
    """A read that began before a reclaim gets its bytes; only then the region becomes free."""

    async def main() -> None:
        disk = FaultyDisk()
        store = store_on(disk, tmp_path)
        store.open()
        ref = await store.write(bundle(KEYS[0], 1))
        free = store.free_regions
        disk.gate = threading.Event()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(version_of(store, KEYS[0], ref, 1))
            await asyncio.sleep(0.02)
            await store.reclaim(ref.region)
            assert store.free_regions == free
            disk.gate.set()
            assert await reading == 1
        assert store.free_regions == free + 1
        store.extents.check()
        await store.close()

    asyncio.run(main())


def test_the_index_breaks_and_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken environment closes the tier; it is reopened, or rebuilt, without a restart."""

    async def main(*, rebuild: bool) -> None:
        directory = tmp_path / str(rebuild)
        store = store_on(RealDisk(), directory)
        store.open()
        refs = {key: (await store.write(bundle(key, 3)), 3) for key in KEYS}
        index: Any = store._index._index
        with monkeypatch.context() as patch:
            patch.setattr(type(index), "commit", _panic)
            with pytest.raises(TierFailed):
                await store.write(bundle(Key(1, 1), 1))
            assert store.state.startswith("closed: ")
        if rebuild:
            (directory / "index.mdb").write_bytes(b"gone")
        await until(lambda: store.state == "open", store)
        refs[Key(1, 1)] = (await store.write(bundle(Key(1, 1), 4)), 4)
        await all_good(store, refs)
        await store.close()
        again = store_on(RealDisk(), directory)
        assert held(again.open()) == refs
        await again.close()

    for rebuild in (False, True):
        asyncio.run(main(rebuild=rebuild))


def _panic(*_: object) -> None:
    raise IndexBroken("MDB_PANIC")


def test_starts_that_are_refused(tmp_path: Path) -> None:
    """Another region size, format or owner, a damaged identity: StartError, nothing is held."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path)
        store.open()
        with pytest.raises(StartError, match="in use"):
            store_on(RealDisk(), tmp_path).open()
        await store.close()
        with pytest.raises(StartError, match="region_bytes"):
            store_on(RealDisk(), tmp_path, region_bytes=2 * REGION_BYTES).open()
        path = tmp_path / "store"
        good = path.read_bytes()
        path.write_bytes(good[:8] + b"\x63" + good[9:])
        with pytest.raises(StartError, match="format 99"):
            store_on(RealDisk(), tmp_path).open()
        path.write_bytes(good[:20] + b"\xff" + good[21:])
        with pytest.raises(StartError, match="damaged"):
            store_on(RealDisk(), tmp_path).open()
        path.write_bytes(good)
        again = store_on(RealDisk(), tmp_path)
        assert again.open().report.how == "clean"
        await again.close()

    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    asyncio.run(main())
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    """A bundle that no region can hold is the caller's mistake."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path)
        store.open()
        big = Part(0, 0, REGION_BYTES, bytes(REGION_BYTES))
        with pytest.raises(ValueError, match="larger"):
            await store.write(Bundle(SPACES[0], b"c" * 32, b"p" * 32, [big]))
        ref = await store.write(bundle(KEYS[0], 1))
        for wrong in ({0: bytearray(1)}, {0: bytes(99999)}):
            with pytest.raises(ValueError, match="too short"):
                await store.read(ref, SPACES[0], KEYS[0].chunk_hash, KEYS[0].parent, wrong)  # type: ignore[arg-type]
        with pytest.raises(Corrupt, match="column"):
            await store.read(ref, SPACES[0], KEYS[0].chunk_hash, KEYS[0].parent, {9: None})
        with pytest.raises(Corrupt, match="tenant"):
            await store.read(ref, SPACES[1], KEYS[0].chunk_hash, KEYS[0].parent, {0: None})
        await store.close()

    asyncio.run(main())


def test_lmdb_place_is_the_default(tmp_path: Path) -> None:
    """Without a place of the test's own the index is LMDB's."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path)
        assert isinstance(store._place, LmdbPlace)
        store.open()
        await store.close()

    asyncio.run(main())
