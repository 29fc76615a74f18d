"""What each request does: the one place where limits are applied.

Synchronous, on the loop, and to completion: between a request's first look at the catalog and its
reply nothing else happens. One request may be answered later: an acquire that waits for promotions
(`waiting.py`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvd.cost import Rates, sooner_by_peer
from kvd.failpoints import maybe_fault
from kvd.ipc.waiting import Fetching, Waiting, no_lease
from kvd.lease import Lease
from kvd.places import places_of
from kvd.prefix import load_of, present, warm_length
from kvd.quota import Resource
from kvd.types import Generation, LeaseId, OwnerId
from kvd_client import wire, wire_gpu
from kvd_client.errors import WireError
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.admin.recording import Recorder
    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config import Limits
    from kvd.entry import Chunk, Space
    from kvd.ipc.caller import Caller
    from kvd.ipc.seams import GpuSide, Reach, Riser
    from kvd.ipc.waiting import Later
    from kvd.lease import LeaseBook
    from kvd.metrics import Counters

_MS = 1_000_000
WAITING_MAX = 64
"""Most acquires of one session that wait for promotions."""


class Dispatcher:
    """Answers requests from the catalog and the lease book."""

    def __init__(
        self,
        catalog: Catalog,
        leases: LeaseBook,
        limits: Limits,
        clock: Clock,
        riser: Riser | None = None,
        *,
        gpu: GpuSide | None = None,
    ) -> None:
        """Share the loop's state; own the acquires that wait."""
        self._gpu = gpu
        self._riser = riser
        self.reach: Reach | None = None
        self._waiting: dict[OwnerId, set[Waiting]] = {}
        self._fetching: dict[OwnerId, set[Fetching]] = {}
        self._catalog = catalog
        self._leases = leases
        self._limits = limits
        self._clock = clock
        self._counters: Counters = catalog.counters
        self._next_lease = 0
        self.draining = False
        self.recorder: Recorder | None = None
        self._handlers: dict[type[Any], Callable[[Caller, Any], tuple[Any, ...]]] = {
            wire.Ping: self._ping,
            wire.Attach: self._attach,
            wire.Release: self._release,
            wire.Reserve: self._reserve,
            wire.Publish: self._publish,
            wire.Abort: self._abort,
            wire.Prefill: self._prefill,
            wire_gpu.UseGpu: self._use_gpu,
            wire_gpu.GpuSlab: self._gpu_slab,
        }

    def answer(self, caller: Caller, body: bytes, later: Later) -> bytes | None:
        """Decode a request, carry it out and encode the reply.

        Args:
            caller: Who asks.
            body: The request.
            later: Takes the reply when it comes later; then None is returned.

        Raises:
            WireError: The request breaks the protocol.
        """
        message = wire.decode(body, wire.REQUESTS)
        self._counters.messages += 1
        self._catalog.eviction.now_ns = self._clock.now_ns()
        if self.recorder is not None:
            self.recorder.hear(caller, message)
        reply: tuple[Any, ...] | None
        if type(message) is wire.Acquire:
            reply = self._acquire(caller, message, later)
        elif type(message) is wire.Lookup:
            reply = self._lookup(caller, message, later)
        else:
            reply = self._handlers[type(message)](caller, message)
        return None if reply is None else wire.encode(reply)

    def _ping(self, caller: Caller, ask: wire.Ping) -> wire.Pong:  # noqa: ARG002
        return wire.Pong(ask.request)

    def _lookup(self, caller: Caller, ask: wire.Lookup, later: Later) -> wire.LookupReply | None:
        hashes = wire.split_hashes(ask.hashes)
        found = self._catalog.usable(caller.space, hashes)

        def answered(more: int) -> None:
            if not caller.gone:
                later(wire.encode(self._looked_up(caller, ask, hashes, more)))

        if found < len(hashes) and self.reach is not None:  # noqa: SIM102 - the call begins it
            if self.reach.elsewhere(caller.space, hashes, found, answered):
                return None
        return self._looked_up(caller, ask, hashes, 0)

    def _looked_up(
        self, caller: Caller, ask: wire.Lookup, hashes: list[bytes], more: int
    ) -> wire.LookupReply:
        """Answer a look-up; other hosts seem to have `more` chunks after those that are here."""
        here = self._catalog.usable(caller.space, hashes)
        found = min(len(hashes), here + more)
        self._counters.lookups += 1
        self._counters.lookup_chunks_asked += len(hashes)
        self._counters.lookup_chunks_found += found
        self._counters.lookup_chunks_elsewhere += found - here
        new = caller.rank == 0 and caller.asks(hashes)
        if new or caller.served:  # the same chain after a lease is another request
            caller.served = False
            tokens = len(hashes) * caller.space.layout.chunk_tokens
            self._counters.measures.usage(caller.tenant).asked_tokens += tokens
        if new:
            if not here:
                self._catalog.eviction.touched(caller.space, hashes)  # else `hold` tells it
            if self._riser is not None:
                self._riser.touched(caller.tenant, hashes)
        worth = self._worth(caller.space, hashes, here, found - here) if found else 0
        self._counters.lookup_chunks_worth += worth
        return wire.LookupReply(ask.request, found, worth)

    def _worth(self, space: Space, hashes: list[bytes], here: int, more: int) -> int:
        """Return how much is faster to load than to compute: what is here, and `more` elsewhere."""
        chunks, warm = present(space, hashes[:here])
        if not more and (warm == len(chunks) or self._riser is None):
            return here  # from host memory it always is
        lengths = {self._catalog.usable(space, hashes[:warm]), here, here + more} - {0}
        offers = [(n, load_of(space, chunks[:n], n)) for n in sorted(lengths)]
        return space.gate.worth(offers, self._rates(peers=bool(more)))

    def _rates(self, *, peers: bool) -> Rates:
        """Return what was measured of the tier below, and of other hosts."""
        rates = self._riser.cost() if self._riser is not None else Rates(0.0, 0.0, 0.0, 0)
        if self.reach is not None and peers:
            rates = Rates(*rates[:4], *self.reach.rates())
        return rates

    def _from_peers(self, space: Space, hashes: list[bytes], here: int) -> int:
        """Return from which chunk on others are asked; for what lies below, if it is slower."""
        chunks, warm = present(space, hashes[:here])
        cold = sum([chunk.cold_bytes for chunk in chunks[warm:] if not chunk.ready])
        raw = sum([chunk.weight_bytes - chunk.size_bytes for chunk in chunks[warm:]])
        if cold and sooner_by_peer(cold, raw, self._rates(peers=True)):
            return warm
        return here

    def _prefill(self, caller: Caller, ask: wire.Prefill) -> wire.StatusReply:
        caller.space.gate.prefill.observe(ask.tokens, ask.micros / 1e6)
        return wire.StatusReply(ask.request, Status.OK)

    def _acquire(
        self, caller: Caller, ask: wire.Acquire, later: Later, *, again: bool = False
    ) -> wire.AcquireReply | None:
        """Grant what is asked for; `again` when other hosts have been asked already."""
        refusal = self._lease_refusal(caller)
        if refusal is not Status.OK:
            return no_lease(ask.request, ask.first, refusal)
        most = wire.HASHES_MAX // len(caller.space.layout.groups)  # what one reply can tell
        hashes = wire.split_hashes(ask.hashes)[: ask.first + most]
        if self.reach is not None and not again and self._fetch(caller, ask, hashes, later):
            return None
        chunks = self._catalog.hold(caller.space, hashes, ask.first)
        if not chunks:
            self._counters.acquires_missed += 1
            return no_lease(ask.request, ask.first, Status.MISS)
        cold = [chunk for chunk in chunks if not chunk.ready]
        if not cold or self._riser is None:
            return self._settle(caller, ask, chunks)
        if len(self._waiting.get(caller.owner, ())) >= WAITING_MAX:
            self._catalog.unpin(chunks)
            return no_lease(ask.request, ask.first, Status.OVER_QUOTA)
        return self._wait(caller, ask, chunks, cold, later)

    def _fetch(self, caller: Caller, ask: wire.Acquire, hashes: list[bytes], later: Later) -> bool:
        """Have other hosts asked for what is missing of a chain; what is here is held meanwhile."""
        assert self.reach is not None
        space = caller.space
        here = self._catalog.usable(space, hashes)
        waiting = self._fetching.get(caller.owner, set())
        first = self._from_peers(space, hashes, here)
        if first >= len(hashes) or len(waiting) >= WAITING_MAX:
            return False
        fetching = Fetching(caller, ask, (), later)
        begun = self.reach.fetch(
            space,
            hashes,
            first,
            over_cold=first < here,
            deadline_ns=self._clock.now_ns() + int(self._limits.promote_s * 1e9),
            worth=lambda more: self._worth_of(space, hashes, here, first + more),
            done=lambda: self._fetched(fetching),
        )
        if begun:
            fetching.chunks = self._catalog.hold(space, hashes, ask.first)
            self._fetching.setdefault(caller.owner, set()).add(fetching)
        return begun

    def _worth_of(self, space: Space, hashes: list[bytes], here: int, whole: int) -> int:
        """Return how much of a prefix is worth it of which others complete what is here."""
        return max(here, self._worth(space, hashes, here, max(0, whole - here)))

    def _fetched(self, fetching: Fetching) -> None:
        """Go on with an acquire when other hosts have given what they will (W2)."""
        if fetching.over:
            return
        fetching.over = True
        owner = fetching.caller.owner
        self._fetching[owner].discard(fetching)
        if not self._fetching[owner]:
            del self._fetching[owner]
        self._catalog.unpin(fetching.chunks)
        if fetching.caller.gone:
            return
        reply = self._acquire(fetching.caller, fetching.ask, fetching.later, again=True)
        if reply is not None:
            fetching.later(wire.encode(reply))

    def _wait(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        cold: list[Chunk],
        later: Later,
    ) -> wire.AcquireReply | None:
        """Begin the promotions that an acquire needs; it is answered when they have ended."""
        assert self._riser is not None
        now_ns = self._clock.now_ns()
        deadline_ns = now_ns + int(self._limits.promote_s * 1e9)
        waiting = Waiting(
            caller, ask, chunks, later=later, deadline_ns=deadline_ns, finish=self._finish
        )
        waiting.cold, waiting.began_ns = frozenset(cold), now_ns
        for chunk in cold:
            done = waiting.risen(chunk)
            if not self._riser.promote(chunk, done):
                del waiting.rising[chunk]
                break  # no room: nothing after it would be usable either
        if not waiting.rising:
            waiting.over = True
            return self._settle(caller, ask, chunks, waiting.cold)
        self._waiting.setdefault(caller.owner, set()).add(waiting)
        return None

    def _finish(self, waiting: Waiting) -> None:
        """Answer an acquire that has waited, with as much as is there (W2)."""
        if waiting.over:
            return  # its session ended while another of its acquires was answered
        waiting.over = True
        assert self._riser is not None
        for chunk, done in waiting.rising.items():
            self._riser.leave(chunk, done)
        owner = waiting.caller.owner
        self._waiting[owner].discard(waiting)
        if not self._waiting[owner]:
            del self._waiting[owner]
        if waiting.caller.gone:
            self._catalog.unpin(waiting.chunks)
            return
        waited_s = (self._clock.now_ns() - waiting.began_ns) / 1e9
        self._counters.measures.seconds["acquire_wait"].note(waited_s)
        reply = self._settle(waiting.caller, waiting.ask, waiting.chunks, waiting.cold)
        waiting.later(wire.encode(reply))

    def _settle(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        cold: frozenset[Chunk] = frozenset(),
    ) -> wire.AcquireReply:
        """Grant a lease over as many of pinned chunks as are usable in host slots.

        What was allowed when it was asked for may not be any more once it has waited. `cold` are
        those chunks that came up from the tier below for it.
        """
        refusal = self._lease_refusal(caller)
        if refusal is not Status.OK:
            self._catalog.unpin(chunks)
            return no_lease(ask.request, ask.first, refusal)
        usable = warm_length(caller.space, chunks, ask.first)
        self._catalog.unpin(chunks[usable:])
        if not usable:
            self._counters.acquires_missed += 1
            return no_lease(ask.request, ask.first, Status.MISS)
        ttl_ms = min(ask.ttl_ms, int(self._limits.lease_s * 1e3))
        reply = self._grant(
            caller, ask.request, chunks[:usable], ask.first, ttl_ms, reading=bool(ask.read)
        )
        if caller.rank == 0 and reply.status is Status.OK:
            caller.served = True
            risen = len(cold.intersection(chunks[:usable]))
            tokens = caller.space.layout.chunk_tokens
            usage = self._counters.measures.usage(caller.tenant)
            usage.hit(host=(usable - risen) * tokens, nvme=risen * tokens)
        return reply

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
            return no_lease(request, first, Status.OVER_QUOTA)
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
            if caller.on_gpu and self._gpu is not None:
                places = self._gpu.places(chunks, first, caller.rank, places)
        self._counters.acquires += 1
        self._counters.chunks_acquired += len(chunks)
        told = sum(place[5] for place in places)
        self._counters.bytes_acquired += told
        self._counters.measures.loaded(caller.tenant, told)
        return wire.AcquireReply(
            request,
            Status.OK,
            lease.id,
            lease.token,
            first,
            first + len(chunks),
            int(any(chunk.lossy_mask for chunk in chunks)),
            wire.pack_places(places),
        )

    def _attach(self, caller: Caller, ask: wire.Attach) -> wire.AcquireReply:
        refusal = self._lease_refusal(caller)
        lease = self._leases.by_token(ask.token, caller.tenant)
        if lease is None or refusal is not Status.OK:
            return no_lease(ask.request, 0, refusal or Status.STALE)
        if lease.chunks[0].space is not caller.space:
            return no_lease(ask.request, 0, Status.STALE)
        self._catalog.pin(lease.chunks)
        left_ms = max(0, lease.deadline_ns - self._clock.now_ns()) // _MS
        return self._grant(caller, ask.request, lease.chunks, lease.first, left_ms, reading=True)

    def _release(self, caller: Caller, ask: wire.Release) -> wire.StatusReply:
        lease = self._leases.of(LeaseId(ask.lease), caller.owner)
        if lease is None:
            return wire.StatusReply(ask.request, Status.STALE)
        self._leases.end(lease)
        self.let_go([lease])
        return wire.StatusReply(ask.request, Status.OK)

    def _reserve(self, caller: Caller, ask: wire.Reserve) -> wire.ReserveReply:
        hashes = wire.split_hashes(ask.hashes)
        groups = range(len(caller.space.layout.groups))
        chosen = [group for group in groups if ask.groups >> group & 1]
        if len(hashes) * len(chosen) > wire.HASHES_MAX or ask.groups >> len(groups):
            raise WireError("Reserve.groups", "must name groups of the layout, few enough")
        if ask.lossy and not caller.space.lossy:
            raise WireError("Reserve.lossy", "must be 0 in an exact namespace")
        if self.draining:
            refused = [
                (index, group, Status.DRAINING, *wire.NOWHERE)
                for index in range(len(hashes))
                for group in chosen
            ]
            return wire.ReserveReply(ask.request, wire.pack_places(refused))
        deadline_ms = min(ask.deadline_ms, int(self._limits.fill_deadline_s * 1e3))
        maybe_fault("reserve.before")
        places = self._catalog.reserve(
            caller.space,
            caller.owner,
            caller.rank,
            parent=ask.parent,
            hashes=hashes,
            groups=ask.groups,
            deadline_ns=self._clock.now_ns() + deadline_ms * _MS,
            lossy=bool(ask.lossy),
        )
        if caller.on_gpu and self._gpu is not None:
            places = self._gpu.reserved(caller.owner, places)
        maybe_fault("reserve.after")
        if self._catalog.eviction.pressed and self._riser is not None:
            self._riser.wake()
        return wire.ReserveReply(ask.request, wire.pack_places(places))

    def _publish(self, caller: Caller, ask: wire.Publish) -> wire.ResultsReply:
        maybe_fault("publish.before")
        generations = [Generation(g) for g in wire.unpack_generations(ask.generations)]
        publish = self._catalog.publish_all if self._gpu is None else self._gpu.publish
        before = self._counters.bytes_published
        results = publish(caller.owner, generations, self._clock.now_ns())
        self._counters.measures.stored(caller.tenant, self._counters.bytes_published - before)
        maybe_fault("publish.after")
        return wire.ResultsReply(ask.request, bytes(results))

    def _abort(self, caller: Caller, ask: wire.Abort) -> wire.ResultsReply:
        generations = wire.unpack_generations(ask.generations)
        results = [self._catalog.abort(caller.owner, Generation(g)) for g in generations]
        return wire.ResultsReply(ask.request, bytes(results))

    def _use_gpu(self, caller: Caller, ask: wire_gpu.UseGpu) -> wire.StatusReply:
        status = Status.MISS if self._gpu is None else self._gpu.use(ask.uuid)
        caller.on_gpu = status is Status.OK
        return wire.StatusReply(ask.request, status)

    def _gpu_slab(self, caller: Caller, ask: wire_gpu.GpuSlab) -> wire_gpu.GpuSlabReply:
        if self._gpu is None:
            return wire_gpu.GpuSlabReply(ask.request, 0, 0, b"")
        return self._gpu.slab(ask.request, caller.tenant, ask.slab)

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
        late = [w for every in self._waiting.values() for w in every if w.deadline_ns <= now_ns]
        for waiting in late:
            self._finish(waiting)
        self._catalog.sweep(now_ns)

    def drain(self) -> None:
        """Take nothing in any more; what waits for the disk or other hosts is refused at once."""
        self.draining = True
        for waiting in [w for every in self._waiting.values() for w in every]:
            self._finish(waiting)
        for fetching in [f for every in self._fetching.values() for f in every]:
            self._fetched(fetching)

    def leave(self, caller: Caller) -> None:
        """Forget what a session waits for; its promotions go on for the others, or end."""
        caller.gone = True
        for waiting in list(self._waiting.get(caller.owner, ())):
            self._finish(waiting)
        for fetching in list(self._fetching.get(caller.owner, ())):
            self._fetched(fetching)

    def part(self, owner: OwnerId, *, dead: bool) -> bool:
        """End what a session holds; all of it if it is dead or said that it is done.

        Returns:
            Whether something stays until its process is gone.
        """
        self.let_go(self._leases.leave(owner, dead=dead))
        self._catalog.abandon(owner, dead=dead)
        return bool(self._leases.count(owner) or self._catalog.fillings.count(owner))
