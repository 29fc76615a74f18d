"""The simulated fleet of bench.fleet: what it must find, in small."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from bench._fleet_sim import Fleet, Host, Server, SimClock
from bench.replay import load
from kvd.config_peer import PeerKnobs
from kvd.log import PRIORITIES, Threshold
from kvd.peer.redis_directory import RedisDirectory

if TYPE_CHECKING:
    from kvd.trace import Trace

pytestmark = pytest.mark.timeout(300)
HOSTS = 4
CHUNKS = 1000


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that come and go are not worth a line each."""
    monkeypatch.setattr(Threshold, "priority", PRIORITIES["error"])


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The beginning of a real trace."""
    return load("conversation").whole_blocks().head(250)


def run(trace: Trace, hosts: int, *, shared: bool, **losses: Any) -> Fleet:
    """Run it, and recount every catalog at the end."""
    fleet = asyncio.run(Fleet(hosts, CHUNKS, "lru", shared=shared).run(trace, **losses))
    for host in fleet.hosts:
        host.catalog.check()
    return fleet


def test_sharing_finds_more_than_hosts_alone(trace: Trace) -> None:
    """Hosts that share find what any of them has, and say so the same way each time."""
    alone, shared = (run(trace, HOSTS, shared=kind) for kind in (False, True))
    assert sum(s.fetched for s in alone.samples) == 0
    assert shared.hit_ratio() > alone.hit_ratio() + 1
    again = run(trace, HOSTS, shared=True)
    assert (again.samples, again.server.counts) == (shared.samples, shared.server.counts)


def test_one_host_gains_nothing(trace: Trace) -> None:
    """With nobody to share with, a directory changes no hit."""
    alone, shared = (run(trace, 1, shared=kind) for kind in (False, True))
    assert shared.samples == alone.samples


def test_the_directory_knows_what_hosts_hold(trace: Trace) -> None:
    """When all has been told, the entries are exactly what the catalogs hold."""
    fleet = Fleet(HOSTS, CHUNKS, "lru", shared=True)
    asyncio.run(fleet.run(trace))
    asyncio.run(fleet._upkeep(fleet.clock.ns + 300 * 10**9))
    held = sum(len(host.space.chunks) for host in fleet.hosts)
    assert sum(map(len, fleet.server.entries.values())) == held


def test_losses_cost_hits_and_nothing_else(trace: Trace) -> None:
    """A lost directory is a fleet of hosts alone, until it is back and told again."""
    end_s = (trace.entries[-1].request.now_ns - trace.entries[0].request.now_ns) / 1e9
    lost = run(trace, HOSTS, shared=True, lose_server_s=(end_s / 3, 2 * end_s / 3))
    whole = run(trace, HOSTS, shared=True, lose_host_s=end_s / 2)
    during = [s for s in lost.samples if end_s / 3 + 3 < s.at_s < 2 * end_s / 3]
    assert during
    assert not sum(s.fetched for s in during), "believed for seconds, then nobody is asked"
    assert sum(s.fetched for s in lost.samples if s.at_s > 2 * end_s / 3 + 6)
    assert whole.hosts[0].epoch == 2


def test_what_is_not_shared_is_not_told() -> None:
    """Of a space that nobody else may have, the directory hears nothing, not even in a sweep."""

    async def main(*, shared: bool) -> int:
        clock = SimClock()
        server, host = Server(clock), Host("h0", CHUNKS, "lru", None)
        async with asyncio.TaskGroup() as group:
            host.start(clock, group)
            knobs = PeerKnobs(host="h0", domain="h0")
            directory = RedisDirectory(
                knobs, host.catalog, clock, 1, tells=lambda _: shared, calls=server
            )
            host.keep([bytes([n]) * 32 for n in range(20)], 0)
            for _ in range(50):
                await directory.step()
                clock.ns += 10**8
            assert directory.counters.sweeps == 1
        return len(server.entries)

    assert asyncio.run(main(shared=True)) == 20
    assert asyncio.run(main(shared=False)) == 0
