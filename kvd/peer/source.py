"""What this host gives to others: chunks held in place, summed and reachable. Loop only.

One source process for all peers maps the slabs that are asked of (over TCP read-only), registers
them with its NIXL agent and sums objects that nobody has summed. The digest is kept with the slot:
bytes of a published slot do not change, and where they did, who reads them sees it. What is watched
is verified before it is offered. A Take holds a pin until it is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from kvd import log
from kvd.cost import Load
from kvd.peer.ahead import next_slab
from kvd.peer.process import START_S, MoverProcess
from kvd.peer.protocol import Held
from kvd.quota import Resource

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable, Sequence

    from kvd.catalog import Catalog
    from kvd.cost import Rates
    from kvd.entry import Chunk, Slot
    from kvd.peer.nixl_agent import Transport
    from kvd.types import SlabId, Tenant
    from kvd.verifying import Check

    OnTaken = Callable[[int, int, Sequence[Held] | None], None]

_LOG = log.get("source")
NO_TICKET: Final = 0
"""Of a question that nobody asks for; the holder's tickets are above it."""
RESTART_S: Final = 1.0
PING_S: Final = 5.0
"""Between two questions to a process that is asked nothing else."""
HANG_S: Final = 10.0
"""A process that has answered nothing for so long, though asked, is killed and started anew."""
METADATA_MOST: Final = 96 << 10
"""Grown longer, it no longer fits the messages it travels in; some 2,300 slabs."""
LIFE_SHIFT: Final = 32
"""Versions of the metadata: a life of the source in the high half, a count in the low."""


class Slabs(Protocol):
    """The host tier's memory."""

    def fd(self, slab: SlabId) -> int:
        """Return a slab's descriptor, still owned by the tier."""
        ...


class Riser(Protocol):
    """What brings chunks up from the tier below."""

    def promote(self, chunk: Chunk, done: Callable[[bool], None]) -> bool:
        """Begin, or join; False when there is no room."""
        ...

    def leave(self, chunk: Chunk, done: Callable[[bool], None]) -> None:
        """Stop waiting for a promotion."""
        ...

    def served(self, chunk: Chunk) -> None:
        """Hear that another host takes a copy."""
        ...

    def cost(self) -> Rates:
        """Return the measured rates."""
        ...


class Verifier(Protocol):
    """What checks the bytes of objects."""

    def check(self, slots: Iterable[Slot], done: Callable[[], None]) -> Check:
        """Have pinned, watched objects checked; what differs is no longer in its chunk then."""
        ...

    def leave(self, check: Check) -> list[Slot]:
        """Stop waiting."""
        ...


class Taking:
    """A chunk being held for a ticket."""

    def __init__(self, ticket: int, chunk: Chunk, mask: int) -> None:
        """Own a pin on the chunk."""
        self.ticket = ticket
        self.chunk = chunk
        self.mask = mask
        self.rising: Callable[[bool], None] | None = None
        self.check: Check | None = None
        self.slots: list[Slot] = []
        self.asked: list[Slot] = []


