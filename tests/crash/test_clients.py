"""Clients that are killed, stopped or hostile: their memory comes back, nobody else notices."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd import statpage
from kvd_client import Status, wire
from kvd_client.connection import Connection, Lost
from kvd_client.paths import stat_page_name
from tests import actor
from tests.daemon_fixture import PATIENCE_S, load, namespace, small_layout, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

    Connect = Callable[..., kvd_client.Client]
    Act = Callable[..., "Actor"]

BACK_PAGES = 5
"""How soon a dead client's memory must be back: five pages of statistics, which the daemon writes
in a second, and in more where it gets less of the machine.
"""
LIMIT_S = 15.0


class Actor:
    """A client process at a known point."""

    def __init__(self, daemon: DaemonProcess, point: str, *arguments: str) -> None:
        """Start it and wait until it is there."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.actor", daemon.socket, point, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.at = self.hear()

    def hear(self) -> dict[str, Any]:
        """Read its next line."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def go_on(self) -> None:
        """Let it leave its point."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill and reap it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def act(daemon: DaemonProcess) -> Iterator[Act]:
    """Start actors; all are dead at the end."""
    actors: list[Actor] = []

    def start(point: str, *arguments: str) -> Actor:
        actors.append(Actor(daemon, point, *arguments))
        return actors[-1]

    yield start
    for each in actors:
        each.end()


