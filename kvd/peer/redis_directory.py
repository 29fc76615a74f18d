"""The directory of a fleet as the daemon sees it: who may hold a chunk, and telling what is here.

The loop asks `where`, which takes `lookup_ms` at most, and nothing at all while the directory is
down or slow. Everything else is one task, `run`: signs of life, reading who is there, telling what
has changed, and a sweep over all that is held after a loss and from time to time.

Z1. `where` never raises, and never takes longer than its time.
Z2. A call given up is not cancelled: it ends by itself, on a connection that nobody else has, and
    its answer serves the next who asks.
Z3. At most ASKS_MAX calls of `where` are under way; more get no answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from itertools import islice
from random import SystemRandom
from typing import TYPE_CHECKING

from kvd import log
from kvd.changes import tiers_of
from kvd.peer.directory import (
    GROUP_CHUNKS,
    Gate,
    Heads,
    Hints,
    Outbox,
    Pace,
    S,
    entry_key,
    parts_to_ask,
    rate_of,
    realm_of,
    to_ask,
)
from kvd.peer.membership import MISSED_MAX, Members, member, refresh_s
from kvd.peer.redis_calls import RedisCalls, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.catalog import Catalog
    from kvd.changes import Tier
    from kvd.clock import Clock
    from kvd.config_peer import PeerKnobs
    from kvd.entry import Chunk, Space
    from kvd.peer.membership import Member
    from kvd.peer.redis_calls import Calls

_LOG = log.get("directory")
_random = SystemRandom().random
ASKS_MAX = 16
TELL_MAX = 512
"""Entries told at once; a server has nothing else to do for some 0.5 ms."""
IDLE_S = 0.05
"""Longest pause while there is something to tell."""
FULL_S = 10.0
"""Pause after the directory had no room."""
RENEWALS = 3
"""Sweeps in the life of an entry."""
LEAVE_S = 0.5
WRONG_MAX = 1024


@dataclass(slots=True)
class DirectoryCounters:
    """Counts that only rise.

    Attributes:
        lookups: Chains asked for, answered from the last seconds' answers or not.
        lookups_asked: Of those, chains for which the directory was asked.
        lookups_late: Of those, given up after `lookup_ms`.
        lookups_shut: Not asked because the directory was down or slow.
        lookups_shed: Not asked because too many were under way.
        chunks_asked: Chunks asked for.
        chunks_found: Of those, held by somebody.
        told: Entries written or renewed.
        withdrawn: Entries taken out.
        dropped: Changes that found no room in the queue; the next sweep makes good for them.
        refused: Entries for which the directory had no room.
        wrong: Hints that were wrong, and were taken out of the directory.
        strange: Keys and records that are not kvd's, passed over.
        trips: Times the directory was given up as down or slow.
        sweeps: Times that everything held was told anew.
        twins: Signs of life of another daemon with this host's name.
    """

    lookups: int = 0
    lookups_asked: int = 0
    lookups_late: int = 0
    lookups_shut: int = 0
    lookups_shed: int = 0
    chunks_asked: int = 0
    chunks_found: int = 0
    told: int = 0
    withdrawn: int = 0
    dropped: int = 0
    refused: int = 0
    wrong: int = 0
    strange: int = 0
    trips: int = 0
    sweeps: int = 0
    twins: int = 0


def _everything(_: Space) -> bool:
    return True


class RedisDirectory:
    """Everything the daemon has to do with the directory; an observer of the catalog."""

    def __init__(
        self,
        knobs: PeerKnobs,
        catalog: Catalog,
        clock: Clock,
        epoch: int,
        *,
        tells: Callable[[Space], bool] = _everything,
        calls: Calls | None = None,
        random: Callable[[], float] = _random,
    ) -> None:
        """Listen to the catalog from now on; nothing is sent before `run`.

        Args:
            knobs: The [peer] table.
            catalog: What is held here.
            clock: Monotonic.
            epoch: Of this life of the daemon.
            tells: Which spaces others are told of.
            calls: What is called in place of the server that `knobs` names.
            random: Gives 0 to 1, so that hosts do nothing in step.

        Raises:
            StartError: The password file cannot be read.
        """
        self.me = member(knobs.cluster, knobs.host, epoch, knobs.address, knobs.domain)
        self.members = Members(self.me)
        self.gate = Gate(random)
        self.counters = DirectoryCounters()
        self._knobs = knobs
        self._tells = tells
        self._random = random
        self._catalog = catalog
        self._clock = clock
        self._calls: Calls = calls or RedisCalls(knobs)
        self._outbox: Outbox[Chunk] = Outbox()
        self._wrong: Outbox[tuple[bytes, int]] = Outbox(WRONG_MAX)
        self._hints = Hints()
        self._heads = Heads()
        self._pace = Pace(knobs.announce_per_s)
        self._realms: dict[Space, bytes] = {}
        self._sweep: Iterator[Chunk] | None = None
        self._sweep_due_ns = 0
        self._beat_due_ns = self._read_due_ns = self._full_until_ns = 0
        self._beaten = False
        self._asking = 0
        self._closing = asyncio.Event()
        self._wake = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        catalog.changes.watch(self)

    # ---------------------------------------------------------------- hearing of changes

    def stored(self, space: Space, chunk: Chunk, tier: Tier) -> None:  # noqa: ARG002 - an observer
        """Hear that a tier has a chunk: news if no other had it."""
        if len(tiers_of(chunk)) == 1 and self._tells(space):
            self._changed(chunk)

    def removed(self, space: Space, chunk: Chunk, tier: Tier, reason: str) -> None:  # noqa: ARG002
        """Hear that a tier has a chunk no more: news if no other has it."""
        if not tiers_of(chunk) and self._tells(space):
            self._changed(chunk)

    def _changed(self, chunk: Chunk) -> None:
        if not self._outbox:
            self._wake.set()
        self._outbox.put(chunk)

    # ---------------------------------------------------------------- asking

    async def where(
        self, space: Space, hashes: Sequence[bytes], first: int = 0
    ) -> list[tuple[Member, ...]]:
        """Return who may hold chunks `first` and later of a chain, this host left out.

        Args:
            space: Where.
            hashes: The chain, from its beginning.
            first: Chunks at its head that are not asked for.

        Returns:
            Up to four holders a chunk, in no order that means anything; none after the first chunk
            that nobody has. Hints: a holder may say no, and others may hold it.
        """
        counters = self.counters
        counters.lookups += 1
        realm = self._realm(space)
        names = [(realm, key) for key in hashes[first:]]
        indexes = to_ask(self._known(names))
        if indexes and not self.gate.open:
            counters.lookups_shut += 1
        elif indexes and self._asking >= ASKS_MAX:
            counters.lookups_shed += 1
        elif indexes and self._group is not None:
            counters.lookups_asked += 1
            self._asking += 1
            asked = [first + index for index in indexes]
            task = self._group.create_task(self._ask(realm, hashes, asked))
            done, _ = await asyncio.wait({task}, timeout=self._knobs.lookup_ms / 1e3)
            if not done:
                counters.lookups_late += 1
                self.gate.late(self._clock.now_ns())
        found: list[tuple[Member, ...]] = []
        for numbers in self._known(names):
            holders = self.members.holders(numbers or ())
            if not holders:
                break
            found.append(holders)
        counters.chunks_found += len(found)
        if self.members.unknown:
            self._read_due_ns = min(self._read_due_ns, self._beat_due_ns)
        return found + [()] * (len(names) - len(found))

    def _known(self, names: Sequence[tuple[bytes, bytes]]) -> list[tuple[int, ...] | None]:
        now_ns, get = self._clock.now_ns(), self._hints.get
        return [get(name, now_ns) for name in names]

    async def _ask(self, realm: bytes, hashes: Sequence[bytes], indexes: Sequence[int]) -> None:
        """Ask for chunks of a chain; the answers become hints (Z2)."""
        begun_ns = self._clock.now_ns()
        try:
            for part in parts_to_ask(indexes):
                keys = [entry_key(realm, hashes[_head(i)], hashes[i]) for i in part]
                self.counters.chunks_asked += len(keys)
                found = await self._calls.ask(keys)
                now_ns = self._clock.now_ns()
                for index, key, numbers in zip(part, keys, found, strict=True):
                    self.counters.strange += numbers is None
                    self._hints.put((realm, hashes[index]), numbers or (), now_ns)
                    for number in self.members.dead.intersection(numbers or ()):
                        self._wrong.put((key, number))  # who meets them clears them away
                if not all(found):
                    break
            if self._clock.now_ns() - begun_ns <= self._knobs.lookup_ms * 1e6:
                self.gate.answered()
        except Unreachable as error:
            self._failed(error)
        finally:
            self._asking -= 1

    def wrong(self, space: Space, hashes: Sequence[bytes], index: int, holder: Member) -> None:
        """Hear that a holder does not have the chunk at `index` of a chain: its entry goes."""
        realm = self._realm(space)
        self.counters.wrong += 1
        self._hints.forget((realm, hashes[index]), holder.number)
        key = entry_key(realm, hashes[_head(index)], hashes[index])
        self._wrong.put((key, holder.number))

    async def holders(self, chunks: Sequence[Chunk]) -> list[tuple[str, ...]] | None:
        """Return which hosts are said to hold each chunk, this one too, for people.

        Up to four a chunk, picked by the directory; None when it cannot be asked.
        """
        try:
            async with asyncio.timeout(LEAVE_S):
                found = await self._calls.ask([self._entry(chunk) for chunk in chunks])
        except (Unreachable, TimeoutError):
            return None
        known = {self.me.number: self.me, **self.members.by_number}
        return [
            tuple(sorted(known[number].host for number in numbers or () if number in known))
            for numbers in found
        ]

    def _realm(self, space: Space) -> bytes:
        realm = self._realms.get(space)
        if realm is None:
            if len(self._realms) >= 4 * (1 + len(self._catalog.spaces)):
                self._realms.clear()  # spaces that were forgotten
            realm = realm_of(self._knobs.cluster, space.tenant, space.namespace, space.layout.id)
            self._realms[space] = realm
        return realm

    # ---------------------------------------------------------------- upkeep

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Keep the directory told until closed or cancelled; look-ups are tasks of `group`."""
        self.join(group)
        task = asyncio.current_task()
        assert task is not None
        while not (self._closing.is_set() or task.cancelling()):  # the library swallows some
            await self.step()
            await self._pause()

    def join(self, group: asyncio.TaskGroup) -> None:
        """Make look-ups tasks of a group; before, they have no answer."""
        self._group = group

    async def step(self) -> None:
        """Do what is due now."""
        now_ns = self._clock.now_ns()
        try:
            if self.gate.open:
                await self._keep_up(now_ns)
            elif self.gate.probe_due(now_ns):
                await self._probe()
        except Unreachable as error:
            self._failed(error)

    def busy(self) -> bool:
        """Tell whether there is something to be told."""
        return self._sweep is not None or bool(self._outbox) or bool(self._wrong)

    async def _pause(self) -> None:
        """Sleep until there is something to do; changes cut it short where nothing else waits."""
        now_ns, event = self._clock.now_ns(), self._closing
        if not self.gate.open:
            seconds = self.gate.wait_s(now_ns)
        elif self.busy() and now_ns >= self._full_until_ns:
            seconds = IDLE_S
        else:
            due_ns = min(self._beat_due_ns, self._read_due_ns, max(self._sweep_due_ns, now_ns + S))
            seconds = (due_ns - now_ns) / S
            event = self._wake
            event.clear()
        try:
            async with asyncio.timeout(max(IDLE_S / 5, seconds)):
                await event.wait()
        except TimeoutError:
            return

    async def _probe(self) -> None:
        """Try the directory again: it is back if it takes a sign of life and answers in time."""
        try:
            await self._beat(self._clock.now_ns())
            begun_ns = self._clock.now_ns()
            await self._calls.ping()
            now_ns = self._clock.now_ns()
            if now_ns - begun_ns > self._knobs.lookup_ms * 1e6:
                raise Unreachable("slow")  # the same as not at all
            await self._read(now_ns)
        except Unreachable as error:
            _LOG.limited("directory not reached", why=str(error))
            self.gate.probed(self._clock.now_ns(), str(error))
            return
        self.gate.probed(now_ns)
        _LOG.info("directory reached", hosts=len(self.members.by_host) + 1)

    def _failed(self, error: Unreachable) -> None:
        if self.gate.open:
            _LOG.warning("directory lost", why=str(error))
        self.gate.failed(self._clock.now_ns(), str(error))

    async def _keep_up(self, now_ns: int) -> None:
        """Do what is due: a sign of life, reading who is there, telling."""
        if now_ns >= self._beat_due_ns:
            await self._beat(now_ns)
        if now_ns >= self._read_due_ns:
            await self._read(now_ns)
        if now_ns >= self._full_until_ns:
            await self._tell(now_ns)

    async def _beat(self, now_ns: int) -> None:
        knobs = self._knobs
        before = await self._calls.beat(self.me, MISSED_MAX * knobs.heartbeat_s)
        self._beat_due_ns = now_ns + int(knobs.heartbeat_s * (0.8 + 0.2 * self._random()) * S)
        if before is None:  # the first of this life, or it lost what it had
            self._sweep_due_ns = 0
            self._sweep = None
        elif self._beaten and before != self.me:
            self.counters.twins += 1
            _LOG.limited(
                "another daemon has this host's name: set [peer] host", address=before.address
            )
        elif not self._beaten:
            self._sweep_due_ns = 0
        self._beaten = True

    async def _read(self, now_ns: int) -> None:
        come, gone = self.members.learn(await self._calls.members())
        for one in come:
            _LOG.limited("host there", host=one.host, address=one.address, domain=one.domain)
        for one in gone:
            _LOG.limited("host gone", host=one.host)
        hosts = len(self.members.by_host) + 1
        self._pace.per_s = rate_of(self._knobs.announce_per_s, hosts, self._calls.servers())
        wait_s = refresh_s(self._knobs.heartbeat_s, hosts)
        self._read_due_ns = now_ns + int(wait_s * (0.8 + 0.4 * self._random()) * S)

    # ---------------------------------------------------------------- telling

    async def _tell(self, now_ns: int) -> None:
        """Tell some of what has changed, and of what is held where a sweep is under way."""
        ttl_s, period_ns = int(self._knobs.entry_ttl_s), int(self._knobs.entry_ttl_s / RENEWALS * S)
        if self._sweep is None and (now_ns >= self._sweep_due_ns or self._outbox.missed):
            self._sweep = self._held()
            self._sweep_due_ns = now_ns + period_ns
            self._outbox.missed = False
            self.counters.sweeps += 1
        allowed = min(TELL_MAX, self._pace.allowed(now_ns))
        chunks = self._outbox.take(allowed)
        if self._sweep is not None and len(chunks) < allowed:
            more = list(islice(self._sweep, allowed - len(chunks)))
            if len(more) < allowed - len(chunks):
                self._sweep = None
            chunks += more
        if chunks:
            await self._tell_of(chunks, ttl_s)
        for key, number in self._wrong.take(min(TELL_MAX, allowed - len(chunks))):
            strange, _ = await self._calls.tell(number, [(key, False)], ttl_s)
            self.counters.strange += strange

    async def _tell_of(self, chunks: list[Chunk], ttl_s: int) -> None:
        entries = [(self._entry(chunk), self._is_held(chunk)) for chunk in chunks]  # Y2
        self._pace.spend(len(entries))
        try:
            strange, full = await self._calls.tell(self.me.number, entries, ttl_s)
        except Unreachable:
            for chunk in chunks:
                self._outbox.put(chunk)
            raise
        held = sum(held for _, held in entries)
        self.counters.told += held - full
        self.counters.withdrawn += len(entries) - held
        self.counters.strange += strange
        if full:
            self.counters.refused += full
            self._outbox.missed = True
            self._full_until_ns = self._clock.now_ns() + int(FULL_S * S)
            _LOG.limited("the directory has no room: raise its maxmemory", entries=full)

    def _entry(self, chunk: Chunk) -> bytes:
        return entry_key(self._realm(chunk.space), self._heads.head(chunk), chunk.hash)

    def _is_held(self, chunk: Chunk) -> bool:
        """Whether a chunk of this name is held: perhaps another than the one that had changed."""
        space = chunk.space
        now = self._catalog.spaces.get((space.tenant, space.namespace, space.layout.id))
        found = now.chunks.get(chunk.hash) if now is not None else None
        return found is not None and bool(tiers_of(found))

    def _held(self) -> Iterator[Chunk]:
        """Yield everything that is held, as it was when the sweep began."""
        for space in filter(self._tells, list(self._catalog.spaces.values())):
            for chunk in list(space.chunks.values()):
                if tiers_of(chunk):
                    yield chunk

    # ---------------------------------------------------------------- the end

    async def close(self) -> None:
        """Leave the fleet, as far as that takes no time, and close the connections."""
        self._closing.set()
        self._wake.set()
        try:
            async with asyncio.timeout(LEAVE_S):
                if self._beaten and self.gate.open:
                    await self._calls.leave(self.me)
        except (Unreachable, TimeoutError):
            _LOG.info("left the fleet without a word")  # the record ends by itself
        await self._calls.close()

    def stats(self) -> dict[str, object]:
        """Return what the statistics page says."""
        self.counters.dropped = self._outbox.dropped
        self.counters.trips = self.gate.trips
        self.counters.strange += self.members.strange
        self.members.strange = 0
        return {
            "state": "open" if self.gate.open else f"shut: {self.gate.why}",
            "host": self.me.host,
            "domain": self.me.domain,
            "hosts": len(self.members.by_host) + 1,
            "waiting": len(self._outbox),
            "sweeping": self._sweep is not None,
            "entries_per_s_max": round(self._pace.per_s),
            "hints": len(self._hints),
            "counters": asdict(self.counters),
        }


def _head(index: int) -> int:
    """Return the index in a chain of the first chunk of a chunk's group."""
    return index - index % GROUP_CHUNKS
