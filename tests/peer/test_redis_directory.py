"""The directory on real servers: what hosts see of each other, whatever happens to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvd.peer import redis_directory
from kvd.peer.membership import host_key, hosts_key
from tests.peer.fleet_kit import PATIENT_S, WAIT_S, Node, fleet, names, patient, until
from tests.redis_kit import DROPS_NODES, make_cluster, make_server
from tests.unit.test_catalog import chain

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.redis_kit import Server

__all__ = ["make_server"]

pytestmark = pytest.mark.timeout(180)
KINDS = pytest.mark.parametrize("kind", ["redis", "valkey"])


@pytest.fixture(
    params=[
        "redis",
        "valkey",
        pytest.param("redis cluster", marks=DROPS_NODES),
        pytest.param("valkey cluster", marks=DROPS_NODES),
    ]
)
def place(request: pytest.FixtureRequest, make_server: Callable[..., Server]) -> tuple[str, str]:
    """Every kind of directory, empty: its URL and mode."""
    kind, *cluster = request.param.split()
    if not cluster:
        return make_server(kind).url, "single"
    servers = [make_server(kind, "--cluster-enabled", "yes") for _ in range(3)]
    make_cluster(servers)
    return servers[0].url, "cluster"


def test_hosts_see_what_others_hold(place: tuple[str, str]) -> None:
    """What one host stores another finds, chunk by chunk, until it is evicted."""
    url, mode = place
    hashes = chain("seen", 75)
    extra = hashes[:40] + chain("branch", 20)

    async def main() -> None:
        a, b, c = (Node(url, name, directory_mode=mode) for name in "abc")
        async with fleet(a, b, c):
            a.store(hashes)
            c.store(hashes[:10])
            await until(lambda: a.directory.counters.told >= 75)
            await until(lambda: c.directory.counters.told >= 10)
            await until(lambda: b.directory.members.by_host.keys() == {"a", "c"})
            await b.finds(hashes, [{"a", "c"}] * 10 + [{"a"}] * 65)
            await b.finds(hashes, [{"a"}] * 42, 33)
            a.store(extra, 40)
            a.evict(hashes[50:])
            await c.sees(hashes, {"a"}, 50)
            await c.sees(extra, {"a"})
            await b.finds(hashes, [{"a"}] * 17 + [set()] * 25, 33)
            await until(lambda: b.directory.members.by_host.get("a") == a.directory.me)
            await a.finds(hashes, [{"c"}] * 10 + [set()] * 65)

    asyncio.run(main())


@KINDS
def test_another_life_another_host(kind: str, make_server: Callable[..., Server]) -> None:
    """What a host held before its restart counts no more, and is cleared away by who meets it."""
    server = make_server(kind)
    hashes = chain("life", 20)

    async def main() -> None:
        b = Node(server.url, "b")
        async with fleet(b):
            first = Node(server.url, "a", epoch=1)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(first.directory.run(group))
                first.store(hashes)
                await b.sees(hashes, {"a"})
                task.cancel()  # and no good-bye, as when it is killed
            reborn = Node(server.url, "a", epoch=2)
            async with fleet(reborn):
                await until(lambda: b.directory.members.by_host.get("a") == reborn.directory.me)
                assert await b.hosts(hashes) == [set()] * 20
                reborn.store(hashes[:5])
                await b.sees(hashes, {"a"}, 5)
                client = server.client()
                keys = [key for key in client.scan_iter("kvd:{*") if client.type(key) == b"set"]
                number = str(first.directory.me.number).encode()
                async with asyncio.timeout(WAIT_S):
                    while sum(number in client.smembers(k) for k in keys) > 12:
                        await b.hosts(hashes)  # once the number is known to be dead, it goes
                        await asyncio.sleep(0.05)
            await until(lambda: "a" not in b.directory.members.by_host)
            await first.directory.close()

    asyncio.run(main())


def test_a_hint_that_was_wrong_is_taken_out(make_server: Callable[..., Server]) -> None:
    """Who was sent to a host in vain says so, and the next one is not."""
    server = make_server()
    hashes = chain("wrong", 12)

    async def main() -> None:
        a, b, c = (Node(server.url, name) for name in "abc")
        async with fleet(a, b, c):
            a.store(hashes)
            await b.sees(hashes, {"a"})
            b.directory.wrong(b.space, hashes, 7, a.directory.me)
            assert await b.hosts(hashes) == [{"a"}] * 7 + [set()] * 5
            await c.sees(hashes, {"a"}, 7)

    asyncio.run(main())


@KINDS
def test_strangers_keys_are_passed_over(
    kind: str, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of another type at a key of kvd's costs that entry, not the directory."""
    server = make_server(kind)
    hashes = chain("strange", 20)
    client = server.client()
    client.rpush(host_key("kvd", "a"), "no record")
    client.set(hosts_key("kvd"), "no list")
    knobs = patient(monkeypatch)

    async def main() -> None:
        a, b = Node(server.url, "a", **knobs), Node(server.url, "b", **knobs)
        async with fleet(a, b):
            a.store(hashes)
            await b.sees(hashes, {"a"})
            key = a.directory._entry(a.space.chunks[hashes[9]])
            client.delete(key)
            client.hset(key, "some", "thing")
            client.set(host_key("kvd", "z"), "no record either")
            client.sadd(hosts_key("kvd"), "z", b"\xff\xfe")
            await b.sees(hashes, {"a"}, 9)
            a.evict(hashes[9:])
            a.store(hashes, 9)
            await until(lambda: a.directory.stats() and a.directory.counters.strange)
            await until(lambda: b.directory.stats() and b.directory.counters.strange)
            assert client.hget(key, "some") == b"thing"
            assert a.directory.gate.trips == b.directory.gate.trips == 0

    asyncio.run(main())


