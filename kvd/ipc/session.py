"""One client: its socket, process, rings, and all that it owns.

    CONNECTED --hello--> ACTIVE --bye | EOF | death | broken rule | drain--> CLOSED

Callbacks on the loop, no task: each runs to completion. `close` is the single way out; it runs
once, whatever the reason, and what the client may still touch outlives it as an *orphan* until the
kernel says that the process is gone (I2).

I1. Nothing is made for a client before its greeting is accepted, and nothing is read from shared
    memory that was not copied out first.
I2. After `close` a session owns nothing but, if its process lives and did not say goodbye, the
    leases it reads under and the slots it may write; these go with the process (pidfd).
I3. No call here can be made to wait by a client: the doorbell is read with RWF_NOWAIT, because a
    client can clear O_NONBLOCK on a descriptor that it shares; the socket's other end it cannot.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from kvd import log
from kvd.errors import RefusedSession
from kvd.ipc.caller import Caller
from kvd.memory import make_memfd
from kvd_client import wire
from kvd_client.errors import RingError, WireError
from kvd_client.identity import Layout
from kvd_client.ring import Consumer, Producer, memory_bytes
from kvd_client.wire import Refusal

if TYPE_CHECKING:
    import asyncio

    from kvd.entry import Space
    from kvd.ipc.dispatch import Dispatcher
    from kvd.types import OwnerId, Tenant

MESSAGES_A_TURN = 64
"""Messages of one session before the others have their turn."""
SPIN_NS = 60_000 if (os.cpu_count() or 1) > 1 else 0
"""How long to look at a ring again, between the loop's other work, before waiting for its bell: an
engine's requests come in twos and threes, and waking an idle core takes longer than answering."""
STALL_S = (0.001, 0.1)
"""First and longest pause before looking again at a client that does not read its replies."""

_LOG = log.get("session")


class Host(Protocol):
    """What a session needs of the daemon."""

    loop: asyncio.AbstractEventLoop
    dispatcher: Dispatcher
    epoch: int
    slab_bytes: int

    def enter(self, tenant: Tenant, hello: wire.Hello, layout: Layout) -> Space:
        """Admit a greeting; raises RefusedSession."""
        ...

    def slab_fd(self, tenant: Tenant, slab: int) -> int | None:
        """Return the descriptor of a tenant's slab."""
        ...

    def becomes_admin(
        self, session: Session, connection: socket.socket, hello: wire.AdminHello
    ) -> None:
        """Take over socket and pidfd of a session that is none: its greeting was an admin's."""
        ...

    def gone(self, session: Session, *, orphaned: bool, refusal: RefusedSession | None) -> None:
        """Hear that a session has closed, and what its client was told."""
        ...


