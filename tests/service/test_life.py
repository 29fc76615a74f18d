"""The daemon under systemd: its socket, its word that it is ready, and its watchdog."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvd_client
from kvd import activation, health, statpage
from kvd.errors import StartError
from kvd.ipc.listener import Listener
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import PATIENCE_S, join, load, namespace, small_layout, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

LIMIT_S = 30.0
"""Generous: what is waited for takes well under a second on an idle machine."""


class Notified:
    """Systemd's end of the notify socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def wait(self, word: str) -> str:
        """Return the datagram that has a word, within the limit."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            text = self._socket.recv(4096).decode()
            if word in text:
                return text

    def drain(self) -> int:
        """Read what is there; return how many watchdog words."""
        self._socket.settimeout(0)
        count = 0
        while True:
            try:
                count += b"WATCHDOG=1" in self._socket.recv(4096)
            except BlockingIOError:
                return count

    def is_silent(self) -> bool:
        """Tell whether no watchdog word comes for three turns of the loop."""
        self.drain()
        time.sleep(0.6)
        return not self.drain()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notified]:
    """Stand in for systemd's notify socket, for the daemons that a test starts."""
    end = Notified(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(end.path))
    yield end
    end.close()


def until(what: Callable[[], bool], why: str) -> None:
    """Wait for something, within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


def test_systemd_hears_ready_life_and_the_end(
    make_daemon: Callable[..., DaemonProcess], notified: Notified
) -> None:
    """READY when clients are served, WATCHDOG again and again, STOPPING on the way out."""
    daemon = make_daemon()
    daemon.start()
    assert "STATUS=serving" in notified.wait("READY=1")
    notified.wait("WATCHDOG=1")
    notified.wait("WATCHDOG=1")
    daemon.process.terminate()
    notified.wait("STOPPING=1")
    assert daemon.process.wait(LIMIT_S) == 0


def stat_code(daemon: DaemonProcess) -> tuple[int, str]:
    """Run `kvd stat`."""
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "stat", "--socket", daemon.socket],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "case",
    [
        ("loop.tick:5", "does not answer"),
        ("mover.turn:5", "mover hangs"),
        ("nvme.call", "nvme pool hangs"),
        ("index.turn", "index thread hangs"),
    ],
)
def test_a_hanging_loop_task_or_thread_is_seen(
    make_daemon: Callable[..., DaemonProcess],
    notified: Notified,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: tuple[str, str],
) -> None:
    """When the loop, its mover or a thread hangs, `kvd stat` says so and systemd hears nothing.

    The threads have nothing to do, and so nothing to hang in, before something is stored.
    """
    point, sign = case
    monkeypatch.setenv("KVD_STALL", point)
    config = tmp_path / "kvd.toml"
    config.write_text('[nvme]\nbytes = "1GiB"\nform = "raw"\n')
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon.start(until="ready")
    if point in {"nvme.call", "index.turn"}:
        with join(daemon) as client:
            assert store(client, client.chunk_hashes(tokens(2))) == 2
    until(lambda: sign in (seen := stat_code(daemon))[1] and seen[0] == 3, "kvd stat is blind")
    snapshot = statpage.read(stat_page_name(daemon.socket))
    verdict = health.judge(
        snapshot.stats, age_s=snapshot.age_s, pid=snapshot.pid, alive=snapshot.alive
    )
    assert verdict.level == "failing"
    until(notified.is_silent, "the watchdog is fed all the same")


def test_the_first_client_starts_the_daemon(tmp_path: Path, notified: Notified) -> None:
    """With systemd's socket the client's connection waits until the daemon is there, and is served;
    the path stays when the daemon goes.
    """
    tool = shutil.which("systemd-socket-activate")
    if tool is None:
        pytest.skip("systemd is not installed")
    path = str(tmp_path / "kvd.sock")
    passed = [f"--setenv={n}" for n in ("NOTIFY_SOCKET", "PATH", "HOME") if n in os.environ]
    serve = ["-m", "kvd", "serve", "--socket", path, "--host-bytes", "16MiB"]
    state = ["--state-dir", str(tmp_path / "state")]
    activate = [tool, "--seqpacket", f"--listen={path}", "--fdname=kvd", *passed]
    process = subprocess.Popen(
        [*activate, sys.executable, *serve, *state], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: Path(path).exists(), "nobody listens")
        client = patient(path)
        notified.wait("READY=1")
        hashes = client.chunk_hashes(tokens(3))
        assert store(client, hashes) == 3
        assert load(client, hashes) == 3
        client.close()
        assert statpage.read(stat_page_name(path)).pid == process.pid
        process.terminate()
        assert process.wait(LIMIT_S) == 0
        assert Path(path).exists(), "the socket is systemd's to remove"
    finally:
        process.kill()
        process.wait()
    with pytest.raises(statpage.NoStatPage):
        statpage.read(stat_page_name(path))


def patient(path: str) -> kvd_client.Client:
    """Connect as an engine does: within its own bound, and again a little later."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return kvd_client.connect(
                path,
                namespace=namespace(),
                layout=small_layout(),
                required=True,
                wait_s=PATIENCE_S,
            )
        except kvd_client.DaemonUnavailable:
            assert time.monotonic() < deadline, "the daemon was not started"
            time.sleep(0.05)


def bound(path: Path, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """Return a listening socket, as systemd makes one."""
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    made.listen(5)
    return made


def test_a_socket_elsewhere_is_refused(tmp_path: Path) -> None:
    """A socket of another path or kind is not served: nobody would find the daemon there."""
    with bound(tmp_path / "a") as elsewhere, bound(tmp_path / "b", socket.SOCK_STREAM) as stream:
        with pytest.raises(StartError, match="ListenSequentialPacket"):
            Listener(str(tmp_path / "c"), 0o660, elsewhere.detach())
        with pytest.raises(StartError, match="ListenSequentialPacket"):
            Listener(str(tmp_path / "b"), 0o660, stream.detach())


@pytest.mark.parametrize("pid", ["1", "", "x"])
def test_what_is_meant_for_another_process_is_left_alone(
    pid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors for another process are not taken, and the words do not go on to children."""
    monkeypatch.setenv("LISTEN_PID", pid)
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_FDNAMES", "a:b")
    assert activation.take() == []
    assert not {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} & set(os.environ)