def test_entries_and_records_end_by_themselves(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays in the directory of a host that is gone for good."""
    server = make_server()
    client = server.client()
    monkeypatch.setattr(redis_directory, "LEAVE_S", PATIENT_S)

    async def main() -> None:
        a = Node(server.url, "a", entry_ttl_s=60.0, heartbeat_s=3.0)
        async with fleet(a):
            a.store(chain("end", 10))
            await until(lambda: a.directory.counters.told >= 10)
            keys = list(client.scan_iter("*"))
            assert len(keys) == 12
            for key in keys:
                assert client.pttl(key) > 0
            assert 50 < client.ttl(a.directory._entry(next(iter(a.space.chunks.values())))) <= 60
            assert client.pttl(host_key("kvd", "a")) <= 9_000
        assert client.get(host_key("kvd", "a")) is None
        assert client.smembers(hosts_key("kvd")) == set()

    asyncio.run(main())


def test_two_daemons_with_one_name(
    make_server: Callable[..., Server], capfd: pytest.CaptureFixture[str]
) -> None:
    """A host's name given twice is noticed, and said with the mend."""
    server = make_server()

    async def main() -> None:
        a, twin = Node(server.url, "a", epoch=1), Node(server.url, "a", epoch=2)
        async with fleet(a, twin):
            await until(lambda: a.directory.counters.twins and twin.directory.counters.twins)

    asyncio.run(main())
    assert "set [peer] host" in capfd.readouterr().err


def test_telling_is_paced_and_newest_wins(make_server: Callable[..., Server]) -> None:
    """A burst of stores is told at the configured rate; what is gone by then is told as gone."""
    server = make_server()
    chains = names(10, 40)
    client = server.client()

    async def main() -> None:
        a = Node(server.url, "a", announce_per_s=200)
        async with fleet(a):
            await asyncio.sleep(0.3)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            for hashes in chains:
                a.store(hashes)
            for hashes in chains[5:]:
                a.evict(hashes)
            await until(lambda: not len(a.directory._outbox))
            assert loop.time() - begun >= (400 - 20) / 200 - 0.1
            assert a.directory.counters.told >= 200
            await until(lambda: len(list(client.scan_iter("kvd:{*}*"))) == 202)

    asyncio.run(main())


@pytest.mark.parametrize(
    "place", ["redis", pytest.param("valkey cluster", marks=DROPS_NODES)], indirect=True
)
def test_a_cancelled_look_up_leaves_nothing_behind(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups cancelled at any point never give their answer to another (CVE-2023-28858)."""
    url, mode = place
    chains = names(6, 20)
    knobs = patient(monkeypatch)

    async def main() -> None:
        nodes = [Node(url, name, directory_mode=mode, **knobs) for name in "abcdef"]
        asker = Node(url, "z", directory_mode=mode, **knobs)
        async with fleet(*nodes, asker), asyncio.TaskGroup() as group:
            for node, hashes in zip(nodes, chains, strict=True):
                node.store(hashes)
            for name, hashes in zip("abcdef", chains, strict=True):
                await asker.sees(hashes, {name})
            for turn in range(30):
                asker.directory._hints._known.clear()
                tasks = [group.create_task(asker.hosts(hashes)) for hashes in chains]
                await asyncio.sleep(0.0005 * (turn % 7))
                for task in tasks[::2]:
                    task.cancel()
                found = await asyncio.gather(*tasks, return_exceptions=True)
                for name, answer in zip("abcdef", found, strict=True):
                    if not isinstance(answer, asyncio.CancelledError):
                        assert answer == [{name}] * 20
            assert asker.directory.gate.trips == 0

    asyncio.run(main())


def test_a_cancelled_host_ends(make_server: Callable[..., Server]) -> None:
    """Cancelled at any moment, a host's task ends, also when the library swallows it (4 in 100)."""
    server = make_server()

    async def main() -> None:
        nodes = [Node(server.url, f"n{number}", heartbeat_s=0.1) for number in range(60)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [group.create_task(node.directory.run(group)) for node in nodes]
            for task in tasks:
                await asyncio.sleep(0.013)
                task.cancel()
            await asyncio.wait(tasks)
        for node in nodes:
            await node.directory.close()

    asyncio.run(main())
