"""A session that is made again when it is lost, and the requests under way on it.

Three bounds make it safe inside an engine. A wait lasts at most as long as its caller says, once: a
daemon that let a request time out is *stalled*, and until it answers every request is a miss at
once. A lost daemon is tried again with back-off, never by waiting. And nothing is started: no
thread, no process, no signal handler.

Thread-safe: one lock, held for at most one wait.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kvd_client import wire
from kvd_client.connection import SLAB_WAIT_S, Connection, Lost
from kvd_client.errors import DaemonUnavailable, Refused
from kvd_client.handles import Ticket
from kvd_client.paths import default_socket
from kvd_client.wire import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd_client.handles import Undo

T = TypeVar("T")

BACKOFF_S = (0.05, 5.0)
"""First and longest pause between attempts to reach the daemon."""
REFUSED_S = 30.0
"""Pause after a refusal, which only a change of configuration ends."""
GREETING_S = 2.0
"""How long an answer to the greeting may take, in the background."""
PENDING_MAX = 1024
"""Most requests under way, apart from those that give something back."""


def warn(text: str) -> None:
    """Log a warning; logging is imported at the first one."""
    import logging

    logging.getLogger("kvd_client").warning(text)


def _passing(refused: Refused) -> bool:
    """Tell whether a refusal may end by itself."""
    try:
        return Refusal(refused.code).passing
    except ValueError:
        return False


def _complete(ticket: Ticket[Any], reply: tuple[Any, ...]) -> None:
    """Give a ticket its reply; one that makes no sense ends the session."""
    try:
        ticket.complete(reply)
    except ValueError as error:
        raise Lost from error


class Link:
    """The client's way to the daemon."""

    def __init__(self, socket: str | None, hello: wire.Hello, wait_s: float) -> None:
        """Describe the session, made at the first need; no socket means the default of the time.

        `wait_s` is the longest wait of most calls; the first use of a slab may take as long again.
        """
        self._named = socket
        self._hello = hello
        self._slab_wait_s = max(SLAB_WAIT_S, wait_s)
        self._populate = True
        self.lock = threading.RLock()
        self.connection: Connection | None = None
        self._greeting_until = 0.0
        self._next_try = 0.0
        self._backoff_s = BACKOFF_S[0]
        self._request = 0
        self._pending: dict[int, Ticket[Any]] = {}
        self._stalled = False
        self._closed = False
        self._refused: Refused | None = None

    @property
    def _path(self) -> str:
        return self._named or default_socket()

    @property
    def session(self) -> Connection | None:
        """The session that is up, as far as is known without looking; None without."""
        connection = self.connection
        return connection if connection is not None and connection.greeted else None

    @property
    def owed(self) -> bool:
        """Whether a reply is still to come that may bring what has to be given back."""
        with self.lock:
            return any(ticket.abandoned for ticket in self._pending.values())

    def greet(self, timeout_s: float) -> None:
        """Try to have a session within `timeout_s`.

        Raises:
            Refused: The daemon said no.
            DaemonUnavailable: Nobody answered.
        """
        deadline = time.monotonic() + timeout_s
        with self.lock:
            while not self.ready():
                if self._refused is not None:
                    raise self._refused
                left = deadline - time.monotonic()
                if left <= 0:
                    msg = (
                        f"no kvd answers at {self._path}: start it with "
                        f"`kvd serve --socket {self._path}` or name another socket"
                    )
                    raise DaemonUnavailable(msg)
                if self.connection is not None:
                    self.connection.wait(left)
                else:
                    time.sleep(min(left, max(0.001, self._next_try - time.monotonic())))

    def map_lazily(self) -> None:
        """From now on map slabs without their pages."""
        with self.lock:
            self._populate = False
            if self.connection is not None:
                self.connection.populate = False

    def ready(self) -> bool:
        """Move the session on without waiting; tell whether it is up."""
        if self.connection is not None and self.connection.greeted:
            return True
        now = time.monotonic()
        if self._closed or (self.connection is None and now < self._next_try):
            return False
        try:
            if self.connection is None:
                self.connection = Connection(
                    self._path,
                    self._hello,
                    slab_wait_s=self._slab_wait_s,
                    populate=self._populate,
                )
                self._greeting_until = now + GREETING_S
            if self.connection.greet():
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
        if self.connection is not None:
            self.connection.close(bye=False)
            self.connection = None
        pause = self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S[1])
        if refused is not None and not _passing(refused):
            self._refused = refused
            pause = REFUSED_S
            warn(f"kvd at {self._path} refused this session: {refused.text}")
        self._next_try = time.monotonic() + pause
        self._stalled = False
        pending, self._pending = self._pending, {}
        for ticket in pending.values():
            if not ticket.done:
                ticket.miss()

    def close(self) -> None:
        """End the session for good, once no copy from or to a slot is under way."""
        with self.lock:
            self._closed = True
            if self.connection is not None:
                self.connection.close(bye=True)
                self.connection = None
            self._drop()

    def begin(
        self,
        make: Callable[[int], tuple[Any, ...]],
        finish: Callable[[Any], T],
        miss: T,
        *,
        undo: Undo | None = None,
        patient: bool = False,
        always: bool = False,
    ) -> Ticket[T]:
        """Send a request; the ticket is done at once, as a miss, when that cannot be.

        Args:
            make: Builds the message from the request's number.
            finish: Turns the reply into the result.
            miss: The result without a reply.
            undo: Builds what gives back a reply whose caller has left, if it brings anything.
            patient: A late reply says nothing about the daemon: it may wait for a disk.
            always: It gives something back: send it to a stalled daemon too.
        """
        with self.lock:
            self._request += 1
            ticket: Ticket[T] = Ticket(self._request, miss, finish, undo, patient=patient)
            if self._stalled:
                self.take()
            if not self.ready() or (self._stalled and not always):
                ticket.miss()
                return ticket
            connection = self.connection
            assert connection is not None
            try:
                room = always or len(self._pending) < PENDING_MAX
                if room and connection.send(wire.encode(make(ticket.request))):
                    self._pending[ticket.request] = ticket
                elif always:
                    raise Lost  # a hold that cannot be given back: end the session instead
                else:
                    self._stalled = True
                    ticket.miss()
            except Lost:
                self._drop()
                ticket.miss()
        return ticket

    def take(self, *, bell: bool = True) -> list[Ticket[Any]]:
        """Take in the replies that are there, without waiting; `bell` as in `receive`."""
        taken: list[Ticket[Any]] = []
        connection = self.connection
        if connection is None or not connection.greeted:
            return taken
        try:
            for reply in connection.receive(bell=bell):
                self._stalled = False
                ticket = self._pending.pop(reply[0], None)
                if ticket is None:
                    raise Lost  # an answer to nothing
                if ticket.abandoned:
                    self._give_back(ticket, reply)
                else:
                    taken.append(ticket)
                    _complete(ticket, reply)
        except Refused as refused:
            self._drop(refused)
        except Lost:
            self._drop()
        return taken

    def _give_back(self, ticket: Ticket[Any], reply: tuple[Any, ...]) -> None:
        """Give back what a reply brings that came after its caller had left."""
        make = ticket.undo(reply) if ticket.undo is not None else None
        if make is not None:
            self.begin(make, lambda _: None, None, always=True)

    def wait(self, ticket: Ticket[T], wait_s: float) -> T:
        """Wait for a ticket, at most `wait_s`; then it is a miss."""
        deadline = time.monotonic() + wait_s
        with self.lock:
            while not ticket.done:
                connection = self.session
                assert connection is not None  # a lost one ends its tickets
                if connection.spin():
                    self.take(bell=False)
                elif connection.wait(deadline - time.monotonic()):
                    self.take()
                else:
                    self.take()  # a last look, bell or no bell
                    self._abandon(ticket)
        return ticket.result

    def _abandon(self, ticket: Ticket[Any]) -> None:
        """End a ticket that is not done as a miss; its late reply is given back."""
        if not ticket.done:
            ticket.abandoned = True
            ticket.miss()
            self._stalled = not ticket.patient
