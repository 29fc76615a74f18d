"""Host tier through kvd itself: store and load of paged KV beside memcpy, and views without a copy.

    python -m bench.host [--json] [--rounds 12] [--host-bytes N]

What is timed, with objects of 32 MiB (256 tokens, 32 layers, 8 KV heads, head size 128, bf16):

    memcpy      the same bytes, plain memory to a shared memfd that is faulted in; one call a thread
    memcpy_back the reverse
    store       reserve, gather from a paged pool through a random block table, publish
    load        acquire, scatter into the pool through another block table, release
    view        acquire and view all of a prefix of 1, 8 or 64 chunks; no copy, objects of 1 MiB

Ratios are to memcpy in the same direction with as many threads, within the same round; figures are
medians over interleaved rounds. The first rounds map and touch the slabs and are not counted. On a
machine that others use, trust `_ratio_best`: the best round of each, which no neighbour delayed.

Figures with suffix `_1t` and `_2t` are for one and two copying threads, those without are for one;
`view_us_p50` without a suffix is for 8 chunks.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import kvd_client
from bench._daemon import running_daemon
from bench._table import print_json, print_table
from kvd_client.paged import PagedKV

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

LAYERS, HEADS, HEAD_SIZE, PAGE_TOKENS, CHUNK_TOKENS = 32, 8, 128, 16, 256
CHUNK_PAGES: Final = CHUNK_TOKENS // PAGE_TOKENS
PAGE_BYTES: Final = PAGE_TOKENS * HEADS * HEAD_SIZE * 2
OBJECT_BYTES: Final = 2 * LAYERS * CHUNK_PAGES * PAGE_BYTES
POOL_BLOCKS: Final = 512  # 1 GiB: larger than any cache
CHUNKS: Final = 4  # of one store and load: 128 MiB
BATCH_BYTES: Final = CHUNKS * OBJECT_BYTES
VIEW_CHUNKS: Final = (1, 8, 64)
THREADS: Final = (1, 2)
WARM_ROUNDS_EXTRA: Final = 2

Samples = dict[str, list[float]]


class Memcpy:
    """The plain copy kvd is measured against, between memory of its own."""

    def __init__(self) -> None:
        """Fault in a private buffer and a shared memfd of three batches each."""
        size = 3 * BATCH_BYTES
        fd = os.memfd_create("bench")
        os.ftruncate(fd, size)
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._shared_map = mmap.mmap(fd, size, flags=shared)
        os.close(fd)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._private_map = mmap.mmap(-1, size, flags=private)
        self._shared = ctypes.addressof(ctypes.c_char.from_buffer(self._shared_map))
        self._private = ctypes.addressof(ctypes.c_char.from_buffer(self._private_map))
        ctypes.memset(self._private, 1, size)
        self._pool = ThreadPoolExecutor(max(THREADS))
        self._turn = 0

    def __call__(self, threads: int, *, back: bool) -> None:
        """Copy one batch, object by object, each cut in one piece a thread."""
        self._turn = (self._turn + 1) % 3
        start = self._turn * BATCH_BYTES
        target, source = (self._shared, self._private)[:: -1 if back else 1]
        piece = OBJECT_BYTES // threads
        for at in range(start, start + BATCH_BYTES, OBJECT_BYTES):
            if threads == 1:
                ctypes.memmove(target + at, source + at, piece)
                continue
            offsets = range(at, at + OBJECT_BYTES, piece)
            copies = [
                self._pool.submit(ctypes.memmove, target + o, source + o, piece) for o in offsets
            ]
            for copy in copies:
                copy.result()


def paged_pool() -> list[torch.Tensor]:
    """Make the engine's paged KV memory: (blocks, page, heads, head size) for K and V a layer."""
    import torch

    shape = (POOL_BLOCKS, PAGE_TOKENS, HEADS, HEAD_SIZE)
    planes = []
    for index in range(2 * LAYERS):
        plane = torch.empty(shape, dtype=torch.bfloat16)
        plane.view(torch.int16).random_(generator=torch.Generator().manual_seed(index))
        planes.append(plane)
    return planes


