"""What the requests of the admin channel do. On the loop; each answer is a bounded page.

A1. A visitor that is not an operator sees and changes nothing but its own tenant's.
A2. No request keeps the loop for more than a slice of `SLICE` chunks: what looks at more lets
    others have their turn, and looks at everything again after it.
A3. What a request leaves behind for its next page belongs to the visitor, and goes with it.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvd import log
from kvd.admin.evicting import Eviction
from kvd.admin.pins import PINS_MAX
from kvd.admin.recording import Recorder
from kvd.admin.warming import Warming
from kvd_client import wire
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from kvd.admin.evicting import Forget
    from kvd.admin.pins import Pin, PinBook
    from kvd.admin.warming import Riser
    from kvd.ages import Ages
    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.entry import Chunk, Space
    from kvd.types import Tenant

    Holders = Callable[[Sequence[Chunk]], Awaitable[list[tuple[str, ...]] | None]]

_LOG = log.get("admin")

SLICE: Final = 1024
"""Chunks looked at in one go: less than a millisecond."""
SPACES_A_PAGE: Final = 24
"""Rows of half a KiB at most: a packet holds them."""
CHUNKS_A_PAGE: Final = 64
LOOKS_A_PAGE: Final = 16 * SLICE
"""Chunks looked at for one page, found or not: then the page goes out as it is."""
HOST, NVME, PEER = 1, 2, 4
"""Bits of a mask of tiers."""
WHOLE: Final = bytes(32)
"""In a Pin: not a chain, but the namespace."""
NO_BUDGET: Final = 1 << 62
PIN_S_MAX: Final = 30 * 86_400
"""Longest life of a pin."""

Job = TypeVar("Job", Eviction, Warming)


class Denied(KvdError):
    """A request is not carried out; the text says why."""


class Answer(NamedTuple):
    """A page: what to ask with for the next (0: this is the last), and its rows."""

    more: int
    rows: list[list[object]]


class Parts(NamedTuple):
    """What the desk acts on beside the catalog.

    Attributes:
        pins: The operators' pins.
        riser: What brings chunks up from NVMe; None without that tier.
        forget: Gives up copies there; None without it.
        stop: Begins the daemon's drain.
        promote_s: What chunks get to come up.
        record: Lets a recorder hear of engines' requests, or none.
    """

    pins: PinBook
    riser: Riser | None
    forget: Forget | None
    stop: Callable[[], None]
    promote_s: float
    record: Callable[[Recorder | None], None]


class Visitor:
    """Who asks, and what is kept for its next page.

    Attributes:
        tenant: Whose chunks it may see and change; None for an operator, who may all.
        chunks: Those of the listing under way.
        listed: What that listing is of.
        uid: Its user.
        job: What it does step by step.
    """

    __slots__ = ("chunks", "job", "listed", "tenant", "uid")

    def __init__(self, tenant: Tenant | None, uid: int) -> None:
        """Start with nothing under way."""
        self.tenant = tenant
        self.uid = uid
        self.chunks: list[Chunk] = []
        self.listed: object = None
        self.job: tuple[object, Eviction | Warming] | None = None

    def sees(self, space: Space) -> bool:
        """Tell whether a space is one of those it may know of (A1)."""
        return self.tenant is None or space.tenant == self.tenant

    def must_be_operator(self) -> None:
        """Raise Denied for a tenant."""
        if self.tenant is not None:
            raise Denied("only root and the daemon's own user may do that; use sudo")


def space_id(space: Space) -> bytes:
    """Return the 32 bytes that name a space on this channel."""
    body = space.namespace + space.layout.id + space.tenant.encode()
    return blake2b(body, digest_size=32, person=b"kvd.space.1").digest()


class Desk:
    """Answers visitors from the daemon's state."""

    def __init__(self, catalog: Catalog, ages: Ages, clock: Clock, parts: Parts) -> None:
        """Share the loop's state: what there is, when it was used, the time, and what acts."""
        self._catalog = catalog
        self._ages = ages
        self._clock = clock
        self._parts = parts
        self._started_ns = clock.now_ns()
        self._recording: tuple[Visitor, Recorder] | None = None
        self.holders: Holders | None = None
        """Asks the directory of other hosts who holds chunks; None for no answer."""
        self._handlers: dict[type[Any], Callable[[Visitor, Any], Awaitable[Answer]]] = {
            wire.ListSpaces: self._list_spaces,
            wire.ListChunks: self._list_chunks,
            wire.Drain: self._drain,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.ListPins: self._list_pins,
            wire.Evict: self._evict,
            wire.Warm: self._warm,
            wire.Record: self._record,
        }

    def knows(self, message: object) -> bool:
        """Tell whether a message is a request of this channel."""
        return type(message) in self._handlers

    async def answer(self, visitor: Visitor, message: Any) -> Answer:  # noqa: ANN401 - wire.TO_DAEMON
        """Carry out a request; raises Denied."""
        return await self._handlers[type(message)](visitor, message)

    # ---------------------------------------------------------------- looking

    async def _list_spaces(self, visitor: Visitor, ask: wire.ListSpaces) -> Answer:
        seen = [space for space in self._catalog.spaces.values() if visitor.sees(space)]
        page = seen[ask.after : ask.after + SPACES_A_PAGE]
        rows = [await self._space_row(space) for space in page]
        end = ask.after + len(page)
        return Answer(end if end < len(seen) else 0, rows)

    async def _space_row(self, space: Space) -> list[object]:
        host = [0, 0]
        nvme = [0, 0]
        tick = 0
        async for chunk in _slowly(list(space.chunks.values())):
            tick = max(tick, chunk.tick)
            if chunk.mask:
                host[0] += 1
                host[1] += chunk.size_bytes
            if chunk.cold_bytes:
                nvme[0] += 1
                nvme[1] += chunk.cold_bytes
        layout = space.layout
        return [
            space_id(space),
            space.tenant,
            space.label,
            layout.id,
            layout.chunk_tokens,
            layout.ranks,
            len(space.chunks),
            *host,
            *nvme,
            space.sessions,
            int(space.lossy),
            self._ages.age_s(tick, self._clock.now_ns()),
        ]

    def _space(self, visitor: Visitor, key: bytes) -> Space:
        """Return the space of an id; raises Denied, also for one of another tenant (A1)."""
        for space in self._catalog.spaces.values():
            if visitor.sees(space) and space_id(space) == key:
                return space
        raise Denied("that namespace is gone: it has no chunks and no sessions any more")

    async def _list_chunks(self, visitor: Visitor, ask: wire.ListChunks) -> Answer:
        space = self._space(visitor, ask.space)
        if not ask.after or visitor.listed != ask.space:
            visitor.chunks, visitor.listed = list(space.chunks.values()), ask.space
        rows: list[list[object]] = []
        found: list[Chunk] = []
        at = ask.after
        for chunk in visitor.chunks[at : at + LOOKS_A_PAGE]:
            at += 1
            if chunk.space.chunks.get(chunk.hash) is chunk and tiers(chunk) & ask.tiers:
                rows.append(self._chunk_row(chunk))
                found.append(chunk)
                if len(rows) == CHUNKS_A_PAGE:
                    break
            if not at % SLICE:
                await asyncio.sleep(0)
        more = at if at < len(visitor.chunks) else 0
        if not more:
            visitor.chunks, visitor.listed = [], None
        if ask.tiers & PEER:
            for row, hosts in zip(rows, await self._holders(found), strict=True):
                row.append(hosts)
        return Answer(more, rows)

    async def _holders(self, chunks: list[Chunk]) -> list[str]:
        """Return who is said to hold each chunk, as text; raises Denied."""
        if self.holders is None:
            raise Denied("there is no directory of other hosts: set [peer] directory")
        found = await self.holders(chunks)
        if found is None:
            raise Denied("the directory does not answer; `kvd stat` says why")
        return [" ".join(hosts) for hosts in found]

    def _chunk_row(self, chunk: Chunk) -> list[object]:
        state = "filling" if chunk.filling else "moving" if chunk.moves else ""
        return [
            chunk.hash,
            chunk.parent.hash if chunk.parent is not None else b"",
            tiers(chunk),
            chunk.size_bytes,
            chunk.cold_bytes,
            int(bool(chunk.lossy_mask) or chunk.cold_lossy),
            chunk.pins,
            state,
            self._ages.age_s(chunk.tick, self._clock.now_ns()),
        ]

    # ---------------------------------------------------------------- steering

    async def _drain(self, visitor: Visitor, ask: wire.Drain) -> Answer:  # noqa: ARG002
        visitor.must_be_operator()
        _LOG.info("drain asked for", uid=visitor.uid)
        self._parts.stop()
        return Answer(0, [])

    async def _pin(self, visitor: Visitor, ask: wire.Pin) -> Answer:
        space = self._space(visitor, ask.space)
        whole = ask.chunk == WHOLE
        if whole:
            chunks = list(space.chunks.values())
        else:
            chunks = _chain(space.chunks.get(ask.chunk))
            if not chunks:
                raise Denied("that chunk is gone")
        ttl_s = min(ask.ttl_s or PIN_S_MAX, PIN_S_MAX)
        pin = self._parts.pins.make(
            space,
            tip=b"" if whole else ask.chunk,
            owner=visitor.uid,
            operator=visitor.tenant is None,
            note=ask.note,
            budget_bytes=ask.budget_bytes or NO_BUDGET,
            expires_ns=self._clock.now_ns() + ttl_s * 10**9,
        )
        if pin is None:
            raise Denied(f"there are {PINS_MAX} pins: end some with `kvd unpin`")
        for first in range(0, len(chunks), SLICE):
            self._parts.pins.take(pin, chunks[first : first + SLICE])
            await asyncio.sleep(0)
        if not whole and not pin.chunks:
            self._parts.pins.end(pin)
            raise Denied(
                "none of it was pinned: it is not in host memory (`kvd warm` first), or the pins "
                "of this tenant have half of what its leases may hold"
            )
        _LOG.info(
            "pinned",
            uid=visitor.uid,
            space=space.label,
            pin=pin.id,
            chunks=len(pin.chunks),
            bytes=pin.held_bytes,
        )
        return Answer(0, [self._pin_row(pin)])

    async def _unpin(self, visitor: Visitor, ask: wire.Unpin) -> Answer:
        pin = self._parts.pins.pins.get(ask.pin)
        if pin is None or visitor.tenant not in {None, pin.tenant}:
            raise Denied(f"there is no pin {ask.pin}: `kvd pin` lists them")
        if pin.operator and visitor.tenant is not None:
            raise Denied("an operator made that pin; only one may end it")
        row = self._pin_row(pin)
        self._parts.pins.end(pin)
        _LOG.info("unpinned", uid=visitor.uid, pin=pin.id)
        return Answer(0, [row])

    async def _list_pins(self, visitor: Visitor, ask: wire.ListPins) -> Answer:
        pins = self._parts.pins.pins
        seen = [pin for pin in pins.values() if visitor.tenant in {None, pin.tenant}]
        seen = [pin for pin in seen if pin.id > ask.after]
        page = seen[:SPACES_A_PAGE]
        return Answer(page[-1].id if len(seen) > len(page) else 0, list(map(self._pin_row, page)))

    def _pin_row(self, pin: Pin) -> list[object]:
        space = self._catalog.spaces.get(pin.key)
        return [
            pin.id,
            space_id(space) if space is not None else b"",
            pin.tenant,
            pin.label,
            pin.tip,
            pin.owner,
            int(pin.operator),
            pin.note,
            0 if pin.budget_bytes == NO_BUDGET else pin.budget_bytes,
            pin.held_bytes,
            len(pin.chunks),
            max(0, pin.expires_ns - self._clock.now_ns()) // 10**9,
        ]

    async def _evict(self, visitor: Visitor, ask: wire.Evict) -> Answer:
        space = self._space(visitor, ask.space)
        name = (ask.space, ask.older_s, ask.host_only, ask.dry)
        if not ask.after:
            _LOG.info(
                "evict asked for",
                uid=visitor.uid,
                space=space.label,
                older_s=ask.older_s,
                host_only=ask.host_only,
                dry=ask.dry,
            )
            job = Eviction(
                self._catalog,
                space,
                old=lambda chunk: self._unused_s(chunk) >= ask.older_s,
                forget=self._parts.forget,
                host_only=bool(ask.host_only),
                dry=bool(ask.dry),
            )
            visitor.job = (name, job)
        current = self._job(visitor, name, Eviction)
        done = await current.step()
        return self._stepped(visitor, ask.after, done, over=current.over)

    async def _warm(self, visitor: Visitor, ask: wire.Warm) -> Answer:
        if self._parts.riser is None:
            raise Denied("this daemon has no NVMe tier to bring anything up from: [nvme] bytes")
        space = self._space(visitor, ask.space)
        if not ask.after:
            _LOG.info("warm asked for", uid=visitor.uid, space=space.label)
            job = Warming(self._catalog, self._parts.riser, space, self._parts.promote_s)
            visitor.job = (ask.space, job)
        current = self._job(visitor, ask.space, Warming)
        done = await current.step(ask.budget_bytes)
        return self._stepped(visitor, ask.after, done, over=current.over)

    async def _record(self, visitor: Visitor, ask: wire.Record) -> Answer:
        mine = self._recording is not None and self._recording[0] is visitor
        if not ask.after:
            if self._recording is not None:
                raise Denied("another recording is under way: end that one first")
            space = None if ask.space == WHOLE else self._space(visitor, ask.space)
            recorder = Recorder(self._clock, tenant=visitor.tenant, space=space)
            self._recording = (visitor, recorder)
            self._parts.record(recorder)
            _LOG.info("recording", uid=visitor.uid)
        elif not mine:
            raise Denied("that is not under way on this connection: begin again")
        assert self._recording is not None
        recorder = self._recording[1]
        return Answer(ask.after + 1, [[recorder.lost], *recorder.fetch()])

    def left(self, visitor: Visitor) -> None:
        """Forget a visitor that has gone: its recording ends."""
        if self._recording is not None and self._recording[0] is visitor:
            self._recording = None
            self._parts.record(None)

    @staticmethod
    def _job(visitor: Visitor, name: object, kind: type[Job]) -> Job:
        """Return what the visitor goes on with."""
        if visitor.job is None or visitor.job[0] != name or not isinstance(visitor.job[1], kind):
            raise Denied("that is not under way on this connection: begin again")
        return visitor.job[1]

    @staticmethod
    def _stepped(visitor: Visitor, after: int, done: tuple[object, ...], *, over: bool) -> Answer:
        if over:
            visitor.job = None
        return Answer(0 if over else after + 1, [list(done)])

    def _unused_s(self, chunk: Chunk) -> int:
        """Return for how long a chunk was not used, at least: never longer than the daemon runs."""
        now_ns = self._clock.now_ns()
        age_s = self._ages.age_s(chunk.tick, now_ns)
        return (now_ns - self._started_ns) // 10**9 if age_s is None else age_s


def _chain(chunk: Chunk | None) -> list[Chunk]:
    """Return a chunk with all before it, the first one first."""
    chain = []
    while chunk is not None:
        chain.append(chunk)
        chunk = chunk.parent
    return chain[::-1]


def tiers(chunk: Chunk) -> int:
    """Return the mask of the tiers that have something of a chunk."""
    return (HOST if chunk.mask else 0) | (NVME if chunk.cold_bytes else 0)


async def _slowly(chunks: list[Chunk]) -> AsyncIterator[Chunk]:
    """Iterate with a turn for the others after each slice (A2)."""
    for index, chunk in enumerate(chunks, 1):
        yield chunk
        if not index % SLICE:
            await asyncio.sleep(0)
