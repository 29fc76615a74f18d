"""What requests of this host want of others: who is asked, for what, and who waits for it. Loop.

A request that misses asks the directory who holds the chunks, lets the gate decide, and fetches
runs of them from the hosts that promise to be fastest. A chunk that is under way is waited for, not
asked for again. When a host gives less than it was asked for, another that holds the rest may be
asked, within a budget of retries; there is no hedging. Everything else that goes wrong is a miss.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.peer.breaker import Bucket
from kvd.peer.membership import adds_safety
from kvd.peer.messages import CHUNKS_MAX, tag_of
from kvd.peer.protocol import Want
from kvd.peer.sink import Chain

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvd.clock import Clock
    from kvd.config_transfer import TransferKnobs
    from kvd.entry import Space
    from kvd.peer.membership import Member
    from kvd.peer.redis_directory import RedisDirectory
    from kvd.peer.sink import Sink

    Done = Callable[[], None]

WAITING_MAX: Final = 256
"""Requests that wait for other hosts at once; more are misses."""
RETRIES: Final = (0.1, 10.0)
"""What an ask earns, and most that is saved up: one ask in ten may be asked of a second host."""
BURST_S: Final = 2.0
UNKNOWN_BYTES_S: Final = 200e6
"""The rate of a link before its first transfer, in the comparison of hosts."""


class Request(NamedTuple):
    """What a request wants; see `Requests.fetch`."""

    space: Space
    hashes: Sequence[bytes]
    found: int
    over_cold: bool
    deadline_ns: int
    worth: Callable[[int], int]
    done: Done

    def missing(self, key: bytes) -> int:
        """Return the columns of a chunk that are to be fetched."""
        chunk = self.space.chunks.get(key)
        if chunk is None:
            return self.space.full_mask
        return self.space.full_mask & ~(chunk.mask | (0 if self.over_cold else chunk.cold_mask))


class Waits:
    """The chunks that a request waits for."""

    def __init__(self) -> None:
        """Wait for nothing yet."""
        self.keys: set[bytes] = set()
        self.over = asyncio.Event()

    def add(self, key: bytes) -> Done:
        """Wait for a chunk; return what is called when it has come, or will not."""
        self.keys.add(key)
        return partial(self._came, key)

    def _came(self, key: bytes) -> None:
        self.keys.discard(key)
        if not self.keys:
            self.over.set()


class Run(NamedTuple):
    """A run of chunks that a host is asked for.

    Attributes:
        request: For whom first.
        hosts: Who else may have them.
        keys: Their hashes, in prefix order.
        spare: Those of them that enough failure domains hold without this host.
    """

    request: Request
    hosts: tuple[str, ...]
    keys: tuple[bytes, ...]
    spare: frozenset[bytes]


class Requests:
    """Asks other hosts for this one's requests."""

    def __init__(
        self,
        cluster: str,
        clock: Clock,
        *,
        transfer: TransferKnobs,
        directory: RedisDirectory,
        sinks: dict[str, Sink],
        random: Callable[[], float],
    ) -> None:
        """Ask nobody yet; `sinks` is kept by others."""
        self._cluster = cluster
        self._clock = clock
        self._tenants = transfer.tenants()
        self._directory = directory
        self._sinks = sinks
        self._random = random
        self._flights: dict[tuple[Space, bytes], list[Done]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retries = Bucket(0.0, RETRIES[1])
        rate_s = float(transfer.fetch_bytes_s)
        self._budget = Bucket(rate_s, BURST_S * rate_s) if rate_s else None
        self.group: asyncio.TaskGroup | None = None
        self.over_budget = 0
        self.retried = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._tasks)

    def close(self) -> None:
        """Let nobody wait any more; their sessions have ended."""
        for task in self._tasks:
            task.cancel()

    # ---------------------------------------------------------------- for the dispatcher

    def elsewhere(
        self, space: Space, hashes: Sequence[bytes], found: int, done: Callable[[int], None]
    ) -> bool:
        """Ask how many chunks after those found others seem to have; False: not worth asking."""
        if not self._able(space):
            return False
        self._spawn(self._elsewhere(space, hashes, found, done))
        return True

    def fetch(
        self,
        space: Space,
        hashes: Sequence[bytes],
        found: int,
        *,
        over_cold: bool,
        deadline_ns: int,
        worth: Callable[[int], int],
        done: Done,
    ) -> bool:
        """Fetch what a request misses; False when there is nothing to wait for.

        Args:
            space: Where.
            hashes: The whole chain.
            found: How much of it is here.
            over_cold: Fetch also what lies in the tier below, which is slower.
            deadline_ns: When it waits no longer.
            worth: Says how long a prefix pays when so many more chunks could be had.
            done: Called once, when all has come that will.
        """
        if not self._able(space):
            return False
        self._spawn(self._fetch(Request(space, hashes, found, over_cold, deadline_ns, worth, done)))
        return True

    def rates(self) -> tuple[float, float, float]:
        """Return bytes a second, latency in seconds and queued bytes of the fastest link."""
        able = [sink.asker for sink in self._sinks.values() if not sink.refusal()]
        if not able:
            return 0.0, 0.0, 0.0
        best = max(able, key=lambda asker: asker.rate.per_s)
        return best.rate.per_s, best.rate.seconds, float(best.queued_bytes())

    def _able(self, space: Space) -> bool:
        """Tell whether it is worth asking; a tenant that gives nothing takes nothing."""
        return (
            space.tenant in self._tenants
            and self.group is not None
            and len(self._tasks) < WAITING_MAX
            and self._directory.gate.open
            and any(sink.connection is not None for sink in self._sinks.values())
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        assert self.group is not None
        task = self.group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------- who

    async def _where(
        self, space: Space, hashes: Sequence[bytes], first: int
    ) -> list[tuple[Member, ...]]:
        """Return for each chunk from `first` the hosts that may hold it and can be asked.

        The list ends with the first chunk that nobody has.
        """
        able = {host for host, sink in self._sinks.items() if not sink.refusal()}
        found: list[tuple[Member, ...]] = []
        if able:
            for holders in await self._directory.where(space, hashes, first):
                reached = tuple(who for who in holders if who.host in able)
                if not reached:
                    break
                found.append(reached)
        return found

    async def _elsewhere(
        self, space: Space, hashes: Sequence[bytes], found: int, done: Callable[[int], None]
    ) -> None:
        done(len(await self._where(space, hashes, found)))

    def _best(self, hosts: Sequence[str]) -> Sink | None:
        """Choose the host that promises to deliver first, by its link's rate and queue."""
        able = [sink for host in hosts if (sink := self._sinks.get(host)) and not sink.refusal()]

        def seconds(sink: Sink) -> float:
            rate = sink.asker.rate.per_s or UNKNOWN_BYTES_S
            return sink.asker.queued_bytes() / rate + self._random() * 1e-3  # equals take turns

        return min(able, key=seconds, default=None)

    # ---------------------------------------------------------------- what

    async def _fetch(self, request: Request) -> None:
        space, found = request.space, request.found
        holders = await self._where(space, request.hashes, found)
        worth = request.worth(len(holders)) if holders else 0
        holders = holders[: max(0, worth - found)]
        keys = request.hashes[found : found + len(holders)]
        me = self._directory.me
        spare = [key for key, who in zip(keys, holders, strict=True) if not adds_safety(me, who)]
        waits = Waits()
        for key in keys:
            flight = self._flights.get((space, key))
            if flight is not None:  # asked for already: whoever asks twice joins the first
                flight.append(waits.add(key))
        for hosts, first, last in runs([[one.host for one in who] for who in holders]):
            run = [key for key in keys[first:last] if (space, key) not in self._flights]
            if run and self._ask(Run(request, hosts, tuple(run), frozenset(spare))):
                for key in run:
                    if (space, key) in self._flights:
                        self._flights[space, key].append(waits.add(key))
        left_s = (request.deadline_ns - self._clock.now_ns()) / 1e9
        if waits.keys and left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await waits.over.wait()
        request.done()

    def _ask(self, run: Run) -> bool:
        """Ask the best of a run's hosts for it."""
        space, hashes = run.request.space, run.request.hashes
        sink = self._best(run.hosts)
        places = {key: index for index, key in enumerate(hashes)}
        wants = [(key, mask) for key in run.keys if (mask := run.request.missing(key))]
        if sink is None or not wants:
            return False
        layout = space.layout
        groups = [layout.groups[layout.group_of(column)] for column in range(layout.columns)]
        sizes = tuple(group.object_bytes for group in groups)
        size_bytes = float(len(wants) * sum(sizes))
        if self._budget and not self._budget.spend(self._clock.now_ns(), size_bytes):
            self.over_budget += 1
            return False
        for key, _ in wants:
            self._flights.setdefault((space, key), [])
        above = (space.namespace, *hashes)
        keys = tuple(key for key, _ in wants)
        chain = Chain(
            space,
            tuple(above[places[key]] for key in keys),
            keys,
            run.spare,
            partial(self._landed, space),
            partial(self._ended, run, sink.host, keys),
        )
        tag = tag_of(self._cluster, space.tenant)
        deadline_ns = run.request.deadline_ns
        want = Want(tag, space.namespace, layout.id, sizes, tuple(wants), deadline_ns)
        self._retries.earn(RETRIES[0])
        sink.fetch(want, chain)
        return True

    def _ended(self, run: Run, host: str, keys: Sequence[bytes], why: str) -> None:
        """Ask another host for what did not come, or tell those who wait."""
        space, now_ns = run.request.space, self._clock.now_ns()
        rest = [key for key in keys if run.request.missing(key)]
        if rest and why == "miss":
            self._wrong(run, host, rest[0])
        others = tuple(other for other in run.hosts if other != host)
        for key in keys:
            if key not in rest:
                self._landed(space, key)
        if rest and others and now_ns < run.request.deadline_ns and self._retries.spend(now_ns, 1):
            self.retried += 1
            if self._ask(Run(run.request, others, tuple(rest), run.spare)):
                return
        for key in rest:
            self._landed(space, key)

    def _wrong(self, run: Run, host: str, key: bytes) -> None:
        """Tell the directory that a hint was wrong."""
        holder = self._directory.members.by_host.get(host)
        if holder is not None:
            request = run.request
            index = request.hashes.index(key)
            self._directory.wrong(request.space, request.hashes, index, holder)

    def _landed(self, space: Space, key: bytes) -> None:
        for waiter in self._flights.pop((space, key), ()):
            waiter()


def runs(holders: Sequence[Sequence[str]]) -> list[tuple[tuple[str, ...], int, int]]:
    """Cut chunks into runs that some hosts hold whole, greedily; each with those hosts."""
    found: list[tuple[tuple[str, ...], int, int]] = []
    first = 0
    while first < len(holders):
        names, last = set(holders[first]), first + 1
        while last < len(holders) and last - first < CHUNKS_MAX and names & set(holders[last]):
            names &= set(holders[last])
            last += 1
        found.append((tuple(sorted(names)), first, last))
        first = last
    return found
