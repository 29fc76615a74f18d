"""What a session may read: acquires, those that wait, attaches, releases.

Synchronous, on the loop. An acquire that waits (`waiting.py`) is answered once, later.

    other hosts   -->   promotions   -->   a check of the bytes   -->   a lease, or a miss

Each has its own time, `promote_s`, and is passed over where there is nothing to wait for. What is
checked is checked for the lease: who attaches to it is told the same bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvd.hits import bytes_by_tier, had_of, tokens_by_tier
from kvd.ipc.waiting import Checking, Fetching, Waiting, no_lease
from kvd.lease import Lease
from kvd.places import places_of, slots_of
from kvd.prefix import warm_length
from kvd.quota import Resource
from kvd.types import LeaseId
from kvd_client import wire
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config import Limits
    from kvd.entry import Chunk, Slot
    from kvd.hits import Had
    from kvd.ipc.caller import Caller
    from kvd.ipc.seams import GpuSide, Reach, Riser, Verifier
    from kvd.ipc.waiting import Later
    from kvd.ipc.worth import Worth
    from kvd.lease import LeaseBook
    from kvd.measures import Usage
    from kvd.metrics import Counters
    from kvd.types import OwnerId

_MS = 1_000_000
WAITING_MAX = 64
"""Most acquires of one session that wait for promotions, or for a check."""


def usages(counters: Counters, caller: Caller) -> tuple[Usage, Usage]:
    """Return what counts for the tenant and for the namespace."""
    return counters.measures.usage(caller.tenant), caller.space.usage


class Acquires:
    """Grants leases and takes them back; owns the acquires that wait."""

    def __init__(
        self,
        catalog: Catalog,
        leases: LeaseBook,
        limits: Limits,
        clock: Clock,
        worth: Worth,
        *,
        riser: Riser | None,
        gpu: GpuSide | None,
        reach: Reach | None,
        verifier: Verifier | None,
    ) -> None:
        """Share the loop's state."""
        self._verifier = verifier
        self._gpu = gpu
        self._riser = riser
        self._reach = reach
        self._worth = worth
        self._waiting: dict[OwnerId, set[Waiting | Checking]] = {}
        self._fetching: dict[OwnerId, set[Fetching]] = {}
        self._catalog = catalog
        self._leases = leases
        self._limits = limits
        self._clock = clock
        self._counters: Counters = catalog.counters
        self._next_lease = 0
        self.draining = False

    def acquire(
        self, caller: Caller, ask: wire.Acquire, later: Later, had: Had | None = None
    ) -> wire.AcquireReply | None:
        """Grant what is asked for; `had` is what was here before other hosts were asked."""
        refusal = self._lease_refusal(caller)
        if refusal is not Status.OK:
            return no_lease(ask.request, ask.first, refusal)
        most = wire.HASHES_MAX // len(caller.space.layout.groups)  # what one reply can tell
        hashes = wire.split_hashes(ask.hashes)[: ask.first + most]
        if self._reach is not None and had is None and self._fetch(caller, ask, hashes, later):
            return None
        chunks = self._catalog.hold(caller.space, hashes, ask.first)
        if not chunks:
            self._counters.acquires_missed += 1
            return no_lease(ask.request, ask.first, Status.MISS)
        if self._riser is None or all(chunk.ready for chunk in chunks):
            return self._check(caller, ask, chunks, later, had)
        if len(self._waiting.get(caller.owner, ())) >= WAITING_MAX:
            self._catalog.unpin(chunks)
            return no_lease(ask.request, ask.first, Status.OVER_QUOTA)
        return self._wait(caller, ask, chunks, later, had_of(chunks) if had is None else had)

    def _fetch(self, caller: Caller, ask: wire.Acquire, hashes: list[bytes], later: Later) -> bool:
        """Have other hosts asked for what is missing of a chain; what is here is held meanwhile."""
        assert self._reach is not None
        space = caller.space
        here = self._catalog.usable(space, hashes)
        waiting = self._fetching.get(caller.owner, set())
        first = self._worth.from_peers(space, hashes, here)
        if first >= len(hashes) or len(waiting) >= WAITING_MAX:
            return False
        fetching = Fetching(caller, ask, (), later)
        begun = self._reach.fetch(
            space,
            hashes,
            first,
            over_cold=first < here,
            deadline_ns=self._clock.now_ns() + int(self._limits.promote_s * 1e9),
            worth=lambda more: self._worth.of_whole(space, hashes, here, first + more),
            done=lambda: self._fetched(fetching),
        )
        if begun:
            fetching.chunks = self._catalog.hold(space, hashes, ask.first)
            fetching.had = had_of(fetching.chunks)
            self._fetching.setdefault(caller.owner, set()).add(fetching)
        return begun

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
        reply = self.acquire(fetching.caller, fetching.ask, fetching.later, fetching.had)
        if reply is not None:
            fetching.later(wire.encode(reply))

    def _wait(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        later: Later,
        had: Had,
    ) -> wire.AcquireReply | None:
        """Begin the promotions that an acquire needs; it is answered when they have ended."""
        assert self._riser is not None
        now_ns = self._clock.now_ns()
        deadline_ns = now_ns + int(self._limits.promote_s * 1e9)
        waiting = Waiting(
            caller, ask, chunks, later=later, deadline_ns=deadline_ns, had=had, finish=self._finish
        )
        waiting.began_ns = now_ns
        for chunk in [chunk for chunk in chunks if not chunk.ready]:
            done = waiting.risen(chunk)
            if not self._riser.promote(chunk, done):
                del waiting.rising[chunk]
                break  # no room: nothing after it would be usable either
        if not waiting.rising:
            waiting.over = True
            return self._check(caller, ask, chunks, later, had)
        self._waiting.setdefault(caller.owner, set()).add(waiting)
        return None

    def _finish(self, waiting: Waiting) -> None:
        """Go on with an acquire that has waited, with as much as is there (W2)."""
        assert self._riser is not None
        for chunk, done in waiting.rising.items():
            self._riser.leave(chunk, done)
        self._over(waiting)
        if waiting.caller.gone:
            self._catalog.unpin(waiting.chunks)
            return
        waited_s = (self._clock.now_ns() - waiting.began_ns) / 1e9
        self._counters.measures.seconds["acquire_wait"].note(waited_s)
        ask, later, had = waiting.ask, waiting.later, waiting.had
        reply = self._check(waiting.caller, ask, waiting.chunks, later, had)
        if reply is not None:
            later(wire.encode(reply))

    def _over(self, waiting: Waiting | Checking) -> None:
        waiting.over = True
        owner = waiting.caller.owner
        self._waiting[owner].discard(waiting)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _check(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        later: Later,
        had: Had | None,
    ) -> wire.AcquireReply | None:
        """Have checked what is watched of pinned chunks, then grant them; at once without any."""
        if self._verifier is None:
            return self._settle(caller, ask, chunks, had)
        refused = self._lease_refusal(caller) is not Status.OK
        watched = [] if refused else _watched(chunks, caller, reading=bool(ask.read))
        if not watched:
            return self._settle(caller, ask, chunks, had, frozenset())
        if len(self._waiting.get(caller.owner, ())) >= WAITING_MAX:
            self._catalog.unpin(chunks)
            return no_lease(ask.request, ask.first, Status.OVER_QUOTA)
        deadline_ns = self._clock.now_ns() + int(self._limits.promote_s * 1e9)
        checking = Checking(
            caller,
            ask,
            chunks,
            later=later,
            deadline_ns=deadline_ns,
            had=had,
            watched=frozenset(watched),
            finish=self._checked,
        )
        checking.check = self._verifier.check(watched, checking.end)
        self._waiting.setdefault(caller.owner, set()).add(checking)
        return None

    def _checked(self, checking: Checking) -> None:
        """Answer an acquire that was checked, as far as it was in time (W2)."""
        assert self._verifier is not None
        left = self._verifier.leave(checking.check)
        self._over(checking)
        caller, ask, chunks = checking.caller, checking.ask, checking.chunks
        if caller.gone:
            self._catalog.unpin(chunks)
            return
        self._counters.acquires_unverified += bool(left)
        sure = checking.watched.difference(left)  # nor is what was published meanwhile
        each = [_watched([chunk], caller, reading=bool(ask.read)) for chunk in chunks]
        cut = (*map(sure.issuperset, each), False).index(False)
        self._catalog.unpin(chunks[cut:])
        checking.later(wire.encode(self._settle(caller, ask, chunks[:cut], checking.had, sure)))

    def _settle(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        had: Had | None,
        sure: frozenset[Slot] | None = None,
    ) -> wire.AcquireReply:
        """Grant a lease over as many of pinned chunks as are usable in host slots.

        What was allowed when it was asked for may not be any more once it has waited. `had` is what
        was in host slots then, None for all of it; `sure` what was checked.
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
        reading, chunks = bool(ask.read), chunks[:usable]
        reply = self._grant(
            caller, ask.request, chunks, ask.first, ttl_ms, reading=reading, had=had, sure=sure
        )
        if caller.rank == 0 and reply.status is Status.OK:
            caller.served = True
            seen = self._gpu is not None and (caller.on_gpu or not reading)  # or by who attaches
            tokens = tokens_by_tier(
                chunks,
                had,
                tokens=caller.space.layout.chunk_tokens,
                on_gpu=self._gpu.whole if self._gpu is not None and seen else None,
            )
            for usage in usages(self._counters, caller):
                usage.hit(tokens)
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
        had: Had | None,
        sure: frozenset[Slot] | None,
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
            had=had,
            sure=sure,
        )
        self._leases.add(lease)
        places = []
        if reading:
            places = places_of(caller.space.layout, chunks, first, caller.rank)
            if caller.on_gpu and self._gpu is not None:
                places = self._gpu.places(chunks, first, caller.rank, places)
        self._counters.acquires += 1
        self._counters.chunks_acquired += len(chunks)
        told = bytes_by_tier(places, chunks, caller.rank, had, first=first)
        self._counters.bytes_acquired += sum(told.values())
        self._counters.measures.loaded(usages(self._counters, caller), told)
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

    def attach(self, caller: Caller, ask: wire.Attach) -> wire.AcquireReply:
        """Give a worker a lease of its own over what a scheduler's holds."""
        refusal = self._lease_refusal(caller)
        lease = self._leases.by_token(ask.token, caller.tenant)
        if lease is None or refusal is not Status.OK:
            return no_lease(ask.request, 0, refusal or Status.STALE)
        if lease.chunks[0].space is not caller.space:
            return no_lease(ask.request, 0, Status.STALE)
        if self._catalog.damaged:  # a part of it may have been taken out since
            usable = warm_length(caller.space, lease.chunks, lease.first)
            if usable < len(lease.chunks):
                return no_lease(ask.request, lease.first, Status.STALE)
        if lease.sure is not None and not lease.sure.issuperset(
            _watched(lease.chunks, caller, reading=True)
        ):  # stored again since, or of a rank that it was not checked for
            return no_lease(ask.request, lease.first, Status.STALE)
        self._catalog.pin(lease.chunks)
        left_ms = max(0, lease.deadline_ns - self._clock.now_ns()) // _MS
        return self._grant(
            caller,
            ask.request,
            lease.chunks,
            lease.first,
            left_ms,
            reading=True,
            had=lease.had,
            sure=lease.sure,
        )

    def release(self, caller: Caller, ask: wire.Release) -> wire.StatusReply:
        """End a lease."""
        lease = self._leases.of(LeaseId(ask.lease), caller.owner)
        if lease is None:
            return wire.StatusReply(ask.request, Status.STALE)
        self._leases.end(lease)
        self.let_go([lease])
        return wire.StatusReply(ask.request, Status.OK)

    # ---------------------------------------------------------------- time and death

    def let_go(self, leases: list[Lease]) -> None:
        """Unpin what ended leases held."""
        for lease in leases:
            self._catalog.quota.discharge(lease.tenant, Resource.LEASES, 1)
            self._catalog.unpin(lease.chunks)

    def sweep(self, now_ns: int) -> None:
        """Let time pass over leases, and answer the acquires whose time is up."""
        self.let_go(self._leases.sweep(now_ns))
        late = [w for every in self._waiting.values() for w in every if w.deadline_ns <= now_ns]
        for waiting in late:
            waiting.end()

    def drain(self) -> None:
        """Grant nothing any more; what waits for the disk or other hosts is refused at once."""
        self.draining = True
        for waiting in [w for every in self._waiting.values() for w in every]:
            waiting.end()
        for fetching in [f for every in self._fetching.values() for f in every]:
            self._fetched(fetching)

    def leave(self, caller: Caller) -> None:
        """Forget what a session waits for; its promotions go on for the others, or end."""
        for waiting in list(self._waiting.get(caller.owner, ())):
            waiting.end()
        for fetching in list(self._fetching.get(caller.owner, ())):
            self._fetched(fetching)


def _watched(chunks: Sequence[Chunk], caller: Caller, *, reading: bool) -> list[Slot]:
    """Return the watched objects that a lease tells of, or lets others be told of, in order."""
    return [
        slot
        for chunk in chunks
        for slot in (slots_of(chunk, caller.rank) if reading else chunk.slots.values())
        if slot.watched
    ]
