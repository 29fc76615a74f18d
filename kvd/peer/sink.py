"""One host that is asked: its link, its asker, its mover, and the slots its chunks land in. Loop.

Carries out what `asker.py` says. A mover is a process of this peer alone; killing it is the fence.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from kvd import log
from kvd.peer.ahead import next_slab
from kvd.peer.asker import Asker, Mover
from kvd.peer.landing import Landings
from kvd.peer.process import START_S, MoverProcess
from kvd.peer.protocol import (
    AskerAction,
    Ended,
    GiveBack,
    KillMover,
    Knobs,
    Land,
    Learn,
    Publish,
    Quarantine,
    Send,
    StartMover,
    Want,
)
from kvd.peer.pump import Pump

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Sequence

    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.entry import Space
    from kvd.peer.control import Connection
    from kvd.peer.messages import Message
    from kvd.peer.nixl_agent import Transport
    from kvd.peer.source import Slabs
    from kvd.types import OwnerId, SlabId, Tenant

    OnEnded = Callable[[str], None]

_LOG = log.get("sink")


class World(NamedTuple):
    """What all sinks share.

    Attributes:
        loop: The daemon's.
        clock: Of decisions.
        catalog: Where slots come from.
        slabs: The host tier's memory.
        transport: What carries the bytes.
        devices: Over which.
        knobs: Bounds.
        tenants: That share something with a host, and so take from it.
        random: From 0 to 1.
        owner: Gives a number below zero, a new one each time.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock
    catalog: Catalog
    slabs: Slabs
    transport: Transport
    devices: Sequence[str]
    knobs: Knobs
    tenants: Callable[[str], Collection[Tenant]]
    random: Callable[[], float]
    owner: Callable[[], OwnerId]


class Chain(NamedTuple):
    """What a fetch is of, in this daemon's terms.

    Attributes:
        space: Where.
        parents: Of each chunk, the one before it.
        hashes: Its chunks.
        spare: Those of them that enough failure domains hold without this host.
        came: Hears of each that has come and can be read.
        ended: Hears why it ended; what came is in the catalog.
    """

    space: Space
    parents: tuple[bytes, ...]
    hashes: tuple[bytes, ...]
    spare: frozenset[bytes]
    came: Callable[[bytes], None]
    ended: OnEnded


