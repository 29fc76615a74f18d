"""The NVMe store alone against the bare disk: the same bytes and buffers, in turn, in one run.

    python -m bench.nvme_store [--directory DIR] [--mib 1024] [--object-mib 4] [--depth 8]

The bare disk: `pwritev` and `preadv` with O_DIRECT from as many threads as the store has, and one
`fdatasync` at the end. The store: that many writes under way, each durable when it returns. `--rows
N` measures a start with N rows in the index instead, after a kill and after a clean stop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.tiers.disk import RealDisk, aligned_memory
from kvd.tiers.index import Change, Changes, LmdbPlace
from kvd.tiers.nvme import Bundle, NvmeConfig, NvmeStore, Part, Space
from kvd.tiers.recover import begin_meta
from kvd.tiers.region import BLOCK, RegionHeader, encode_region, encode_space
from kvd.tiers.rows import KEY_BYTES, Row, pack_row, seal_rows
from kvd.tiers.storefiles import Identity, encode_identity, region_path

if TYPE_CHECKING:
    from collections.abc import Iterator

SPACE = Space("bench", b"n" * 32, b"l" * 32)
REGION_BYTES = 256 << 20


def key(number: int) -> bytes:
    """Return a chunk hash of its own."""
    return number.to_bytes(8, "big") * 4


def bare(path: Path, buffers: list[memoryview], count: int) -> tuple[float, float]:
    """Return GB/s of writing and reading the bare file."""
    size, lanes = buffers[0].nbytes, len(buffers)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(handle, 0, count * size)
        with ThreadPoolExecutor(4) as pool:
            began = time.perf_counter()
            wrote = pool.map(
                lambda n: os.pwritev(handle, [buffers[n % lanes]], n * size), range(count)
            )
            assert sum(wrote) == count * size
            os.fdatasync(handle)
            middle = time.perf_counter()
            read = pool.map(
                lambda n: os.preadv(handle, [buffers[n % lanes]], n * size), range(count)
            )
            assert sum(read) == count * size
            end = time.perf_counter()
    finally:
        os.close(handle)
        path.unlink()
    return count * size / (middle - began) / 1e9, count * size / (end - middle) / 1e9


async def store(directory: Path, buffers: list[memoryview], count: int) -> tuple[float, float]:
    """Return GB/s of writing durably and reading verified through the store."""
    size, depth = buffers[0].nbytes, len(buffers)
    regions = 4 + count * (size + BLOCK) // (REGION_BYTES - 2 * size)
    config = NvmeConfig(directory, regions * REGION_BYTES, REGION_BYTES)
    tier = NvmeStore(config, asyncio.get_running_loop())
    tier.open()
    refs = {}

    async def write(lane: int) -> None:
        for number in range(lane, count, depth):
            part = Part(0, 0, size, buffers[lane])
            item = Bundle(SPACE, key(number), key(number + 1), [part])
            refs[number] = await tier.write(item)

    async def read(lane: int) -> None:
        for number in range(lane, count, depth):
            into = {0: buffers[lane]}
            await tier.read(refs[number], SPACE, key(number), key(number + 1), into)

    began = time.perf_counter()
    await asyncio.gather(*(write(lane) for lane in range(depth)))
    middle = time.perf_counter()
    await asyncio.gather(*(read(lane) for lane in range(depth)))
    end = time.perf_counter()
    await tier.close()
    shutil.rmtree(directory)
    return count * size / (middle - began) / 1e9, count * size / (end - middle) / 1e9


def rates(directory: Path, *, mib: int, object_mib: int, depth: int, rounds: int) -> None:
    """Print both, round by round in turn, and the median ratios."""
    buffers = [aligned_memory(object_mib << 20) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = os.urandom(buffer.nbytes)
    count = mib // object_mib
    ratios = []
    print("GB/s     bare write  store write   bare read   store read")
    for _ in range(rounds):
        one = bare(directory / "bare", buffers, count)
        two = asyncio.run(store(directory / "store", buffers, count))
        ratios.append((two[0] / one[0], two[1] / one[1]))
        print(f"{one[0]:19.2f}{two[0]:13.2f}{one[1]:12.2f}{two[1]:13.2f}")
    write, read = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median ratio to the bare disk: write {write:.2f}, read {read:.2f}")


def starts(directory: Path, rows: int) -> None:
    """Print how long a start with that many rows takes. Sparse regions: only the index is real."""
    uuid, per = os.urandom(16), (REGION_BYTES - BLOCK) // (2 * BLOCK)
    count = -(-rows // per) + 2
    (directory / "regions").mkdir()
    (directory / "store").write_bytes(encode_identity(Identity(uuid, REGION_BYTES)))
    for number in range(count):
        with region_path(directory, number).open("wb") as file:
            file.write(encode_region(RegionHeader(uuid, number, REGION_BYTES, 1)))
            file.truncate(REGION_BYTES)

    def fill() -> Iterator[Changes]:
        yield Changes(meta=begin_meta(uuid, 1), spaces={SPACE.key: encode_space(SPACE)})
        keys = sorted(os.urandom(32) for _ in range(rows))
        for first in range(0, rows, 65536):
            part = enumerate(keys[first : first + 65536], first)
            packed = seal_rows([pack_row(_row(number, chunk, per)) for number, chunk in part])
            yield Changes([Change(row[:KEY_BYTES], row[KEY_BYTES:]) for row in packed])

    config = NvmeConfig(directory, count * REGION_BYTES, REGION_BYTES)
    LmdbPlace(RealDisk(), directory, config.map_bytes).build(fill()).close()
    for _ in range(2):
        asyncio.run(_start(config))
    print(f"index.mdb: {(directory / 'index.mdb').stat().st_size / 1e6:.0f} MB")


async def _start(config: NvmeConfig) -> None:
    began = time.perf_counter()
    tier = NvmeStore(config, asyncio.get_running_loop())
    opened = tier.open()
    ready = time.perf_counter()
    seen = sum(1 for _, rows in opened.entries for _ in rows)
    iterate_s = time.perf_counter() - ready
    how = opened.report.how
    print(f"{how:8} {seen} rows: open {ready - began:.2f} s, iterate {iterate_s:.2f} s")
    await tier.close()


def _row(number: int, chunk: bytes, per: int) -> Row:
    offset = BLOCK + number % per * 2 * BLOCK
    region, generation = number // per, (1 << 32) + number + 1
    mask = (1).to_bytes(32, "little")
    return Row(SPACE.key, chunk, chunk, mask, region, 0, offset, 2 * BLOCK, generation, BLOCK, 0)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description="Measure the NVMe store against the bare disk.")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--object-mib", type=int, default=4)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=options.directory) as folder:
        if options.rows:
            starts(Path(folder), options.rows)
            return
        rates(
            Path(folder),
            mib=options.mib,
            object_mib=options.object_mib,
            depth=options.depth,
            rounds=options.rounds,
        )


if __name__ == "__main__":
    main()