def stats(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the daemon's statistics page."""
    return dict(statpage.read(stat_page_name(daemon.socket)).stats)


def wait_for(daemon: DaemonProcess, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the statistics say so."""
    deadline = time.monotonic() + LIMIT_S
    while not holds(page := stats(daemon)):
        assert time.monotonic() < deadline, page["host"]
        time.sleep(0.02)


def is_back(daemon: DaemonProcess) -> None:
    """Nothing is held for a dead client, as the next few pages say."""
    seen = set()
    keys = ("reserved_bytes", "quarantined_bytes", "pinned_bytes")
    while any((page := stats(daemon))["host"][key] for key in keys) or page["orphans"]:
        seen.add(page["uptime_s"])
        assert len(seen) <= BACK_PAGES + 1, page["host"]  # and the one from before its death
        time.sleep(0.02)


@pytest.mark.parametrize("point", ["reserved", "midfill", "filled", "lease"])
def test_a_killed_clients_memory_is_back_within_a_second(
    daemon: DaemonProcess, connect: Connect, act: Act, point: str
) -> None:
    """SIGKILL frees reservations and leases at once; what was not published is never found."""
    client = connect()
    hashes = client.chunk_hashes(tokens(actor.CHUNKS, seed=actor.SEED))
    victim = act(point)
    key = "pinned_bytes" if point == "lease" else "reserved_bytes"
    wait_for(daemon, lambda s: s["host"][key] == actor.CHUNKS * 65536)
    victim.signal(signal.SIGKILL)
    victim.process.wait()
    is_back(daemon)
    assert client.lookup(hashes).chunks == (actor.CHUNKS if point == "lease" else 0)
    for seed in range(1, 12):  # the whole tier can be used again, the dead client's places too
        assert store(client, client.chunk_hashes(tokens(100, seed=seed))) == 100
    assert load(client, client.chunk_hashes(tokens(100, seed=11))) == 100


def test_a_client_stopped_past_its_deadline_cannot_publish_or_hurt(
    daemon: DaemonProcess, connect: Connect, act: Act
) -> None:
    """Its slots stay out of use while it is stopped; its late write and publish change nothing."""
    client = connect()
    sleeper = act("midfill", "0.3")
    sleeper.signal(signal.SIGSTOP)
    wait_for(daemon, lambda s: s["host"]["quarantined_bytes"] == actor.CHUNKS * 65536)
    chains = [client.chunk_hashes(tokens(100, seed=seed)) for seed in range(1, 25)]
    for chain in chains:  # turn the tier over twice: the quarantined places must not be among it
        store(client, chain)
    mine = client.chunk_hashes(tokens(actor.CHUNKS, seed=actor.SEED))
    assert store(client, mine) == actor.CHUNKS, "the key itself is free for another writer"
    assert stats(daemon)["host"]["quarantined_bytes"] == actor.CHUNKS * 65536
    sleeper.signal(signal.SIGCONT)
    sleeper.go_on()
    after = sleeper.hear()
    assert after["statuses"] == [Status.EXPIRED] * actor.CHUNKS
    assert load(client, mine) == actor.CHUNKS
    for chain in chains[-8:]:
        assert load(client, chain) == 100, "a late write reached somebody else's bytes"
    wait_for(daemon, lambda s: s["host"]["quarantined_bytes"] == 0)


def test_a_stopped_client_that_dies_leaves_no_quarantine(daemon: DaemonProcess, act: Act) -> None:
    """Death ends a quarantine as well as a confirmation does."""
    sleeper = act("reserved", "0.2")
    sleeper.signal(signal.SIGSTOP)
    wait_for(daemon, lambda s: s["host"]["quarantined_bytes"] > 0)
    sleeper.signal(signal.SIGKILL)
    sleeper.process.wait()
    is_back(daemon)


def test_a_stale_generation_is_refused(connect: Connect) -> None:
    """A generation of another session, or used once already, publishes nothing."""
    one, other = connect(), connect()
    hashes = one.chunk_hashes(tokens(1))
    slot = one.reserve(hashes).slots[0]
    generation = wire.pack_generations([slot.generation, slot.generation + 7])

    def publish(client: kvd_client.Client) -> list[int]:
        ticket: kvd_client.Ticket[list[int]] = client._link.begin(
            lambda r: wire.Publish(r, generation), lambda reply: list(reply.results), []
        )
        return client.wait(ticket)

    assert publish(other) == [Status.STALE, Status.STALE]
    assert other.lookup(hashes).chunks == 0
    assert publish(one) == [Status.OK, Status.STALE]
    assert publish(one) == [Status.STALE, Status.STALE]


def hello(**fields: Any) -> wire.Hello:
    """Return a good greeting, changed where asked."""
    good = wire.Hello(wire.PROTOCOL, "raw", namespace().id, "raw", small_layout().fields(), 0, 0)
    return good._replace(**fields)


def greeted(daemon: DaemonProcess) -> Connection:
    """Return a raw session."""
    connection = Connection(daemon.socket, hello())
    while not connection.greet():
        connection.wait(1.0)
    return connection


def hear_the_end(connection: Connection) -> None:
    """Listen until the daemon ends the session, which raises."""
    for _ in range(100):
        assert connection.wait(PATIENCE_S), "the daemon does not end the session"
        list(connection.receive())


def test_clients_that_leave_before_their_welcome(daemon: DaemonProcess, connect: Connect) -> None:
    """A greeting whose sender is gone already, engine or admin, ends that session only."""
    neighbour = connect()
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        for greeting in (hello(), wire.AdminHello(wire.PROTOCOL, "")) * 3:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leaver:
                leaver.connect(daemon.socket)
                leaver.send(wire.encode(greeting))
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert neighbour.ping()
    wait_for(daemon, lambda s: s["session_count"] == 1)
    assert connect().ping()
    assert daemon.process.poll() is None


def scribble_garbage(connection: Connection) -> None:
    """A frame with a right checksum and a body that is no message."""
    connection.send(b"\xc1 not msgpack")


def scribble_extension(connection: Connection) -> None:
    """A message that smuggles in an extension type."""
    connection.send(b"\x92\x01\xc7\x01\x05\x00")


def scribble_index(connection: Connection) -> None:
    """An index far outside the ring."""
    connection._requests._lines[0] = 1 << 60
    os.eventfd_write(connection._bell, 1)


def scribble_checksum(connection: Connection) -> None:
    """A frame rewritten after it was written."""
    connection._requests.send(wire.encode(wire.Ping(1)))
    connection._requests._data[17] ^= 0xFF
    os.eventfd_write(connection._bell, 1)


def send_oversized(connection: Connection) -> None:
    """A packet over the limit."""
    connection._socket.send(bytes(wire.PACKET_BYTES_MAX + 1))


def send_fds(connection: Connection) -> None:
    """Descriptors nobody asked for."""
    reader, writer = os.pipe()
    socket.send_fds(connection._socket, [wire.encode(wire.SlabRequest(0))], [reader, writer])
    os.close(reader)
    os.close(writer)


def send_second_hello(connection: Connection) -> None:
    """A second greeting."""
    connection._socket.send(wire.encode(hello()))


ABUSES = [
    scribble_garbage,
    scribble_extension,
    scribble_index,
    scribble_checksum,
    send_oversized,
    send_fds,
    send_second_hello,
]


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda f: f.__name__)
def test_a_broken_rule_ends_that_session_and_no_other(
    daemon: DaemonProcess, connect: Connect, abuse: Callable[[Connection], None]
) -> None:
    """The offender is told and closed; a neighbour that works meanwhile loses nothing."""
    neighbour = connect()
    hashes = neighbour.chunk_hashes(tokens(20))
    store(neighbour, hashes)
    stop = threading.Event()
    loads: list[int] = []

    def work() -> None:
        loads.append(load(neighbour, hashes))
        while not stop.is_set():
            loads.append(load(neighbour, hashes))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(20):
            offender = greeted(daemon)
            abuse(offender)
            with pytest.raises((kvd_client.Refused, Lost)):
                hear_the_end(offender)
            offender.close(bye=False)
    finally:
        stop.set()
        worker.join()
    assert loads
    assert set(loads) == {20}
    assert neighbour.ping()
    wait_for(daemon, lambda s: s["session_count"] == 1)


def test_a_client_cannot_make_the_daemon_wait_on_a_doorbell(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """O_NONBLOCK cleared on the shared doorbell, drained by the client: the loop goes on."""
    offender = greeted(daemon)
    flags = fcntl.fcntl(offender._bell, fcntl.F_GETFL)
    fcntl.fcntl(offender._bell, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    neighbour = connect()
    until = time.monotonic() + 1.0
    eight = bytearray(8)
    while time.monotonic() < until:
        os.eventfd_write(offender._bell, 1)
        try:
            os.preadv(offender._bell, [eight], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
    assert neighbour.ping()
    offender.close(bye=False)


def test_a_client_that_never_reads_replies_holds_up_nobody(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Its own requests wait once its ring is full; the others are served."""
    offender, neighbour = greeted(daemon), connect()
    hashes = bytes(32 * 4096)
    for request in range(1, 5000):
        body = wire.encode(wire.Reserve(request, namespace().id, hashes[: 32 * 4000], 1, 0, 0))
        if not offender.send(body):
            break
    assert neighbour.ping()
    for _ in range(200):
        assert neighbour.ping()
    assert neighbour.lookup(neighbour.chunk_hashes(tokens(4))).chunks == 0
    offender.close(bye=False)
    wait_for(daemon, lambda s: s["session_count"] == 1)
