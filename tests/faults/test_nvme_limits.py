"""The limits of the NVMe store: capacity, queues, sizes, starts that are refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from kvd.errors import StartError
from kvd.tiers.disk import RealDisk, aligned_memory
from kvd.tiers.index import IndexBroken, LmdbPlace
from kvd.tiers.nvme import (
    Bundle,
    Corrupt,
    NoSpace,
    Part,
    TierBusy,
    TierError,
    TierFailed,
)
from tests.nvme_faulty import KEYS, FaultyDisk, all_good, fill, store_on, until
from tests.nvme_kit import REGION_BYTES, SPACES, Key, bundle, held, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.tiers.nvme import Ref


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
            await until(disk.at_gate.is_set, store)
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
                await store.read(ref, SPACES[0], KEYS[0].chunk_hash, KEYS[0].parent, wrong)
        with pytest.raises(Corrupt, match="column"):
            await store.read(ref, SPACES[0], KEYS[0].chunk_hash, KEYS[0].parent, {9: None})
        with pytest.raises(Corrupt, match="tenant"):
            await store.read(ref, SPACES[1], KEYS[0].chunk_hash, KEYS[0].parent, {0: None})
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("good", [True, False])
def test_bytes_that_are_not_what_their_writer_promised_are_refused(
    tmp_path: Path, *, good: bool
) -> None:
    """A checksum that comes with an object is the record's, also after a restart."""

    async def scene() -> None:
        store = store_on(FaultyDisk(), tmp_path)
        store.open()
        plain = bundle(KEYS[0], 1)
        promised = xxhash.xxh3_64_intdigest(plain.parts[0].stored) ^ (not good)
        parts = [plain.parts[0]._replace(checksum=promised), *plain.parts[1:]]
        ref = await store.write(plain._replace(parts=parts))
        expected = 1 if good else None
        assert await version_of(store, KEYS[0], ref, 1) == expected
        await store.close()
        store = store_on(FaultyDisk(), tmp_path)
        store.open()
        assert await version_of(store, KEYS[0], ref, 1) == expected
        await store.close()

    asyncio.run(scene())


def test_lmdb_place_is_the_default(tmp_path: Path) -> None:
    """Without a place of the test's own the index is LMDB's."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path)
        assert isinstance(store._place, LmdbPlace)
        store.open()
        await store.close()

    asyncio.run(main())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 12 MiB; skipped where this may not be done."""
    spot = tmp_path / "small"
    spot.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(spot)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield spot
    subprocess.run(["umount", "-l", str(spot)], check=True)


def fill_up(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def test_a_really_full_file_system(small_disk: Path) -> None:
    """Filled from outside: writes are refused, reads and deletes go on, all without a restart."""

    async def main() -> None:
        store = store_on(RealDisk(), small_disk / "store", regions=100)
        store.open()
        refs = {key: (await store.write(bundle(key, 1)), 1) for key in KEYS}
        with pytest.raises(OSError, match="space"):
            fill_up(small_disk / "filler")
        with pytest.raises(TierError):
            await fill(store, dict(refs))
        await all_good(store, refs)
        assert await store.delete([(SPACES[0].key, KEYS[0].chunk_hash, 0)]) == 1
        del refs[KEYS[0]]
        for region in {ref.region for ref, _ in refs.values()}:
            await store.reclaim(region)
        (small_disk / "filler").unlink()
        await until(lambda: store.state == "open" and store.health.grow, store)
        ref = await store.write(bundle(KEYS[3], 2))
        assert await version_of(store, KEYS[3], ref, 2) == 2
        await store.close()
        again = store_on(RealDisk(), small_disk / "store", regions=100)
        assert (ref, 2) in held(again.open()).values()
        await again.close()

    asyncio.run(main())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 12288, 16000])
def test_every_size_into_every_buffer(tmp_path: Path, size: int, *, direct: bool) -> None:
    """Raw objects arrive whole in aligned, odd, longer and missing buffers; nothing is overrun."""

    async def main() -> None:
        store = store_on(RealDisk(), tmp_path, direct=direct)
        store.open()
        page = aligned_memory(size)[:size]
        page[:] = os.urandom(size)
        stored: list[bytes | memoryview] = [os.urandom(size), page, memoryview(bytearray(size))]
        parts = [Part(column, 0, size, item) for column, item in enumerate(stored)]
        ref = await store.write(Bundle(SPACES[0], b"c" * 32, b"p" * 32, parts))
        room = aligned_memory(size + 8192)
        for start, extra in [(0, 0), (0, 100), (1, 0), (4096, 0)]:
            room[:] = b"\xee" * room.nbytes
            into = {0: room[start : start + size + extra], 2: None}
            loaded = await store.read(ref, SPACES[0], b"c" * 32, b"p" * 32, into)
            assert bytes(room[start : start + size]) == stored[0]
            assert bytes(room[start + size :]) == b"\xee" * (room.nbytes - start - size)
            assert bytes(room[:start]) == b"\xee" * start
            assert bytes(loaded[2].stored) == stored[2]
            assert loaded[0].stored.nbytes == size
        await store.close()

    asyncio.run(main())
