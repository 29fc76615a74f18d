"""A million entries: what each costs in memory, in a look-up, and at a start.

    python -m bench.scale [--json] [--entries 1000000] [--lookups 3000] [--directory DIR]

A store of the NVMe tier is made with the store's own code: its index (LMDB, filled in random order,
as it grows in use), its region files, its clean mark. Only the records are left out: the region
files are sparse beyond their headers. A start does not read records, so that for it this is a store
of `stored_bytes`, in `regions` files of 256 MiB.

    bytes_per_entry     anonymous memory of the daemon, by the difference to one with 1,000 entries
    catalog_...         of that, the objects of the catalog, by their sizes
    lookup_p99_growth   over a socket, prefixes of 128 chunks, all on disk: the 99th percentile with
                        all entries over that with 1,000; two daemons, asked in turn
    catalog_p99_growth  the same for the catalog's own look-up, in this process
    ready_s             from the start of the process to READY, median of the starts after a stop
    ready_killed_s      the same after a kill: then the index is copied first

Noise of a shared machine is in all of it; the look-ups are asked in turn so that it hits both.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgpack

import kvd_client
from bench._daemon import DaemonProcess
from bench._table import report
from kvd.catalog import Catalog
from kvd.metrics import Counters
from kvd.quota import Quota
from kvd.tiers.disk import RealDisk, replace_file
from kvd.tiers.extents import Region
from kvd.tiers.index import Change, Changes, LmdbPlace
from kvd.tiers.nvme_types import NvmeConfig
from kvd.tiers.recover import LIFE_SHIFT, begin_meta
from kvd.tiers.region import BLOCK, FORM_RAW, RegionHeader, Space, encode_space
from kvd.tiers.rows import KEY_BYTES, ROW, ROW_BYTES, checks, words_of
from kvd.tiers.slab import SlabPool
from kvd.tiers.storefiles import encode_clean, identify, prepare_region, take
from kvd.trees import found_copy, plant
from kvd.types import Tenant
from kvd_client.identity import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.trees import Found

TENANT: Final = "default"
CHAIN_CHUNKS: Final = 128
FEW: Final = 1000
OBJECT_BYTES: Final = 1 << 20
RECORD_BYTES: Final = BLOCK + OBJECT_BYTES
REGION_BYTES: Final = 256 << 20
RECORDS_A_REGION: Final = (REGION_BYTES - BLOCK) // RECORD_BYTES
COMMIT_ROWS: Final = 1 << 14
HOST_BYTES: Final = 64 << 20
STARTS: Final = 3
SETTLE_S: Final = 1.0
CONFIG: Final = """
[nvme]
bytes = {size}
region_bytes = {region}
"""


class Entry(NamedTuple):
    """One chunk that lies in the tier below."""

    chunk: bytes
    parent: bytes
    region: int
    offset_bytes: int
    generation: int


def namespace() -> kvd_client.Namespace:
    """Name the bench's own namespace."""
    return kvd_client.Namespace("bench-scale", "0", "bfloat16")


def layout() -> kvd_client.Layout:
    """Give a layout with one object of 1 MiB a chunk of 64 tokens."""
    group = kvd_client.Group("full", 32, 1, 128, OBJECT_BYTES)
    return kvd_client.Layout(64, 16, "bfloat16", (group,)).check()


