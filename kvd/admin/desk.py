"""What the requests of the admin channel do. On the loop; each answer is a bounded page.

A1. A visitor that is not an operator sees and changes nothing but its own tenant's.
A2. No request keeps the loop for more than a slice of `SLICE` chunks: what looks at more lets
    others have their turn, and looks at everything again after it.
A3. What a request leaves behind for its next page belongs to the visitor, and goes with it.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd import log
from kvd_client import wire
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

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


class Denied(KvdError):
    """A request is not carried out; the text says why."""


class Answer(NamedTuple):
    """A page: what to ask with for the next (0: this is the last), and its rows."""

    more: int
    rows: list[list[object]]


class Visitor:
    """Who asks, and what is kept for its next page.

    Attributes:
        tenant: Whose chunks it may see and change; None for an operator, who may all.
        chunks: Those of the listing under way.
        listed: What that listing is of.
        uid: Its user.
    """

    __slots__ = ("chunks", "listed", "tenant", "uid")

    def __init__(self, tenant: Tenant | None, uid: int) -> None:
        """Start with nothing under way."""
        self.tenant = tenant
        self.uid = uid
        self.chunks: list[Chunk] = []
        self.listed: object = None

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

    def __init__(
        self, catalog: Catalog, ages: Ages, clock: Clock, *, stop: Callable[[], None]
    ) -> None:
        """Share the loop's state.

        Args:
            catalog: What there is.
            ages: When it was used.
            clock: The time.
            stop: Begins the daemon's drain.
        """
        self._catalog = catalog
        self._ages = ages
        self._clock = clock
        self._stop = stop
        self.holders: Holders | None = None
        """Asks the directory of other hosts who holds chunks; None for no answer."""
        self._handlers: dict[type[Any], Callable[[Visitor, Any], Awaitable[Answer]]] = {
            wire.ListSpaces: self._list_spaces,
            wire.ListChunks: self._list_chunks,
            wire.Drain: self._drain,
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
        self._stop()
        return Answer(0, [])


def tiers(chunk: Chunk) -> int:
    """Return the mask of the tiers that have something of a chunk."""
    return (HOST if chunk.mask else 0) | (NVME if chunk.cold_bytes else 0)


async def _slowly(chunks: list[Chunk]) -> AsyncIterator[Chunk]:
    """Iterate with a turn for the others after each slice (A2)."""
    for index, chunk in enumerate(chunks, 1):
        yield chunk
        if not index % SLICE:
            await asyncio.sleep(0)
