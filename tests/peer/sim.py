"""Three to seven hosts in one process: the real asker and holder, everything else simulated.

Time, messages, memory, movers and faults are events on one heap. Memory is places of two words that
reads write one after the other, at times of their own, whatever the place is used for by then: that
is how the transfer library behaves. Each key has one value; a host that finds a key must find it.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvd.peer.asker import Asker
from kvd.peer.holder import Holder
from kvd.peer.messages import Ask, Have, Message, Offer, Release, decode, encode
from kvd.peer.protocol import (
    Drop,
    Ended,
    GiveBack,
    Held,
    KillMover,
    Knobs,
    Land,
    Publish,
    Quarantine,
    S,
    Send,
    StartMover,
    Take,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], None]

PLACES = 24
CHAINS, DEPTH = 4, 6
SIZE = 1 << 20
TICK_S = 0.5
BUSY_S, QUIET_S = 20.0, 25.0
WAIT_S = 3.0
KNOBS = Knobs(
    lease_ms=6_000,
    answer_ms=1_000,
    read_ms=800,
    window_bytes=4 * SIZE,
    reads_max=4,
    asks_max=2,
    ahead_max=4,
    quarantine_bytes=5 * SIZE,
    quarantine_ms=2_000,
    floor_bytes_s=1e12,
)
NAMESPACE, LAYOUT, TAG = b"n" * 32, b"l" * 32, b"t" * 16


def key_of(chain: int, depth: int) -> bytes:
    """Name a chunk."""
    return bytes([chain, depth]) * 16


def value_of(key: bytes) -> list[bytes]:
    """Return the one right content of a key, two words."""
    return [key[:2] + b"0", key[:2] + b"1"]


class Wrong(AssertionError):
    """The history is not one that kvd may have."""


class Read(NamedTuple):
    """What a mover has posted."""

    place: int
    key: bytes
    life: int


class Host:
    """One daemon: memory, what is published in it, its two machines."""

    def __init__(self, world: World, name: str) -> None:
        """Be born for the first time."""
        self.world = world
        self.name = name
        self.rate = 1 + world.random.uniform(-0.02, 0.02)
        self.stopped_until = 0.0
        self.epoch = 0
        self.born()

    def born(self) -> None:
        """Start with empty memory, as a new epoch; what the old life posted dies with it."""
        self.epoch += 1
        self.memory = [[b"", b""] for _ in range(PLACES)]
        self.free = list(range(PLACES))
        self.store: dict[bytes, tuple[int, int]] = {}
        self.generation = 0
        self.pins: dict[int, int] = {}
        self.tickets: dict[int, int] = {}
        self.holder = Holder(self.epoch, KNOBS, lambda _host, tag, _ns: tag == TAG)
        self.askers: dict[str, Asker] = {}
        self.alive: set[tuple[str, int]] = set()
        self.reads: dict[tuple[str, int], Read] = {}
        self.wanted: set[bytes] = set()
        self.calls: dict[tuple[str, int], tuple[float, tuple[bytes, ...]]] = {}

    def now_ns(self) -> int:
        """Read its own clock, which runs at a rate of its own."""
        return int(self.world.now * self.rate * S) + S

    def put(self, key: bytes, place: int) -> None:
        """Publish what lies in a place; the first stays."""
        if key in self.store:
            self.free.append(place)
            return
        self.generation += 1
        self.store[key] = (place, self.generation)

    def look(self, key: bytes) -> bool:
        """Look a key up, as an engine does that then reads the bytes."""
        if key not in self.store:
            return False
        found = self.memory[self.store[key][0]]
        if found != value_of(key):
            msg = f"{self.name} at {self.world.now:.3f}: {found} for {value_of(key)}"
            raise Wrong(msg)
        return True

    def keep(self, key: bytes) -> None:
        """Store a key locally, as an engine that computed it does."""
        if key in self.store or not self.free:
            return
        place = self.free.pop()
        self.memory[place][:] = value_of(key)
        self.put(key, place)

    def evict(self) -> None:
        """Free a place that nobody holds."""
        loose = [key for key, (place, _) in self.store.items() if not self.pins.get(place)]
        if loose:
            self.free.append(self.store.pop(self.world.random.choice(loose))[0])


class World:
    """The hosts, the network between them, and time."""

    def __init__(self, seed: int, asker: type[Asker] = Asker, *, fence: bool = True) -> None:
        """Make a world; `asker` and `fence` are there to break rules."""
        self.random = random.Random(seed)
        self.make_asker = asker
        self.fences = fence
        self.now = 0.0
        self.calm = False
        self.history = hashlib.blake2b(digest_size=16)
        self.counts = dict.fromkeys(("hits", "misses", "fetched", "quarantined", "fenced"), 0)
        self._heap: list[tuple[float, int, Step]] = []
        self._sequence = 0
        self.cut: set[tuple[str, str]] = set()
        self.loss, self.chaos = self.random.choice(((0.0, 0.3), (0.02, 0.6), (0.1, 1.0)))
        self.hosts = {f"h{i}": Host(self, f"h{i}") for i in range(self.random.randint(3, 7))}
        for host in self.hosts.values():
            self.join(host)
            for chain in range(CHAINS):
                for depth in range(self.random.randint(0, DEPTH)):
                    host.keep(key_of(chain, depth))

    # ---------------------------------------------------------------- time

    def at(self, delay: float, step: Step) -> None:
        """Do something later."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, step))

    def on(self, host: Host, delay: float, step: Step) -> None:
        """Do something on a host later: not while it is stopped, nor in another life of it."""
        epoch = host.epoch

        def run() -> None:
            if host.epoch != epoch:
                return
            if self.now < host.stopped_until:
                self.at(host.stopped_until - self.now + 1e-6, run)
            else:
                step()

        self.at(delay, run)

    def run(self) -> str:
        """Run to the end; return a hash of the history."""
        for host in self.hosts.values():
            self.at(self.random.uniform(0, TICK_S), partial(self.tick, host))
        for _ in range(int(BUSY_S * len(self.hosts))):
            self.at(self.random.uniform(0, BUSY_S), self.something)
        self.at(BUSY_S, self.heal)
        while self._heap and self._heap[0][0] < BUSY_S + QUIET_S:
            self.now, _, step = heapq.heappop(self._heap)
            step()
        self.finish()
        return self.history.hexdigest()

    def note(self, *facts: object) -> None:
        """Write into the history."""
        self.history.update(repr((round(self.now, 6), *facts)).encode())

    def tick(self, host: Host) -> None:
        """Let a host's time pass; a stopped one has none."""
        if self.now >= host.stopped_until:
            now_ns = host.now_ns()
            for asker in list(host.askers.values()):
                if asker.fetches or asker.reads:
                    self.do(host, asker, asker.tick(now_ns))
                    asker.check()
            if host.holder.services:
                self.serve(host, host.holder.tick(now_ns))
            for (peer, fetch), (deadline, _) in host.calls.items():
                if self.now > deadline + 2 * TICK_S + 0.1 and self.now > host.stopped_until + 1:
                    msg = f"{host.name} waits for fetch {fetch} of {peer} beyond its deadline"
                    raise Wrong(msg)
        self.at(TICK_S, lambda: self.tick(host))

    def something(self) -> None:
        """Let an engine or a fault do something."""
        host = self.random.choice(list(self.hosts.values()))
        if self.now < host.stopped_until:
            return
        roll = self.random.random()
        if roll < 0.6:
            self.want(host)
        elif roll < 0.8:
            host.evict()
            host.evict()
            if self.random.random() < 0.7:
                chain = self.random.randrange(CHAINS)
                host.keep(key_of(chain, self.random.randrange(DEPTH)))
        elif self.random.random() < self.chaos:
            reading = sorted({peer for h in self.hosts.values() for peer, _ in h.reads})
            self.fault(self.hosts[self.random.choice(reading)] if reading else host)

    def fault(self, host: Host) -> None:
        """Break something for a while."""
        roll = self.random.random()
        if roll < 0.5:
            self.note("stop", host.name)
            host.stopped_until = self.now + self.random.choice((0.5, 3.0, 9.0))
        elif roll < 0.65:
            self.note("crash", host.name)
            host.born()
            self.on(host, self.random.uniform(0.1, 2), lambda: self.join(host))
            for other in self.hosts.values():
                if other is not host:
                    self.lose(other, host.name, self.random.uniform(0, 1))
        else:
            peer = self.random.choice([h for h in self.hosts if h != host.name])
            self.note("cut", host.name, peer)
            pair = (host.name, peer)
            self.cut.add(pair)  # one way
            until = self.random.uniform(0.5, 5)
            self.at(until, lambda: self.cut.discard(pair))
            if self.random.random() < 0.5:
                self.lose(host, peer, self.random.uniform(0, 1))
                self.on(host, until + 0.1, lambda: self.link(host, self.hosts[peer]))

    def lose(self, host: Host, peer: str, delay: float) -> None:
        """Let a host notice that a link is gone; sometimes the other side notices as well."""

        def down() -> None:
            asker = host.askers.get(peer)
            if asker is not None and asker.linked:
                self.do(host, asker, asker.link_down(host.now_ns()))
            self.serve(host, host.holder.link_down(peer))

        self.on(host, delay, down)

    def join(self, host: Host) -> None:
        """Link a host with all others, both ways."""
        for other in self.hosts.values():
            if other is not host:
                self.link(host, other)
                self.link(other, host)

    def link(self, host: Host, other: Host) -> None:
        """Let a host learn the other's epoch."""
        asker = host.askers.get(other.name)
        if asker is None:
            asker = self.make_asker(other.name, KNOBS, self.random.random)
            host.askers[other.name] = asker
        self.do(host, asker, asker.link_up(host.now_ns(), other.epoch))

    def heal(self) -> None:
        """Mend everything; from here on all must come to rest."""
        self.calm, self.loss = True, 0.0
        self.cut.clear()
        for host in self.hosts.values():
            host.stopped_until = min(host.stopped_until, self.now)

    def want(self, host: Host) -> None:
        """Look a chain up and fetch what is missing, from whoever may have it."""
        chain = self.random.randrange(CHAINS)
        keys = [key_of(chain, depth) for depth in range(DEPTH)]
        here = [host.look(key) for key in keys]
        self.counts["hits"] += sum(here)
        self.counts["misses"] += DEPTH - sum(here)
        missing = tuple(
            key
            for key, found in zip(keys, here, strict=True)
            if not found and key not in host.wanted
        )
        if not missing:
            return
        asker = host.askers[self.random.choice(sorted(host.askers))] if host.askers else None
        now_ns = host.now_ns()
        if asker is None or asker.refusal(now_ns):
            return
        deadline_ns = now_ns + int(WAIT_S * S * host.rate)
        chunks = tuple((key, 1) for key in missing)
        number, actions = asker.fetch(
            now_ns, Want(TAG, NAMESPACE, LAYOUT, (SIZE,), chunks, deadline_ns)
        )
        host.wanted.update(missing)
        host.calls[asker.host, number] = (self.now + WAIT_S, missing)
        self.do(host, asker, actions)

    # ---------------------------------------------------------------- the asker's actions

    def do(self, host: Host, asker: Asker, actions: list[Any]) -> None:
        """Carry out what an asker says."""
        for action in actions:
            match action:
                case Send(message=message):
                    self.send(host, asker.host, message)
                case StartMover(life=life):
                    self.start(host, asker, life)
                case KillMover(life=life):
                    self.on(host, 0.05, partial(self.kill, host, asker, life))
                case Land():
                    self.land(host, asker, action)
                case Publish(read=read):
                    done = host.reads.pop((asker.host, read))
                    host.put(done.key, done.place)
                    self.counts["fetched"] += 1
                    self.note("publish", host.name, done.key)
                    host.look(done.key)
                case GiveBack(read=read):
                    host.free.append(host.reads.pop((asker.host, read)).place)
                case Quarantine(read=read):
                    self.counts["quarantined"] += 1
                    self.note("quarantine", host.name, read)
                case Ended(fetch=fetch):
                    _, keys = host.calls.pop((asker.host, fetch))
                    host.wanted.difference_update(keys)

    def start(self, host: Host, asker: Asker, life: int) -> None:
        """Start a mover; now and then it dies at once."""

        def up() -> None:
            if self.random.random() < 0.05 * self.chaos:
                self.do(host, asker, asker.mover_gone(host.now_ns(), life))
            else:
                host.alive.add((asker.host, life))
                self.do(host, asker, asker.mover_up(host.now_ns(), life))

        self.on(host, self.random.uniform(0.05, 0.3), up)

    def kill(self, host: Host, asker: Asker, life: int) -> None:
        """Kill a mover and reap it: what it has posted writes nothing any more."""
        self.counts["fenced"] += 1
        if self.fences:
            host.alive.discard((asker.host, life))
        self.do(host, asker, asker.mover_gone(host.now_ns(), life))

    def land(self, host: Host, asker: Asker, land: Land) -> None:
        """Take a place and post a read into it: two words, each in its own time."""
        key = asker.fetches[land.fetch].want.chunks[land.at][0]
        if not host.free or key in host.store or any(r.key == key for r in host.reads.values()):
            self.do(host, asker, asker.no_room(host.now_ns(), land.read))
            return
        self._one_flight(asker, key)
        place, source = host.free.pop(), self.hosts[asker.host]
        host.reads[asker.host, land.read] = Read(place, key, land.life)
        memory, address, epoch = host.memory, land.pieces[0].address, source.epoch
        flip = self.random.random() < 0.02 * self.chaos and not self.calm

        def word(which: int) -> None:
            if (asker.host, land.life) not in host.alive or host.memory is not memory:
                return  # the mover's process is gone, or the whole host
            if source.epoch != epoch:
                self.do(host, asker, asker.failed(host.now_ns(), land.read))
                return
            if self.now < source.stopped_until or (source.name, host.name) in self.cut:
                self.at(0.3, lambda: word(which))  # it hangs, and goes on later
                return
            memory[place][which] = b"?" if flip else source.memory[address][which]
            if which == 0:
                self.at(self.random.expovariate(8), lambda: word(1))
            else:
                self.on(host, 0.001, landed)

        def landed() -> None:
            digest = digest_of(memory[place])
            self.do(host, asker, asker.landed(host.now_ns(), land.read, [digest]))

        self.at(self.random.expovariate(8), lambda: word(0))

    @staticmethod
    def _one_flight(asker: Asker, key: bytes) -> None:
        """Check P4: at most one transfer in flight a key and peer."""
        live = [read for read in asker.reads.values() if not read.quarantined_ns]
        keys = [read.fetch.want.chunks[read.index][0] for read in live]
        if keys.count(key) > 1:
            msg = f"{key!r} is fetched twice from {asker.host}"
            raise Wrong(msg)

    # ---------------------------------------------------------------- the holder's actions

    def serve(self, host: Host, actions: list[Any]) -> None:
        """Carry out what a holder says."""
        for action in actions:
            match action:
                case Send(host=peer, message=message):
                    self.send(host, peer, message)
                case Take():
                    self.take(host, action)
                case Drop(ticket=ticket):
                    place = host.tickets.pop(ticket, None)
                    if place is not None:
                        host.pins[place] -= 1

    def take(self, host: Host, take: Take) -> None:
        """Hold a chunk, after a while; a miss is a miss."""
        found = host.store.get(take.key)
        if found is None:
            held = None
        else:
            place, generation = found
            host.pins[place] = host.pins.get(place, 0) + 1
            host.tickets[take.ticket] = place
            held = [Held(0, place, SIZE, generation, 0, digest_of(host.memory[place]))]
        delay = self.random.choice((0.001, 0.001, 0.2))
        holder = host.holder
        self.on(host, delay, lambda: self.serve(host, holder.taken(take.ticket, 1, held)))

    # ---------------------------------------------------------------- the network

    def send(self, host: Host, peer: str, message: Message) -> None:
        """Carry a message: late, twice, or never; what is under way survives a crash."""
        if self.random.random() < self.loss:
            return
        copies = 2 if self.random.random() < self.loss else 1
        if self.random.random() < 0.1:
            message = decode(
                encode(message)[4:]
            )  # the bytes say the same; not each time, for speed
        for _ in range(copies):
            delay = self.random.expovariate(100) + (0.3 if self.random.random() < self.loss else 0)
            self.at(delay, lambda: self.deliver(host.name, peer, message))

    def deliver(self, sender: str, peer: str, message: Message) -> None:
        """Hand a message over, unless the way is cut; a stopped host reads it later."""
        host = self.hosts[peer]
        if (sender, peer) in self.cut:
            return
        if self.now < host.stopped_until:
            self.at(host.stopped_until - self.now, lambda: self.deliver(sender, peer, message))
            return
        if isinstance(message, Ask | Have | Release):
            self.serve(host, host.holder.heard(host.now_ns(), sender, message))
        elif (asker := host.askers.get(sender)) is not None:
            if isinstance(message, Offer):
                self.note("offer", sender, peer, message.at)
            self.do(host, asker, asker.heard(host.now_ns(), message))

    def finish(self) -> None:
        """Check that all came to rest: nothing wrong, nothing lost, nothing waiting."""
        for host in self.hosts.values():
            for key in list(host.store):
                host.look(key)
            for asker in host.askers.values():
                asker.check()
                rest = (asker.fetches, asker.reads, asker.quarantined_bytes)
                if any(rest):
                    msg = f"{host.name} has not come to rest with {asker.host}: {rest}"
                    raise Wrong(msg)
            if host.calls or host.holder.services or any(host.pins.values()) or host.tickets:
                msg = f"{host.name} still waits or holds"
                raise Wrong(msg)
            if sorted([*host.free, *(p for p, _ in host.store.values())]) != list(range(PLACES)):
                msg = f"{host.name} lost places, or has some twice"
                raise Wrong(msg)


def digest_of(words: list[bytes]) -> bytes:
    """Sum a place, in place of xxh3."""
    return hashlib.blake2b(repr(words).encode(), digest_size=16).digest()
