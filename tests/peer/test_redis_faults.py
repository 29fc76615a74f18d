"""The directory down, slow, full, lost or mad: look-ups go on without it, and it comes back."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from kvd.peer import redis_calls
from kvd.peer.directory import SLOW_MAX
from tests.peer.fleet_kit import (
    PATIENT_S,
    SLACK_S,
    Node,
    duration_s,
    fleet,
    names,
    patient,
    until,
)
from tests.redis_kit import DROPS_NODES, make_cluster, make_server
from tests.unit.test_catalog import chain

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.redis_kit import Server

__all__ = ["make_server"]

pytestmark = pytest.mark.timeout(180)
KINDS = pytest.mark.parametrize("kind", ["redis", "valkey"])


def test_killed_and_started_empty(make_server: Callable[..., Server]) -> None:
    """Killed: nobody waits, stores go on. Empty again: told anew, at the limited rate."""
    server = make_server("valkey")
    hashes, later = names(2, 120)

    async def main() -> None:
        a, b = Node(server.url, "a", announce_per_s=100), Node(server.url, "b")
        async with fleet(a, b):
            a.store(hashes)
            await b.sees(hashes, {"a"})
            server.kill()
            await until(lambda: not a.directory.gate.open and not b.directory.gate.open)
            b.directory._hints._known.clear()
            loop = asyncio.get_running_loop()
            begun = loop.time()
            for _ in range(1000):
                await b.directory.where(b.space, hashes)
            assert loop.time() - begun < 1000 * 0.002 + SLACK_S
            assert b.directory.counters.lookups_shut == 1000
            a.store(later)
            told = a.directory.counters.told
            server.start()
            await until(lambda: a.directory.gate.open)
            begun, told = loop.time(), a.directory.counters.told - told
            client = server.client()
            await until(lambda: len(list(client.scan_iter("kvd:{*}*"))) >= 240)
            assert loop.time() - begun > (240 - told - 10 - 5) / 100 - 0.2
            await b.sees(hashes, {"a"})
            await b.sees(later, {"a"})

    asyncio.run(main())


@KINDS
def test_stopped_and_let_go_on(
    kind: str, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: a look-up takes its 20 ms, after three in a row none waits; then all is well again."""
    server = make_server(kind)
    monkeypatch.setattr(redis_calls, "CALL_S", PATIENT_S)  # it is late answers that shut the gate
    chains = names(6, 30)

    async def main() -> None:
        nodes = [Node(server.url, name) for name in "abcdef"]
        asker = Node(server.url, "z", lookup_ms=20.0)
        async with fleet(*nodes, asker):
            for node, hashes in zip(nodes, chains, strict=True):
                node.store(hashes)
            await until(lambda: all(node.directory.counters.told >= 30 for node in nodes))
            await until(lambda: asker.directory.gate.open)
            asker.directory._hints._known.clear()
            server.send(signal.SIGSTOP)
            took = [await duration_s(asker, hashes) for hashes in chains[:SLOW_MAX]]
            assert min(took) >= 0.015, "its time was not given"
            assert min(took) < PATIENT_S / 4, "longer than its time; a call itself takes all of it"
            assert not asker.directory.gate.open
            assert [await duration_s(asker, hashes) < SLACK_S for hashes in chains] == [True] * 6
            counters = asker.directory.counters
            assert (counters.lookups_late, counters.lookups_shut) == (SLOW_MAX, 6)
            server.send(signal.SIGCONT)
            for name, hashes in zip("abcdef", chains, strict=True):
                await asker.sees(hashes, {name})

    asyncio.run(main())


