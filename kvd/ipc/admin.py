"""One admin connection: the daemon's end of the channel that `kvd ls`, `kvd drain` and others use.

    GREETING --AdminHello--> OPEN --end of file | death | broken rule | end of the daemon--> CLOSED

D1. One request is under way at a time; the socket is not read meanwhile, so that a visitor that
    asks faster than it is answered waits in its own socket.
D2. An answer is one packet. A visitor that does not read its answers is closed, not waited for.
D3. `close` is the single way out: it ends the request under way, and gives socket and pidfd back.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvd import log
from kvd.admin.desk import Denied, Visitor
from kvd.quota import Resource
from kvd_client import wire
from kvd_client.errors import WireError
from kvd_client.wire import Refusal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine

    from kvd.admin.desk import Desk
    from kvd.ipc.listener import Peer
    from kvd.quota import Quota
    from kvd.types import Tenant

_LOG = log.get("admin")

ADMINS_MAX: Final = 16
"""Connections of operators at a time; a tenant's count among its sessions."""


class Host(Protocol):
    """What the door needs of the daemon."""

    loop: asyncio.AbstractEventLoop
    desk: Desk
    epoch: int
    quota: Quota
    tenant_by_uid: dict[int, Tenant]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in the daemon's group."""
        ...


class AdminSession:
    """An operator's, or a tenant's, connection without rings."""

    def __init__(
        self,
        door: AdminDoor,
        peer: Peer,
        visitor: Visitor,
        *,
        greeting_s: float,
        refusal: tuple[Refusal, str],
    ) -> None:
        """Take over the connection and wait for the greeting.

        Args:
            door: Where it came in, and goes out.
            peer: The connection, its process and user, by the kernel's word.
            visitor: What it may see.
            greeting_s: What it gets to send it.
            refusal: What a greeting for rings is answered with.
        """
        self._door = door
        self._host = host = door.host
        self.peer = peer
        self._refusal = refusal
        self.visitor = visitor
        self.closed = False
        self._task: asyncio.Task[None] | None = None
        self._timer = host.loop.call_later(greeting_s, self._late)
        host.loop.add_reader(peer.connection, self._on_packet)
        host.loop.add_reader(peer.pidfd, self._on_death)

    def greet(self, hello: wire.AdminHello) -> None:
        """Open it."""
        self._timer.cancel()
        tenant = self.visitor.tenant
        _LOG.debug("open", uid=self.peer.uid, pid=self.peer.pid, name=hello.client, tenant=tenant)
        self._send(
            wire.AdminWelcome(wire.PROTOCOL, self._host.epoch, os.getpid(), str(tenant or ""))
        )

    def _on_packet(self) -> None:
        try:
            payload, _, flags, _ = self.peer.connection.recvmsg(wire.PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            payload, flags = b"", 0
        if not payload:
            self.close("connection closed")
            return
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("packet", f"must be at most {wire.PACKET_BYTES_MAX} bytes, no fds")
            self._act(wire.decode(payload, wire.TO_DAEMON))
        except WireError as error:
            code = Refusal.PROTOCOL if error.field == "protocol" else Refusal.MALFORMED
            self.refuse(code, str(error))

    def _act(self, message: Any) -> None:  # noqa: ANN401 - one of wire.TO_DAEMON
        greeting = not self._timer.cancelled()
        if greeting and isinstance(message, wire.AdminHello):
            self.greet(message)
        elif greeting and isinstance(message, wire.Hello):
            self.refuse(*self._refusal)
        elif greeting or not self._host.desk.knows(message):
            raise WireError("message", "must be one of the admin channel's, its greeting first")
        else:
            self._host.loop.remove_reader(self.peer.connection)  # D1
            self._task = self._host.spawn(self._carry_out(message))

    async def _carry_out(self, message: Any) -> None:  # noqa: ANN401 - one of wire.TO_DAEMON
        try:
            more, rows = await self._host.desk.answer(self.visitor, message)
            reply: tuple[Any, ...] = wire.AdminPage(message.request, more, rows)
        except Denied as denied:
            reply = wire.AdminDenied(message.request, str(denied))
        self._task = None
        if not self.closed:
            self._host.loop.add_reader(self.peer.connection, self._on_packet)
            self._send(reply)

    def _send(self, message: tuple[Any, ...]) -> None:
        packet = wire.encode(message)
        assert len(packet) <= wire.PACKET_BYTES_MAX
        try:
            self.peer.connection.send(packet, socket.MSG_DONTWAIT)
        except OSError:  # it left, or does not read its answers (D2)
            self.close("answers are not read")

    def _late(self) -> None:
        self.refuse(Refusal.LATE, "the greeting did not come in time")

    def _on_death(self) -> None:
        self.close("process gone")

    def refuse(self, code: Refusal, text: str) -> None:
        """Say why, and close."""
        with suppress(OSError):  # it left already
            packet = wire.encode(wire.Refused(code, text[:2048]))
            self.peer.connection.send(packet, socket.MSG_DONTWAIT)
        self.close(text)

    def close(self, why: str) -> None:
        """End it; twice is harmless."""
        if self.closed:
            return
        self.closed = True
        self._timer.cancel()
        self._host.loop.remove_reader(self.peer.connection)
        self._host.loop.remove_reader(self.peer.pidfd)
        if self._task is not None:
            self._task.cancel()
        self._host.desk.left(self.visitor)
        self.peer.connection.close()
        os.close(self.peer.pidfd)
        _LOG.debug("closed", uid=self.peer.uid, pid=self.peer.pid, why=why)
        self._door.left(self)


class AdminDoor:
    """Who comes in as an admin, and all who are in.

    Attributes:
        host: The daemon.
        inside: Connections that are open, or wait for their greeting.
    """

    def __init__(self, host: Host, greeting_s: float) -> None:
        """Start with nobody."""
        self.host = host
        self.inside: set[AdminSession] = set()
        self._greeting_s = greeting_s
        self._charged: dict[AdminSession, Tenant] = {}

    @staticmethod
    def is_operator(uid: int) -> bool:
        """Tell whether a user may see and steer everything: root, and the daemon's own."""
        return uid in {0, os.geteuid()}

    def _full(self) -> bool:
        return len(self.inside) - len(self._charged) >= ADMINS_MAX

    def admit(self, peer: Peer, code: Refusal, text: str) -> bool:
        """Take in an operator who cannot have a session, and is refused one with this text.

        Returns:
            False: no operator, or too many; the connection stays the caller's.
        """
        if not self.is_operator(peer.uid) or self._full():
            return False
        refusal = (code, text)
        visitor = Visitor(None, peer.uid)
        self.inside.add(
            AdminSession(self, peer, visitor, greeting_s=self._greeting_s, refusal=refusal)
        )
        return True

    def take_over(self, peer: Peer, tenant: Tenant, hello: wire.AdminHello) -> None:
        """Take in a connection that began as a session and is charged as one.

        An operator's is not charged any more; a tenant's stays one of its sessions.
        """
        operator = self.is_operator(peer.uid)
        refusal = (Refusal.MALFORMED, "an admin connection has no rings")
        admin = AdminSession(
            self,
            peer,
            Visitor(None if operator else tenant, peer.uid),
            greeting_s=self._greeting_s,
            refusal=refusal,
        )
        self.inside.add(admin)
        if not operator:
            self._charged[admin] = tenant
        else:
            self.host.quota.discharge(tenant, Resource.SESSIONS, 1)
            if len(self.inside) - len(self._charged) > ADMINS_MAX:
                text = f"{ADMINS_MAX} admin connections are open: close some"
                admin.refuse(Refusal.TOO_MANY, text)
                return
        admin.greet(hello)

    def left(self, admin: AdminSession) -> None:
        """Forget a connection that has closed."""
        self.inside.discard(admin)
        tenant = self._charged.pop(admin, None)
        if tenant is not None:
            self.host.quota.discharge(tenant, Resource.SESSIONS, 1)

    def close(self) -> None:
        """Close them all: the daemon ends."""
        for admin in list(self.inside):
            admin.close("the daemon ends")
