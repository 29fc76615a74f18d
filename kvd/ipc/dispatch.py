"""What each request does: the one place where limits are applied.

Synchronous, on the loop, and to completion: between a request's first look at the catalog and its
reply nothing else happens.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvd.lease import Lease
from kvd.places import places_of
from kvd.quota import Resource
from kvd.types import Generation, LeaseId, OwnerId, Tenant
from kvd_client import wire
from kvd_client.errors import WireError
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config import Limits
    from kvd.entry import Chunk, Space
    from kvd.lease import LeaseBook
    from kvd.metrics import Counters

_MS = 1_000_000
_NO_TOKEN = bytes(wire.TOKEN_BYTES)


class Caller:
    """Who asks: a session's place in the world, from its greeting.

    Attributes:
        owner: The session.
        tenant: Its tenant, by uid.
        space: What it sees.
        rank: Whose shards it reads and writes.
    """

    __slots__ = ("owner", "rank", "space", "tenant")

    def __init__(self, owner: OwnerId, tenant: Tenant, space: Space, rank: int) -> None:
        """Keep the four."""
        self.owner = owner
        self.tenant = tenant
        self.space = space
        self.rank = rank


class Dispatcher:
    """Answers requests from the catalog and the lease book."""

    def __init__(self, catalog: Catalog, leases: LeaseBook, limits: Limits, clock: Clock) -> None:
        """Share the loop's state; owns none of it."""
        self._catalog = catalog
        self._leases = leases
        self._limits = limits
        self._clock = clock
        self._counters: Counters = catalog.counters
        self._next_lease = 0
        self.draining = False
        self._handlers: dict[type[Any], Callable[[Caller, Any], tuple[Any, ...]]] = {
            wire.Ping: self._ping,
            wire.Lookup: self._lookup,
            wire.Acquire: self._acquire,
            wire.Attach: self._attach,
            wire.Release: self._release,
            wire.Reserve: self._reserve,
            wire.Publish: self._publish,
            wire.Abort: self._abort,
        }

    def answer(self, caller: Caller, body: bytes) -> bytes:
        """Decode a request, carry it out and encode the reply.

        Raises:
            WireError: The request breaks the protocol.
        """
        message = wire.decode(body, wire.REQUESTS)
        self._counters.messages += 1
        return wire.encode(self._handlers[type(message)](caller, message))

    def _ping(self, caller: Caller, ask: wire.Ping) -> wire.Pong:  # noqa: ARG002
        return wire.Pong(ask.request)

    def _lookup(self, caller: Caller, ask: wire.Lookup) -> wire.LookupReply:
        hashes = wire.split_hashes(ask.hashes)
        found = self._catalog.usable(caller.space, hashes)
        self._counters.lookups += 1
        self._counters.lookup_chunks_asked += len(hashes)
        self._counters.lookup_chunks_found += found
        return wire.LookupReply(ask.request, found)

    def _acquire(self, caller: Caller, ask: wire.Acquire) -> wire.AcquireReply:
        refusal = self._lease_refusal(caller)
        if refusal is not Status.OK:
            return _no_lease(ask.request, ask.first, refusal)
        most = wire.HASHES_MAX // len(caller.space.layout.groups)  # what one reply can tell
        hashes = wire.split_hashes(ask.hashes)[: ask.first + most]
        chunks = self._catalog.hold(caller.space, hashes, ask.first)
        if not chunks:
            self._counters.acquires_missed += 1
            return _no_lease(ask.request, ask.first, Status.MISS)
        ttl_ms = min(ask.ttl_ms, int(self._limits.lease_s * 1e3))
        return self._grant(caller, ask.request, chunks, ask.first, ttl_ms, reading=bool(ask.read))

    def _lease_refusal(self, caller: Caller) -> Status:
        if self.draining:
            return Status.DRAINING
        if self._leases.count(caller.owner) >= self._limits.leases_per_session:
            return Status.OVER_QUOTA
        return Status.OK

    def _grant(
        self,
        caller: Caller,
        request: int,
        chunks: tuple[Chunk, ...],
        first: int,
        ttl_ms: int,
        *,
        reading: bool,
    ) -> wire.AcquireReply:
        """Make a lease over pinned chunks, which now owns their pins."""
        if not self._catalog.quota.charge(caller.tenant, Resource.LEASES, 1):
            self._catalog.unpin(chunks)
            return _no_lease(request, first, Status.OVER_QUOTA)
        self._next_lease += 1
        lease = Lease(
            LeaseId(self._next_lease),
            os.urandom(wire.TOKEN_BYTES),
            owner=caller.owner,
            tenant=caller.tenant,
            chunks=chunks,
            first=first,
            reading=reading,
            deadline_ns=self._clock.now_ns() + ttl_ms * _MS,
        )
        self._leases.add(lease)
        places = []
        if reading:
            places = places_of(caller.space.layout, chunks, first, caller.rank)
        self._counters.acquires += 1
        self._counters.chunks_acquired += len(chunks)
        self._counters.bytes_acquired += sum(place[5] for place in places)
        return wire.AcquireReply(
            request,
            Status.OK,
            lease.id,
            lease.token,
            first,
            first + len(chunks),
            wire.pack_places(places),
        )

    def _attach(self, caller: Caller, ask: wire.Attach) -> wire.AcquireReply:
        refusal = self._lease_refusal(caller)
        lease = self._leases.by_token(ask.token, caller.tenant)
        if lease is None or refusal is not Status.OK:
            return _no_lease(ask.request, 0, refusal or Status.STALE)
        if lease.chunks[0].space is not caller.space:
            return _no_lease(ask.request, 0, Status.STALE)
        self._catalog.pin(lease.chunks)
        left_ms = max(0, lease.deadline_ns - self._clock.now_ns()) // _MS
        return self._grant(caller, ask.request, lease.chunks, lease.first, left_ms, reading=True)

    def _release(self, caller: Caller, ask: wire.Release) -> wire.ReleaseReply:
        lease = self._leases.of(LeaseId(ask.lease), caller.owner)
        if lease is None:
            return wire.ReleaseReply(ask.request, Status.STALE)
        self._leases.end(lease)
        self.let_go([lease])
        return wire.ReleaseReply(ask.request, Status.OK)

    def _reserve(self, caller: Caller, ask: wire.Reserve) -> wire.ReserveReply:
        hashes = wire.split_hashes(ask.hashes)
        groups = range(len(caller.space.layout.groups))
        chosen = [group for group in groups if ask.groups >> group & 1]
        if len(hashes) * len(chosen) > wire.HASHES_MAX or ask.groups >> len(groups):
            raise WireError("Reserve.groups", "must name groups of the layout, few enough")
        if self.draining:
            refused = [
                (index, group, Status.DRAINING, *wire.NOWHERE)
                for index in range(len(hashes))
                for group in chosen
            ]
            return wire.ReserveReply(ask.request, wire.pack_places(refused))
        deadline_ms = min(ask.deadline_ms, int(self._limits.fill_deadline_s * 1e3))
        places = self._catalog.reserve(
            caller.space,
            caller.owner,
            caller.rank,
            parent=ask.parent,
            hashes=hashes,
            groups=ask.groups,
            deadline_ns=self._clock.now_ns() + deadline_ms * _MS,
        )
        return wire.ReserveReply(ask.request, wire.pack_places(places))

    def _publish(self, caller: Caller, ask: wire.Publish) -> wire.ResultsReply:
        now_ns = self._clock.now_ns()
        publish = self._catalog.publish
        generations = wire.unpack_generations(ask.generations)
        results = [publish(caller.owner, Generation(g), now_ns) for g in generations]
        return wire.ResultsReply(ask.request, bytes(results))

    def _abort(self, caller: Caller, ask: wire.Abort) -> wire.ResultsReply:
        generations = wire.unpack_generations(ask.generations)
        results = [self._catalog.abort(caller.owner, Generation(g)) for g in generations]
        return wire.ResultsReply(ask.request, bytes(results))

    # ---------------------------------------------------------------- time and death

    def let_go(self, leases: list[Lease]) -> None:
        """Unpin what ended leases held."""
        for lease in leases:
            self._catalog.quota.discharge(lease.tenant, Resource.LEASES, 1)
            self._catalog.unpin(lease.chunks)

    def sweep(self) -> None:
        """Let time pass over leases and reservations."""
        now_ns = self._clock.now_ns()
        self.let_go(self._leases.sweep(now_ns))
        self._catalog.sweep(now_ns)

    def part(self, owner: OwnerId, *, dead: bool) -> bool:
        """End what a session holds; all of it if it is dead or said that it is done.

        Returns:
            Whether something stays until its process is gone.
        """
        self.let_go(self._leases.leave(owner, dead=dead))
        self._catalog.abandon(owner, dead=dead)
        return bool(self._leases.count(owner) or self._catalog.fillings.count(owner))


def _no_lease(request: int, first: int, status: Status) -> wire.AcquireReply:
    return wire.AcquireReply(request, status, 0, _NO_TOKEN, first, first, b"")