def test_many_look_ups_of_a_slow_directory(make_server: Callable[..., Server]) -> None:
    """Of a burst, so many wait and the others have no answer at once; none hangs, none piles up."""
    server = make_server()
    chains = names(200, 3)

    async def main() -> None:
        asker = Node(server.url, "z", lookup_ms=100.0)
        async with fleet(asker):
            server.send(signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            async with asyncio.TaskGroup() as group:
                for hashes in chains:
                    group.create_task(asker.directory.where(asker.space, hashes))
            assert loop.time() - begun < 0.1 + SLACK_S
            counters = asker.directory.counters
            assert counters.lookups_asked == 16
            assert counters.lookups_shed == 184
            server.send(signal.SIGCONT)

    asyncio.run(main())


@KINDS
def test_full(
    kind: str, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room: refused entries are counted, look-ups and signs of life go on; with room, told."""
    server = make_server(kind)
    client = server.client()
    hashes, more = names(2, 60)
    knobs = {**patient(monkeypatch), "heartbeat_s": 0.8}

    async def main() -> None:
        a, b = Node(server.url, "a", **knobs), Node(server.url, "b", **knobs)
        async with fleet(a, b):
            a.store(hashes)
            await b.sees(hashes, {"a"})
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            a.store(more)
            await until(lambda: a.directory.counters.refused >= 60)  # a sweep counts its own
            await asyncio.sleep(3)  # longer than a record lasts without a sign of life
            await b.sees(hashes, {"a"})
            assert a.directory.gate.trips == b.directory.gate.trips == 0
            client.config_set("maxmemory", 0)
            a.directory._full_until_ns = 0  # and not ten seconds later
            await b.sees(more, {"a"})

    asyncio.run(main())


@KINDS
def test_emptied_while_nobody_looked(kind: str, make_server: Callable[..., Server]) -> None:
    """A directory that lost all it knew without a word is told again."""
    server = make_server(kind)
    hashes = chain("flushed", 40)

    async def main() -> None:
        a, b = Node(server.url, "a"), Node(server.url, "b")
        async with fleet(a, b):
            a.store(hashes)
            await b.sees(hashes, {"a"})
            server.client().flushall()
            b.directory._hints._known.clear()
            await b.sees(hashes, {"a"})

    asyncio.run(main())


def test_a_change_too_many_is_made_good_for(make_server: Callable[..., Server]) -> None:
    """What the queue had no room for is counted, and told by the next sweep."""
    server = make_server()
    hashes, more = names(2, 100)

    async def main() -> None:
        a, b = Node(server.url, "a"), Node(server.url, "b")
        async with fleet(a, b):
            await until(lambda: a.directory._sweep is None and a.directory.counters.sweeps)
            a.directory._outbox._limit = 30
            a.store(hashes)
            a.store(more)
            assert a.directory.stats()["waiting"] == 30
            assert a.directory.counters.dropped == 170
            await b.sees(hashes, {"a"})
            await b.sees(more, {"a"})

    asyncio.run(main())


@DROPS_NODES
def test_one_of_three_servers_of_a_cluster_dies(make_server: Callable[..., Server]) -> None:
    """With a server of the cluster gone nobody waits and nothing wrong is said."""
    servers = [make_server("redis", "--cluster-enabled", "yes") for _ in range(3)]
    make_cluster(servers)
    chains = names(12, 70)

    async def main() -> None:
        a = Node(servers[0].url, "a", directory_mode="cluster")
        b = Node(servers[0].url, "b", directory_mode="cluster")
        async with fleet(a, b):
            for hashes in chains:
                a.store(hashes)
            for hashes in chains:
                await b.sees(hashes, {"a"})
            sizes = [server.client().dbsize() for server in servers]
            assert min(sizes) > 0.15 * sum(sizes), "groups are spread over the servers"
            servers[1].kill()
            for _ in range(5):
                for hashes in chains:
                    b.directory._hints._known.clear()
                    assert await duration_s(b, hashes) < 0.25 + SLACK_S
                    assert {frozenset(found) for found in await b.hosts(hashes)} <= {
                        frozenset(),
                        frozenset({"a"}),
                    }
            assert b.directory.gate.trips >= 1

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-99\r\n", b"*3\r\n", b":1\r\n", b"\xff" * 64],
)
def test_something_else_at_the_address(answer: bytes) -> None:
    """What is no Redis keeps the gate shut, and the daemon goes on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(10)
            for _ in range(20):
                writer.write(answer)
            writer.close()
            await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        a = Node(f"redis://127.0.0.1:{port}/0", "a")
        async with server, asyncio.TaskGroup() as group:
            task = group.create_task(a.directory.run(group))
            a.store(chain("mad", 9))
            await asyncio.sleep(0.5)
            assert not a.directory.gate.open
            assert a.directory.gate.why
            assert await a.hosts(chain("mad", 9)) == [set()] * 9
            task.cancel()
            await a.directory.close()

    asyncio.run(main())
