"""The client: look up, acquire, release, reserve, publish. Everything that fails is a miss.

A call waits at most `wait_s` for the daemon (`link.py` says what bounds the rest). Thread-safe.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvd_client import wire, wire_gpu
from kvd_client.errors import DaemonUnavailable, Refused
from kvd_client.handles import Found, Lease, Reservation, Slot, Ticket
from kvd_client.identity import HASH_BYTES, Layout, Namespace, chunk_hashes
from kvd_client.link import Link, warn
from kvd_client.wire import Status
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Self

    from kvd_client.connection import Connection
    from kvd_client.handles import Make, T


class Client:
    """A rank's session with the daemon of this host, made again when it is lost."""

    def __init__(
        self,
        socket: str | None,
        *,
        namespace: Namespace,
        layout: Layout,
        rank: int = 0,
        name: str = "",
        wait_s: float = 0.25,
    ) -> None:
        """Describe the session; use `connect` to make one.

        Raises:
            ValueError: A field of namespace, layout or rank is bad; the text names it.
        """
        self.layout = layout.check()
        self.namespace_id = namespace.id
        self.lossy = namespace.lossy
        if not 0 <= rank < layout.ranks:
            msg = f"rank must be from 0 to {layout.ranks - 1} for tp={layout.tp}, pp={layout.pp}"
            raise ValueError(msg)
        self.rank = rank
        self.wait_s = wait_s
        hello = wire.Hello(
            wire.PROTOCOL,
            (name or f"pid {os.getpid()}")[:128],
            self.namespace_id,
            namespace.label,
            layout.fields(),
            rank,
            int(namespace.lossy),
        )
        self._link = Link(socket, hello, wait_s)

    @property
    def connected(self) -> bool:
        """Whether a session is up, as far as is known without waiting."""
        with self._link.lock:
            return self._link.ready()

    @property
    def connection(self) -> Connection | None:
        """The session that is up, as far as is known; None without."""
        return self._link.session

    @property
    def epoch(self) -> int:
        """The daemon's epoch; 0 without a session."""
        session = self._link.session
        return session.welcome.epoch if session else 0

    def fileno(self) -> int:
        """Return an fd that is readable when `poll` has work; -1 without a session.

        It changes when the session is made again: look at `epoch`.
        """
        session = self._link.session
        return session.fileno() if session else -1

    def greet(self, timeout_s: float) -> None:
        """Try to have a session within `timeout_s`.

        Raises:
            Refused: The daemon said no.
            DaemonUnavailable: Nobody answered.
        """
        self._link.greet(timeout_s)

    def close(self) -> None:
        """End the session for good, once no copy from or to a slot is under way."""
        self._link.close()

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def wait(self, ticket: Ticket[T], wait_s: float | None = None) -> T:
        """Wait for a ticket, at most `wait_s` (default: the client's); then it is a miss."""
        return self._link.wait(ticket, self.wait_s if wait_s is None else wait_s)

    @property
    def owed(self) -> bool:
        """Whether a wait was given up whose reply may still bring a lease or slots.

        They are given back by the next call, whichever; who makes none for long calls `poll`.
        """
        return self._link.owed

    def poll(self) -> list[Ticket[Any]]:
        """Return the tickets that have ended since the last look, without waiting."""
        with self._link.lock:
            return self._link.take()

    # ---------------------------------------------------------------- GPUs

    def map_lazily(self) -> None:
        """Map slabs without their pages from now on, for who has them pinned by another thread.

        With them it takes tens of milliseconds a slab, and Python holds the GIL meanwhile.
        """
        self._link.map_lazily()

    def begin_use_gpu(self, uuid: bytes) -> Ticket[bool]:
        """Say on which GPU this session copies: places in its memory may then be named to it.

        For who can map them (`kvd_client.cuda`), anew in each session. The ticket tells whether
        the daemon has a tier there.
        """
        return self._link.begin(
            lambda r: wire_gpu.UseGpu(r, uuid),
            lambda reply: reply.status == Status.OK,
            miss=False,
        )

    def gpu_slab(self, slab: int) -> wire_gpu.GpuSlabReply | None:
        """Ask how a slab of the GPU tier is mapped; None if it is not this tenant's, or gone."""
        ticket = self._link.begin(
            lambda r: wire_gpu.GpuSlab(r, slab), lambda reply: reply if reply.handle else None, None
        )
        return self.wait(ticket)

    # ---------------------------------------------------------------- what engines ask

    def chunk_hashes(
        self, tokens: Iterable[int], extras: Mapping[int, bytes] | None = None
    ) -> list[bytes]:
        """Hash every whole chunk of `tokens` under this client's namespace."""
        return chunk_hashes(self.namespace_id, tokens, self.layout.chunk_tokens, extras)

    def ping(self) -> bool:
        """Tell whether the daemon answers."""
        return self.wait(self._link.begin(wire.Ping, lambda _: True, miss=False))

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long computing so many tokens took: what loading has to beat."""
        micros = _milliseconds("seconds", seconds * 1e3)
        if tokens > 0 and micros:
            count = min(tokens, (1 << 32) - 1)
            self._link.begin(lambda r: wire.Prefill(r, count, micros), _status, Status.STALE)

    def begin_lookup(self, hashes: Sequence[bytes]) -> Ticket[Found]:
        """Begin `lookup`; wait for the ticket or poll."""
        joined = _join(hashes)
        step = self.layout.chunk_tokens
        return self._link.begin(
            lambda r: wire.Lookup(r, joined),
            lambda reply: Found(reply.chunks, reply.chunks * step, reply.worth),
            Found(0, 0, 0),
        )

    def lookup(self, hashes: Sequence[bytes]) -> Found:
        """Ask how long the usable prefix of a chain is; holds nothing.

        Args:
            hashes: Chunk hashes from the first chunk on; the first 4,096 count.
        """
        return self.wait(self.begin_lookup(hashes))

    def begin_acquire(
        self, hashes: Sequence[bytes], *, first: int = 0, read: bool = True, ttl_s: float = 30.0
    ) -> Ticket[Lease]:
        """Begin `acquire`; wait for the ticket or poll."""
        joined = _join(hashes)
        _check_first(first, hashes)
        ttl_ms = _milliseconds("ttl_s", ttl_s)
        return self._link.begin(
            lambda r: wire.Acquire(r, joined, first, ttl_ms, int(read)),
            self._lease,
            Lease(self, None, first=first, chunks=first),
            undo=_undo_lease,
            patient=True,
        )

    def acquire(
        self, hashes: Sequence[bytes], *, first: int = 0, read: bool = True, ttl_s: float = 30.0
    ) -> Lease:
        """Hold the usable prefix of a chain for reading.

        Args:
            hashes: Chunk hashes from the first chunk on; the first 4,096 count.
            first: Chunks the engine has already; held and told from here on.
            read: False to hold for others who `attach` by the lease's token, without reading.
            ttl_s: For how long the token is good, and the hold of a lease that does not read.

        Returns:
            A lease, false when there is nothing to load.
        """
        return self.wait(self.begin_acquire(hashes, first=first, read=read, ttl_s=ttl_s))

    def attach(self, token: bytes) -> Lease:
        """Hold for reading, for this rank, what another session's lease holds."""
        miss = Lease(self, None)
        if not token:
            return miss  # the token of a lease that holds nothing
        if len(token) != wire.TOKEN_BYTES:
            msg = f"token must be the {wire.TOKEN_BYTES} bytes of Lease.token"
            raise ValueError(msg)
        ticket = self._link.begin(
            lambda r: wire.Attach(r, token), self._lease, miss, undo=_undo_lease
        )
        return self.wait(ticket)

    def _lease(self, reply: wire.AcquireReply) -> Lease:
        connection = self._link.connection
        if reply.status != Status.OK or connection is None:
            return Lease(self, None, first=reply.first, chunks=reply.first)
        return Lease(
            self,
            connection,
            reply.lease,
            token=reply.token,
            first=reply.first,
            chunks=reply.chunks,
            lossy=bool(reply.lossy),
            objects=reply.objects,
            slabs=connection.slabs_of(reply.objects),
        )

    def release(self, lease: Lease) -> None:
        """End a lease; see `Lease.release`."""
        if not lease.lease or lease.connection is not self._link.connection:
            return
        number, lease.lease = lease.lease, 0
        self._link.begin(lambda r: wire.Release(r, number), _status, Status.STALE, always=True)

    def begin_reserve(
        self,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        groups: Sequence[int] | None = None,
        deadline_s: float = 30.0,
        lossy: bool = False,
    ) -> Ticket[Reservation]:
        """Begin `reserve`; wait for the ticket or poll."""
        if lossy and not self.lossy:
            msg = "what was computed from a lossy copy is not stored in an exact namespace"
            raise ValueError(msg)
        every = range(len(self.layout.groups))
        chosen = set(every if groups is None else groups)
        if not chosen <= set(every):
            msg = f"groups must be from 0 to {len(every) - 1}"
            raise ValueError(msg)
        _check_first(first, hashes)
        mask = sum(1 << group for group in chosen)
        most = wire.HASHES_MAX // max(1, len(chosen))
        joined = _join(hashes[first : first + most])
        parent = hashes[first - 1] if first else self.namespace_id
        deadline_ms = _milliseconds("deadline_s", deadline_s)
        return self._link.begin(
            lambda r: wire.Reserve(r, parent, joined, mask, deadline_ms, int(lossy)),
            lambda reply: self._reservation(reply, first),
            Reservation(self, None),
            undo=_undo_slots,
        )

    def reserve(
        self,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        groups: Sequence[int] | None = None,
        deadline_s: float = 30.0,
        lossy: bool = False,
    ) -> Reservation:
        """Take slots for this rank's objects of chunks `first` and later of a chain.

        Args:
            hashes: Chunk hashes from the first chunk on.
            first: First chunk to store; the one before must be stored or being stored.
            groups: Layer groups to store; all by default.
            deadline_s: Publish before this much time has passed; later is refused.
            lossy: The bytes were computed from a lossy copy (`Lease.lossy`), so that whoever loads
                them must be told the same. Only in a lossy namespace: ValueError otherwise.

        Returns:
            A reservation; its slots say for each object whether there is a place, and why not.
        """
        return self.wait(
            self.begin_reserve(
                hashes, first=first, groups=groups, deadline_s=deadline_s, lossy=lossy
            )
        )

    def _reservation(self, reply: wire.ReserveReply, first: int) -> Reservation:
        connection = self._link.connection
        assert connection is not None
        slots = []
        for place in wire.unpack_places(reply.objects):
            buffer, on_gpu = None, None
            if place.status == Status.OK and place.slab >= GPU_SLABS:
                on_gpu = (place.slab, place.offset_bytes)
            elif place.status == Status.OK:
                end = place.offset_bytes + place.size_bytes
                buffer = connection.slab(place.slab)[place.offset_bytes : end]
            status = Status(place.status)
            chunk = place.chunk + first
            slots.append(Slot(chunk, place.group, status, buffer, place.generation, on_gpu))
        return Reservation(self, connection, tuple(slots))

    def _end_slots(
        self,
        reservation: Reservation,
        slots: Iterable[Slot] | None,
        kind: type[wire.Publish | wire.Abort],
    ) -> Ticket[list[Status]]:
        chosen = reservation.placed if slots is None else list(slots)
        generations = [s.generation for s in chosen if s.generation in reservation.open]
        reservation.close(generations)
        packed = wire.pack_generations(generations)
        miss = [Status.STALE] * len(generations)
        if not generations or reservation.connection is not self._link.connection:
            ticket = Ticket(0, miss, _results)
            ticket.miss()
            return ticket
        return self._link.begin(lambda r: kind(r, packed), _results, miss, always=True)

    def begin_publish(
        self, reservation: Reservation, slots: Iterable[Slot] | None = None
    ) -> Ticket[list[Status]]:
        """Begin `publish`; wait for the ticket or poll."""
        return self._end_slots(reservation, slots, wire.Publish)

    def publish(
        self, reservation: Reservation, slots: Iterable[Slot] | None = None
    ) -> list[Status]:
        """Make filled slots findable; call it when the last copy into them has finished.

        Args:
            reservation: Where the slots are from.
            slots: Which of them; all that are still open by default.

        Returns:
            One status a slot: OK, or EXPIRED or STALE for what was not published.
        """
        return self.wait(self.begin_publish(reservation, slots))

    def abort(self, reservation: Reservation, slots: Iterable[Slot] | None = None) -> None:
        """Give slots back unpublished; call it when no copy into them is under way."""
        self._end_slots(reservation, slots, wire.Abort)


