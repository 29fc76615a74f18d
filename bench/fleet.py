"""A fleet that shares its caches by the directory: hits, load on the directory, losses.

    python -m bench.fleet [--json] [--trace NAME] [--requests N] [--plot FILE.svg]

Simulated (`bench/_fleet_sim.py`): one trace, spread request by request over 1 to 256 hosts of 3,000
blocks each, with the real catalog, policy and directory code. The trace does not grow with the
fleet, so that a host of 256 sees every 256th request. Beside it the same hosts alone, and one cache
of all their memory. With 16 hosts, one is lost at half time, and in another run the directory is,
for two minutes. Nothing is random but with a seed.

Measured: what a real `redis-server` on this machine spends on the real calls, the memory of an
entry, and how long a look-up of 128 chunks takes. Some one minute of one core in all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import redis

from bench._fleet_sim import Fleet, Host
from bench._table import print_json, print_table
from bench.replay import load
from kvd.clock import MonotonicClock
from kvd.config_peer import PeerKnobs
from kvd.log import PRIORITIES, Threshold
from kvd.peer.directory import entry_key
from kvd.peer.redis_calls import RedisCalls
from kvd.peer.redis_directory import RedisDirectory
from kvd.policies import DEFAULT, make
from kvd.replay import replay

if TYPE_CHECKING:
    from kvd.trace import Trace

SIZES: Final = (1, 4, 16, 64, 256)
CHUNKS: Final = 3000
LOSS_HOSTS: Final = 16
OUTAGE_S: Final = 120
WINDOW_S: Final = 180
ENTRIES: Final = 50_000
LOOKUPS: Final = 100
REQUESTS: Final = 2500
CHAIN: Final = 128


def run(trace: Trace, hosts: int, chunks: int, *, shared: bool, **losses: Any) -> Fleet:  # noqa: ANN401 - as `Fleet.run`
    """Run the trace over a fleet."""
    return asyncio.run(Fleet(hosts, chunks, DEFAULT, shared=shared).run(trace, **losses))


def simulate(trace: Trace) -> list[dict[str, Any]]:
    """Run every size of fleet."""
    rows = []
    blocks = sum(len(entry.request.chain) for entry in trace.entries)
    duration_s = (trace.entries[-1].request.now_ns - trace.entries[0].request.now_ns) / 1e9
    for hosts in SIZES:
        alone = run(trace, hosts, CHUNKS, shared=False)
        whole = replay(trace, make(DEFAULT), CHUNKS * hosts)
        fleet = run(trace, hosts, CHUNKS, shared=True)
        counts, requests = fleet.server.counts, len(fleet.samples)
        rows.append(
            {
                "hosts": hosts,
                "alone_hit_%": round(alone.hit_ratio(), 2),
                "fleet_hit_%": round(fleet.hit_ratio(), 2),
                "one_cache_hit_%": round(100 * whole.hits / blocks, 2),
                "wrong_hints_%": round(100 * fleet.wrong / requests, 2),
                "calls_a_request": round((counts["asks"] + counts["tells"]) / requests, 2),
                "asks_a_request": round(counts["asks"] / requests, 2),
                "asked_a_request": round(counts["asked"] / requests, 1),
                "told_a_request": round(counts["told"] / requests, 1),
                "ops_a_second_and_host": round(
                    (counts["asked"] + counts["told"]) / duration_s / hosts, 2
                ),
                "bytes_a_second_and_host": round(counts["bytes"] / duration_s / hosts),
                "entries": fleet.server.most_entries,
            }
        )
    return rows


def losses(trace: Trace) -> tuple[dict[str, Any], Fleet]:
    """Lose a host, and the directory, at half time."""
    end_s = (trace.entries[-1].request.now_ns - trace.entries[0].request.now_ns) / 1e9
    half_s = end_s / 2
    whole = run(trace, LOSS_HOSTS, CHUNKS, shared=True)
    host = run(trace, LOSS_HOSTS, CHUNKS, shared=True, lose_host_s=half_s)
    server = run(trace, LOSS_HOSTS, CHUNKS, shared=True, lose_server_s=(half_s, half_s + OUTAGE_S))
    outage = (half_s, half_s + OUTAGE_S)
    after = (half_s + OUTAGE_S, half_s + OUTAGE_S + WINDOW_S)
    seconds = [s for s in server.server.told_in if s >= half_s + OUTAGE_S]
    figures = {
        "lost_host_hit_%_before": round(host.hit_ratio(half_s - WINDOW_S, half_s), 2),
        "lost_host_hit_%_after": round(host.hit_ratio(half_s, half_s + WINDOW_S), 2),
        "unharmed_hit_%_after": round(whole.hit_ratio(half_s, half_s + WINDOW_S), 2),
        "lost_host_wrong_hints": host.wrong - whole.wrong,
        "lost_directory_hit_%": round(server.hit_ratio(*outage), 2),
        "unharmed_hit_%": round(whole.hit_ratio(*outage), 2),
        "directory_back_hit_%": round(server.hit_ratio(*after), 2),
        "unharmed_hit_%_then": round(whole.hit_ratio(*after), 2),
        "directory_back_told_a_second_max": max(
            (server.server.told_in[s] for s in seconds), default=0
        ),
    }
    return figures, server


# ---------------------------------------------------------------------------------- measured


class Redis:
    """A `redis-server` of the bench's own."""

    def __init__(self, program: str, directory: str) -> None:
        """Start it on a unix socket."""
        self.path = f"{directory}/redis.sock"
        command = [program, "--port", "0", "--unixsocket", self.path, "--save", ""]
        self.process = subprocess.Popen([*command, "--dir", directory], stdout=subprocess.DEVNULL)
        self.client = redis.Redis(unix_socket_path=self.path, protocol=2)
        for _ in range(200):
            try:
                self.client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.02)

    def cpu_s(self) -> float:
        """Return the CPU time that it has spent."""
        found = self.client.info("cpu")
        return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])

    def memory_bytes(self) -> int:
        """Return what it holds."""
        return int(self.client.info("memory")["used_memory"])

    def close(self) -> None:
        """End it."""
        self.client.close()
        self.process.kill()
        self.process.wait()


