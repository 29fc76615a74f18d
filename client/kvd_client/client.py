"""The client: look up, acquire, release, reserve, publish. Everything that fails is a miss.

Three bounds make it safe inside an engine. A call waits at most `wait_s` for the daemon, once: a
daemon that let a request time out is *stalled*, and until it answers every call is a miss at
once. A lost daemon is tried again with back-off, never by waiting. And nothing is started: no
thread, no process, no signal handler.

Thread-safe: one lock, held for at most `wait_s`.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kvd_client import wire
from kvd_client.connection import Connection, Lost
from kvd_client.errors import DaemonUnavailable, Refused
from kvd_client.handles import Found, Lease, Reservation, Slot, Ticket
from kvd_client.identity import Layout, Namespace, chunk_hashes
from kvd_client.paths import default_socket
from kvd_client.wire import Place, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

BACKOFF_S = (0.05, 5.0)
"""First and longest pause between attempts to reach the daemon."""
REFUSED_S = 30.0
"""Pause after a refusal, which only a change of configuration ends."""
GREETING_S = 2.0
"""How long an answer to the greeting may take, in the background."""
PENDING_MAX = 1024
"""Most requests under way."""


def _warn(text: str) -> None:
    import logging  # noqa: PLC0415 - 6 ms that most processes never need

    logging.getLogger("kvd_client").warning(text)


class Client:
    """A rank's session with the daemon of this host, made again when it is lost."""

    def __init__(  # noqa: PLR0913
        self,
        socket: str,
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
        self.socket = socket
        self.layout = layout.check()
        self.namespace_id = namespace.id
        if not 0 <= rank < layout.ranks:
            msg = f"rank must be from 0 to {layout.ranks - 1} for tp={layout.tp}, pp={layout.pp}"
            raise ValueError(msg)
        self.rank = rank
        self.wait_s = wait_s
        self._hello = wire.Hello(
            wire.PROTOCOL,
            (name or f"pid {os.getpid()}")[:128],
            self.namespace_id,
            namespace.label,
            layout.fields(),
            rank,
        )
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._greeting_until = 0.0
        self._next_try = 0.0
        self._backoff_s = BACKOFF_S[0]
        self._request = 0
        self._pending: dict[int, Ticket[Any]] = {}
        self._stalled = False
        self._closed = False
        self._refused: Refused | None = None

    # ---------------------------------------------------------------- the connection

    @property
    def connected(self) -> bool:
        """Whether a session is up, as far as is known without waiting."""
        with self._lock:
            return self._ready()

    @property
    def epoch(self) -> int:
        """The daemon's epoch; 0 without a session."""
        with self._lock:
            connection = self._connection
            return connection.welcome.epoch if connection and connection.greeted else 0

    def fileno(self) -> int:
        """Return an fd that is readable when `poll` has work; -1 without a session.

        It changes when the session is made again: look at `epoch`.
        """
        with self._lock:
            connection = self._connection
            return connection.fileno() if connection and connection.greeted else -1

    def greet(self, timeout_s: float) -> None:
        """Try to have a session within `timeout_s`.

        Raises:
            Refused: The daemon said no.
            DaemonUnavailable: Nobody answered.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._ready():
                if self._refused is not None:
                    raise self._refused
                left = deadline - time.monotonic()
                if left <= 0:
                    msg = (
                        f"no kvd answers at {self.socket}: start it with "
                        f"`kvd serve --socket {self.socket}` or name another socket"
                    )
                    raise DaemonUnavailable(msg)
                if self._connection is not None:
                    self._connection.wait(left)
                else:
                    time.sleep(min(left, max(0.001, self._next_try - time.monotonic())))

    def _ready(self) -> bool:
        """Move the session on without waiting; tell whether it is up."""
        if self._connection is not None and self._connection.greeted:
            return True
        now = time.monotonic()
        if self._closed or (self._connection is None and now < self._next_try):
            return False
        try:
            if self._connection is None:
                self._connection = Connection(self.socket, self._hello)
                self._greeting_until = now + GREETING_S
            if self._connection.greet():
                self._backoff_s = BACKOFF_S[0]
                self._refused = None
                return True
            if now > self._greeting_until:
                self._drop()
        except Refused as refused:
            self._drop(refused)
        except (Lost, OSError):
            self._drop()
        return False

    def _drop(self, refused: Refused | None = None) -> None:
        """End the session; everything under way is a miss; try again later."""
        if self._connection is not None:
            self._connection.close(bye=False)
            self._connection = None
        pause = self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S[1])
        if refused is not None:
            self._refused = refused
            pause = REFUSED_S
            _warn(f"kvd at {self.socket} refused this session: {refused.text}")
        self._next_try = time.monotonic() + pause
        self._stalled = False
        pending, self._pending = self._pending, {}
        for ticket in pending.values():
            if not ticket.done:
                ticket.miss()

    def close(self) -> None:
        """End the session for good, once no copy from or to a slot is under way."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close(bye=True)
                self._connection = None
            self._drop()

    def __enter__(self) -> Client:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # ---------------------------------------------------------------- requests and replies

    def _begin(
        self,
        make: Callable[[int], tuple[Any, ...]],
        finish: Callable[[Any], T],
        miss: T,
        *,
        undo: bool = False,
        always: bool = False,
    ) -> Ticket[T]:
        """Send a request; the ticket is done at once, as a miss, when that cannot be."""
        self._request += 1
        ticket: Ticket[T] = Ticket(self._request, miss, finish, undo=undo)
        with self._lock:
            if self._stalled:
                self._take()
            if not self._ready() or (self._stalled and not always):
                ticket.miss()
                return ticket
            connection = self._connection
            assert connection is not None
            try:
                room = len(self._pending) < PENDING_MAX
                if room and connection.send(wire.encode(make(ticket.request))):
                    self._pending[ticket.request] = ticket
                else:
                    self._stalled = True
                    ticket.miss()
            except Lost:
                self._drop()
                ticket.miss()
        return ticket

    def _take(self) -> list[Ticket[Any]]:
        """Take in the replies that are there, without waiting."""
        taken: list[Ticket[Any]] = []
        connection = self._connection
        if connection is None or not connection.greeted:
            return taken
        try:
            for reply in connection.receive():
                self._stalled = False
                ticket = self._pending.pop(reply[0], None)
                if ticket is None:
                    raise Lost  # an answer to nothing
                if ticket.abandoned:
                    self._undo(ticket, reply)
                else:
                    taken.append(ticket)
                    ticket.complete(reply)
        except Refused as refused:
            self._drop(refused)
        except Lost:
            self._drop()
        return taken

    def _undo(self, ticket: Ticket[Any], reply: tuple[Any, ...]) -> None:
        """Give back what a reply brings that came after its caller had left."""
        if not ticket.undo:
            return
        if isinstance(reply, wire.AcquireReply) and reply.status == Status.OK:
            lease = reply.lease
            self._begin(lambda r: wire.Release(r, lease), _status, Status.STALE, always=True)
        elif isinstance(reply, wire.ReserveReply):
            placed = [p.generation for p in wire.unpack_places(reply.objects) if not p.status]
            packed = wire.pack_generations(placed)
            self._begin(lambda r: wire.Abort(r, packed), _results, [], always=True)

    def wait(self, ticket: Ticket[T], wait_s: float | None = None) -> T:
        """Wait for a ticket, at most `wait_s` (default: the client's); then it is a miss."""
        deadline = time.monotonic() + (self.wait_s if wait_s is None else wait_s)
        with self._lock:
            while not ticket.done:
                self._take()
                if ticket.done:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    ticket.abandoned = True
                    ticket.miss()
                    self._stalled = True
                    break
                if self._connection is not None:
                    self._connection.wait(left)
        return ticket.result

    def poll(self) -> list[Ticket[Any]]:
        """Return the tickets that have ended since the last look, without waiting."""
        with self._lock:
            return self._take()

    # ---------------------------------------------------------------- what engines ask

    def chunk_hashes(
        self, tokens: Iterable[int], extras: Mapping[int, bytes] | None = None
    ) -> list[bytes]:
        """Hash every whole chunk of `tokens` under this client's namespace."""
        return chunk_hashes(self.namespace_id, tokens, self.layout.chunk_tokens, extras)

    def ping(self) -> bool:
        """Tell whether the daemon answers."""
        return self.wait(self._begin(wire.Ping, lambda _: True, miss=False))

    def begin_lookup(self, hashes: Sequence[bytes]) -> Ticket[Found]:
        """Begin `lookup`; wait for the ticket or poll."""
        joined = b"".join(hashes[: wire.HASHES_MAX])
        step = self.layout.chunk_tokens
        return self._begin(
            lambda r: wire.Lookup(r, joined),
            lambda reply: Found(reply.chunks, reply.chunks * step),
            Found(0, 0),
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
        joined = b"".join(hashes[: wire.HASHES_MAX])
        ttl_ms = int(ttl_s * 1e3)
        return self._begin(
            lambda r: wire.Acquire(r, joined, first, ttl_ms, int(read)),
            self._lease,
            Lease(self, None, first=first, chunks=first),
            undo=True,
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
        ticket = self._begin(lambda r: wire.Attach(r, token), self._lease, miss, undo=True)
        return self.wait(ticket)

    def _lease(self, reply: wire.AcquireReply) -> Lease:
        connection = self._connection
        if reply.status != Status.OK or connection is None:
            return Lease(self, None, first=reply.first, chunks=reply.first)
        places = tuple(wire.unpack_places(reply.objects))
        self._map_slabs(connection, places)
        return Lease(
            self,
            connection,
            reply.lease,
            token=reply.token,
            first=reply.first,
            chunks=reply.chunks,
            places=places,
        )

    @staticmethod
    def _map_slabs(connection: Connection, places: Iterable[Place]) -> None:
        """Map every slab of `places` and check that they lie inside."""
        for place in places:
            if place.status == Status.OK:
                slab = connection.slab(place.slab)
                if place.offset_bytes + place.size_bytes > len(slab):
                    raise Lost

    def release(self, lease: Lease) -> None:
        """End a lease; see `Lease.release`."""
        if not lease.lease or lease.connection is not self._connection:
            return
        number, lease.lease = lease.lease, 0
        self._begin(lambda r: wire.Release(r, number), _status, Status.STALE, always=True)

    def begin_reserve(
        self,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        groups: Sequence[int] | None = None,
        deadline_s: float = 30.0,
    ) -> Ticket[Reservation]:
        """Begin `reserve`; wait for the ticket or poll."""
        chosen = range(len(self.layout.groups)) if groups is None else groups
        mask = sum(1 << group for group in set(chosen))
        most = wire.HASHES_MAX // max(1, mask.bit_count())
        joined = b"".join(hashes[first : first + most])
        parent = hashes[first - 1] if first else self.namespace_id
        deadline_ms = int(deadline_s * 1e3)
        return self._begin(
            lambda r: wire.Reserve(r, parent, joined, mask, deadline_ms),
            lambda reply: self._reservation(reply, first),
            Reservation(self, None),
            undo=True,
        )

    def reserve(
        self,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        groups: Sequence[int] | None = None,
        deadline_s: float = 30.0,
    ) -> Reservation:
        """Take slots for this rank's objects of chunks `first` and later of a chain.

        Args:
            hashes: Chunk hashes from the first chunk on.
            first: First chunk to store; the one before must be stored or being stored.
            groups: Layer groups to store; all by default.
            deadline_s: Publish before this much time has passed; later is refused.

        Returns:
            A reservation; its slots say for each object whether there is a place, and why not.
        """
        return self.wait(
            self.begin_reserve(hashes, first=first, groups=groups, deadline_s=deadline_s)
        )

    def _reservation(self, reply: wire.ReserveReply, first: int) -> Reservation:
        connection = self._connection
        assert connection is not None
        places = list(wire.unpack_places(reply.objects))
        self._map_slabs(connection, places)
        slots = []
        for place in places:
            buffer = None
            if place.status == Status.OK:
                end = place.offset_bytes + place.size_bytes
                buffer = connection.slab(place.slab)[place.offset_bytes : end]
            status = Status(place.status)
            slots.append(
                Slot(place.chunk + first, place.group, status, buffer, place.generation)
            )
        return Reservation(self, connection, tuple(slots))

    def _end_slots(
        self,
        reservation: Reservation,
        slots: Iterable[Slot] | None,
        kind: type[wire.Publish] | type[wire.Abort],
    ) -> Ticket[list[Status]]:
        chosen = reservation.placed if slots is None else list(slots)
        generations = [s.generation for s in chosen if s.generation in reservation.open]
        reservation.close(generations)
        packed = wire.pack_generations(generations)
        miss = [Status.STALE] * len(generations)
        if not generations or reservation.connection is not self._connection:
            ticket = Ticket(0, miss, _results, undo=False)
            ticket.miss()
            return ticket
        return self._begin(lambda r: kind(r, packed), _results, miss, always=True)

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
            One status a slot: OK, EXISTS (first writer won), EXPIRED or STALE (not published).
        """
        return self.wait(self.begin_publish(reservation, slots))

    def abort(self, reservation: Reservation, slots: Iterable[Slot] | None = None) -> None:
        """Give slots back unpublished; call it when no copy into them is under way."""
        self._end_slots(reservation, slots, wire.Abort)


def _status(reply: wire.ReleaseReply) -> Status:
    return Status(reply.status)


def _results(reply: wire.ResultsReply) -> list[Status]:
    return [Status(result) for result in reply.results]


def connect(  # noqa: PLR0913
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
        Refused: The daemon refuses this session; the text says what to change.
        DaemonUnavailable: Nobody answers, and `required`.
    """
    client = Client(
        socket or default_socket(),
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
        _warn(f"{error}; every look-up is a miss until it is there")
    return client
