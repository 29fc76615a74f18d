"""Connections between daemons: one direction each, framed, bounded, authenticated. Loop only.

Who opens a connection asks over it; who accepted it holds. A frame's length is read and checked
before anything is allocated for it; a side that stops reading, stops speaking or breaks a rule
loses the connection, and nothing else happens: what it asked for is let go, what was asked of it
is a miss.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvd import log
from kvd.peer.messages import (
    FRAME_BYTES_MAX,
    VERSION,
    Hello,
    Message,
    PeerError,
    Ping,
    Pong,
    Welcome,
    decode,
    encode,
)
from kvd.peer.security import AUTH_S, check_name, prove

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.peer.security import Credentials

_LOG = log.get("peer")
PING_S: Final = 1.0
SILENCE_S: Final = 3.0
"""Without a word for so long, a connection has ended: a stopped host's kernel goes on answering."""
CONNECT_S: Final = 3.0
RETRY_S: Final = (0.2, 10.0)
UNREAD_BYTES_MAX: Final = 8 << 20
"""What may wait for a side that does not read."""
CONNECTIONS_MAX: Final = 1024
BROKEN: Final = (OSError, EOFError, ssl.SSLError, TimeoutError, PeerError)
"""What ends a connection and nothing else."""


class Me(NamedTuple):
    """Who this host is."""

    cluster: str
    host: str
    epoch: int
    transport: str


class Connection:
    """An authenticated connection to one host."""

    def __init__(
        self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Take over the streams."""
        self.host = host
        self.agent = 0
        """The newest version of our source's metadata that was sent here."""
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        """Send a message; a connection that takes nothing in is closed."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        self._writer.write(encode(message))
        if transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            transport.abort()

    async def receive(self) -> Message:
        """Return the next message; raises one of `BROKEN` at the end."""
        return await _receive(self._reader, SILENCE_S)

    def close(self) -> None:
        """End it at once."""
        self._writer.transport.abort()


async def _receive(reader: asyncio.StreamReader, limit_s: float) -> Message:
    async with asyncio.timeout(limit_s):
        length = int.from_bytes(await reader.readexactly(4), "little")
        if not 0 < length <= FRAME_BYTES_MAX:
            msg = f"a message of {length} bytes"
            raise PeerError(msg)
        return decode(await reader.readexactly(length))


def _check(mine: Me, other: Hello | Welcome) -> None:
    """Refuse who is of another cluster, protocol or transport; raises PeerError."""
    if other.version != VERSION:
        msg = f"speaks version {other.version} of the peer protocol, this host {VERSION}"
        raise PeerError(msg)
    if other.cluster != mine.cluster:
        raise PeerError("is of another cluster")
    if other.transport != mine.transport:
        msg = f'has transport = "{other.transport}", this host "{mine.transport}"'
        raise PeerError(msg)
    if other.host == mine.host:
        raise PeerError("has this host's name")


class Events(Protocol):
    """Who hears of connections that others made."""

    def up(self, connection: Connection, epoch: int) -> None:
        """A host can be asked, or asks."""

    def heard(self, connection: Connection, message: Message) -> None:
        """It said something."""

    def down(self, connection: Connection) -> None:
        """It is gone."""


class LinkEvents(Protocol):
    """Who hears of the connection to a host."""

    def up(self, connection: Connection, epoch: int) -> None:
        """It can be asked."""

    def heard(self, connection: Connection, message: Message) -> None:
        """It said something."""

    def down(self, connection: Connection, why: str) -> None:
        """It is gone."""

    def failed(self, why: str) -> None:
        """It cannot be reached."""


class Server:
    """Accepts those who ask."""

    def __init__(self, me: Me, credentials: Credentials, events: Events) -> None:
        """Accept nobody yet."""
        self._me = me
        self._credentials = credentials
        self._events = events
        self._group: asyncio.TaskGroup | None = None
        self._server: asyncio.Server | None = None
        self._count = 0
        self._by_host: dict[str, Connection] = {}
        self.refused = 0

    async def open(self, host: str, port: int) -> None:
        """Take the address; raises OSError."""
        tls = self._credentials.server
        self._server = await asyncio.start_server(
            self._accepted,
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=AUTH_S if tls else None,
            limit=2 * FRAME_BYTES_MAX,
            start_serving=False,
        )

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Accept; every connection is a task of `group`."""
        assert self._server is not None
        self._group = group
        await self._server.start_serving()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._count >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        assert self._group is not None
        self._count += 1
        self._group.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = None
        try:
            connection, epoch = await self._greet(reader, writer)
            before = self._by_host.pop(connection.host, None)
            if before is not None:
                before.close()
                self._events.down(before)
            self._by_host[connection.host] = connection
            self._events.up(connection, epoch)
            while True:
                self._events.heard(connection, await connection.receive())
        except BROKEN as error:
            if connection is None:
                self.refused += 1
                peer = writer.get_extra_info("peername")
                _LOG.limited("peer refused", address=str(peer), why=_why(error))
        finally:
            self._count -= 1
            writer.transport.abort()
            if connection is not None and self._by_host.get(connection.host) is connection:
                del self._by_host[connection.host]
                self._events.down(connection)

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Connection, int]:
        me = self._me
        if self._credentials.key:
            await prove(reader, writer, self._credentials.key, server=True)
        hello = await _receive(reader, AUTH_S)
        if not isinstance(hello, Hello):
            raise PeerError("did not greet")
        check_name(writer, hello.host)
        welcome = Welcome(VERSION, me.cluster, me.host, me.epoch, me.transport)
        writer.write(encode(welcome))  # first, so that both sides can say what does not fit
        _check(me, hello)
        return Connection(hello.host, reader, writer), hello.epoch

    def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._by_host.values()):
            connection.close()


