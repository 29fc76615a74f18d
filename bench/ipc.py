"""Message latency: kvd's rings beside ZeroMQ, and look-ups.

    python -m bench.ipc [--json] [--rounds N]

Both servers run in a process of their own; the client asks one request at a time. The ZeroMQ side
is the usual DEALER to ROUTER over ipc:// with the same msgpack body and a blocking server loop,
which favours it: kvd's server is its real event loop with all its checks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import msgpack
import zmq

import kvd_client
from bench._daemon import running_daemon
from bench._table import report

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX_CHUNKS = 128
TOKENS = 32 << 10
CHUNK_TOKENS = 256


def latencies_us(call: Callable[[], object], rounds: int) -> list[float]:
    """Time `rounds` calls one by one; sorted, in microseconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def at(times: list[float], share: float) -> float:
    """Return a quantile of sorted times."""
    return round(times[min(len(times) - 1, int(len(times) * share))], 1)


def zmq_server(address: str) -> None:
    """Answer every request until an empty one comes."""
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    while True:
        sender, body = router.recv_multipart()
        if not body:
            return
        router.send_multipart([sender, msgpack.packb(msgpack.unpackb(body))])


def zmq_pings_us(rounds: int) -> list[float]:
    """Measure round trips to `zmq_server` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
        address = f"ipc://{directory}/zmq"
        server = multiprocessing.get_context("spawn").Process(target=zmq_server, args=(address,))
        server.start()
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(address)

        def ping() -> None:
            dealer.send(msgpack.packb([1, 7]))
            msgpack.unpackb(dealer.recv())

        ping()
        times = latencies_us(ping, rounds)
        dealer.send(b"")
        server.join(10)
        dealer.close(0)
        return times


def bench_layout() -> kvd_client.Layout:
    """Return a small layout: the look-up does not touch objects."""
    group = kvd_client.Group("full", layers=1, kv_heads=1, head_size=64, object_bytes=4096)
    return kvd_client.Layout(CHUNK_TOKENS, 16, "bfloat16", (group,))


def run(rounds: int) -> dict[str, Any]:
    """Measure everything once, interleaved in three parts."""
    namespace = kvd_client.Namespace(model="bench", revision="0", dtype="bfloat16")
    tokens = [random.randrange(1 << 17) for _ in range(TOKENS)]
    with running_daemon(64 << 20) as socket:
        client = kvd_client.connect(
            socket, namespace=namespace, layout=bench_layout(), required=True
        )
        hashes = client.chunk_hashes(tokens)
        with client.reserve(hashes) as reservation:
            client.publish(reservation)
        assert client.lookup(hashes).chunks == len(hashes) == PREFIX_CHUNKS
        pings: list[list[float]] = []
        zmqs: list[list[float]] = []
        for _ in range(3):
            latencies_us(client.ping, rounds // 10)
            pings.append(latencies_us(client.ping, rounds))
            zmqs.append(zmq_pings_us(rounds))
        lookups = latencies_us(lambda: client.lookup(hashes), rounds)
        hashing = latencies_us(lambda: client.chunk_hashes(tokens), 50)
        client.close()
    median = statistics.median
    ping = median(at(times, 0.5) for times in pings)
    zmq_ping = median(at(times, 0.5) for times in zmqs)
    return {
        "ping_us_p50": ping,
        "ping_us_p99": median(at(times, 0.99) for times in pings),
        "zmq_ping_us_p50": zmq_ping,
        "zmq_over_ping": round(zmq_ping / ping, 2),
        "lookup_128_us_p50": at(lookups, 0.5),
        "lookup_128_us_p99": at(lookups, 0.99),
        "hash_32k_tokens_us": at(hashing, 0.5),
    }


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5000, help="round trips a measurement")
    arguments = parser.parse_args()
    report("bench.ipc", run(arguments.rounds), as_json=arguments.json)


if __name__ == "__main__":
    main()