def process_gone(pidfd: int) -> bool:
    """Tell whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class Session:
    """A client's session; made at accept, ended by `close`."""

    def __init__(
        self,
        host: Host,
        owner: OwnerId,
        *,
        connection: socket.socket,
        pidfd: int,
        pid: int,
        uid: int,
        tenant: Tenant,
        greeting_s: float,
    ) -> None:
        """Take over the socket and the pidfd, and wait for the greeting."""
        self._host = host
        self.owner = owner
        self.pidfd = pidfd
        self.pid = pid
        self.uid = uid
        self.tenant = tenant
        self.name = ""
        self.caller: Caller | None = None
        self.closed = False
        self._socket = connection
        self._bell = -1
        self._memory: mmap.mmap | None = None
        self._unsent: deque[bytes] = deque()
        self._ends: list[Consumer | Producer] = []
        self._outbox: tuple[bytes, list[int]] | None = None
        self._stall_s = STALL_S[0]
        self._answered_ns = 0
        self._again: asyncio.Handle | None = None
        self._eight = bytearray(8)
        self._timer = host.loop.call_later(greeting_s, self._late)
        host.loop.add_reader(connection, self._on_packet)
        host.loop.add_reader(pidfd, self._on_death)

    # ---------------------------------------------------------------- the socket

    def _on_packet(self) -> None:
        try:
            payload, _, flags, _ = self._socket.recvmsg(wire.PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            self.close("connection lost")
            return
        if not payload:
            self.close("connection closed")
            return
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("packet", f"must be at most {wire.PACKET_BYTES_MAX} bytes, no fds")
            self._act(wire.decode(payload, wire.TO_DAEMON))
        except WireError as error:
            code = Refusal.PROTOCOL if error.field == "protocol" else Refusal.MALFORMED
            text = str(error)
            if code is Refusal.PROTOCOL:
                text = (
                    f"this daemon speaks protocol {wire.PROTOCOL} and the client another: "
                    "install the same release of kvd on both sides"
                )
            self.close("broken protocol", refusal=RefusedSession(code, text))
        except RefusedSession as refused:
            self.close("refused", refusal=refused)

    def _act(self, message: Any) -> None:  # noqa: ANN401 - one of wire.TO_DAEMON
        if isinstance(message, wire.Hello):
            if self.caller is not None:
                raise WireError("Hello", "must come once")
            self._greet(message)
        elif isinstance(message, wire.AdminHello) and self.caller is None:
            self._hand_over(message)
        elif self.caller is None:
            raise WireError("Hello", "must come first")
        elif isinstance(message, wire.SlabRequest):
            self._send_slab(message.slab)
        elif isinstance(message, wire.Bye):
            self.close("goodbye", bye=True)
        else:
            raise WireError(type(message).__name__, "must come on an admin connection")

    def _hand_over(self, hello: wire.AdminHello) -> None:
        """End as a session: an admin connection goes on with this one's socket and pidfd."""
        self.closed = True
        self._timer.cancel()
        self._host.loop.remove_reader(self._socket)
        self._host.loop.remove_reader(self.pidfd)
        self._host.becomes_admin(self, self._socket, hello)

    def _greet(self, hello: wire.Hello) -> None:
        try:
            layout = Layout.from_fields(hello.layout)
        except ValueError as error:
            raise RefusedSession(Refusal.BAD_LAYOUT, str(error)) from error
        if hello.rank >= layout.ranks:
            text = f"rank {hello.rank} of a layout with {layout.ranks} ranks"
            raise RefusedSession(Refusal.BAD_LAYOUT, text)
        largest = max(group.object_bytes for group in layout.groups)
        if largest > self._host.slab_bytes:
            text = (
                f"an object of {largest} bytes does not fit a slab of {self._host.slab_bytes}: "
                "use smaller chunks or set a larger [host] slab_bytes"
            )
            raise RefusedSession(Refusal.BAD_LAYOUT, text)
        space = self._host.enter(self.tenant, hello, layout)
        self.caller = Caller(self.owner, self.tenant, space, hello.rank)
        self.name = hello.client
        self._timer.cancel()
        try:
            self._make_rings()
        except OSError as error:
            text = f"no memory or descriptors for a session: {error.strerror}"
            raise RefusedSession(Refusal.TOO_MANY, text) from error
        if self.closed:
            return  # it left before its welcome
        self._host.loop.add_reader(self._bell, self._on_bell)
        _LOG.often("session open", id=self.owner, tenant=self.tenant, pid=self.pid, name=self.name)

    def _make_rings(self) -> None:
        """Make what the welcome carries, and send it; raises OSError."""
        size = memory_bytes(wire.RING_BYTES)
        memory_fd = make_memfd("kvd-ring", size)
        try:
            self._memory = mmap.mmap(memory_fd, size)
            self._requests = Consumer(
                self._memory,
                wire.RING_BYTES,
                completion=False,
                message_bytes_max=wire.MESSAGE_BYTES_MAX,
            )
            self._completions = Producer(self._memory, wire.RING_BYTES, completion=True)
            self._ends = [self._requests, self._completions]
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            welcome = wire.Welcome(
                wire.PROTOCOL,
                self._host.epoch,
                self.owner,
                wire.RING_BYTES,
                self._host.slab_bytes,
            )
            self._send(wire.encode(welcome), [memory_fd, self._bell])
        finally:
            os.close(memory_fd)

    def _send_slab(self, slab: int) -> None:
        fd = self._host.slab_fd(self.tenant, slab)
        if fd is None:
            self._send(wire.encode(wire.SlabReply(slab, 0)), [])
        else:
            self._send(wire.encode(wire.SlabReply(slab, self._host.slab_bytes)), [fd])

    def _send(self, packet: bytes, fds: list[int]) -> None:
        """Send a packet, later if the socket is full of bells; at most one waits.

        Raises:
            WireError: The client asks for more before it took what it asked for.
        """
        if self._outbox is not None:
            raise WireError("SlabRequest", "must wait for the answer to the one before")
        try:
            socket.send_fds(self._socket, [packet], fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._outbox = (packet, fds)
            self._host.loop.add_writer(self._socket, self._on_room)
        except OSError:
            self.close("connection lost")

    def _on_room(self) -> None:
        outbox, self._outbox = self._outbox, None
        self._host.loop.remove_writer(self._socket)
        if outbox is not None:
            self._send(*outbox)

    # ---------------------------------------------------------------- the rings

    def _on_bell(self) -> None:
        with suppress(BlockingIOError):  # the client took it back
            os.preadv(self._bell, [self._eight], -1, os.RWF_NOWAIT)
        if self._again is None:
            self._serve()

    def turn(self) -> None:
        """Look at the ring although no bell rang: one may have been taken back by its client."""
        if self.closed or self.caller is None or self._again is not None:
            return
        if self._requests.pending():
            self._serve()

    def _serve(self) -> None:
        """Answer what is on the ring, up to a turn's worth; then at most one turn is planned."""
        self._again = None
        if self.closed or self.caller is None:
            return
        answered = False
        try:
            answered = self._send_late()
            for _ in range(MESSAGES_A_TURN):
                if self._unsent or self._completions.room_bytes() < wire.MESSAGE_BYTES_MAX:
                    self._again = self._host.loop.call_later(self._stall_s, self._serve)
                    self._stall_s = min(2 * self._stall_s, STALL_S[1])
                    break
                self._stall_s = STALL_S[0]
                body = self._requests.receive()
                if body is None:
                    break
                reply = self._host.dispatcher.answer(self.caller, body, self._send_later)
                if reply is not None:
                    sent = self._completions.send(reply)
                    assert sent  # room was made sure of
                    answered = True
            else:
                self._again = self._host.loop.call_soon(self._serve)
        except (RingError, WireError) as error:
            refusal = RefusedSession(Refusal.MALFORMED, str(error))
            self.close("broken protocol", refusal=refusal)
            return
        now_ns = time.monotonic_ns()
        if answered:
            self._answered_ns = now_ns
            self._ring()
        if self._again is None and now_ns - self._answered_ns < SPIN_NS and not self.closed:
            self._again = self._host.loop.call_soon(self._serve)

    def _send_later(self, reply: bytes) -> None:
        """Take a reply that comes on its own; it waits where the ring has no room (bounded, W2)."""
        if not self.closed:
            self._unsent.append(reply)
            if self._again is None:
                self._serve()

    def _send_late(self) -> bool:
        """Send late replies as far as there is room."""
        sent = False
        while self._unsent and self._completions.room_bytes() >= len(self._unsent[0]):
            sent = self._completions.send(self._unsent.popleft())
        return sent

    def _ring(self) -> None:
        """Tell the client that there are replies."""
        if not self.closed:
            with suppress(OSError):  # bells enough to wake it, or it left: its last packet is next
                self._socket.send(wire.BELL, socket.MSG_DONTWAIT)

    # ---------------------------------------------------------------- the end

    def _late(self) -> None:
        text = "the greeting did not come in time"
        self.close("late greeting", refusal=RefusedSession(Refusal.LATE, text))

    def _on_death(self) -> None:
        self.close("process gone")

    def close(self, why: str, *, bye: bool = False, refusal: RefusedSession | None = None) -> None:
        """End the session. Idempotent; the single way out.

        Args:
            why: For the log.
            bye: The client promised that it touches no slot any more.
            refusal: What to tell the client.
        """
        if self.closed:
            return
        self.closed = True
        loop = self._host.loop
        self._timer.cancel()
        if self._again is not None:
            self._again.cancel()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        loop.remove_reader(self.pidfd)
        if self._bell >= 0:
            loop.remove_reader(self._bell)
            os.close(self._bell)
        if refusal is not None:
            packet = wire.encode(wire.Refused(refusal.code, str(refusal)[:2048]))
            with suppress(OSError):  # it is not listening; the counters tell
                self._socket.send(packet, socket.MSG_DONTWAIT)
        self._socket.close()
        for end in self._ends:
            end.close()
        if self._memory is not None:
            self._memory.close()
        stays = False
        if self.caller is not None:
            self._host.dispatcher.leave(self.caller)
            dead = bye or process_gone(self.pidfd)
            stays = self._host.dispatcher.part(self.owner, dead=dead)
        _LOG.often("session closed", id=self.owner, why=why, error=refusal, orphaned=stays)
        self._host.gone(self, orphaned=stays, refusal=refusal)
