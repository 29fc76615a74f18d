"""The command line's end of the admin channel: one connection, a request at a time."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Final, Self

from kvd_client import wire
from kvd_client.errors import KvdError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWER_S: Final = 30.0
"""Longest wait for an answer, unless a request says otherwise."""


class NoDaemon(KvdError):
    """Nobody answers at the socket."""

    exit_code = 1


class Denied(KvdError):
    """The daemon said no; the text is its own."""


class Admin:
    """A connection to a daemon.

    Attributes:
        welcome: What the daemon said at the start.
    """

    def __init__(self, path: str, *, name: str = "kvd") -> None:
        """Connect and greet.

        Raises:
            NoDaemon: Nobody is there.
            Denied: The daemon does not let this user in, or is of another release.
        """
        self._path = path
        self._request = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(ANSWER_S)
        try:
            self._socket.connect(path)
            self._socket.send(wire.encode(wire.AdminHello(wire.PROTOCOL, name)))
            welcome = self._receive(ANSWER_S)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            self._socket.close()
            raise NoDaemon(
                f"no daemon at {path}: start one with `kvd serve`, or name its socket with --socket"
            ) from error
        except PermissionError as error:
            self._socket.close()
            raise Denied(f"{path}: this user may not connect; use sudo") from error
        except OSError as error:
            self._socket.close()
            raise NoDaemon(f"{path}: {error.strerror or error}; see `kvd stat`") from error
        except KvdError:
            self._socket.close()
            raise
        if not isinstance(welcome, wire.AdminWelcome):
            self.close()
            raise Denied(f"{path}: the daemon is of another release; use the kvd it was started by")
        self.welcome: wire.AdminWelcome = welcome

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Hang up; the request under way, if any, ends."""
        self._socket.close()

    def _receive(self, limit_s: float) -> Any:  # noqa: ANN401 - one of wire.TO_CLIENT
        """Take in one message; raises NoDaemon when the daemon went away or says nothing."""
        self._socket.settimeout(limit_s)
        try:
            payload = self._socket.recv(wire.PACKET_BYTES_MAX)
        except TimeoutError:
            raise NoDaemon(
                f"{self._path}: no answer within {limit_s:.0f} s; `kvd stat` says what it does"
            ) from None
        except ConnectionError:
            payload = b""
        if not payload:
            raise NoDaemon(f"{self._path}: the daemon closed the connection; see its log")
        try:
            message = wire.decode(payload, wire.TO_CLIENT)
        except WireError as error:
            raise Denied(f"{self._path}: the daemon is of another release ({error})") from error
        if isinstance(message, wire.Refused):
            raise Denied(message.text)
        return message

    def ask(
        self, kind: Callable[..., tuple[Any, ...]], *fields: object, limit_s: float = ANSWER_S
    ) -> tuple[int, list[list[Any]]]:
        """Ask one thing and return the answer's cursor and rows.

        Raises:
            KvdError: It was denied, or there is no answer.
        """
        self._request += 1
        try:
            self._socket.send(wire.encode(kind(self._request, *fields)))
        except OSError as error:
            raise NoDaemon(f"{self._path}: the daemon closed the connection") from error
        reply = self._receive(limit_s)
        if isinstance(reply, wire.AdminDenied):
            raise Denied(reply.text)
        if not isinstance(reply, wire.AdminPage) or reply.request != self._request:
            raise Denied(f"{self._path}: an answer to something else; is it of another release?")
        return reply.more, reply.rows

    def pages(
        self, kind: Callable[..., tuple[Any, ...]], *fields: object, limit_s: float = ANSWER_S
    ) -> Iterator[list[list[Any]]]:
        """Ask for page after page; the cursor is the request's last field."""
        after = 0
        while True:
            after, rows = self.ask(kind, *fields, after, limit_s=limit_s)
            yield rows
            if not after:
                return

    def wait_for_end(self, limit_s: float, look: Callable[[], None]) -> bool:
        """Wait until the daemon's process has ended; `look` is called twice a second."""
        deadline_s = time.monotonic() + limit_s
        try:
            pidfd = os.pidfd_open(self.welcome.pid)
        except OSError:
            return True  # gone already
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            while not poller.poll(500):
                if time.monotonic() > deadline_s:
                    return False
                look()
            return True
        finally:
            os.close(pidfd)
