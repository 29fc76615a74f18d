"""The control channel on real sockets: who is let in, what a hostile other side can do."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from kvd.config_transfer import TransferKnobs
from kvd.errors import StartError
from kvd.peer.control import Connection, Link, Me, Server
from kvd.peer.messages import Hello, Message, Ping, Pong, Release, Welcome, decode, encode
from kvd.peer.security import Credentials, credentials

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)
HOLDER = Me("test", "holder", 7, "tcp")
ASKER = Me("test", "asker", 8, "tcp")
SOON_S = 30.0


async def eventually(what: Callable[[], bool]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(SOON_S):
        while not what():  # noqa: ASYNC110 - a test
            await asyncio.sleep(0.01)


class Heard:
    """Notes what happens to connections, of either side."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self.events: list[tuple[Any, ...]] = []
        self.connection: Connection | None = None
        self.changed = asyncio.Event()

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self.changed.set()

    def up(self, connection: Connection, epoch: int) -> None:
        self.connection = connection
        self._note("up", connection.host, epoch)

    def heard(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Ping):
            connection.send(Pong(message.nonce, HOLDER.epoch))
        self._note("heard", message)

    def down(self, connection: Connection, why: str = "") -> None:
        self._note("down", connection.host, why)

    def failed(self, why: str) -> None:
        self._note("failed", why)

    async def wait(self, kind: str) -> tuple[Any, ...]:
        """Return the first event of a kind."""
        async with asyncio.timeout(SOON_S):
            while True:
                for event in self.events:
                    if event[0] == kind:
                        return event
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Make the fleet's authority."""
    return trustme.CA()


def identity(directory: Path, authority: trustme.CA, name: str, ca: trustme.CA) -> Credentials:
    """Make credentials for a name, signed by one authority and believing another."""
    made = authority.issue_cert(name)
    paths = [directory / f"{name}.{kind}" for kind in ("cert", "key", "ca")]
    paths[0].write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
    paths[1].write_bytes(made.private_key_pem.bytes())
    paths[2].write_bytes(ca.cert_pem.bytes())
    cert, key, root = map(str, paths)
    return credentials(TransferKnobs(tls_cert=cert, tls_key=key, tls_ca=root))


class Case:
    """A server on loopback and what a test does with it."""

    def __init__(self, directory: Path, authority: trustme.CA) -> None:
        """Give the server a certificate."""
        self.directory = directory
        self.authority = authority
        self.credentials = identity(directory, authority, "holder", authority)
        self.served, self.asked = Heard(), Heard()
        self.address = ""
        self.server = Server(HOLDER, self.credentials, self.served)

    def run(self, do: Callable[[Case], Awaitable[None]]) -> None:
        """Serve while something is done."""

        async def main() -> None:
            await self.server.open("127.0.0.1", 0)
            assert self.server._server is not None
            port = self.server._server.sockets[0].getsockname()[1]
            self.address = f"127.0.0.1:{port}"
            async with asyncio.TaskGroup() as group:
                await self.server.begin(group)
                self.group = group
                try:
                    await do(self)
                finally:
                    self.server.close()
                    for task in self.tasks:
                        task.cancel()

        self.tasks: list[asyncio.Task[None]] = []
        asyncio.run(main())

    def link(self, me: Me, who: Credentials, host: str = "holder") -> None:
        """Connect to the server as somebody."""
        link = Link(me, who, self.asked)
        run = link.run(host, self.address, random.random)
        self.tasks.append(self.group.create_task(run))

    async def raw(self, who: Credentials | None) -> tuple[Any, Any]:
        """Connect by hand."""
        port = int(self.address.rpartition(":")[2])
        context = who.client if who is not None else None
        name = "holder" if context is not None else None
        return await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)


@pytest.fixture
def case(tmp_path: Path, authority: trustme.CA) -> Case:
    """Make a case of the fleet's authority."""
    return Case(tmp_path, authority)


def asker(case: Case, name: str = "asker") -> Credentials:
    """Return credentials of the fleet."""
    return identity(case.directory, case.authority, name, case.authority)


def test_two_hosts_meet(case: Case) -> None:
    """With certificates of one authority each learns the other's name and epoch, and they talk."""

    async def do(case: Case) -> None:
        case.link(ASKER, asker(case))
        assert await case.asked.wait("up") == ("up", "holder", 7)
        assert await case.served.wait("up") == ("up", "asker", 8)
        assert case.asked.connection is not None
        case.asked.connection.send(Release(3))
        await eventually(lambda: ("heard", Release(3)) in case.served.events)

    case.run(do)


