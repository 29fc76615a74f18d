"""Between two hosts: kvd beside a plain socket and beside NIXL alone, over the same link.

    python -m bench.peer [--json] [--rounds 5]

Two daemons in two network namespaces on a bridge, Redis in a third; needs root, `ip` and
`redis-server`. One GiB a round, in 32 objects of 32 MiB, the three ways one after the other:

    raw_tcp     one plain socket, 4 MiB buffers
    raw_nixl    NIXL as kvd tunes it, three reads at a time, nothing checked
    kvd         from the acquire on host B to the lease over all 32 chunks, which host A stored: the
                directory asked, keys asked, summed by A, read, summed by B, published

Ratios are medians over rounds, each within its round, after as many uncounted ones as use every
slab of B's host tier once; `first_gbps` is kvd's very first, in which connections are made and
memory is mapped, by movers and engine. `first_chunk_ms` is when the first chunk of
the GiB can be read by another request, which came 3 ms later; `idle_cpu` what the connected daemon
of B and its two mover processes take of a core; `directory_lookup_ms` a look-up of 128 chunks that
A has and nobody asked for lately, through client and daemon, of those that were answered; of 39
`lookups_late` were not, in the 20 ms that they may take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvd_client
from bench._fleet import Fleet, Host, lacking, wait_for
from bench._peer_raw import OBJECT_BYTES, OBJECTS, TOTAL_BYTES
from bench._table import report
from kvd.peer.nixl_agent import environment

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST_BYTES = 5 << 29
CHUNK_TOKENS = 16
LOOKUPS = 40
LOOKUP_CHUNKS = 128
IDLE_S = 5.0
BEHIND_S = 0.003
WARM_ROUNDS = -(-HOST_BYTES // TOTAL_BYTES)
_NAMESPACE = kvd_client.Namespace("bench", "1", "bfloat16")


class Child:
    """One end of a raw transfer, in a host's namespace."""

    def __init__(self, host: Host, *arguments: str) -> None:
        """Start it, and read what it says of itself."""
        self.process = subprocess.Popen(
            host.command(sys.executable, "-m", "bench._peer_raw", *arguments),
            env={**os.environ, **environment("tcp", ["eth0"])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self.hear()

    def hear(self) -> dict[str, Any]:
        """Return its next line."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def tell(self, line: str = "go") -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def round(self) -> float:
        """Run one round; return its seconds."""
        self.tell()
        return float(self.hear()["seconds"])

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def connect(host: Host, object_bytes: int) -> kvd_client.Client:
    """Connect to a host with objects of a size."""
    group = kvd_client.Group("full", 1, 1, 64, object_bytes)
    layout = kvd_client.Layout(CHUNK_TOKENS, CHUNK_TOKENS, "bfloat16", (group,))
    return kvd_client.connect(
        host.socket, namespace=_NAMESPACE, layout=layout, required=True, wait_s=60
    )


def stored(client: kvd_client.Client, seed: int, chunks: int) -> list[bytes]:
    """Store a prefix of its own; return its hashes."""
    tokens = [seed * 10_000 + index for index in range(chunks * CHUNK_TOKENS)]
    hashes = client.chunk_hashes(tokens)
    for first in range(0, chunks, 8):
        with client.reserve(hashes[: first + 8], first=first) as reservation:
            for slot in reservation.placed:
                assert slot.buffer is not None
                slot.buffer[:8] = seed.to_bytes(8, "little")
            client.publish(reservation)
    return hashes


def fetched(
    client: kvd_client.Client, other: kvd_client.Client, hashes: list[bytes]
) -> list[float]:
    """Fetch a prefix; return the seconds to all of it, and to the first chunk for another."""
    first: list[float] = []

    def ask_first() -> None:
        time.sleep(BEHIND_S)  # or it would ask for the first chunk by itself
        with other.acquire(hashes[:1]) as lease:
            assert lease.chunks == 1
        first.append(time.perf_counter() - begun)

    thread = threading.Thread(target=ask_first)
    begun = time.perf_counter()
    thread.start()
    with client.acquire(hashes) as lease:
        whole = time.perf_counter() - begun
        assert lease.chunks == len(hashes), lease.chunks
    thread.join()
    return [whole, first[0]]


def cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time that processes have taken."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def idle_cpu(host: Host) -> float:
    """Return what a connected daemon and its movers take of a core while nothing is asked."""
    page = host.stat()
    pids = [page["page"]["pid"], page["peer"]["source_pid"]]
    pids += [peer["mover_pid"] for peer in page["peer"]["peers"] if peer["mover_pid"]]
    before = cpu_s(pids)
    time.sleep(IDLE_S)
    return (cpu_s(pids) - before) / IDLE_S


def lookups(a: Host, b: Host) -> tuple[float, int]:
    """Return the median milliseconds of a look-up that the directory answered, and how many not."""
    here, there = connect(a, 4096), connect(b, 4096)
    chains = [stored(here, 5000 + index, LOOKUP_CHUNKS) for index in range(LOOKUPS)]
    wait_for(lambda: there.lookup(chains[-1]).chunks == LOOKUP_CHUNKS, "announced", 60)
    samples = []
    for hashes in chains[:-1]:
        begun = time.perf_counter()
        found = there.lookup(hashes)
        if found.chunks == LOOKUP_CHUNKS:
            samples.append((time.perf_counter() - begun) * 1e3)
        else:
            time.sleep(0.5)  # given up after `lookup_ms`; after three of them nobody is asked
    return statistics.median(samples or [float("nan")]), LOOKUPS - 1 - len(samples)


def measure(directory: Path, rounds: int) -> dict[str, float]:
    """Run it all."""
    fleet = Fleet(directory)
    children: list[Child] = []
    try:
        peer = {"lookup_ms": 20}
        a, b = fleet.start(["a", "b"], host_bytes=HOST_BYTES, slab_bytes=128 << 20, peer=peer)
        wait_for(lambda: b.peer("a").get("mover") == "up", "the mover")
        tcp = [Child(a, "tcp-source", a.ip)]
        tcp.append(Child(b, "tcp-sink", a.ip))
        nixl = [Child(a, "nixl-source"), Child(b, "nixl-sink")]
        children = [*tcp, *nixl]
        nixl[1].tell(json.dumps(nixl[0].about))
        here, there, other = (
            connect(a, OBJECT_BYTES),
            connect(b, OBJECT_BYTES),
            connect(b, OBJECT_BYTES),
        )
        rates: dict[str, list[float]] = {"raw_tcp": [], "raw_nixl": [], "kvd": []}
        first = []
        first_gbps = 0.0
        for number in range(WARM_ROUNDS + rounds):
            hashes = stored(here, number, OBJECTS)
            wait_for(lambda h=hashes: there.lookup(h).chunks == OBJECTS, "announced")  # type: ignore[misc]
            seconds = {"raw_tcp": tcp[1].round(), "raw_nixl": nixl[1].round()}
            seconds["kvd"], first_s = fetched(there, other, hashes)
            if not number:
                first_gbps = TOTAL_BYTES / seconds["kvd"] / 1e9
            if number >= WARM_ROUNDS:
                for name, taken in seconds.items():
                    rates[name].append(TOTAL_BYTES / taken / 1e9)
                first.append(first_s * 1e3)
        result = {f"{name}_gbps": statistics.median(all_) for name, all_ in rates.items()}
        for name in ("tcp", "nixl"):
            pairs = zip(rates["kvd"], rates[f"raw_{name}"], strict=True)
            result[f"{name}_ratio"] = statistics.median(k / r for k, r in pairs)
        result["first_gbps"] = first_gbps
        result["first_chunk_ms"] = statistics.median(first)
        result["idle_cpu"] = idle_cpu(b)
        result["directory_lookup_ms"], result["lookups_late"] = lookups(a, b)
        return result
    finally:
        for child in children:
            child.close()
        fleet.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    why = lacking()
    if why:
        raise SystemExit(f"bench.peer: {why}")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        result = {k: round(v, 4) for k, v in measure(Path(directory), options.rounds).items()}
    report("between two hosts", result, as_json=options.json)


if __name__ == "__main__":
    main()
