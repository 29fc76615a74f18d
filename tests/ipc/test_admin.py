"""The admin channel of a real daemon: who gets in, what each sees, and what nobody can do to it."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd import cli
from kvd.admin import names
from kvd.admin.client import Admin, Denied, NoDaemon
from kvd.ipc.admin import ADMINS_MAX
from kvd_client import wire
from kvd_client.errors import KvdError
from kvd_client.wire import Refusal
from tests.daemon_fixture import (
    CHUNK_TOKENS,
    OBJECT_BYTES,
    PATIENCE_S,
    join,
    namespace,
    small_layout,
    store,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._daemon import DaemonProcess

    Connect = Callable[..., kvd_client.Client]
    MakeDaemon = Callable[..., DaemonProcess]

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def configured(make_daemon: MakeDaemon, text: str) -> DaemonProcess:
    """Start a daemon with a configuration, reachable by every user."""
    daemon = make_daemon()
    config = daemon.directory / "kvd.toml"
    config.write_text(f"socket_mode = 0o666\n{text}", encoding="utf-8")
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon.start()
    for folder in [daemon.directory, daemon.directory.parent]:
        folder.chmod(0o755)
    return daemon


def as_nobody(work: Callable[[], object]) -> Any:
    """Do something as another user, in a process of its own; return what it returned, as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        return json.load(told)


def stored(client: kvd_client.Client, chunks: int) -> list[bytes]:
    """Store a chain; return its hashes."""
    hashes = client.chunk_hashes(tokens(chunks))
    assert store(client, hashes) == chunks
    return hashes


def until_denied(admin: Admin, *ask: Any) -> None:
    """Ask again and again until the namespace is gone."""
    said = ""
    while "is gone" not in said:
        try:
            admin.ask(*ask)
        except Denied as denied:
            said = str(denied)
        else:
            time.sleep(0.01)


def flood(here: socket.socket, packet: bytes) -> int:
    """Send a packet until the socket is full, or was closed (D2); return how often."""
    here.settimeout(0)
    for count in range(100_000):
        try:
            here.send(packet)
        except (BlockingIOError, ConnectionError):
            return count
    raise AssertionError("the daemon takes everything in")


def raw(daemon: DaemonProcess) -> socket.socket:
    """Connect without greeting."""
    here = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.settimeout(PATIENCE_S)
    here.connect(daemon.socket)
    return here


def told(here: socket.socket) -> Any:
    """Receive one message."""
    return wire.decode(here.recv(wire.PACKET_BYTES_MAX), wire.TO_CLIENT)


def test_namespaces_and_chunks_are_listed(daemon: DaemonProcess, connect: Connect) -> None:
    """What a client stored is there with its bytes, its chain and its leases, page by page."""
    client = connect()
    hashes = stored(client, 150)
    other = connect(namespace=namespace(model="other"))
    stored(other, 1)
    with Admin(daemon.socket) as admin, client.acquire(hashes[:3]):
        known = names.spaces(admin)
        assert sorted(row.label for row in known) == ["model@1", "other@1"]
        space = names.find_one(known, "model@1")
        assert (space.chunks, space.host_bytes) == (150, 150 * OBJECT_BYTES)
        assert (space.nvme_bytes, space.sessions, space.chunk_tokens) == (0, 1, CHUNK_TOKENS)
        assert space.age_s is not None
        assert space.age_s < 60
        pages = list(admin.pages(wire.ListChunks, space.space, 3))
        assert [len(page) for page in pages] == [64, 64, 22]
        rows = [row for page in pages for row in page]
        assert [row[0] for row in rows] == hashes
        assert [row[1] for row in rows] == [b"", *hashes[:-1]]
        assert [row[6] for row in rows] == [1, 1, 1, *([0] * 147)]
        assert {row[2] for row in rows} == {1}
        assert list(admin.pages(wire.ListChunks, space.space, 2)) == [[]]


def test_a_listing_survives_what_happens_meanwhile(daemon: DaemonProcess, connect: Connect) -> None:
    """Between two pages a namespace may vanish: the rest is denied, the connection stays."""
    client = connect()
    client.reserve(client.chunk_hashes(tokens(100)))
    with Admin(daemon.socket) as admin:
        (space,) = names.spaces(admin)
        more, rows = admin.ask(wire.ListChunks, space.space, 3, 0)
        assert (more, rows) == (0, [])  # nothing is published
        client.close()
        until_denied(admin, wire.ListChunks, space.space, 3, 64)
        assert names.spaces(admin) == []


