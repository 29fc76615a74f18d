"""The NVMe tier through a real daemon, beside the same disk without kvd.

    python -m bench.nvme [--json] [--rounds 3] [--directory DIR] [--synthetic] [--limit-mbps N]

What is timed, each beside the raw disk measured just before in the same round, with real KV
(`bench.codec.real_kv`) in objects of 512 tokens, one a chunk, prefixes of 8 chunks:

    raw write   as many records, plain O_DIRECT writes from as many threads as kvd has, to fresh
                files laid out like kvd's regions (made before); until they are synced
    demote      a client stores four times the host tier, refused whenever nothing is durable yet;
                until all of it is durable: until the whole host tier could be given to others
    raw read    the records again, the same way
    promote     after a restart of the daemon, a client acquires every prefix, two at a time;
                until they are readable

`raw_*_gbps` and `FORM_*_gbps` count an object's own bytes (bfloat16), whatever is on disk;
`FORM_*_disk_share` is what kvd moved to or from disk, over the raw disk; `FORM_*_cpu` the cores
that the daemon kept busy. Where the disk share is high the disk was the limit, else the codec or
the CPU (`FORM_*_limit`). `demote_ratio` and `promote_ratio` are those of the form `raw`.
`fp8_over_raw` is that of loading, which an engine waits for; both are there by name.

`--limit-mbps` holds the disk to so many MB/s each way, by the kernel's block I/O controller (root):
what happens where the disk is slower than the CPU, on any machine.

Figures are medians over rounds, `_best` the best round, to trust on a machine that others use.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import kvd_client
from bench import codec as bench_codec
from bench._daemon import DaemonProcess
from bench._limit import limited_disk
from bench._rawdisk import REGION_BYTES, THREADS, RawDisk
from bench._table import print_json, print_table
from kvd import statpage
from kvd.tiers.region import aligned
from kvd_client.identity import HASH_BYTES
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    Object = npt.NDArray[np.uint8]
    Samples = dict[str, list[float]]

FORMS: Final = ("raw", "fp8", "lossless")
CHUNK_TOKENS: Final = 512
PREFIX_CHUNKS: Final = 8
PREFIXES: Final = 24
HOST_PREFIXES: Final = 6
AHEAD: Final = 2
RETRY_S: Final = 0.001
WAIT_S: Final = 60.0
DISK_LIMIT_SHARE: Final = 0.8
CONFIG: Final = """
[host]
bytes = {host}
slab_bytes = {slab}
[nvme]
bytes = "{size}"
region_bytes = {region}
form = "{form}"
threads = {threads}
[limits]
filling_share = 1.0
"""


def payload(*, synthetic: bool) -> tuple[str, list[Object]]:
    """Return what the KV is, and some objects of it, tokens before heads as paged engines have."""
    from kvd.demo.model import ModelMissing

    kind = "synthetic"
    kv = None
    if not synthetic:
        try:
            kv, kind = bench_codec.real_kv(), "SmolLM2-135M-Instruct"
        except ModelMissing as missing:
            print(f"bench.nvme: {missing}; synthetic KV instead", file=sys.stderr)
    if kv is None:
        kv = bench_codec.synthetic_kv()
    cuts = range(0, kv.shape[3], CHUNK_TOKENS)
    parts = [kv[:, :, :, at : at + CHUNK_TOKENS].swapaxes(2, 3) for at in cuts]
    return kind, [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]


def layout_of(object_bytes: int) -> kvd_client.Layout:
    """Give the layout of the objects."""
    group = kvd_client.Group(
        "full", bench_codec.LAYERS, bench_codec.HEADS, bench_codec.HEAD_SIZE, object_bytes
    )
    return kvd_client.Layout(
        CHUNK_TOKENS, 16, "bfloat16", (group,), order=bench_codec.ORDERS[""]
    ).check()


# ------------------------------------------------------------------------------- kvd on it


class Tier:
    """A daemon with a small host tier over an NVMe tier, and a client."""

    def __init__(self, directory: Path, form: str, objects: Sequence[Object]) -> None:
        """Write the configuration; `start` runs it."""
        self.form = form
        self._objects = objects
        self._size = objects[0].nbytes
        slab = PREFIX_CHUNKS * aligned(self._size)
        slab += -slab % (2 << 20)
        config = directory / "kvd.toml"
        regions = 4 + 2 * PREFIXES * PREFIX_CHUNKS * self._size // REGION_BYTES
        config.write_text(
            CONFIG.format(
                host=HOST_PREFIXES * slab,
                slab=slab,
                size=regions * REGION_BYTES,
                region=REGION_BYTES,
                form=form,
                threads=THREADS,
            )
        )
        self._daemon = DaemonProcess(
            directory, host_bytes=HOST_PREFIXES * slab, arguments=["--config", str(config)]
        )
        self._namespace = kvd_client.Namespace("bench", "0", "bfloat16", lossy=form == "fp8")
        self._chains = [chain(number) for number in range(PREFIXES)]
        self._client: kvd_client.Client
        self.used_s = 0.0
        self.stalls = 0
        """Times the disk was too slow, of those shown so far; the tier sheds meanwhile."""

    def start(self) -> None:
        """Run the daemon and connect."""
        self._daemon.start()
        self._client = kvd_client.connect(
            self._daemon.socket,
            namespace=self._namespace,
            layout=layout_of(self._size),
            wait_s=WAIT_S,
            required=True,
        )
        self._wait_until_warm()

    def _wait_until_warm(self) -> None:
        """Give the codec's compiler its time, which a daemon needs once after its start."""
        idle = 0
        while idle < 3:
            before = self.cpu_s()
            time.sleep(0.1)
            idle = idle + 1 if self.cpu_s() - before < 0.02 else 0

    def stop(self) -> None:
        """End the client and the daemon."""
        self._client.close()
        if self._daemon.stop():
            raise RuntimeError(self._daemon.log.read_text()[-2000:])

    def clean_up(self) -> None:
        """End what is left after an error."""
        self._daemon.clean_up()

    def cpu_s(self) -> float:
        """Return the processor time that the daemon has used."""
        fields = Path(f"/proc/{self._daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def counters(self) -> dict[str, Any]:
        """Return the store's counters once the page shows the present."""
        time.sleep(0.45)
        found = statpage.read(stat_page_name(self._daemon.socket)).stats
        counters: dict[str, Any] = found["nvme"]["counters"]
        self.stalls += counters["stalls"]
        return counters

    def store(self) -> float:
        """Store every prefix until it is durable; return seconds."""
        return self._timed(self._store)

    def load(self) -> float:
        """Acquire every prefix, a few at a time, until it is readable; return seconds."""
        return self._timed(self._load)

    def _timed(self, action: Callable[[], None]) -> float:
        """Time an action, and the daemon's processor time meanwhile (`used_s`)."""
        before, started = self.cpu_s(), time.perf_counter()
        action()
        took_s = time.perf_counter() - started
        self.used_s = self.cpu_s() - before
        return took_s

    def _store(self) -> None:
        started = time.perf_counter()
        deadline = started + WAIT_S
        for hashes in self._chains:
            first = 0
            while first < len(hashes):
                first += self._store_some(hashes, first)
                if time.perf_counter() > deadline:
                    raise RuntimeError("the host tier does not empty")
        self._take_all(deadline)

    def _store_some(self, hashes: list[bytes], first: int) -> int:
        """Store what there is room for; return how many chunks."""
        stored = 0
        with self._client.reserve(hashes, first=first) as reservation:
            for slot in reservation.placed:
                assert slot.buffer is not None
                source = self._objects[slot.chunk % len(self._objects)]
                np.copyto(np.frombuffer(slot.buffer, np.uint8), source)
                statuses = self._client.publish(reservation, [slot])
                assert statuses == [kvd_client.Status.OK], statuses
                stored += 1
        if not stored:
            time.sleep(RETRY_S)
        return stored

    def _take_all(self, deadline: float) -> None:
        """Reserve the whole host tier, which works once nothing in it is the only copy."""
        hashes = [os.urandom(HASH_BYTES) for _ in range(HOST_PREFIXES * PREFIX_CHUNKS)]
        with contextlib.ExitStack() as stack:
            taken = 0
            while taken < len(hashes):
                reservation = stack.enter_context(self._client.reserve(hashes, first=taken))
                got = len(reservation.placed)
                taken += got
                if not got:
                    time.sleep(RETRY_S)
                if time.perf_counter() > deadline:
                    raise RuntimeError("what was stored does not become durable")

    def _load(self) -> None:
        waiting = deque(self._client.begin_acquire(c) for c in self._chains[:AHEAD])
        for number in range(PREFIXES):
            with self._client.wait(waiting.popleft()) as lease:
                if lease.chunks != PREFIX_CHUNKS:
                    found = f"{lease.chunks} of {PREFIX_CHUNKS} chunks"
                    raise RuntimeError(f"prefix {number}: {found}; stalls: {self.stalls}")
                read = sum(lease.view(index)[0] for index in range(PREFIX_CHUNKS))
                assert read >= 0
            if number + AHEAD < PREFIXES:
                waiting.append(self._client.begin_acquire(self._chains[number + AHEAD]))

    def check(self) -> None:
        """Compare the last prefix with what was stored; RuntimeError if it is not that."""
        with self._client.acquire(self._chains[-1]) as lease:
            for index in range(PREFIX_CHUNKS):
                source = self._objects[index % len(self._objects)]
                found = np.frombuffer(lease.view(index), np.uint8)
                if self.form != "fp8" and not np.array_equal(source, found):
                    raise RuntimeError("what was loaded is not what was stored")
                exact, near = (_floats(bits) for bits in (source, found))
                if np.abs(near - exact).max() > np.abs(exact).max() / 16:
                    raise RuntimeError("what was loaded is far from what was stored")
                del found, near


def _floats(bits: Object) -> npt.NDArray[np.float32]:
    """View bfloat16 as numbers."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def chain(number: int) -> list[bytes]:
    """Give the chunk hashes of one prefix; opaque to the daemon."""
    return [
        (number * PREFIX_CHUNKS + index + 1).to_bytes(8, "little") * (HASH_BYTES // 8)
        for index in range(PREFIX_CHUNKS)
    ]


# ------------------------------------------------------------------------------- the whole


@contextlib.contextmanager
def fresh_tier(parent: Path, form: str, objects: Sequence[Object]) -> Iterator[Tier]:
    """Make a tier in a directory of its own, and remove both."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir=parent) as directory:
        tier = Tier(Path(directory), form, objects)
        try:
            yield tier
        finally:
            tier.clean_up()


def in_turn(first: Callable[[], float], second: Callable[[], float], turn: int) -> list[float]:
    """Time two things, the other one first in every other turn; nothing else is on the disk."""
    took = [0.0, 0.0]
    for index in (0, 1) if turn % 2 else (1, 0):
        os.sync()  # files that were removed are discarded, which delays the next writes
        took[index] = (first, second)[index]()
    return took


def one_round(
    parent: Path, form: str, objects: Sequence[Object], samples: Samples, turn: int
) -> None:
    """Time raw write and demote, then raw read and promote, once each."""
    count = PREFIXES * PREFIX_CHUNKS
    size = count * objects[0].nbytes
    took: dict[str, float] = {}
    disk_bytes: dict[str, int] = {}
    cpu_s: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="raw-", dir=parent) as directory,
        fresh_tier(parent, form, objects) as tier,
    ):
        raw = RawDisk(Path(directory), objects)
        for name, reference, own, plain in (
            ("demote", "raw_write", tier.store, raw.write),
            ("promote", "raw_read", tier.load, raw.read),
        ):
            tier.start()
            took[reference], took[name] = in_turn(partial(plain, count), own, turn)
            cpu_s[name] = tier.used_s
            disk_bytes[name] = tier.counters()[f"{reference[4:]}_bytes"]
            if name == "demote":
                tier.stop()
        tier.check()
        tier.stop()
        raw.remove()
    for name, reference in (("demote", "raw_write"), ("promote", "raw_read")):
        raw_gbps = size / took[reference] / 1e9
        found = {
            f"{reference}_gbps": raw_gbps,
            f"{form}_{name}_gbps": size / took[name] / 1e9,
            f"{form}_{name}_ratio": took[reference] / took[name],
            f"{form}_{name}_disk_share": disk_bytes[name] / took[name] / 1e9 / raw_gbps,
            f"{form}_{name}_cpu": cpu_s[name] / took[name],
        }
        for key, value in found.items():
            samples.setdefault(key, []).append(value)


