"""Bad input and bad luck: a clear word that names the mend, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import kvd_client
from kvd_client import wire
from kvd_client.connection import Connection
from kvd_client.link import REFUSED_S
from kvd_client.wire import Refusal
from tests.daemon_fixture import (
    PATIENCE_S,
    join,
    load,
    namespace,
    small_layout,
    stamp,
    store,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench._daemon import DaemonProcess

    Connect = Callable[..., kvd_client.Client]
    MakeDaemon = Callable[..., DaemonProcess]


def test_no_daemon_is_named_with_the_mend(tmp_path: Path) -> None:
    """A wrong socket path says what to start; without `required` everything is a miss."""
    path = str(tmp_path / "nobody.sock")
    options = {"namespace": namespace(), "layout": small_layout(), "timeout_s": 0.05}
    with pytest.raises(kvd_client.DaemonUnavailable, match=f"kvd serve --socket {path}"):
        kvd_client.connect(path, required=True, **options)  # type: ignore[arg-type]
    client = kvd_client.connect(path, **options)  # type: ignore[arg-type]
    hashes = client.chunk_hashes(tokens(2))
    assert client.lookup(hashes) == (0, 0, 0)
    assert not client.acquire(hashes)
    assert client.reserve(hashes).slots == ()
    assert not client.ping()
    assert not client.attach(client.acquire(hashes).token)
    client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_an_unknown_uid_is_told_which_table_to_fill(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """A uid of no tenant is refused by its number, also when the daemon closes first."""
    config = tmp_path / "kvd.toml"
    config.write_text("socket_mode = 0o666\n")
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon.start()
    for folder in [daemon.directory, daemon.directory.parent]:
        folder.chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            join(daemon)
        except kvd_client.Refused as refused:
            os.write(writer, f"{refused.code} {refused}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    assert said.startswith("2 uid 65534 belongs to no tenant")
    assert "[tenants.NAME]" in said


def refusal_of(daemon: DaemonProcess, hello: wire.Hello) -> kvd_client.Refused:
    """Greet and return the refusal."""
    connection = Connection(daemon.socket, hello)
    assert connection.wait(PATIENCE_S)
    with pytest.raises(kvd_client.Refused) as refused:
        connection.greet()
    connection.close(bye=False)
    return refused.value


GOOD = wire.Hello(wire.PROTOCOL, "raw", namespace().id, "raw", small_layout().fields(), 0, 0)
LARGE = kvd_client.Layout(16, 16, "float32", (kvd_client.Group("full", 2, 2, 64, 1 << 30),))


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        (GOOD._replace(protocol=2), Refusal.PROTOCOL, "same release"),
        (GOOD._replace(rank=1), Refusal.BAD_LAYOUT, "rank 1"),
        (GOOD._replace(layout=[1, 2]), Refusal.BAD_LAYOUT, "7 fields"),
        (GOOD._replace(layout=LARGE.fields()), Refusal.BAD_LAYOUT, "slab_bytes"),
        (GOOD._replace(namespace=b"short"), Refusal.MALFORMED, "exactly 32 bytes"),
    ],
    ids=["protocol", "rank", "layout", "too large", "namespace"],
)
def test_a_bad_greeting_is_refused_with_its_reason(
    daemon: DaemonProcess, hello: wire.Hello, code: Refusal, words: str
) -> None:
    """Each refusal carries a code for programs and words for people."""
    refused = refusal_of(daemon, hello)
    assert refused.code == code
    assert words in refused.text


SILENT = """
import socket, sys
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(sys.argv[1])
print(client.recv(4096))
"""


def test_a_silent_client_is_closed(daemon: DaemonProcess) -> None:
    """Whoever does not greet in time is told so and costs nothing more."""
    connection = Connection(daemon.socket, GOOD._replace(protocol=wire.PROTOCOL))
    while not connection.greet():
        assert connection.wait(PATIENCE_S)
    connection.close(bye=True)
    silent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SILENT,
            daemon.socket,
        ],
        stdout=subprocess.PIPE,
    )
    output, _ = silent.communicate(timeout=40)
    assert b"greeting did not come in time" in output


def test_arguments_are_checked_before_they_are_sent(connect: Connect) -> None:
    """A wrong argument is a ValueError that names it; the session lives on."""
    client = connect()
    hashes = client.chunk_hashes(tokens(2))
    store(client, hashes)
    with pytest.raises(ValueError, match="hashes must be 32 bytes"):
        client.lookup([b"short"])
    with pytest.raises(ValueError, match="first must be"):
        client.acquire(hashes, first=3)
    with pytest.raises(ValueError, match="ttl_s"):
        client.acquire(hashes, ttl_s=-1)
    with pytest.raises(ValueError, match="groups must be"):
        client.reserve(hashes, groups=[1])
    with pytest.raises(ValueError, match="token must be"):
        client.attach(b"x")
    assert client.acquire(hashes, ttl_s=1e9)
    assert load(client, hashes) == 2


def test_a_lease_tells_as_much_as_a_reply_can(connect: Connect) -> None:
    """Thousands of chunks in several groups are held as far as one reply tells, and usable."""
    group = kvd_client.Group("full", 1, 1, 64, 4096)
    client = connect(layout=kvd_client.Layout(16, 16, "float32", (group, group, group)))
    hashes = client.chunk_hashes(tokens(2000))
    for first in range(0, 2000, 500):
        with client.reserve(hashes[: first + 500], first=first) as reservation:
            assert client.publish(reservation) == [kvd_client.Status.OK] * 1500
    assert client.lookup(hashes).chunks == 2000
    with client.acquire(hashes) as lease:
        assert lease.chunks == wire.HASHES_MAX // 3
        assert lease.has(lease.chunks - 1, 2)
    assert client.connected


def test_a_lease_outlives_its_session(daemon: DaemonProcess, connect: Connect) -> None:
    """Once the daemon is known to be gone, a held lease still reads every byte."""
    client = connect()
    hashes = client.chunk_hashes(tokens(4))
    store(client, hashes)
    lease = client.acquire(hashes)
    daemon.kill()
    assert client.lookup(hashes).chunks == 0
    assert not client.connected
    for chunk in range(4):
        assert bytes(lease.view(chunk)) == stamp(hashes[chunk], len(lease.view(chunk)))


def test_an_ordinary_restart_is_found_at_once(daemon: DaemonProcess, connect: Connect) -> None:
    """A draining daemon's refusal is passing: the next one is found by the usual attempts, and not
    after the pause that follows a refusal for good.
    """
    client = connect()
    assert daemon.stop() == 0
    assert client.lookup(client.chunk_hashes(tokens(1))).chunks == 0
    daemon.start()
    deadline = time.monotonic() + REFUSED_S / 2
    while not client.connected:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_orphans_count_as_sessions(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """A process that loses session after session in use runs into its tenant's limit, no other."""
    config = tmp_path / "kvd.toml"
    config.write_text("[limits]\nsessions = 5\n")
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon.start()
    held: list[kvd_client.Reservation] = []
    refused = None
    for number in range(6):
        try:
            client = join(daemon, required=False, timeout_s=0.3 if number == 5 else PATIENCE_S)
        except kvd_client.Refused as error:
            refused = error
            break
        if not client.connected:
            break
        held.append(client.reserve(client.chunk_hashes(tokens(1, seed=len(held)))))
        session = client._link.session
        assert session is not None
        session.close(bye=False)
    assert len(held) == 5
    assert refused is None, "too many sessions is a passing refusal"
