"""Daemons that die, are stopped or come back: engines live on, a miss at worst."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

import kvd_client
from kvd import statpage
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import join, load, stamp, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._daemon import DaemonProcess

    Connect = Callable[..., kvd_client.Client]


def reconnect(client: kvd_client.Client, limit_s: float = 20.0) -> None:
    """Wait until the client has a session again, by its own back-off."""
    deadline = time.monotonic() + limit_s
    while not client.connected:
        assert time.monotonic() < deadline, "no new session"
        time.sleep(0.01)


def test_a_client_outlives_the_daemon_and_finds_the_next(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Killed mid-copy: the copy ends right, everything is a miss, a new epoch serves again."""
    client = connect()
    hashes = client.chunk_hashes(tokens(200))
    store(client, hashes)
    epoch = client.epoch
    lease = client.acquire(hashes)
    reservation = client.reserve(client.chunk_hashes(tokens(3, seed=8)))
    for chunk in range(100):
        assert bytes(lease.view(chunk)) == stamp(hashes[chunk], len(lease.view(chunk)))
    daemon.kill()
    for chunk in range(100, 200):
        assert bytes(lease.view(chunk)) == stamp(hashes[chunk], len(lease.view(chunk)))
    assert client.lookup(hashes) == (0, 0, 0)
    assert not client.acquire(hashes)
    assert client.reserve(hashes).slots == ()
    assert client.publish(reservation) == [kvd_client.Status.STALE] * 3
    lease.release()
    daemon.start()
    reconnect(client)
    assert client.epoch != epoch
    assert client.lookup(hashes).chunks == 0
    assert store(client, hashes) == 200
    assert load(client, hashes) == 200


def test_a_stopped_daemon_costs_one_bounded_wait(daemon: DaemonProcess, connect: Connect) -> None:
    """The first call waits its bound, the next ones do not; a late reply is given back."""
    writer, client = connect(), connect(wait_s=0.2)
    hashes = client.chunk_hashes(tokens(10))
    assert store(writer, hashes) == 10
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert not client.acquire(hashes)
        waited = time.monotonic() - start
        assert 0.15 < waited < 10.0
        start = time.monotonic()
        for _ in range(100):
            assert client.lookup(hashes).chunks == 0
        assert time.monotonic() - start < 10, "a stalled daemon is asked no more"  # 100 x 0.2 s
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 15
    while client.lookup(hashes).chunks != 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    deadline = time.monotonic() + 15
    while statpage.read(stat_page_name(daemon.socket)).stats["host"]["pinned_bytes"]:
        assert time.monotonic() < deadline, "the late lease was not given back"
        time.sleep(0.02)
        client.poll()


def test_stat_answers_while_the_daemon_is_stopped(daemon: DaemonProcess) -> None:
    """`kvd stat` reads the page without the daemon, and says how old it is."""
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    try:
        stat = subprocess.run(
            [sys.executable, "-m", "kvd", "stat", "--socket", daemon.socket],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert stat.returncode == 3, stat.stderr
    assert "stopped" in stat.stdout + stat.stderr
    assert str(daemon.pid) in stat.stdout + stat.stderr


def test_a_second_daemon_says_who_is_there(
    daemon: DaemonProcess, make_daemon: Callable[..., DaemonProcess]
) -> None:
    """The same state, or the same socket, is refused with the holder's pid; the first goes on."""
    same_state = make_daemon("a")
    same_state.start(until=None)
    assert same_state.process.wait(30) == 2
    text = same_state.log.read_text()
    assert f"in use by kvd pid {daemon.pid}" in text
    same_socket = make_daemon("b", arguments=["--socket", daemon.socket])
    same_socket.start(until=None)
    assert same_socket.process.wait(30) == 2
    assert f"process {daemon.pid} already listens" in same_socket.log.read_text()
    client = join(daemon)
    assert client.ping()
    client.close()


def test_a_killed_daemon_leaves_nothing_in_the_way(daemon: DaemonProcess, connect: Connect) -> None:
    """Socket, page and lock of a killed daemon do not stop the next one."""
    daemon.kill()
    assert os.path.exists(daemon.socket)  # noqa: PTH110
    daemon.start()
    assert connect().ping()


def test_the_next_daemon_sweeps_a_dead_ones_page(
    daemon: DaemonProcess, make_daemon: Callable[..., DaemonProcess]
) -> None:
    """A page whose daemon was killed is gone once any other daemon has started."""
    page = stat_page_name(daemon.socket)[1:]
    other = make_daemon("b")
    other.start()
    assert page in os.listdir("/dev/shm"), "a live daemon's page is left alone"  # noqa: PTH208
    other.stop()
    daemon.kill()
    other.start()
    assert page not in os.listdir("/dev/shm")  # noqa: PTH208


def counts(pid: int) -> tuple[int, int, int]:
    """Return a process's descriptors, maps and threads."""
    with open(f"/proc/{pid}/maps") as maps:  # noqa: PTH123
        return (
            len(os.listdir(f"/proc/{pid}/fd")),  # noqa: PTH208
            sum(1 for _ in maps),
            len(os.listdir(f"/proc/{pid}/task")),  # noqa: PTH208
        )


def settled(daemon: DaemonProcess, keeper: kvd_client.Client) -> tuple[int, int, int]:
    """Return its counts once every session but the keeper's is gone, as a new page says."""
    assert keeper.ping()
    since, deadline = time.monotonic(), time.monotonic() + 20
    while True:
        snapshot = statpage.read(stat_page_name(daemon.socket))
        page = snapshot.stats
        left = (page["session_count"], page["orphans"], page["leases"])
        if left == (1, 0, 0) and snapshot.age_s < time.monotonic() - since:
            return counts(daemon.pid)
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.timeout(300)
def test_a_thousand_sessions_leave_nothing(daemon: DaemonProcess, connect: Connect) -> None:
    """Descriptors, maps, threads and shared memory are flat after 1,000 connects, in any style."""
    keeper = connect()
    hashes = keeper.chunk_hashes(tokens(4))
    store(keeper, hashes)

    def cycle(number: int) -> None:
        client = join(daemon)
        if number % 4 == 1:
            load(client, hashes)
        if number % 4 == 2:
            client.abort(client.reserve(client.chunk_hashes(tokens(2, seed=number))))
        if number % 4 == 3:
            session = client._link.session
            assert session is not None
            session.send(b"garbage")
        client.close()

    for number in range(40):
        cycle(number)
    before = settled(daemon, keeper), counts(os.getpid())
    for number in range(1000):
        cycle(number)
    after = settled(daemon, keeper), counts(os.getpid())
    assert after[0][0] == before[0][0], "the daemon's descriptors"
    assert abs(after[0][1] - before[0][1]) <= 4, "the daemon's maps"
    assert after[0][2] == before[0][2], "the daemon's threads"
    assert after[1][0] == before[1][0], "the client's descriptors"
    assert abs(after[1][1] - before[1][1]) <= 4, "the client's maps"
    keeper.close()
    assert daemon.stop() == 0
    assert stat_page_name(daemon.socket)[1:] not in os.listdir("/dev/shm")  # noqa: PTH208


def test_clients_in_threads_share_one_session(connect: Connect) -> None:
    """A client may be used from several threads at once."""
    client = connect()
    hashes = client.chunk_hashes(tokens(30))
    store(client, hashes)
    loads: list[int] = []

    def work() -> None:
        loads.extend(load(client, hashes) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [30] * 200