def seconds(action: Callable[[], None]) -> float:
    """Time one action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Engine:
    """An engine with a paged pool that stores and loads prefixes through one client."""

    def __init__(self, client: kvd_client.Client, planes: list[torch.Tensor]) -> None:
        """Keep a PagedKV for each number of threads."""
        self._client = client
        self._planes = planes
        self._random = random.Random(6)
        self._paged = {
            threads: PagedKV(planes, PAGE_TOKENS, threads=threads) for threads in THREADS
        }
        self.kernel = self._paged[1].kernel

    def prefix(self) -> list[bytes]:
        """Give the chunk hashes of a prompt nobody has seen."""
        tokens = [self._random.randrange(32_000) for _ in range(CHUNKS * CHUNK_TOKENS)]
        return self._client.chunk_hashes(tokens)

    def tables(self) -> list[list[int]]:
        """Give a random block table for each chunk."""
        blocks = self._random.sample(range(POOL_BLOCKS), CHUNKS * CHUNK_PAGES)
        return [blocks[at : at + CHUNK_PAGES] for at in range(0, len(blocks), CHUNK_PAGES)]

    def store(self, threads: int, hashes: Sequence[bytes], tables: list[list[int]]) -> None:
        """Reserve, gather, publish; RuntimeError if anything of it was refused."""
        with self._client.reserve(hashes) as reservation:
            slots = reservation.placed
            self._paged[threads].gather_many(
                [(tables[slot.chunk], slot.buffer) for slot in slots if slot.buffer is not None]
            )
            statuses = self._client.publish(reservation)
        if statuses != [kvd_client.Status.OK] * CHUNKS:
            raise RuntimeError(f"store was refused in part: {statuses}")

    def load(self, threads: int, hashes: Sequence[bytes], tables: list[list[int]]) -> None:
        """Acquire, scatter, release; RuntimeError if it was not a full hit."""
        with self._client.acquire(hashes) as lease:
            if lease.chunks != CHUNKS:
                raise RuntimeError(f"hit {lease.chunks} of {CHUNKS} chunks")
            self._paged[threads].scatter_many(
                [(tables[chunk], lease.view(chunk)) for chunk in range(CHUNKS)]
            )

    def check_same(self, stored: list[list[int]], loaded: list[list[int]]) -> None:
        """Raise RuntimeError unless the loaded blocks have the stored blocks' bytes."""
        import torch

        source = [block for table in stored for block in table]
        target = [block for table in loaded for block in table]
        for plane in self._planes:
            words = plane.view(torch.int16)
            if not torch.equal(words[source], words[target]):
                raise RuntimeError("what was loaded is not what was stored")


def copy_round(engine: Engine, memcpy: Memcpy, threads: int, samples: Samples, turn: int) -> None:
    """Time memcpy, store, memcpy back and load once each, in an order that alternates."""
    hashes, tables, others = engine.prefix(), engine.tables(), engine.tables()
    steps: list[tuple[str, Callable[[], None]]] = [
        ("memcpy", lambda: memcpy(threads, back=False)),
        ("store", lambda: engine.store(threads, hashes, tables)),
        ("memcpy_back", lambda: memcpy(threads, back=True)),
        ("load", lambda: engine.load(threads, hashes, others)),
    ]
    order = (0, 1, 2, 3) if turn % 2 else (1, 0, 3, 2)
    took = {name: seconds(action) for name, action in (steps[index] for index in order)}
    if turn == 0:
        disjoint = not {b for t in tables for b in t} & {b for t in others for b in t}
        if disjoint:
            engine.check_same(tables, others)
    for name, took_s in took.items():
        samples.setdefault(f"{name}_gbps_{threads}t", []).append(BATCH_BYTES / took_s / 1e9)
    for name, reference in (("store", "memcpy"), ("load", "memcpy_back")):
        ratio = took[reference] / took[name]
        samples.setdefault(f"{name}_ratio_{threads}t", []).append(ratio)