def measure(rounds: int, parent: Path, *, synthetic: bool = False) -> dict[str, object]:
    """Measure everything, interleaved; see the module for the names."""
    kind, objects = payload(synthetic=synthetic)
    samples: Samples = {}
    for number in range(rounds):
        for form in FORMS:
            print(f"bench.nvme: round {number + 1}/{rounds}, {form}", file=sys.stderr)
            one_round(parent, form, objects, samples, number)
    figures: dict[str, object] = {
        "kv": kind,
        "object_bytes": objects[0].nbytes,
        "bytes": PREFIXES * PREFIX_CHUNKS * objects[0].nbytes,
        "threads": THREADS,
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
    }
    figures |= {name: statistics.median(values) for name, values in samples.items()}
    for name in ("demote", "promote"):
        figures[f"{name}_ratio"] = figures[f"raw_{name}_ratio"]
        figures[f"{name}_ratio_best"] = max(samples[f"raw_{name}_ratio"])
        for form in FORMS:
            share = statistics.median(samples[f"{form}_{name}_disk_share"])
            figures[f"{form}_{name}_limit"] = "disk" if share >= DISK_LIMIT_SHARE else "cpu"
        for form in FORMS[1:]:
            ratios = [
                own / raw
                for own, raw in zip(
                    samples[f"{form}_{name}_ratio"], samples[f"raw_{name}_ratio"], strict=True
                )
            ]
            figures[f"{form}_over_raw_{name}"] = statistics.median(ratios)
    figures["fp8_over_raw"] = figures["fp8_over_raw_promote"]
    figures["codec"] = bench_codec.measure(2, synthetic=synthetic)
    return figures


