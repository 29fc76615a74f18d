"""One greeted session: socket, rings, doorbell and mapped slabs. No policy, no retries.

Ownership: the connection owns its fds and maps. `close` ends them, except that a map under a live
view (a tensor over a slot) stays until the view is gone; the kernel keeps its memory until then.

Not thread-safe; `Client` holds a lock around it.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvd_client import wire
from kvd_client.errors import Refused, RingError, WireError
from kvd_client.ring import Consumer, Producer, memory_bytes
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from collections.abc import Iterator

_GREETING_FDS = 2
_RECEIVE_BYTES = 4096
SPIN_NS = 60_000 if (os.cpu_count() or 1) > 1 and os.uname().machine == "x86_64" else 0
"""How long to watch the ring before sleeping; only where stores are seen in their order."""
BELLS_LEFT_MAX = 32
"""Most bells left in the socket by replies that were seen without them."""
SLAB_WAIT_S = 0.25
"""Least bound of the wait for a slab's descriptor, once a slab and session."""


class Lost(Exception):
    """The session is over; never leaves this package."""


class Connection:
    """A session with the daemon, from the greeting to its end."""

    def __init__(
        self,
        path: str,
        hello: wire.Hello,
        *,
        slab_wait_s: float = SLAB_WAIT_S,
        populate: bool = True,
    ) -> None:
        """Connect and send the greeting; does not wait for the answer.

        Args:
            path: The daemon's socket.
            hello: The greeting.
            slab_wait_s: Longest wait for a slab's descriptor; then the session is lost.
            populate: Map a slab with its pages, or leave them to who has the slab pinned.

        Raises:
            OSError: Nobody listens at `path`.
        """
        self._hello = hello
        self._slab_wait_s = slab_wait_s
        self.populate = populate
        self._memory: mmap.mmap | None = None
        self._slabs: dict[int, memoryview] = {}
        self._bell = -1
        self._bells_left = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(0)
            self._socket.connect(path)
            with suppress(BrokenPipeError, ConnectionResetError):  # turned away: `greet` hears why
                self._socket.send(wire.encode(hello))
        except OSError:
            self._socket.close()
            raise
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    @property
    def greeted(self) -> bool:
        """Whether the daemon has welcomed this session."""
        return self._memory is not None

    def greet(self) -> bool:
        """Take in the daemon's answer to the greeting if it is there.

        Raises:
            Refused: The daemon said no.
            Lost: The daemon went away, or answered nonsense.
        """
        received = self._packet(_GREETING_FDS)
        if received is None:
            return False
        message, fds = received
        if not isinstance(message, wire.Welcome) or len(fds) != _GREETING_FDS:
            _close_all(fds)
            raise Lost
        memory_fd, self._bell = fds
        try:
            memory = mmap.mmap(memory_fd, memory_bytes(message.ring_bytes))
            self.welcome = message
            self._requests = Producer(memory, message.ring_bytes, completion=False)
            self._completions = Consumer(
                memory,
                message.ring_bytes,
                completion=True,
                message_bytes_max=wire.MESSAGE_BYTES_MAX,
            )
        except (OSError, ValueError, RingError) as error:
            raise Lost from error
        finally:
            os.close(memory_fd)
        self._memory = memory
        return True

    def _packet(self, fds_max: int) -> tuple[Any, list[int]] | None:
        """Receive one packet without waiting; raises Lost at the end of the session."""
        try:
            payload, fds, flags, _ = self._receive_fds(fds_max)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Lost from error
        try:
            if not payload or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise Lost
            message = None if payload == wire.BELL else wire.decode(payload, wire.TO_CLIENT)
            if isinstance(message, wire.Refused):
                raise Refused(message.code, message.text)
        except WireError as error:
            _close_all(fds)
            raise Lost from error
        except (Refused, Lost):
            _close_all(fds)
            raise
        return message, list(fds)

    def _receive_fds(self, fds_max: int) -> tuple[bytes, list[int], int, Any]:
        receive = socket.recv_fds, wire.PACKET_BYTES_MAX, fds_max, socket.MSG_CMSG_CLOEXEC
        try:
            return receive[0](self._socket, *receive[1:])
        except ConnectionResetError:  # told once, before the last words of who closed it
            return receive[0](self._socket, *receive[1:])

    def send(self, body: bytes) -> bool:
        """Put one request on the ring and ring the bell; False when the ring is full.

        Raises:
            Lost: The daemon broke the ring.
        """
        try:
            if not self._requests.send(body):
                return False
        except RingError as error:
            raise Lost from error
        os.eventfd_write(self._bell, 1)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the daemon says something; tell whether it did before the time was over."""
        return bool(self._poller.poll(max(0.0, timeout_s) * 1e3))

    def spin(self) -> bool:
        """Watch the ring for `SPIN_NS` before sleeping: most replies are there by then.

        Saves a wake-up, a third of a round trip. The bell stays in the socket for `receive`.
        """
        pending = self._completions.pending
        until = time.perf_counter_ns() + SPIN_NS
        while time.perf_counter_ns() < until:
            if pending():
                return True
        return False

    def receive(self, *, bell: bool = True) -> Iterator[Any]:
        """Yield the replies that are there.

        Args:
            bell: Look at the socket first; False after `spin`, which needs no bell.

        Raises:
            Lost: The daemon went away or broke the protocol.
            Refused: The daemon ended the session and said why.
        """
        self._bells_left += not bell
        packet = wire.BELL
        if bell or self._bells_left > BELLS_LEFT_MAX:
            packet = self._hear_bells()
        try:
            while (body := self._completions.receive()) is not None:
                yield wire.decode(body, wire.REPLIES)
            if packet != wire.BELL:
                message = wire.decode(packet, wire.TO_CLIENT) if packet else None
                if isinstance(message, wire.Refused):
                    raise Refused(message.code, message.text)
                raise Lost  # its end, or what nobody asked for
        except (RingError, WireError) as error:
            raise Lost from error

    def _hear_bells(self) -> bytes:
        """Take the bells out of the socket; return the first packet that is none, or a bell."""
        try:
            for _ in range(self._bells_left + 1):
                packet = self._socket.recv(_RECEIVE_BYTES)
                if packet != wire.BELL:
                    return packet
        except BlockingIOError:
            pass  # no more; the ring may have something all the same
        except OSError as error:
            raise Lost from error
        self._bells_left = 0
        return wire.BELL

    def slab(self, slab: int) -> memoryview:
        """Return a writable view of a slab, mapping it at first use.

        Raises:
            Lost: The daemon went away or did not answer in `slab_wait_s`.
            Refused: The daemon ended the session and said why.
        """
        view = self._slabs.get(slab)
        if view is None:
            view = self._slabs[slab] = memoryview(self._map(slab))
        return view

    def slabs_of(self, objects: bytes) -> dict[int, memoryview]:
        """Return the slabs that OBJECT records name, mapping new ones; raises as `slab`."""
        named = wire.slabs_of(objects)
        return {slab: self.slab(slab) for slab in named if slab < GPU_SLABS}

    def _map(self, slab: int) -> mmap.mmap:
        try:
            self._socket.send(wire.encode(wire.SlabRequest(slab)))
        except OSError as error:
            raise Lost from error
        deadline = time.monotonic() + self._slab_wait_s
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        message: Any = None
        fds: list[int] = []
        while message is None:  # bells may come before the answer
            received = self._packet(1)
            if received is not None:
                message, fds = received
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise Lost
            poller.poll(left * 1e3)
        try:
            if not isinstance(message, wire.SlabReply) or message.slab != slab or len(fds) != 1:
                raise Lost
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self.populate else 0)
            return mmap.mmap(fds[0], message.slab_bytes, flags=flags)
        except (OSError, ValueError) as error:
            raise Lost from error
        finally:
            _close_all(fds)

    def fileno(self) -> int:
        """Return the fd that is readable when `receive` has work."""
        return self._socket.fileno()

    def close(self, *, bye: bool) -> None:
        """End the session; with `bye`, promise that no copy to or from a slot is under way."""
        if bye and self.greeted:
            with suppress(OSError):  # it is gone already
                self._socket.send(wire.encode(wire.Bye()))
        self._socket.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
        self._slabs.clear()
        if self._memory is not None:
            self._requests.close()
            self._completions.close()
            self._memory.close()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