def bench_copies(socket: str, rounds: int, host_bytes: int) -> dict[str, object]:
    """Measure store and load; the warm-up fills the tier once, so that every slot was touched."""
    layout = layout_of(LAYERS, OBJECT_BYTES)
    samples: Samples = {}
    warm = host_bytes // (BATCH_BYTES * len(THREADS)) + WARM_ROUNDS_EXTRA
    with kvd_client.connect(socket, namespace=namespace(), layout=layout, rank=0) as client:
        engine = Engine(client, paged_pool())
        memcpy = Memcpy()
        cold: Samples = {}
        for turn in range(-warm, rounds):
            for threads in sorted(THREADS, reverse=bool(turn & 2)):
                copy_round(engine, memcpy, threads, cold if turn < 0 else samples, turn)
    figures: dict[str, object] = {"kernel": engine.kernel, "rounds": rounds}
    figures |= {name: statistics.median(values) for name, values in samples.items()}
    for name, reference in (("store", "memcpy"), ("load", "memcpy_back")):
        for threads in THREADS:
            best, best_memcpy = (max(samples[f"{n}_gbps_{threads}t"]) for n in (name, reference))
            figures[f"{name}_ratio_best_{threads}t"] = best / best_memcpy
    figures |= {
        name.removesuffix("_1t"): value for name, value in figures.items() if name.endswith("_1t")
    }
    figures["store_first_gbps"] = cold["store_gbps_1t"][0]
    return figures


def bench_views(socket: str, rounds: int) -> dict[str, object]:
    """Measure how long a prefix takes from `acquire` to memory that can be read in place."""
    layout = layout_of(1, OBJECT_BYTES // LAYERS)
    figures: dict[str, object] = {}
    with kvd_client.connect(socket, namespace=namespace(), layout=layout, rank=0) as client:
        hashes = client.chunk_hashes(range(max(VIEW_CHUNKS) * CHUNK_TOKENS))
        with client.reserve(hashes) as reservation:
            client.publish(reservation)
        for chunks in VIEW_CHUNKS:
            took = [view_s(client, hashes[:chunks]) for _ in range(rounds * 20)]
            figures[f"view_us_p50_{chunks}"] = statistics.median(took) * 1e6
    figures["view_us_p50"] = figures["view_us_p50_8"]
    return figures


def view_s(client: kvd_client.Client, hashes: Sequence[bytes]) -> float:
    """Time one acquire with all its views, a byte of each read; releasing is not timed."""
    start = time.perf_counter()
    with client.acquire(hashes) as lease:
        read = sum(lease.view(chunk)[0] for chunk in range(lease.chunks))
        took_s = time.perf_counter() - start
        if lease.chunks != len(hashes) or read < 0:
            raise RuntimeError(f"hit {lease.chunks} of {len(hashes)} chunks")
    return took_s


def namespace() -> kvd_client.Namespace:
    """Name the bench's own namespace."""
    return kvd_client.Namespace(model="bench", revision="0", dtype="bfloat16")


def layout_of(layers: int, object_bytes: int) -> kvd_client.Layout:
    """Give the layout of one group of full attention."""
    group = kvd_client.Group(
        kind="full",
        layers=layers,
        kv_heads=HEADS,
        head_size=HEAD_SIZE,
        object_bytes=object_bytes,
    )
    return kvd_client.Layout(
        chunk_tokens=CHUNK_TOKENS,
        page_tokens=PAGE_TOKENS,
        dtype="bfloat16",
        tp=1,
        pp=1,
        groups=(group,),
    )


def show(figures: dict[str, object]) -> None:
    """Print the figures for people."""
    store = ("memcpy_gbps", "store_gbps", "store_ratio", "store_ratio_best")
    load = ("memcpy_back_gbps", "load_gbps", "load_ratio", "load_ratio_best")
    rows = [
        {"threads": threads} | {name: figures[f"{name}_{threads}t"] for name in (*store, *load)}
        for threads in THREADS
    ]
    print_table(f"32 MiB objects, {figures['kernel']} copier, {figures['rounds']} rounds", rows)
    print_table(
        "acquire to readable memory, no copy",
        [{"chunks": n, "view_us_p50": figures[f"view_us_p50_{n}"]} for n in VIEW_CHUNKS],
    )


def main() -> None:
    """Start a daemon of our own, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--rounds", type=int, default=12, help="counted rounds (default 12)")
    parser.add_argument("--host-bytes", type=int, default=1 << 30, help="size of the host tier")
    options = parser.parse_args()
    with running_daemon(host_bytes=options.host_bytes) as socket:
        figures = bench_views(socket, options.rounds)
        figures |= bench_copies(socket, options.rounds, options.host_bytes)
    if options.json:
        print_json(figures)
    else:
        show(figures)


if __name__ == "__main__":
    main()