class Source:
    """The source process and what is taken for others."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        catalog: Catalog,
        slabs: Slabs,
        riser: Riser | None,
        *,
        verifier: Verifier | None = None,
        transport: Transport,
        devices: Sequence[str],
        tenants: Collection[Tenant],
        on_taken: OnTaken,
    ) -> None:
        """Plan it; `start` starts the process. `tenants` share something with some host."""
        self._loop = loop
        self._catalog = catalog
        self._slabs = slabs
        self._riser = riser
        self._verifier = verifier
        self._transport: Transport = transport
        self._devices = devices
        self._tenants = tenants
        self._on_taken = on_taken
        self._process: MoverProcess | None = None
        self._life = 0
        self._bases: dict[int, int] = {}
        self._takings: dict[int, Taking] = {}
        self._closing = False
        self._ahead = True
        self._owed = 0
        self._answer_by_s = self._ticked_s = 0.0
        self.version = 0
        self.metadata = b""
        self.up = False
        self.on_change: Callable[[], None] | None = None

    # ---------------------------------------------------------------- the process

    def start(self) -> None:
        """Start the process; raises OSError."""
        self._life += 1
        self._ticked_s = self._loop.time()
        self._owed, self._answer_by_s = 1, self._ticked_s + START_S
        self._process = MoverProcess(
            self._loop,
            "source",
            transport=self._transport,
            devices=self._devices,
            on_message=self._on_message,
            on_gone=self._on_gone,
        )

    @property
    def pid(self) -> int:
        """The process's id, 0 without one."""
        return self._process.process.pid if self._process is not None else 0

    def _on_gone(self) -> None:
        self._ahead = self._ahead and not (self._process and self._process.mapping)
        self._process, self.up = None, False
        self._bases.clear()
        for ticket in list(self._takings):
            self._on_taken(ticket, 0, ())  # the holder drops it
        if self.on_change is not None:
            self.on_change()
        if not self._closing:
            _LOG.warning("source ended; it is started again")
            self._loop.call_later(RESTART_S, self._restart)

    def tick(self) -> None:
        """Let time pass: kill a process that hangs; call it some five times a second."""
        now_s = self._loop.time()
        self._answer_by_s += max(0.0, now_s - self._ticked_s - 1.0)  # while this daemon stood still
        self._ticked_s = now_s
        if self._process is None:
            return
        if not self._owed and now_s > self._answer_by_s - HANG_S + PING_S:
            self._process.send("sum", NO_TICKET, [])
            self._asked()
        elif self._owed and now_s > self._answer_by_s:
            _LOG.warning("source hangs; it is killed", pid=self.pid, owed=self._owed)
            self._owed = 0
            self._process.kill()
        elif self.up and self._ahead and not self._takings:
            slab = next_slab(self._catalog.pool, self._tenants, self._process.slabs)
            if slab is not None:
                self._give(self._process, slab)

    def _asked(self) -> None:
        """Note that an answer is owed."""
        if not self._owed:
            self._answer_by_s = self._loop.time() + HANG_S
        self._owed += 1

    def _restart(self) -> None:
        if not self._closing:
            self.start()

    def close(self) -> None:
        """Kill the process."""
        self._closing = True
        if self._process is not None:
            self._process.kill()

    def _on_message(self, message: list[Any]) -> None:
        kind, *fields = message
        self._answer_by_s = self._loop.time() + HANG_S
        if kind != "mapped":
            self._owed -= 1
        if kind == "up":
            self.up = True
            if self.on_change is not None:
                self.on_change()
        elif kind == "mapped":
            slab, base, version, self.metadata = fields
            self._bases[slab] = base
            self.version = self._life << LIFE_SHIFT | version
            if len(self.metadata) > METADATA_MOST and self._process is not None:
                _LOG.info("source starts anew with the slabs that are asked of", mapped=version)
                self._process.kill()
        elif kind == "summed":
            ticket, digests = fields
            self._summed(ticket, digests)

    # ---------------------------------------------------------------- taking

    def take(self, ticket: int, chunk: Chunk | None, mask: int) -> None:
        """Hold what of a chunk is here and wanted; answered by `on_taken`, now or later."""
        cold = chunk.cold_mask if chunk is not None and self._catalog.cold_readable else 0
        if chunk is None or not (chunk.mask | cold) & mask:
            self._on_taken(ticket, 0, None)
            return
        if self._process is None or not self.up or not self._may_pin(chunk):
            self._on_taken(ticket, 0, ())
            return
        self._catalog.pin([chunk])
        taking = self._takings[ticket] = Taking(ticket, chunk, mask)
        if cold & ~chunk.mask & mask and self._worth_raising(chunk):
            taking.rising = lambda _: self._risen(taking)
            assert self._riser is not None
            if self._riser.promote(chunk, taking.rising):
                return
            taking.rising = None
        self._verify(taking)

    def _may_pin(self, chunk: Chunk) -> bool:
        left = self._catalog.quota.left(chunk.space.tenant, Resource.PINNED_BYTES)
        return bool(chunk.pins) or chunk.weight_bytes <= left

    def _worth_raising(self, chunk: Chunk) -> bool:
        """Ask this host's own gate whether to read a chunk from NVMe for another."""
        if self._riser is None or chunk.cold is None:
            return False
        load = Load(chunk.space.layout.chunk_tokens, chunk.weight_bytes, chunk.cold[2])
        return chunk.space.gate.worth([(1, load)], self._riser.cost()) > 0

    def _risen(self, taking: Taking) -> None:
        taking.rising = None
        if taking.ticket in self._takings:
            self._verify(taking)

    @staticmethod
    def _wanted(taking: Taking) -> list[Slot]:
        chunk = taking.chunk
        columns = [c for c in sorted(chunk.slots) if chunk.mask & taking.mask & 1 << c]
        return [chunk.slots[column] for column in columns]

    def _verify(self, taking: Taking) -> None:
        """Have checked what is watched; what differs is not there any more."""
        watched = [slot for slot in self._wanted(taking) if slot.watched]
        if self._verifier is None or not watched:
            self._hold(taking)
            return
        taking.check = self._verifier.check(watched, lambda: self._verified(taking))

    def _verified(self, taking: Taking) -> None:
        taking.check = None
        if taking.ticket in self._takings:
            self._hold(taking)

    def _hold(self, taking: Taking) -> None:
        """Map and sum what is missing, in this order; the process answers in this order too."""
        taking.slots = self._wanted(taking)
        process = self._process
        if not taking.slots or process is None:
            self._on_taken(taking.ticket, 0, ())
            return
        missing = [s for s in taking.slots if not s.digest]
        unmapped = {s.slab for s in taking.slots} - self._bases.keys()
        if not missing and not unmapped:
            self._tell(taking)
            return
        for slab in sorted(unmapped):
            self._give(process, slab)
        taking.asked = missing
        objects = [[s.slab, s.offset_bytes, s.size_bytes] for s in missing]
        process.send("sum", taking.ticket, objects)
        self._asked()

    def _give(self, process: MoverProcess, slab: SlabId) -> None:
        size_bytes = self._catalog.pool.slab_bytes
        process.give(slab, size_bytes, self._slabs.fd(slab), writable=self._transport != "tcp")

    def _summed(self, ticket: int, digests: Sequence[bytes]) -> None:
        taking = self._takings.get(ticket)
        if taking is None:
            return  # dropped meanwhile, and its slots may be others' by now
        for slot, digest in zip(taking.asked, digests, strict=True):
            slot.digest = slot.digest or digest
        self._tell(taking)

    def _tell(self, taking: Taking) -> None:
        self._catalog.eviction.served(taking.chunk)
        if self._riser is not None:
            self._riser.served(taking.chunk)
        held = [
            Held(
                slot.column,
                self._bases[slot.slab] + slot.offset_bytes,
                slot.size_bytes,
                slot.generation,
                taking.chunk.lossy_mask >> slot.column & 1,
                slot.digest,
            )
            for slot in taking.slots
        ]
        self._on_taken(taking.ticket, self.version, held)

    def drop(self, ticket: int) -> None:
        """Let go of what was taken, or is being taken."""
        taking = self._takings.pop(ticket, None)
        if taking is None:
            return
        if taking.rising is not None and self._riser is not None:
            self._riser.leave(taking.chunk, taking.rising)
        if taking.check is not None and self._verifier is not None:
            self._verifier.leave(taking.check)
        self._catalog.unpin([taking.chunk])
