"""A fleet in one process under a simulated clock: real catalogs, policies and directory code.

Each host is a real `Catalog` with its eviction policy over a pool of slots without memory, and a
real `RedisDirectory` that listens to it. Only the server is a stand-in: sets in a dictionary, with
the same calls as `RedisCalls`. A request goes to one host; what the host has not, and some other
host holds by the directory and in fact, is fetched and kept; the rest is computed and kept.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.catalog import Catalog
from kvd.changes import tiers_of
from kvd.config_peer import PeerKnobs
from kvd.metrics import Counters
from kvd.peer.directory import HOLDERS_ASKED
from kvd.peer.landing import Landings
from kvd.peer.membership import adds_safety
from kvd.peer.messages import Piece
from kvd.peer.redis_calls import Unreachable
from kvd.peer.redis_directory import RedisDirectory
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.peer.membership import Member
    from kvd.trace import Trace

S: Final = 1_000_000_000
TENANT: Final = Tenant("default")
NAMESPACE: Final = b"n" * 32
PAGE: Final = 4096
SLOTS: Final = 100
LAYOUT: Final = Layout(8, 8, "float16", (Group("full", 1, 1, 8, PAGE),)).check()
ME: Final = OwnerId(1)
HEARTBEAT_S: Final = 10.0
STEP_NS: Final = S // 20
WINDOW_S: Final = 60


class SimClock:
    """Nanoseconds that the simulation sets."""

    def __init__(self) -> None:
        """Start at one second."""
        self.ns = S

    def now_ns(self) -> int:
        """Return the simulated time."""
        return self.ns


class Server:
    """A directory's server: sets, and what was asked of it."""

    def __init__(self, clock: SimClock) -> None:
        """Start empty and up."""
        self._clock = clock
        self._chance = random.Random(1)
        self.entries: dict[bytes, set[int]] = {}
        self.records: dict[str, tuple[Member, int]] = {}
        self.up = True
        self.counts = dict.fromkeys(("asks", "asked", "tells", "told", "beats", "bytes"), 0)
        self.told_in: dict[int, int] = {}
        self.most_entries = 0

    def lose(self) -> None:
        """Forget everything, and be down."""
        self.entries.clear()
        self.records.clear()
        self.up = False

    def _call(self, name: str, size_bytes: int) -> None:
        if not self.up:
            raise Unreachable("down")
        self.counts[name] += 1
        self.counts["bytes"] += size_bytes

    def servers(self) -> int:
        """There is one."""
        return 1

    async def ping(self) -> None:
        """Answer."""
        self._call("beats", 21)

    async def ask(self, keys: Sequence[bytes]) -> list[tuple[int, ...] | None]:
        """Answer with some members of each set."""
        found: list[tuple[int, ...] | None] = []
        size_bytes = 250
        for key in keys:
            numbers = self.entries.get(key, ())
            some = sorted(numbers)
            if len(some) > HOLDERS_ASKED:
                some = self._chance.sample(some, HOLDERS_ASKED)
            found.append(tuple(some))
            size_bytes += len(key) + 11 + 4 + 27 * len(some)
        self._call("asks", size_bytes)
        self.counts["asked"] += len(keys)
        return found

    async def tell(
        self, number: int, entries: Sequence[tuple[bytes, bool]], ttl_s: int
    ) -> tuple[int, int]:
        """Put a number in, or take it out; entries outlive a trace of an hour."""
        assert ttl_s > 0
        self._call("tells", 700 + sum(len(key) + 12 for key, _ in entries))
        self.counts["told"] += len(entries)
        second = self._clock.ns // S
        self.told_in[second] = self.told_in.get(second, 0) + len(entries)
        for key, held in entries:
            if held:
                self.entries.setdefault(key, set()).add(number)
            elif numbers := self.entries.get(key):
                numbers.discard(number)
                if not numbers:
                    del self.entries[key]
        self.most_entries = max(self.most_entries, len(self.entries))
        return 0, 0

    async def beat(self, me: Member, ttl_s: float) -> Member | None:
        """Renew a record."""
        self._call("beats", 700)
        before, until = self.records.get(me.host, (None, 0))
        self.records[me.host] = (me, self._clock.ns + int(ttl_s * S))
        return before if until > self._clock.ns else None

    async def leave(self, me: Member) -> None:
        """Forget a record."""
        self.records.pop(me.host, None)

    async def members(self) -> list[Member | None]:
        """Return the records that have not ended."""
        now_ns = self._clock.ns
        found: list[Member | None] = [m for m, until in self.records.values() if until > now_ns]
        self._call("beats", 100 + 90 * len(found))
        return found

    async def close(self) -> None:
        """Nothing is open."""