class Link:
    """The connection to a host that is asked; made again whenever it is lost."""

    def __init__(self, me: Me, credentials: Credentials, events: LinkEvents) -> None:
        """Connect to nobody yet."""
        self._me = me
        self._credentials = credentials
        self._events = events
        self.why = "not connected yet"

    async def run(self, host: str, address: str, random: Callable[[], float]) -> None:
        """Stay connected until cancelled; pauses grow while it fails."""
        pause_s = RETRY_S[0]
        while True:
            try:
                connection, epoch = await self._connect(host, address)
            except BROKEN as error:
                why = _why(error)
                if why != self.why:
                    _LOG.warning("no link", host=host, why=why)
                self.why = why
                self._events.failed(why)
                await asyncio.sleep(pause_s * (0.5 + random()))
                pause_s = min(RETRY_S[1], 2 * pause_s)
                continue
            pause_s, self.why = RETRY_S[0], ""
            self._events.up(connection, epoch)
            try:
                await self._converse(connection)
            finally:
                connection.close()
                self._events.down(connection, self.why or "link lost")
            _LOG.warning("link lost", host=host, why=self.why)
            await asyncio.sleep(pause_s * random())

    async def _connect(self, host: str, address: str) -> tuple[Connection, int]:
        name, _, port = address.rpartition(":")
        tls = self._credentials.client
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                name.strip("[]"),
                int(port),
                ssl=tls,
                server_hostname=host if tls else None,
                limit=2 * FRAME_BYTES_MAX,
            )
        try:
            return await self._greet(host, reader, writer)
        except BaseException:
            writer.transport.abort()
            raise

    async def _greet(
        self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Connection, int]:
        me = self._me
        if self._credentials.key:
            await prove(reader, writer, self._credentials.key, server=False)
        hello = Hello(VERSION, me.cluster, me.host, me.epoch, me.transport)
        writer.write(encode(hello))
        welcome = await _receive(reader, AUTH_S)
        if not isinstance(welcome, Welcome):
            raise PeerError("did not welcome")
        check_name(writer, welcome.host)
        _check(me, welcome)
        if welcome.host != host:
            msg = f"is {welcome.host}, not {host}"
            raise PeerError(msg)
        return Connection(host, reader, writer), welcome.epoch

    async def _converse(self, connection: Connection) -> None:
        async with asyncio.TaskGroup() as group:
            pings = group.create_task(self._ping(connection))
            try:
                while True:
                    message = await connection.receive()
                    if not isinstance(message, Pong):
                        self._events.heard(connection, message)
            except BROKEN as error:
                self.why = _why(error)
            finally:
                pings.cancel()

    @staticmethod
    async def _ping(connection: Connection) -> None:
        nonce = 0
        while True:
            nonce += 1
            connection.send(Ping(nonce))
            await asyncio.sleep(PING_S)


def _why(error: BaseException) -> str:
    """Say in one line why a connection ended."""
    if isinstance(error, TimeoutError):
        return "silent"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"tls: {error.reason or error}"
    if isinstance(error, EOFError):
        return "closed by the other side"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