@pytest.mark.parametrize(
    ("me", "certified", "host", "why"),
    [
        (ASKER, "other", "holder", "down"),
        (ASKER._replace(cluster="else"), "asker", "holder", "another cluster"),
        (ASKER._replace(transport="rdma"), "asker", "holder", "transport"),
        (ASKER._replace(host="holder"), "holder", "holder", "name"),
        (ASKER, "asker", "third", "certificate"),
    ],
    ids=["forged name", "other cluster", "other transport", "same name", "other host answers"],
)
def test_who_does_not_fit_is_refused(
    case: Case, me: Me, certified: str, host: str, why: str
) -> None:
    """A host with another's certificate, of another cluster or transport, or elsewhere: no link."""

    async def do(case: Case) -> None:
        case.link(me, asker(case, certified), host)
        if why == "down":  # the server hangs up on it; nothing it says is heard
            await eventually(lambda: case.server.refused > 0)
        else:
            await eventually(
                lambda: any(e[0] == "failed" and why in e[1] for e in case.asked.events)
            )
        assert not case.served.events

    case.run(do)


def test_a_stranger_is_refused(case: Case) -> None:
    """A certificate of another authority, or none at all, gets no further than the handshake."""

    async def do(case: Case) -> None:
        stranger = identity(case.directory, trustme.CA(), "asker", case.authority)
        case.link(ASKER, stranger)
        await case.asked.wait("failed")
        reader, writer = await case.raw(None)
        writer.write(encode(Hello(1, "test", "asker", 8, "tcp")))
        with suppress(OSError):  # hung up on, one way or the other
            assert not await reader.read()
        writer.transport.abort()
        assert not case.served.events

    case.run(do)


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x04\x00\x00\x00junk",
        encode(Ping(1)),
        encode(Hello(99, "test", "asker", 8, "tcp")),
    ],
    ids=["too long", "empty", "junk", "no greeting", "other version"],
)
def test_a_broken_greeting_ends_the_connection(case: Case, noise: bytes) -> None:
    """Whatever comes instead of a greeting ends that connection, and another is served."""

    async def do(case: Case) -> None:
        who = asker(case)
        reader, writer = await case.raw(who)
        writer.write(noise)
        async with asyncio.timeout(SOON_S):
            left = await reader.read()
        assert not left or isinstance(decode(left[4:]), Welcome)
        writer.close()
        assert not case.served.events
        case.link(ASKER, who)
        await case.asked.wait("up")

    case.run(do)


def test_silence_ends_a_connection(case: Case) -> None:
    """A host that says nothing for some seconds is gone, though its socket is open."""

    async def do(case: Case) -> None:
        reader, writer = await case.raw(asker(case))
        writer.write(encode(Hello(1, "test", "asker", 8, "tcp")))
        await case.served.wait("up")
        assert (await case.served.wait("down"))[1] == "asker"
        assert await reader.read() is not None
        writer.close()

    case.run(do)


def test_a_newer_connection_replaces_the_older(case: Case) -> None:
    """A host that connects again is served once; its older connection ends."""

    async def do(case: Case) -> None:
        who = asker(case)
        _, first = await case.raw(who)
        first.write(encode(Hello(1, "test", "asker", 8, "tcp")))
        await case.served.wait("up")
        case.link(ASKER, who)
        await case.asked.wait("up")
        await case.served.wait("down")
        assert [e[0] for e in case.served.events if e[0] != "heard"] == ["up", "down", "up"]
        first.close()

    case.run(do)


def test_a_key_serves_on_loopback(tmp_path: Path) -> None:
    """Two who have one key meet; one with another does not."""
    files = [tmp_path / "key", tmp_path / "other"]
    for number, file in enumerate(files):
        file.write_text(f"{number}" * 32)
    keys = [credentials(TransferKnobs(key_file=str(file))) for file in files]
    case = Case.__new__(Case)
    case.credentials = keys[0]
    case.served, case.asked = Heard(), Heard()
    case.server = Server(HOLDER, keys[0], case.served)

    async def do(case: Case) -> None:
        case.link(ASKER, keys[1])
        await case.asked.wait("failed")
        assert not case.served.events
        case.link(ASKER, keys[0])
        await case.asked.wait("up")

    case.run(do)


@pytest.mark.parametrize("kind", ["tls_cert", "tls_ca", "key_file"])
def test_a_missing_file_says_what_to_do(tmp_path: Path, authority: trustme.CA, kind: str) -> None:
    """The start names the file that cannot be used."""
    identity(tmp_path, authority, "a", authority)
    paths = {k: str(tmp_path / f"a.{k[4:]}") for k in ("tls_cert", "tls_key", "tls_ca")}
    wrong = str(tmp_path / "nowhere")
    knobs = TransferKnobs(**({"key_file": wrong} if kind == "key_file" else {**paths, kind: wrong}))  # type: ignore[arg-type]
    with pytest.raises(StartError, match="nowhere"):
        credentials(knobs)
