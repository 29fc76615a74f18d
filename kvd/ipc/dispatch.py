"""What each request does: the one place where limits are applied.

Synchronous, on the loop, and to completion: between a request's first look at the catalog and its
reply nothing else happens. One request may be answered later: an acquire that waits
(`acquiring.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.failpoints import maybe_fault
from kvd.ipc.acquiring import Acquires, usages
from kvd.ipc.worth import Worth
from kvd.types import Generation, OwnerId
from kvd_client import wire, wire_gpu
from kvd_client.errors import WireError
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.admin.recording import Recorder
    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config import Limits
    from kvd.ipc.caller import Caller
    from kvd.ipc.seams import GpuSide, Reach, Riser, Verifier
    from kvd.ipc.waiting import Later
    from kvd.lease import LeaseBook
    from kvd.metrics import Counters

_MS = 1_000_000


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
        reach: Reach | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """Share the loop's state."""
        self._gpu = gpu
        self._riser = riser
        self._reach = reach
        self._worth = Worth(catalog, riser, reach)
        self.acquires = Acquires(
            catalog,
            leases,
            limits,
            clock,
            self._worth,
            riser=riser,
            gpu=gpu,
            reach=reach,
            verifier=verifier,
        )
        self._catalog = catalog
        self._leases = leases
        self._limits = limits
        self._clock = clock
        self._counters: Counters = catalog.counters
        self.recorder: Recorder | None = None
        self._handlers: dict[type[Any], Callable[[Caller, Any], tuple[Any, ...]]] = {
            wire.Ping: self._ping,
            wire.Attach: self.acquires.attach,
            wire.Release: self.acquires.release,
            wire.Reserve: self._reserve,
            wire.Publish: self._publish,
            wire.Abort: self._abort,
            wire.Prefill: self._prefill,
            wire_gpu.UseGpu: self._use_gpu,
            wire_gpu.GpuSlab: self._gpu_slab,
        }

    @property
    def draining(self) -> bool:
        """Whether nothing is taken in or granted any more."""
        return self.acquires.draining

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
            reply = self.acquires.acquire(caller, message, later)
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

        if found < len(hashes) and self._reach is not None:  # noqa: SIM102 - the call begins it
            if self._reach.elsewhere(caller.space, hashes, found, answered):
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
            for usage in usages(self._counters, caller):
                usage.asked_tokens += len(hashes) * caller.space.layout.chunk_tokens
        if new:
            if not here:
                self._catalog.eviction.touched(caller.space, hashes)  # else `hold` tells it
            if self._riser is not None:
                self._riser.touched(caller.tenant, hashes)
        worth = self._worth.of(caller.space, hashes, here, found - here) if found else 0
        self._counters.lookup_chunks_worth += worth
        return wire.LookupReply(ask.request, found, worth)

    def _prefill(self, caller: Caller, ask: wire.Prefill) -> wire.StatusReply:
        caller.space.gate.prefill.observe(ask.tokens, ask.micros / 1e6)
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
        grown = self._counters.bytes_published - before
        self._counters.measures.stored(usages(self._counters, caller), grown)
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

    def sweep(self) -> None:
        """Let time pass over leases and reservations."""
        now_ns = self._clock.now_ns()
        self.acquires.sweep(now_ns)
        self._catalog.sweep(now_ns)

    def drain(self) -> None:
        """Take nothing in any more; what waits for the disk or other hosts is refused at once."""
        self.acquires.drain()

    def leave(self, caller: Caller) -> None:
        """Forget what a session waits for; its promotions go on for the others, or end."""
        caller.gone = True
        self.acquires.leave(caller)

    def part(self, owner: OwnerId, *, dead: bool) -> bool:
        """End what a session holds; all of it if it is dead or said that it is done.

        Returns:
            Whether something stays until its process is gone.
        """
        self.acquires.let_go(self._leases.leave(owner, dead=dead))
        self._catalog.abandon(owner, dead=dead)
        return bool(self._leases.count(owner) or self._catalog.fillings.count(owner))