@AS_ROOT
def test_a_tenant_sees_its_own_only(make_daemon: MakeDaemon) -> None:
    """Another user's namespaces are not listed, not named by their id, and not to be drained."""
    daemon = configured(
        make_daemon, f"[tenants.a]\nuids = [{os.geteuid()}]\n[tenants.b]\nuids = [{NOBODY}]\n"
    )
    with join(daemon) as client, Admin(daemon.socket) as admin:
        stored(client, 2)
        (mine,) = names.spaces(admin)
        assert (admin.welcome.tenant, mine.tenant) == ("", "a")

        def look() -> list[object]:
            with Admin(daemon.socket) as theirs:
                said = []
                for ask in ((wire.ListChunks, mine.space, 3, 0), (wire.Drain,)):
                    with pytest.raises(Denied) as denied:
                        theirs.ask(*ask)
                    said.append(str(denied.value))
                with join(daemon) as other:
                    stored(other, 1)
                    return [theirs.welcome.tenant, *said, *[s.tenant for s in names.spaces(theirs)]]

        tenant, gone, no_drain, *seen = as_nobody(look)
        assert (tenant, seen) == ("b", ["b"])
        assert "is gone" in gone
        assert "only root" in no_drain
        assert {row.tenant for row in names.spaces(admin)} == {"a", "b"}


@AS_ROOT
def test_an_operator_of_no_tenant_may_look_but_not_store(make_daemon: MakeDaemon) -> None:
    """Root gets in as an admin where no tenant lists it; for rings it is refused as before."""
    daemon = configured(make_daemon, f"[tenants.b]\nuids = [{NOBODY}]\n")
    with Admin(daemon.socket) as admin:
        assert names.spaces(admin) == []
    with pytest.raises(kvd_client.Refused, match=r"uid 0 belongs to no tenant.*\[tenants\.NAME\]"):
        join(daemon)


def test_an_operator_gets_in_when_all_sessions_are_taken(make_daemon: MakeDaemon) -> None:
    """The look is free when it is needed most, and leaves no charge behind."""
    daemon = configured(make_daemon, "[limits]\nsessions = 1\n")
    for _ in range(3):
        with Admin(daemon.socket) as early, join(daemon) as client:
            store(client, client.chunk_hashes(tokens(1)))
            with Admin(daemon.socket) as late:
                assert len(names.spaces(late)) == len(names.spaces(early)) == 1
            hello = wire.Hello(1, "", bytes(32), "", small_layout().fields(), 0, 0)
            with raw(daemon) as here:
                here.send(wire.encode(hello))
                refused = told(here)
            assert isinstance(refused, wire.Refused)
            assert (refused.code, "1 sessions" in refused.text) == (Refusal.TOO_MANY, True)


def test_admins_have_a_bound(daemon: DaemonProcess) -> None:
    """One too many is refused with the mend; one that leaves makes room."""
    with ExitStack() as stack:
        inside = [stack.enter_context(Admin(daemon.socket)) for _ in range(ADMINS_MAX)]
        with pytest.raises(Denied, match="close some"):
            Admin(daemon.socket)
        inside[0].close()
        while True:
            try:
                stack.enter_context(Admin(daemon.socket))
                break
            except Denied:
                time.sleep(0.01)


@pytest.mark.parametrize(
    ("packets", "code"),
    [
        ([wire.ListSpaces(1, 0)], Refusal.MALFORMED),
        ([wire.AdminHello(1, ""), wire.AdminHello(1, "")], Refusal.MALFORMED),
        ([wire.AdminHello(1, ""), wire.SlabRequest(1)], Refusal.MALFORMED),
        ([wire.AdminHello(1, ""), wire.Bye()], Refusal.MALFORMED),
        ([wire.AdminHello(2, "")], Refusal.PROTOCOL),
    ],
    ids=["no greeting", "two greetings", "a session's request", "a session's end", "protocol"],
)
def test_a_broken_rule_ends_only_that_connection(
    daemon: DaemonProcess, packets: list[Any], code: Refusal
) -> None:
    """The visitor is told which rule; the next one is served."""
    with raw(daemon) as here, Admin(daemon.socket) as admin:
        for packet in packets:
            here.send(wire.encode(packet))
        said = [told(here) for _ in packets]
        assert isinstance(said[-1], wire.Refused)
        assert said[-1].code == code
        assert here.recv(1) == b""
        assert names.spaces(admin) == []


def test_a_session_cannot_become_an_admin(daemon: DaemonProcess, connect: Connect) -> None:
    """After the greeting for rings, admin messages break the protocol."""
    for message in (wire.AdminHello(1, ""), wire.Drain(1)):
        client = connect()
        connection = client._link.connection
        assert connection is not None
        connection._socket.send(wire.encode(message))
        while client.ping():
            time.sleep(0.01)
    with Admin(daemon.socket) as admin:
        assert admin.welcome.pid == daemon.pid