def _join(hashes: Sequence[bytes]) -> bytes:
    """Join hashes for the wire, as many as a message takes; ValueError if they are none."""
    joined = b"".join(hashes[: wire.HASHES_MAX])
    if len(joined) != HASH_BYTES * min(len(hashes), wire.HASHES_MAX):
        msg = f"hashes must be {HASH_BYTES} bytes each, as from chunk_hashes"
        raise ValueError(msg)
    return joined


def _check_first(first: int, hashes: Sequence[bytes]) -> None:
    if not 0 <= first <= len(hashes):
        msg = f"first must be from 0 to the {len(hashes)} hashes given"
        raise ValueError(msg)


def _milliseconds(name: str, seconds: float) -> int:
    """Turn a time into the wire's milliseconds; the daemon shortens what is too long."""
    if not seconds >= 0:
        msg = f"{name} must be 0 or more seconds"
        raise ValueError(msg)
    return int(min(seconds, 1e6) * 1e3)


def _status(reply: wire.StatusReply) -> Status:
    return Status(reply.status)


def _results(reply: wire.ResultsReply) -> list[Status]:
    return [Status(result) for result in reply.results]


def _undo_lease(reply: wire.AcquireReply) -> Make | None:
    return (lambda r: wire.Release(r, reply.lease)) if reply.status == Status.OK else None


