"""The daemon's end of a mover process: start, messages, kill, reap. Loop only.

A process is *gone* when it has been reaped: all its threads have ended and the kernel has closed
its sockets and queue pairs. Only that is told as the end (`on_gone`); a kill alone proves nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgpack

from kvd import log
from kvd.peer.nixl_agent import environment

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from kvd.peer.nixl_agent import Transport
    from kvd.types import SlabId

_LOG = log.get("mover")
PACKET_BYTES_MAX: Final = 1 << 20
START_S: Final = 60.0
"""What a process gets to start: the library has been known to hang."""
UNSENT_MAX: Final = 4096
"""Messages that may wait for a mover; one that falls so far behind is killed."""


class MoverProcess:
    """One mover, from its start until it is reaped."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        role: str,
        *,
        transport: Transport,
        devices: Sequence[str],
        on_message: Callable[[list[Any]], None],
        on_gone: Callable[[], None],
    ) -> None:
        """Start it; `on_gone` comes exactly once, after `kill` or by itself.

        Raises:
            OSError: No process can be started.
        """
        self._loop = loop
        self._on_message = on_message
        self._on_gone = on_gone
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self.slabs: set[SlabId] = set()
        self.mapping: set[SlabId] = set()
        """Slabs it was given and has not said that it maps: one that ends now may do so again."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET_BYTES_MAX)
            ours.setblocking(False)  # noqa: FBT003
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "kvd.peer.mover", role, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment(transport, devices)},
                stdin=subprocess.DEVNULL,
            )
        self._channel = ours
        self._pidfd = os.pidfd_open(self.process.pid)
        loop.add_reader(ours, self._on_packet)
        loop.add_reader(self._pidfd, self._on_death)

    def send(self, *message: object, fds: Sequence[int] = ()) -> None:
        """Send a message, in order; what does not fit now is sent later."""
        self._unsent.append((msgpack.packb(message, use_bin_type=True), [os.dup(f) for f in fds]))
        if len(self._unsent) > UNSENT_MAX:
            self.kill()
        elif len(self._unsent) == 1:
            self._flush()

    def give(self, slab: SlabId, size_bytes: int, fd: int, *, writable: bool) -> None:
        """Have it map a slab, unless it has it."""
        if slab not in self.slabs:
            self.slabs.add(slab)
            self.mapping.add(slab)
            self.send("slab", slab, size_bytes, int(writable), fds=[fd])

    def _flush(self) -> None:
        self._loop.remove_writer(self._channel)
        while self._unsent:
            payload, fds = self._unsent[0]
            try:
                socket.send_fds(self._channel, [payload], fds)
            except BlockingIOError:
                self._loop.add_writer(self._channel, self._flush)
                return
            except OSError:
                return  # it has ended: the pidfd says so
            self._unsent.popleft()
            for fd in fds:
                os.close(fd)

    def _on_packet(self) -> None:
        try:
            payload = self._channel.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            payload = b""
        if not payload:
            self._loop.remove_reader(self._channel)  # the pidfd says the rest
            return
        message = msgpack.unpackb(payload)
        if message[0] == "mapped":
            self.mapping.discard(message[1])
        self._on_message(message)

    def kill(self) -> None:
        """Kill it, also a stopped one; `on_gone` comes when it has been reaped."""
        self.process.send_signal(signal.SIGKILL)

    def _on_death(self) -> None:
        code = self.process.wait()  # it has ended: this does not wait
        _LOG.info("mover gone", pid=self.process.pid, code=code)
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._channel.close()
        os.close(self._pidfd)
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        self._on_gone()