def hash_of(number: int) -> bytes:
    """Give the hash of an entry; opaque to the daemon."""
    return blake2b(number.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()


def chain(first: int) -> list[bytes]:
    """Give the hashes of the chain that begins with an entry."""
    return [hash_of(number) for number in range(first, first + CHAIN_CHUNKS)]


def entries(count: int) -> Iterator[Entry]:
    """Yield entries: chains of 128 chunks, one after another in the regions."""
    parent = root = namespace().id
    for number in range(count):
        chunk = hash_of(number)
        region, place = divmod(number, RECORDS_A_REGION)
        above = parent if number % CHAIN_CHUNKS else root
        generation = 1 << LIFE_SHIFT | (number + region + 2)
        yield Entry(chunk, above, region, BLOCK + place * RECORD_BYTES, generation)
        parent = chunk


# ------------------------------------------------------------------------------- the store


class SparseDisk(RealDisk):
    """Files that have their length, but no space."""

    def allocate(self, handle: int, size_bytes: int) -> None:
        os.ftruncate(handle, size_bytes)


def rows_of(space: Space, count: int) -> Iterator[Changes]:
    """Yield the rows of the index, a transaction at a time."""
    mask = (1).to_bytes(HASH_BYTES, "little")
    packed: list[bytes] = []
    for index, entry in enumerate(entries(count), 1):
        place = (entry.region, FORM_RAW, entry.offset_bytes, RECORD_BYTES, entry.generation)
        fields = (space.key, entry.chunk, entry.parent, mask, *place, OBJECT_BYTES, 0, 0)
        packed.append(ROW.pack(*fields))
        if len(packed) == COMMIT_ROWS or index == count:
            words = words_of(b"".join(packed)).copy()
            words[:, -1] = checks(words)
            raw = words.tobytes()
            rows = [raw[at : at + ROW_BYTES] for at in range(0, len(raw), ROW_BYTES)]
            yield Changes([Change(row[:KEY_BYTES], row[KEY_BYTES:]) for row in rows])
            packed.clear()


def build_store(directory: Path, count: int) -> int:
    """Make a store that was stopped cleanly; return its regions."""
    disk = SparseDisk()
    lock = take(disk, directory)
    uuid = identify(disk, directory, REGION_BYTES).uuid
    regions = -(-count // RECORDS_A_REGION)
    for number in range(regions):
        incarnation = 1 << LIFE_SHIFT | (number * (RECORDS_A_REGION + 1) + 1)
        region = Region(number)
        header = RegionHeader(uuid, number, REGION_BYTES, incarnation)
        prepare_region(disk, directory, region, header, direct=False)
        disk.close(region.handle)
    fields = msgpack.packb(layout().fields(), use_bin_type=True)
    space = Space(TENANT, namespace().id, layout().id, namespace().label, fields)
    config = NvmeConfig(directory, store_bytes(count), REGION_BYTES)
    begin = Changes(spaces={space.key: encode_space(space)}, meta=begin_meta(uuid, 1))

    def fill() -> Iterator[Changes]:
        yield begin
        yield from rows_of(space, count)

    index = LmdbPlace(disk, directory, config.map_bytes).build(fill())
    replace_file(disk, directory / "clean", encode_clean(uuid, index.close()), sync=False)
    disk.close(lock)
    return regions


def store_bytes(count: int) -> int:
    """Return the size to configure: what there is, and some room."""
    return (-(-count // RECORDS_A_REGION) + 4) * REGION_BYTES


# ------------------------------------------------------------------------------- the daemon


class Host:
    """A daemon over a store of so many entries."""

    def __init__(self, directory: Path, count: int) -> None:
        """Make the store."""
        self.count = count
        nvme = directory / "state" / "nvme"
        nvme.parent.mkdir(mode=0o700)
        self.regions = build_store(nvme, count)
        self.index_bytes = (nvme / "index.mdb").stat().st_blocks * 512
        config = directory / "kvd.toml"
        config.write_text(CONFIG.format(size=store_bytes(count), region=REGION_BYTES))
        arguments = ["--config", str(config)]
        self.daemon = DaemonProcess(directory, host_bytes=HOST_BYTES, arguments=arguments)

    def start(self) -> float:
        """Run it; return seconds until READY."""
        started = time.perf_counter()
        self.daemon.start(until="ready")
        return time.perf_counter() - started

    def connect(self) -> kvd_client.Client:
        """Open a session."""
        return kvd_client.connect(
            self.daemon.socket, namespace=namespace(), layout=layout(), wait_s=30, required=True
        )

    def memory_bytes(self, name: str) -> int:
        """Return a line of the process's status, in bytes."""
        text = Path(f"/proc/{self.daemon.pid}/status").read_text()
        return int(text.partition(f"{name}:")[2].split()[0]) << 10


def starts(few: Host, many: Host) -> dict[str, float]:
    """Start both again and again, stopped cleanly before; then once more after a kill."""
    times: dict[Host, list[float]] = {few: [], many: []}
    for _ in range(STARTS):
        for host in (few, many):
            times[host].append(host.start())
            if host.daemon.stop():
                raise RuntimeError(host.daemon.log.read_text()[-2000:])
    many.start()
    many.daemon.kill()
    found = {"ready_killed_s": many.start()}
    few.start()
    return found | {
        "ready_s": statistics.median(times[many]),
        "ready_best_s": min(times[many]),
        "ready_few_s": statistics.median(times[few]),
    }


def memory(few: Host, many: Host) -> dict[str, float]:
    """Compare the two daemons' memory."""
    time.sleep(SETTLE_S)
    more = many.count - few.count
    anonymous = many.memory_bytes("RssAnon") - few.memory_bytes("RssAnon")
    return {"bytes_per_entry": anonymous / more, "rss_bytes": float(many.memory_bytes("VmRSS"))}


# ------------------------------------------------------------------------------- look-ups


def growth(
    few: Callable[[list[bytes]], int], many: Callable[[list[bytes]], int], counts: Sequence[int]
) -> dict[str, float]:
    """Ask both in turn for random prefixes; return percentiles in microseconds, and growths."""
    order = random.Random(8)
    asks, lookups = (few, many), counts[2]
    took: tuple[list[float], list[float]] = ([], [])
    for turn in range(lookups):
        for which in (0, 1) if turn % 2 else (1, 0):
            hashes = chain(CHAIN_CHUNKS * order.randrange(counts[which] // CHAIN_CHUNKS))
            started = time.perf_counter()
            found = asks[which](hashes)
            took[which].append((time.perf_counter() - started) * 1e6)
            if found != CHAIN_CHUNKS:
                raise RuntimeError(f"found {found} of {CHAIN_CHUNKS} chunks")
    figures: dict[str, float] = {}
    for percent in (50, 99):
        small, large = (statistics.quantiles(times, n=100)[percent - 1] for times in took)
        figures |= {
            f"p{percent}_few_us": small,
            f"p{percent}_us": large,
            f"p{percent}_growth": large / small,
        }
    return figures


def filled_catalog(count: int) -> tuple[Catalog, float]:
    """Restore a catalog in this process; return it with the bytes of its objects an entry."""
    tenant = Tenant(TENANT)
    catalog = Catalog(SlabPool(1 << 20, {tenant: 1}), Quota({tenant: {}}), Counters())
    catalog.cold_readable = True
    space = catalog.enter(tenant, namespace().id, "", layout())

    def rows() -> Iterator[Found]:
        for entry in entries(count):
            place = (entry.region, entry.offset_bytes, RECORD_BYTES, entry.generation)
            yield found_copy(entry.chunk, bytes(entry.parent), (place, 1, False))

    if plant(space, rows(), catalog.changes):
        raise RuntimeError("the catalog has left entries out")
    size = sys.getsizeof(space.chunks)
    for chunk in space.chunks.values():
        size += sys.getsizeof(chunk) + sys.getsizeof(chunk.hash) + sys.getsizeof(chunk.cold_place)
    return catalog, size / count


def catalog_figures(counts: Sequence[int]) -> dict[str, float]:
    """Measure the catalog alone."""
    few, _ = filled_catalog(counts[0])
    many, size = filled_catalog(counts[1])
    spaces = [next(iter(catalog.spaces.values())) for catalog in (few, many)]
    found = growth(
        lambda hashes: few.usable(spaces[0], hashes),
        lambda hashes: many.usable(spaces[1], hashes),
        counts,
    )
    named = {f"catalog_{name}": value for name, value in found.items()}
    return {"catalog_bytes_per_entry": size} | named


def daemon_figures(directory: Path, counts: Sequence[int]) -> dict[str, object]:
    """Measure two daemons."""
    hosts = []
    for name, count in zip(("few", "many"), counts, strict=False):
        (directory / name).mkdir()
        hosts.append(Host(directory / name, count))
    few, many = hosts
    figures: dict[str, object] = {
        "regions": many.regions,
        "index_bytes": many.index_bytes,
        "stored_bytes": counts[1] * RECORD_BYTES,
    }
    try:
        figures |= starts(few, many)
        figures |= memory(few, many)
        with few.connect() as one, many.connect() as other:
            found = growth(
                lambda hashes: one.lookup(hashes).chunks,
                lambda hashes: other.lookup(hashes).chunks,
                counts,
            )
        figures |= {f"lookup_{name}": value for name, value in found.items()}
    finally:
        for host in hosts:
            host.daemon.clean_up()
    return figures


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--entries", type=int, default=1_000_000, help="in the larger store")
    parser.add_argument("--lookups", type=int, default=3000, help="of each daemon")
    parser.add_argument("--directory", type=Path, help="for the stores (default: TMPDIR)")
    arguments = parser.parse_args()
    if arguments.entries <= FEW:
        parser.error(f"--entries must be more than {FEW}")
    counts = (FEW, arguments.entries, arguments.lookups)
    figures: dict[str, object] = {"entries": arguments.entries, "lookups": arguments.lookups}
    with tempfile.TemporaryDirectory(prefix="kvd-scale-", dir=arguments.directory) as directory:
        figures |= daemon_figures(Path(directory), counts)
    figures |= catalog_figures(counts)
    figures |= {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0]}
    report(f"{arguments.entries:,} entries", figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