def chain_of(number: int) -> list[bytes]:
    """Return the hashes of one of many chains."""
    return [blake2b(b"%d/%d" % (number, i), digest_size=32).digest() for i in range(CHAIN)]


async def measure(server: Redis) -> dict[str, float]:  # noqa: PLR0915 - one story
    """Measure the real calls against it."""
    knobs = PeerKnobs(
        host="b", domain="b", directory=f"unix://{server.path}", lookup_ms=1000.0, heartbeat_s=1.0
    )
    calls = RedisCalls(knobs)
    realm = b"r" * 32
    figures: dict[str, float] = {}

    async def tell(number: int, name: str) -> None:
        before = server.memory_bytes()
        begun, cpu_s = time.perf_counter(), server.cpu_s()
        for first in range(0, ENTRIES, 512):
            keys = [
                entry_key(realm, b"%d" % (n // 32), b"%d" % n) for n in range(first, first + 512)
            ]
            await calls.tell(number, [(key, True) for key in keys], 3600)
        count = -(-ENTRIES // 512) * 512
        figures[f"{name}_server_us"] = (server.cpu_s() - cpu_s) / count * 1e6
        figures[f"{name}_per_s"] = count / (time.perf_counter() - begun)
        figures[f"{name}_bytes"] = (server.memory_bytes() - before) / count

    await tell(1 << 60, "told_new")
    await tell((1 << 60) + 1, "told_second_holder")
    host = Host("b", 10, DEFAULT, None)
    chains = [chain_of(number) for number in range(LOOKUPS)]
    async with asyncio.TaskGroup() as group:
        host.start(_no_clock(), group)
        directory = RedisDirectory(knobs, host.catalog, MonotonicClock(), 1)
        task = group.create_task(directory.run(group))
        other = Host("a", LOOKUPS * CHAIN, DEFAULT, None)
        other.start(_no_clock(), group)
        told = RedisDirectory(
            replace(knobs, host="a", domain="a", announce_per_s=1_000_000),
            other.catalog,
            MonotonicClock(),
            1,
        )
        teller = group.create_task(told.run(group))
        for hashes in chains:
            other.keep(hashes, 0)
        while not (directory.gate.open and told.gate.open) or told.busy():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while "a" not in directory.members.by_host:  # noqa: ASYNC110 - read every few seconds
            await asyncio.sleep(0.1)
        for name, asked in (
            ("lookup_128", chains),
            ("lookup_128_of_nobody", [chain_of(-1 - n) for n in range(LOOKUPS)]),
        ):
            times, cpu_s = [], server.cpu_s()
            for hashes in asked:
                begun = time.perf_counter()
                found = await directory.where(host.space, hashes)
                times.append((time.perf_counter() - begun) * 1e3)
                assert bool(found[-1]) == (asked is chains)
            figures[f"{name}_ms_p50"] = statistics.median(times)
            figures[f"{name}_ms_p99"] = sorted(times)[int(0.99 * len(times))]
            figures[f"{name}_server_us"] = (server.cpu_s() - cpu_s) / len(asked) * 1e6
        for one, running in ((directory, task), (told, teller)):
            await one.close()
            await running
    await calls.close()
    return figures


def _no_clock() -> Any:  # noqa: ANN401 - a host without a directory never asks for the time
    return None


def measured() -> dict[str, float]:
    """Measure with a real server; nothing without one."""
    program = shutil.which("redis-server")
    if program is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
        server = Redis(program, directory)
        try:
            return asyncio.run(measure(server))
        finally:
            server.close()


def plot(path: str, rows: list[dict[str, Any]], lost: Fleet) -> None:
    """Draw hits over fleet sizes, and over time where the directory is lost."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvd"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    sizes = [row["hosts"] for row in rows]
    for name, label in (
        ("one_cache_hit_%", "one cache of all their memory"),
        ("fleet_hit_%", "hosts that share by the directory"),
        ("alone_hit_%", "hosts alone"),
    ):
        left.plot(sizes, [row[name] for row in rows], marker="o", label=label)
    left.set(xscale="log", xlabel="hosts", ylabel="blocks not computed again, %", ylim=(0, None))
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.legend()
    left.set_title(f"one trace over hosts of {CHUNKS:,} blocks")
    end_s = lost.samples[-1].at_s
    minutes = range(int(end_s // 60))
    right.plot([m + 0.5 for m in minutes], [lost.hit_ratio(60 * m, 60 * m + 60) for m in minutes])
    right.axvspan(end_s / 120, (end_s / 2 + OUTAGE_S) / 60, color="0.85", label="no directory")
    right.set(xlabel="minutes", ylabel="blocks not computed again, %", ylim=(0, None))
    right.legend()
    right.set_title(f"{LOSS_HOSTS} hosts, directory lost and back empty")
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Simulate and measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--trace", default="conversation", choices=("conversation", "synthetic"))
    parser.add_argument("--requests", type=int, default=REQUESTS, help="the first N; 0: all")
    parser.add_argument("--plot", help="write a picture there")
    options = parser.parse_args()
    Threshold.priority = PRIORITIES["error"]
    trace = load(options.trace).whole_blocks()
    if options.requests:
        trace = trace.head(options.requests)
    rows = simulate(trace)
    lost, server = losses(trace)
    gc.collect()
    gc.freeze()  # what the simulations left takes a second to look through: no look-up waits for it
    figures = measured()
    if options.plot:
        plot(options.plot, rows, server)
    if options.json:
        flat = {f"{name}_{row['hosts']}": row[name] for row in rows for name in list(row)[1:]}
        print_json({**flat, **lost, **figures})
        return
    print_table(f"{options.trace}: {len(trace.entries)} requests", rows)
    print_table(f"losses, {LOSS_HOSTS} hosts", [{"figure": k, "value": v} for k, v in lost.items()])
    shown = [{"figure": k, "value": round(v, 3)} for k, v in figures.items()]
    print_table("one redis-server", shown)


if __name__ == "__main__":
    main()
