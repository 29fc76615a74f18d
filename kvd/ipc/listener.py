"""The socket that clients connect to: who they are is the kernel's word, not theirs."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvd.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")
BACKLOG = 128
ACCEPTS_A_TURN = 16


class Peer(NamedTuple):
    """A connection and the process at its other end; the caller owns both descriptors."""

    connection: socket.socket
    pidfd: int
    pid: int
    uid: int


class Listener:
    """A listening SOCK_SEQPACKET socket at a path, our own or systemd's."""

    def __init__(self, path: str, mode: int, inherited_fd: int | None = None) -> None:
        """Bind and listen; replaces a dead daemon's socket, never a live one's.

        Args:
            path: Where clients connect.
            mode: Its permissions.
            inherited_fd: A socket that systemd has bound there, owned from here on; its path and
                permissions stay systemd's.

        Raises:
            StartError: The path or the socket cannot be used; the text says why.
        """
        self.path = path
        self._ours = inherited_fd is None
        if inherited_fd is not None:
            self._socket = _adopted(inherited_fd, path)
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.settimeout(0)
        try:
            os.makedirs(os.path.dirname(path) or ".", mode=0o750, exist_ok=True)  # noqa: PTH103, PTH120
            self._clear(path)
            mask = os.umask(0o777 & ~mode)
            try:
                self._socket.bind(path)
            finally:
                os.umask(mask)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            msg = f"cannot listen at {path}: {error.strerror}; name another with --socket"
            raise StartError(msg) from error
        except StartError:
            self._socket.close()
            raise

    @staticmethod
    def _clear(path: str) -> None:
        """Remove a socket nobody listens at."""
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with probe:
            probe.settimeout(0)
            try:
                probe.connect(path)
            except FileNotFoundError:
                return
            except ConnectionRefusedError:
                os.unlink(path)  # noqa: PTH108 - a dead daemon's
                return
            except BlockingIOError:
                pass  # a full backlog: somebody is there
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, _, _ = _CREDENTIALS.unpack(credentials)
        msg = f"process {pid} already listens at {path}: stop it or name another with --socket"
        raise StartError(msg)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def accept(self) -> Iterator[Peer]:
        """Yield the connections that wait, up to a turn's worth."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # none waits, or it left already, or no descriptors: later
            connection.settimeout(0)
            try:
                yield _peer_of(connection)
            except OSError:
                connection.close()  # it died before it could be named

    def close(self) -> None:
        """Stop listening, and remove the path if it is ours; twice is harmless."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        if self._ours:
            with suppress(OSError):  # somebody removed it already
                os.unlink(self.path)  # noqa: PTH108


def _adopted(fd: int, path: str) -> socket.socket:
    """Take over systemd's socket; raises StartError if it is not the one that is configured."""
    here = socket.socket(fileno=fd)
    wanted = (socket.AF_UNIX, socket.SOCK_SEQPACKET, 1)
    listens = here.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    name = here.getsockname()
    if (here.family, here.type, listens) != wanted or os.path.realpath(name) != os.path.realpath(
        path
    ):
        here.close()
        raise StartError(
            f"systemd passes a socket at {name!r}, but kvd is to listen at {path}:"
            f" write ListenSequentialPacket={path} into kvd.socket, or change `socket` in kvd.toml"
        )
    here.settimeout(0)
    return here


def _peer_of(connection: socket.socket) -> Peer:
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # before Linux 6.5
        pidfd = os.pidfd_open(pid)
    return Peer(connection, pidfd, pid, uid)
