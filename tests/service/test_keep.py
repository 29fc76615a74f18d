"""Host memory over a restart, through a stand-in for systemd's fd store. Never a wrong byte.

`load` of the fixtures checks every byte it reads.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd import keeping, statpage
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import load, namespace, small_layout, stamp, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench._daemon import DaemonProcess

LIMIT_S = 30.0
CHUNKS = 12
WRAPPER = """
import os, sys
names, paths, command = sys.argv[1].split(":"), sys.argv[2].split(":"), sys.argv[3:]
fds = [os.open(path, os.O_RDWR) for path in paths]
for at, fd in enumerate(fds):
    os.dup2(fd, 100 + at)
for at, fd in enumerate(fds):
    os.dup2(100 + at, 3 + at)
    os.close(100 + at)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)))
os.environ["LISTEN_FDNAMES"] = ":".join(names)
os.execv(command[0], command)
"""
"""Stands for systemd's start: passes descriptors by name, from 3 on."""


class FdStore:
    """Systemd's end of the notify socket, with the descriptors that it keeps."""

    def __init__(self, path: Path) -> None:
        self.kept: dict[str, int] = {}
        self.removed: list[str] = []
        self.deaf = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            text, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            lines = text.decode().splitlines()
            name = next((x.removeprefix("FDNAME=") for x in lines if x.startswith("FDNAME=")), "")
            if "END" in lines:
                return
            if "FDSTORE=1" in lines and not self.deaf:
                self.kept[name] = fds.pop()
            if "FDSTOREREMOVE=1" in lines and name in self.kept:
                self.removed.append(name)
                os.close(self.kept.pop(name))
            if self.deaf and "BARRIER=1" in lines:
                continue  # never answered
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """End the thread; let go of everything."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"END", self._socket.getsockname())
        self._thread.join(LIMIT_S)
        self._socket.close()
        for fd in self.kept.values():
            os.close(fd)


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FdStore]:
    """Stand in for systemd, for the daemons that a test starts."""
    made = FdStore(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    yield made
    made.close()


def connect(daemon: DaemonProcess, **options: Any) -> kvd_client.Client:
    """Connect a client."""
    given = {"namespace": namespace(), "layout": small_layout(), "required": True, "wait_s": 5.0}
    return kvd_client.connect(daemon.socket, **{**given, **options})


def end(daemon: DaemonProcess) -> None:
    """Have it drain."""
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(LIMIT_S) == 0


def again(daemon: DaemonProcess, systemd: FdStore, kept: dict[str, int] | None = None) -> None:
    """Start it as systemd does: with what the store has."""
    given = dict(systemd.kept) if kept is None else kept
    plain = list(daemon._command)
    if given:
        paths = ":".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in given.values())
        wrapped = [sys.executable, "-c", WRAPPER, ":".join(given), paths, *plain]
        daemon._command = wrapped
    try:
        daemon.start()
    finally:
        daemon._command = plain


def copies(systemd: FdStore) -> dict[str, int]:
    """Hold what the store has, for the test itself."""
    return {name: os.dup(fd) for name, fd in systemd.kept.items()}


def host(daemon: DaemonProcess) -> dict[str, Any]:
    """Read what it says of host memory, in a page written from now on."""
    now = time.monotonic()
    deadline = now + LIMIT_S
    while True:
        with suppress(statpage.NoStatPage):
            found = statpage.read(stat_page_name(daemon.socket))
            if found.pid == daemon.pid and time.monotonic() - found.age_s > now:
                return dict(found.stats["host"])
        assert time.monotonic() < deadline
        time.sleep(0.02)


def filled(daemon: DaemonProcess, seeds: int = 3) -> list[list[bytes]]:
    """Store some chains."""
    with connect(daemon) as client:
        chains = [client.chunk_hashes(tokens(CHUNKS, seed)) for seed in range(seeds)]
        for chain in chains:
            first, deadline = 0, time.monotonic() + LIMIT_S
            while first < CHUNKS:  # where NVMe is slower than the test, part of it finds no room
                first += store(client, chain, first)
                assert time.monotonic() < deadline
    return chains


def found(daemon: DaemonProcess, chains: list[list[bytes]]) -> list[int]:
    """Load chains, each byte checked; return the chunks of each."""
    with connect(daemon) as client:
        return [load(client, chain) for chain in chains]


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess], systemd: FdStore) -> DaemonProcess:
    """Run a daemon of eight slabs of 2 MiB, told to systemd."""
    del systemd
    made = make_daemon(host_bytes=16 << 20)
    made.start()
    return made


def test_a_restart_keeps_host_memory(daemon: DaemonProcess, systemd: FdStore) -> None:
    """All is found again, and the store is empty; what comes after is stored as ever; twice."""
    chains = filled(daemon)
    for _ in range(2):
        used = host(daemon)["used_bytes"]
        end(daemon)
        assert keeping.CATALOG_NAME in systemd.kept
        again(daemon, systemd)
        assert host(daemon)["used_bytes"] == used
        assert systemd.kept == {}
        assert found(daemon, chains) == [CHUNKS] * len(chains)
        with connect(daemon) as client:
            chains.append(client.chunk_hashes(tokens(CHUNKS, 10 + len(chains))))
            assert store(client, chains[-1]) == CHUNKS
    assert host(daemon)["capacity_bytes"] == host(daemon)["ready_bytes"]


def test_a_full_tier_goes_on_evicting(daemon: DaemonProcess, systemd: FdStore) -> None:
    """What was taken up again is evicted, the least lately used first, and its memory used."""
    chains = filled(daemon, 18)
    with connect(daemon) as client:
        last = load(client, chains[-1])
        assert last == CHUNKS
    end(daemon)
    again(daemon, systemd)
    more = []
    with connect(daemon) as client:
        for seed in range(100, 105):
            more.append(client.chunk_hashes(tokens(CHUNKS, seed)))
            assert store(client, more[-1]) == CHUNKS
    assert found(daemon, more) == [CHUNKS] * 5
    assert found(daemon, [chains[-1]]) == [CHUNKS], "it was used last"
    assert all(count in range(CHUNKS + 1) for count in found(daemon, chains))


@pytest.mark.parametrize("lives", [2, 30])
def test_killed_afterwards_nothing_old_comes_back(
    daemon: DaemonProcess, systemd: FdStore, lives: int
) -> None:
    """A picture is good for one start, whoever still has it: the next one begins empty."""
    chains = filled(daemon)
    end(daemon)
    kept = copies(systemd)
    again(daemon, systemd)
    with connect(daemon) as client:
        for seed in range(200, 200 + lives):  # other bytes come into all of the memory, or some
            store(client, client.chunk_hashes(tokens(CHUNKS, seed)))
    daemon.kill()
    again(daemon, systemd, kept)
    assert host(daemon)["used_bytes"] == 0
    assert found(daemon, chains) == [0] * len(chains)
    for fd in kept.values():
        os.close(fd)


def test_killed_at_once_it_begins_empty(daemon: DaemonProcess, systemd: FdStore) -> None:
    """Without an orderly end nothing is kept."""
    chains = filled(daemon)
    daemon.kill()
    assert systemd.kept == {}
    again(daemon, systemd)
    assert found(daemon, chains) == [0] * len(chains)


def test_a_changed_byte_loses_that_chunk_and_its_tail(
    daemon: DaemonProcess, systemd: FdStore
) -> None:
    """Whoever wrote late, what he wrote is not believed; everything else is there."""
    chains = filled(daemon)
    end(daemon)
    name = next(name for name in systemd.kept if name.startswith(keeping.SLAB_NAME))
    os.pwrite(systemd.kept[name], b"!", 5 * (64 << 10) + 17)
    again(daemon, systemd)
    counts = found(daemon, chains)
    assert sum(counts) < CHUNKS * len(chains)
    assert sorted(counts)[1:] == [CHUNKS] * (len(chains) - 1)
    assert "damaged=1" in daemon.log.read_text()


@pytest.mark.parametrize("verify", ["off", "always"])
def test_a_byte_changed_before_the_end_is_seen_where_it_was_summed_before(
    make_daemon: Callable[..., DaemonProcess], systemd: FdStore, tmp_path: Path, verify: str
) -> None:
    """The sum of a verified object goes on into the next life: what was changed since it was
    published is not taken up. Of others nobody knows what they were.
    """
    config = tmp_path / "kvd.toml"
    config.write_text(f'[host]\nverify = "{verify}"\n')
    daemon = make_daemon(host_bytes=16 << 20, arguments=["--config", str(config)])
    daemon.start()
    with connect(daemon) as client:
        hashes = client.chunk_hashes(tokens(CHUNKS))
        with client.reserve(hashes) as reservation:
            for slot in reservation.placed:
                assert slot.buffer is not None
                slot.buffer[:] = stamp(hashes[slot.chunk], len(slot.buffer))
            view = reservation.placed[2].buffer[:]  # type: ignore[index]
            client.publish(reservation)
        deadline = time.monotonic() + LIMIT_S
        while host(daemon).get("summed", CHUNKS) < CHUNKS:
            assert time.monotonic() < deadline
        view[17] ^= 1
        view.release()
    end(daemon)
    again(daemon, systemd)
    with connect(daemon) as client:
        assert client.lookup(hashes).chunks == (2 if verify == "always" else CHUNKS)


@pytest.mark.parametrize("where", ["head", "body", "missing slab", "state"])
def test_a_damaged_picture_is_not_believed(
    daemon: DaemonProcess, systemd: FdStore, where: str
) -> None:
    """Then memory begins empty, or without that slab, and the daemon starts all the same."""
    chains = filled(daemon)
    end(daemon)
    fd = systemd.kept[keeping.CATALOG_NAME]
    if where == "missing slab":
        name = next(name for name in systemd.kept if name.startswith(keeping.SLAB_NAME))
        os.close(systemd.kept.pop(name))
    else:
        at, byte = {"head": (12, b"\x09"), "body": (4200, b"!!"), "state": (8, b"\x00")}[where]
        os.pwrite(fd, byte, at)
    again(daemon, systemd)
    assert sum(found(daemon, chains)) < CHUNKS * len(chains)
    with connect(daemon) as client:
        fresh = client.chunk_hashes(tokens(CHUNKS, 77))
        assert store(client, fresh) == CHUNKS
    assert found(daemon, [fresh]) == [CHUNKS]


def test_who_still_reads_or_writes_keeps_his_slab_from_it(
    daemon: DaemonProcess, systemd: FdStore
) -> None:
    """Slabs of a lease or a reservation whose process lives on are not kept: nobody's memory is
    used anew under him, and he is told no other bytes than he asked for.
    """
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.wait(LIMIT_S)
    daemon._command += ["--config", str(daemon.directory / "kvd.toml")]
    (daemon.directory / "kvd.toml").write_text("[limits]\ndrain_s = 0.2\n")
    again(daemon, systemd)
    chains = filled(daemon, 1)
    reader, writer = connect(daemon), connect(daemon, layout=small_layout(128 << 10))
    lease = reader.acquire(chains[0])
    view = lease.view(0)
    before = bytes(view)
    reservation = writer.reserve(writer.chunk_hashes(tokens(3, 9)))
    assert reservation.placed
    end(daemon)
    assert keeping.CATALOG_NAME not in systemd.kept
    again(daemon, systemd)
    assert host(daemon)["used_bytes"] == 0
    filled(daemon, 30)
    assert bytes(view) == before
    for client in (reader, writer):
        client.close()


def test_another_configuration_takes_what_fits(daemon: DaemonProcess, systemd: FdStore) -> None:
    """Slabs of another size, or more than there may be, are let go; the daemon starts."""
    chains = filled(daemon)
    end(daemon)
    at = daemon._command.index("--host-bytes") + 1
    daemon._command[at] = str(4 << 20)
    again(daemon, systemd)
    assert systemd.kept == {}
    assert all(count in range(CHUNKS + 1) for count in found(daemon, chains))
    end(daemon)
    (daemon.directory / "kvd.toml").write_text('[host]\nslab_bytes = "4MiB"\n')
    daemon._command[at] = str(16 << 20)
    daemon._command += ["--config", str(daemon.directory / "kvd.toml")]
    again(daemon, systemd)
    assert found(daemon, chains) == [0] * len(chains)


def test_with_nvme_below(
    make_daemon: Callable[..., DaemonProcess], systemd: FdStore, tmp_path: Path
) -> None:
    """Chunks that lie in both are one chunk: nothing has to come up, and all is found."""
    config = tmp_path / "kvd.toml"
    config.write_text('[nvme]\nbytes = "64MiB"\nregion_bytes = "4MiB"\nform = "raw"\n')
    daemon = make_daemon(host_bytes=16 << 20, arguments=["--config", str(config)])
    daemon.start()
    chains = filled(daemon, 25)  # more than host memory
    end(daemon)
    again(daemon, systemd)
    assert host(daemon)["used_bytes"] > 0
    assert found(daemon, chains) == [CHUNKS] * 25
    page = statpage.read(stat_page_name(daemon.socket)).stats
    assert page["chunks"] == 25 * CHUNKS


def test_systemd_that_keeps_nothing(daemon: DaemonProcess, systemd: FdStore) -> None:
    """The end is the same, and the next start begins empty."""
    systemd.deaf = True
    chains = filled(daemon)
    end(daemon)
    assert systemd.kept == {}
    assert "does not take" in daemon.log.read_text()
    again(daemon, systemd)
    assert found(daemon, chains) == [0] * len(chains)