def test_who_asks_without_reading_waits_alone(daemon: DaemonProcess, connect: Connect) -> None:
    """Thousands of requests with nobody reading: engines are served, nothing piles up."""
    stored(client := connect(), 64)
    with raw(daemon) as here, Admin(daemon.socket) as admin:
        here.send(wire.encode(wire.AdminHello(1, "")))
        (space,) = names.spaces(admin)
        assert flood(here, wire.encode(wire.ListChunks(1, space.space, 3, 0)))
        assert client.ping()
        assert len(names.spaces(admin)) == 1


def test_connections_leave_nothing_behind(daemon: DaemonProcess) -> None:
    """Greeted or not, answered or not: every descriptor comes back."""

    def count() -> int:
        return len(os.listdir(f"/proc/{daemon.pid}/fd"))  # noqa: PTH208 - names, not paths

    before = count()
    for index in range(40):
        with raw(daemon) as here:
            if index % 4:
                here.send(wire.encode(wire.AdminHello(1, "")))
            if index % 4 > 1:
                here.send(wire.encode(wire.ListSpaces(1, 0)))
            if index % 4 > 2:
                told(here)
    while count() > before:
        time.sleep(0.01)


def test_no_daemon_is_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line that says how to start one, for each command that asks."""
    for command in ("ls", "drain"):
        assert cli.main([command, "--socket", str(tmp_path / "none")]) == 1
        err = capsys.readouterr().err
        assert "start one with `kvd serve`" in err
        assert err.count("\n") == 1
    with pytest.raises(NoDaemon):
        Admin(str(tmp_path / "none"))


def test_ls_for_people_and_programs(
    daemon: DaemonProcess, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table names what the JSON has; a name that fits none or several is told what there is."""
    at = ["--socket", daemon.socket]
    assert cli.main(["ls", *at]) == 0
    assert "no namespaces" in capsys.readouterr().out
    client = connect()
    hashes = stored(client, 60)
    stored(connect(layout=small_layout(OBJECT_BYTES // 2)), 1)
    assert cli.main(["ls", *at, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["spaces"]
    assert [space["chunks"] for space in listed] == [60, 1]
    assert cli.main(["ls", *at]) == 0
    table = capsys.readouterr().out
    assert all(space["id"] in table for space in listed)
    assert "3.75 MiB" in table
    ident = listed[0]["id"][:8]
    assert cli.main(["ls", ident, *at, "--limit", "5"]) == 0
    out = capsys.readouterr().out
    assert out.count("64.0 KiB") == 5
    assert "--limit 0 shows all" in out
    assert cli.main(["ls", ident, *at, "--limit", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [chunk["chunk"] for chunk in found["chunks"]] == [key.hex() for key in hashes]
    assert not found["more"]
    assert cli.main(["ls", "model@1", *at]) == 2
    assert "several namespaces" in capsys.readouterr().err
    assert cli.main(["ls", "llama", *at]) == 2
    assert listed[1]["id"] in capsys.readouterr().err


@pytest.mark.parametrize("word", ["mo*", "model@1", "5a5a5a"])
def test_a_namespace_is_named_by_label_pattern_or_id(word: str) -> None:
    """Each finds it; an id that is also a label of another is the label's."""
    row = names.SpaceRow(b"\x5a" * 32, "t", "model@1", b"\0" * 32, 16, 1, 0, 0, 0, 0, 0, 0, 0, None)
    other = row._replace(space=b"\xa5" * 32, label="else")
    assert names.find([other, row], word) == [row]
    taken = other._replace(label=word)
    assert names.find([row, taken], word)[0].label == word
    with pytest.raises(KvdError, match="there are: a5a5a5a5a5a5"):
        names.find([other], word)


def test_drain_ends_the_daemon_and_says_so(
    daemon: DaemonProcess, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader that does not end holds it up for drain_s: not done after --wait is code 3."""
    at = ["--socket", daemon.socket]
    client = connect()
    lease = client.acquire(stored(client, 1))
    assert cli.main(["drain", *at, "--wait", "0.01", "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["ended"], said["pid"]) == (False, daemon.pid)
    lease.release()
    assert daemon.process.wait(15) == 0
    assert cli.main(["drain", *at]) == 1


def test_drain_waits_for_the_end(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """With nobody in the way it has ended when the command has, its socket and page gone."""
    assert cli.main(["drain", "--socket", daemon.socket]) == 0
    assert "has ended" in capsys.readouterr().out
    assert not Path(daemon.socket).exists()
    assert daemon.process.wait(15) == 0