class Sink:
    """A host that is asked."""

    def __init__(self, world: World, host: str) -> None:
        """Start without a link and without a mover."""
        self._world = world
        self.host = host
        self.asker = Asker(host, world.knobs, world.random)
        self.connection: Connection | None = None
        self.address = ""
        self.why = "not connected yet"
        self.spare = 0
        """Chunks fetched that enough failure domains had already."""
        self._process: MoverProcess | None = None
        self._landings: dict[int, Landings] = {}
        self._reads: dict[int, tuple[Landings, Chain]] = {}
        self._chains: dict[int, Chain] = {}
        self._agents: dict[int, bytes] = {}
        self._agent_sent = 0
        self._do = Pump(self._act)
        self._up_by_s = math.inf
        self._ahead = True

    @property
    def mover_pid(self) -> int:
        """The mover's process id, 0 without one."""
        return self._process.process.pid if self._process is not None else 0

    # ---------------------------------------------------------------- what happens

    def up(self, connection: Connection, epoch: int) -> None:
        """Hear that the link stands."""
        self.connection, self.why = connection, ""
        if epoch != self.asker.epoch:
            self._agents.clear()
        self._do(self.asker.link_up(self._now(), epoch))

    def down(self, why: str) -> None:
        """Hear that it is lost."""
        self.connection, self.why = None, why
        self._do(self.asker.link_down(self._now()))

    def heard(self, message: Message) -> None:
        """Hear the host."""
        self._do(self.asker.heard(self._now(), message))

    def tick(self) -> None:
        """Let time pass: what hangs at its start is killed, as is what hangs later (the fence)."""
        if self._process is not None and self._world.loop.time() > self._up_by_s:
            _LOG.warning("mover does not start; it is killed", host=self.host, pid=self.mover_pid)
            self._up_by_s = math.inf
            self._process.kill()
        if self.asker.fetches or self.asker.reads:
            self._do(self.asker.tick(self._now()))
        else:
            self._give_ahead()

    def refusal(self) -> str:
        """Return why nothing can be fetched from here now, or nothing."""
        return self.asker.refusal(self._now())

    def fetch(self, want: Want, chain: Chain) -> None:
        """Ask for chunks; `chain.ended` hears why it ended, what came is in the catalog."""
        number, actions = self.asker.fetch(self._now(), want)
        self._chains[number] = chain
        self._do(actions)

    def close(self) -> None:
        """Kill the mover."""
        if self._process is not None:
            self._process.kill()

    def _now(self) -> int:
        return self._world.clock.now_ns()

    # ---------------------------------------------------------------- what to do

    def _act(self, action: AskerAction) -> None:  # noqa: C901 - one line each
        match action:
            case Send(message=message):
                if self.connection is not None:
                    self.connection.send(message)
            case Learn(version=version, metadata=metadata):
                self._agents = {version: metadata}
            case StartMover(life=life):
                self._start(life)
            case KillMover(why=why):
                held = self.asker.quarantined_bytes
                _LOG.warning("fence", host=self.host, quarantine=why, bytes=held)
                assert self._process is not None
                self._process.kill()
            case Land():
                self._land(action)
            case Publish(read=read):
                landings, chain = self._reads.pop(read)
                chunk = landings.publish(read, self._now())
                self.spare += chunk.spare > 0
                chain.came(chunk.hash)
            case Quarantine(read=read):
                self._reads[read][0].quarantine(read)
            case GiveBack(read=read):
                self._reads.pop(read)[0].give_back(read)
            case Ended(fetch=fetch, published=published, why=why):
                chain = self._chains.pop(fetch)
                _LOG.debug("fetch ended", host=self.host, chunks=published, why=why)
                chain.ended(why)

    def _start(self, life: int) -> None:
        world = self._world
        self._agent_sent = 0
        try:
            self._process = MoverProcess(
                world.loop,
                "sink",
                transport=world.transport,
                devices=world.devices,
                on_message=lambda message: self._on_message(life, message),
                on_gone=lambda: self._on_gone(life),
            )
        except OSError as error:
            _LOG.limited("no mover", host=self.host, why=error.strerror)
            world.loop.call_soon(self._on_gone, life)
            return
        self._up_by_s = world.loop.time() + START_S
        self._landings[life] = Landings(world.catalog, world.owner())

    def _on_gone(self, life: int) -> None:
        self._ahead = self._ahead and not (self._process and self._process.mapping)
        self._process = None
        self._do(self.asker.mover_gone(self._now(), life))
        self._landings.pop(life, None)

    def _on_message(self, life: int, message: list[Any]) -> None:
        kind, *fields = message
        now_ns = self._now()
        if kind == "up":
            self._up_by_s = math.inf
            self._do(self.asker.mover_up(now_ns, life))
        elif kind == "landed":
            if (reading := self._reads.get(fields[0])) is not None:
                reading[0].summed(*fields)
            self._do(self.asker.landed(now_ns, *fields))
        elif kind == "failed":
            self._do(self.asker.failed(now_ns, *fields))

    def _land(self, land: Land) -> None:
        """Reserve slots and have the mover read into them."""
        chain, process = self._chains.get(land.fetch), self._process
        landings = self._landings.get(land.life)
        slots = None
        if chain is not None and process is not None and landings is not None:
            slots = landings.take(
                land.read,
                chain.space,
                chain.parents[land.at],
                chain.hashes[land.at],
                land.pieces,
                spare=chain.hashes[land.at] in chain.spare,
            )
        if slots is None or process is None or landings is None or chain is None:
            self._do(self.asker.no_room(self._now(), land.read))
            return
        self._reads[land.read] = landings, chain
        for slab in {slot.slab for slot in slots}:
            self._give(process, slab)
        for version, metadata in self._agents.items():
            if version != self._agent_sent:
                process.send("agent", version, metadata)
                self._agent_sent = version
        objects = [
            [slot.slab, slot.offset_bytes, piece.address, piece.size_bytes]
            for slot, piece in zip(slots, land.pieces, strict=True)
        ]
        process.send("read", land.read, self._agent_sent, objects)

    def _give(self, process: MoverProcess, slab: SlabId) -> None:
        size_bytes = self._world.catalog.pool.slab_bytes
        process.give(slab, size_bytes, self._world.slabs.fd(slab), writable=True)

    def _give_ahead(self) -> None:
        """Have an idle mover map a slab that chunks of this host may land in."""
        process, world = self._process, self._world
        if process is not None and self._ahead and self.asker.mover is Mover.UP:
            slab = next_slab(world.catalog.pool, world.tenants(self.host), process.slabs)
            if slab is not None:
                self._give(process, slab)

    def stats(self) -> dict[str, Any]:
        """Describe it for the statistics page."""
        asker = self.asker
        state = self.why or self.refusal() or "ready"
        return {
            "host": self.host,
            "address": self.address,
            "state": state,
            "epoch": asker.epoch,
            "mover": asker.mover.value,
            "mover_pid": self.mover_pid,
            "bytes_s": round(asker.rate.per_s),
            "fetches": len(asker.fetches),
            "in_flight_bytes": sum(read.size_bytes for read in asker.reads.values()),
            "quarantined_bytes": asker.quarantined_bytes,
            "spare": self.spare,
            **asker.counts,
        }