def show(figures: dict[str, object]) -> None:
    """Print the figures for people."""
    columns = ("gbps", "ratio", "disk_share", "cpu", "limit")
    for name, reference in (("demote", "raw_write_gbps"), ("promote", "raw_read_gbps")):
        rows = [
            {"form": form} | {column: figures[f"{form}_{name}_{column}"] for column in columns}
            for form in FORMS
        ]
        raw = figures[reference]
        assert isinstance(raw, float)
        print_table(f"{name}, GB/s of bfloat16; the disk without kvd {raw:.2f} GB/s", rows)
    print_table(
        f"{figures['kv']}, objects of {figures['object_bytes']} bytes, {figures['rounds']} rounds",
        [
            {"over the form raw": form}
            | {name: figures[f"{form}_over_raw_{name}"] for name in ("demote", "promote")}
            for form in FORMS[1:]
        ],
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.nvme", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="of every form")
    parser.add_argument("--synthetic", action="store_true", help="random numbers, no model")
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: TMPDIR)")
    parser.add_argument("--limit-mbps", type=int, default=0, help="hold the disk to this (root)")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvd-nvme-", dir=arguments.directory) as directory,
        contextlib.ExitStack() as stack,
    ):
        if arguments.limit_mbps:
            limit = limited_disk(Path(directory), arguments.limit_mbps * 1_000_000)
            try:
                stack.enter_context(limit)
            except OSError as error:
                print(f"bench.nvme: --limit-mbps: {error}; needs root", file=sys.stderr)
                return 2
        figures = measure(arguments.rounds, Path(directory), synthetic=arguments.synthetic)
    figures["limit_mbps"] = arguments.limit_mbps
    if arguments.json:
        print_json(figures)
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