def _undo_slots(reply: wire.ReserveReply) -> Make | None:
    places = wire.unpack_places(reply.objects)
    placed = [place.generation for place in places if place.status == Status.OK]
    return (lambda r: wire.Abort(r, wire.pack_generations(placed))) if placed else None


def connect(
    socket: str | None = None,
    *,
    namespace: Namespace,
    layout: Layout,
    rank: int = 0,
    name: str = "",
    timeout_s: float = 1.0,
    wait_s: float = 0.25,
    required: bool = False,
) -> Client:
    """Open a session with this host's daemon.

    Args:
        socket: The daemon's socket; `KVD_SOCKET`, the system's or the user's by default.
        namespace: Who may share; all of it must be known.
        layout: How this engine's KV is laid out.
        rank: This process's rank.
        name: Shown by `kvd stat`.
        timeout_s: How long to wait for a first session.
        wait_s: Longest wait of any later call.
        required: Raise when there is no daemon, instead of returning a client that misses.

    Raises:
        ValueError: A field is bad; the text names it.
        Refused: The daemon refuses this session until something is changed; the text says what.
        DaemonUnavailable: Nobody answers, and `required`.
    """
    client = Client(
        socket,
        namespace=namespace,
        layout=layout,
        rank=rank,
        name=name,
        wait_s=wait_s,
    )
    try:
        client.greet(timeout_s)
    except Refused:
        client.close()
        raise
    except DaemonUnavailable as error:
        if required:
            client.close()
            raise
        warn(f"{error}; every look-up is a miss until it is there")
    return client