class Sample(NamedTuple):
    """One request: when, chunks asked for, had here, had from others."""

    at_s: float
    asked: int
    here: int
    fetched: int


class Host:
    """One host of the fleet."""

    def __init__(self, name: str, chunks: int, policy: str, server: Server | None) -> None:
        """Start empty."""
        self.name = name
        self.chunks = chunks
        self.policy = policy
        self.server = server
        self.epoch = 0
        self.catalog: Catalog
        self.directory: RedisDirectory | None = None

    def start(self, clock: SimClock, group: asyncio.TaskGroup) -> None:
        """Begin a life: nothing is left of an earlier one."""
        slabs = -(-self.chunks // SLOTS)
        pool = SlabPool(SLOTS * PAGE, {TENANT: slabs})
        for slab in range(slabs):
            pool.add_blank(SlabId(slab))
        quota = Quota({TENANT: dict.fromkeys(Resource, 1 << 60)})
        self.catalog = Catalog(pool, quota, Counters(), self.policy)
        self.space = self.catalog.enter(TENANT, NAMESPACE, "", LAYOUT)
        self.landings = Landings(self.catalog, OwnerId(-1))
        self.epoch += 1
        if self.server is not None:
            knobs = PeerKnobs(host=self.name, domain=self.name, heartbeat_s=HEARTBEAT_S)
            chance = random.Random(f"{self.name}/{self.epoch}").random
            directory = RedisDirectory(
                knobs, self.catalog, clock, self.epoch, calls=self.server, random=chance
            )
            directory.join(group)
            self.directory = directory

    def has(self, key: bytes) -> bool:
        """Tell whether a chunk is here."""
        chunk = self.space.chunks.get(key)
        return chunk is not None and bool(tiers_of(chunk))

    def serve(self, key: bytes) -> None:
        """Let another host have a chunk that is here."""
        self.catalog.eviction.served(self.space.chunks[key])

    def keep(self, hashes: list[bytes], first: int) -> None:
        """Store what is missing of a chain."""
        records = self.catalog.reserve(
            self.space,
            ME,
            0,
            parent=hashes[first - 1] if first else NAMESPACE,
            hashes=hashes[first:],
            groups=1,
            deadline_ns=1 << 62,
        )
        generations = [Generation(record[-1]) for record in records if record[-1]]
        self.catalog.publish_all(ME, generations, 0)

    def land(self, hashes: list[bytes], at: int, *, spare: bool) -> bool:
        """Take in a chunk of another host; False where there is no room."""
        parent = hashes[at - 1] if at else NAMESPACE
        piece = Piece(0, 0, PAGE, 1, 0, b"")
        if self.landings.take(0, self.space, parent, hashes[at], [piece], spare=spare) is None:
            return False
        self.landings.publish(0, 0)
        return True


class Fleet:
    """Hosts, their server, and a trace that runs over them."""

    def __init__(self, hosts: int, chunks: int, policy: str, *, shared: bool) -> None:
        """Make hosts of so many chunks each, with a directory or without."""
        self.clock = SimClock()
        self.server = Server(self.clock)
        server = self.server if shared else None
        self.hosts = [Host(f"h{n}", chunks, policy, server) for n in range(hosts)]
        self.samples: list[Sample] = []
        self.wrong = 0
        self.sparing = True
        self._due: list[tuple[int, int]] = []
        self._chance = random.Random(2)

    async def run(
        self, trace: Trace, *, lose_host_s: float = 0, lose_server_s: tuple[float, float] = (0, 0)
    ) -> Fleet:
        """Run a trace, one host a request in turn.

        Args:
            trace: The requests.
            lose_host_s: When host 0 is killed and starts empty; 0 for never.
            lose_server_s: When the server is lost, and when it is back, empty; 0 for never.
        """
        hashes: dict[int, bytes] = {}
        for entry in trace.entries:
            for block in entry.request.chain:
                if block not in hashes:
                    hashes[block] = blake2b(block.to_bytes(8, "big"), digest_size=32).digest()
        async with asyncio.TaskGroup() as group:
            for host in self.hosts:
                host.start(self.clock, group)
            self._due = [(S, n) for n, h in enumerate(self.hosts) if h.directory is not None]
            begin = trace.entries[0].request.now_ns
            for number, entry in enumerate(trace.entries):
                at_s = (entry.request.now_ns - begin) / 1e9
                await self._upkeep(S + entry.request.now_ns - begin)
                if lose_host_s and at_s >= lose_host_s:
                    lose_host_s = 0
                    self.hosts[0].start(self.clock, group)
                if lose_server_s[0] and at_s >= lose_server_s[0]:
                    self.server.lose()
                    lose_server_s = (0, lose_server_s[1])
                if lose_server_s[1] and not lose_server_s[0] and at_s >= lose_server_s[1]:
                    self.server.up = True
                    lose_server_s = (0, 0)
                chain = [hashes[block] for block in entry.request.chain]
                await self._request(number % len(self.hosts), chain, at_s)
        return self

    async def _upkeep(self, until_ns: int) -> None:
        """Let the hosts do what they do in the background, up to a moment."""
        while self._due and self._due[0][0] <= until_ns:
            at_ns, number = heapq.heappop(self._due)
            self.clock.ns = max(self.clock.ns, at_ns)
            directory = self.hosts[number].directory
            assert directory is not None
            await directory.step()
            wait_ns = STEP_NS if directory.busy() or not directory.gate.open else 2 * S
            heapq.heappush(self._due, (self.clock.ns + wait_ns, number))
        self.clock.ns = max(self.clock.ns, until_ns)

    async def _request(self, number: int, chain: list[bytes], at_s: float) -> None:
        host = self.hosts[number]
        catalog = host.catalog
        catalog.eviction.now_ns = self.clock.ns
        here = catalog.usable(host.space, chain)
        got = here
        if host.directory is not None and here < len(chain):
            found = await host.directory.where(host.space, chain, here)
            for index, holders in enumerate(found, here):
                if not holders:
                    break
                one = self._chance.choice(holders)
                other = self.hosts[int(one.host[1:])]
                if other.epoch != one.epoch or not other.has(chain[index]):
                    self.wrong += 1
                    host.directory.wrong(host.space, chain, index, one)
                    break
                spare = self.sparing and not adds_safety(host.directory.me, holders)
                if not host.land(chain, index, spare=spare):
                    break
                other.serve(chain[index])
                got += 1
        catalog.unpin(catalog.hold(host.space, chain, 0))
        host.keep(chain, got)
        self.samples.append(Sample(at_s, len(chain), here, got - here))

    def hit_ratio(self, since_s: float = 0, until_s: float = 1e9) -> float:
        """Return the share of chunks that were not computed again, in per cent."""
        some = [s for s in self.samples if since_s <= s.at_s < until_s]
        return 100 * sum(s.here + s.fetched for s in some) / max(1, sum(s.asked for s in some))
