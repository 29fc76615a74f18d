"""A real daemon whose disk is full, fails or stalls: host memory goes on, NVMe comes back.

Full: small file systems of their own, filled from outside (as root, otherwise skipped). Failing and
stalling: a library that is loaded into the daemon before libc (with a C compiler, otherwise
skipped).
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvd import check as kvd_check
from kvd import statpage
from kvd.daemon import EXIT_GAVE_UP
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import join, load, store, tokens
from tests.faults.faulty_disk import FaultyDisk, faulty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench._daemon import DaemonProcess

    MakeDaemon = Callable[..., DaemonProcess]

__all__ = ["faulty"]
CONFIG: Final = """
[nvme]
directory = "{directory}"
bytes = "{size}"
region_bytes = "2MiB"
form = "raw"
flush_s = 2.0
"""
HOST_BYTES: Final = 8 << 20
MOUNT_BYTES: Final = 40 << 20
RECOVERY_S: Final = 60.0
STORE_S: Final = 30.0


class Rig:
    """A daemon with an NVMe tier somewhere, and a client that expects no error ever."""

    def __init__(self, make_daemon: MakeDaemon, directory: Path, tmp_path: Path, size: str) -> None:
        config = tmp_path / "kvd.toml"
        config.write_text(CONFIG.format(directory=directory, size=size))
        self.directory = directory
        self.daemon = make_daemon(host_bytes=HOST_BYTES, arguments=["--config", str(config)])
        self.start()

    def start(self) -> None:
        """Start the daemon and connect."""
        self.daemon.start()
        self.client = join(self.daemon)

    def restart(self) -> None:
        """Stop it in order, and start it again: nothing is in host memory then."""
        self.client.close()
        assert self.daemon.stop() == 0
        self.start()

    def chain(self, seed: int, chunks: int = 16) -> list[bytes]:
        """Return the hashes of a chain."""
        return self.client.chunk_hashes(tokens(chunks, seed=seed))

    def store(self, seed: int, chunks: int = 16) -> list[bytes]:
        """Store a chain; all of it gets in within a time."""
        chain = self.chain(seed, chunks)
        first, deadline = 0, time.monotonic() + STORE_S
        while first < chunks:
            first += store(self.client, chain, first)
            assert time.monotonic() < deadline, self.page()
        return chain

    def page(self) -> dict[str, Any]:
        """Read the statistics page."""
        return dict(statpage.read(stat_page_name(self.daemon.socket)).stats)

    def wait(self, holds: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any]:
        """Wait until the statistics say so, on a page that is written from now on; return it."""
        since, deadline = time.monotonic(), time.monotonic() + limit_s
        while True:
            found = statpage.read(stat_page_name(self.daemon.socket))
            page = dict(found.stats)
            if found.age_s < time.monotonic() - since and holds(page):
                return page
            assert self.daemon.process.poll() is None, self.daemon.log.read_text()[-2000:]
            assert time.monotonic() < deadline, page
            time.sleep(0.05)

    def wait_durable(self, limit_s: float = RECOVERY_S) -> dict[str, Any]:
        """Wait until the tier is open and nothing is the only copy."""

        def durable(page: dict[str, Any]) -> bool:
            nvme = page["nvme"]
            return bool(nvme["state"] == "open" and nvme["demoting"] and nvme["dirty_bytes"] == 0)

        return self.wait(durable, limit_s)

    def finish(self, *chains: list[bytes]) -> None:
        """Everything that is offered after a restart has its bytes, and the store is whole."""
        self.restart()
        for chain in chains:
            assert load(self.client, chain) == len(chain)
        self.client.close()
        assert self.daemon.stop() == 0
        assert kvd_check.check(self.directory).good


# ---------------------------------------------------------------------------------- full


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of MOUNT_BYTES."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "tmpfs", str(where)]
    if request.param == "ext4":
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 here")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(MOUNT_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        mount = ["mount", "-o", "loop", str(image), str(where)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount {request.param} here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill_up(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for piece in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(piece))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_disk_that_somebody_else_fills(
    small_disk: Path, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """Full: stores and loads go on, in host memory; emptied: NVMe takes in again, by itself."""
    rig = Rig(make_daemon, small_disk / "nvme", tmp_path, "64MiB")
    first = rig.store(1)
    rig.wait_durable()
    before = rig.page()["nvme"]["counters"]
    fill_up(small_disk / "filler")
    newest = first
    for seed in range(2, 40):  # 38 MiB: more than the tier below has room for
        newest = rig.store(seed)
        assert load(rig.client, newest) == len(newest), "what was just stored is there"
    page = rig.page()
    assert page["nvme"]["used_bytes"] < MOUNT_BYTES
    assert page["counters"]["sessions_ended_badly"] == 0
    for seed in range(1, 40):
        load(rig.client, rig.chain(seed))  # a miss at worst
    assert before["refused_space"] == 0
    (small_disk / "filler").unlink()
    latest = rig.store(50)
    page = rig.wait_durable()
    counters = page["nvme"]["counters"]
    assert counters["openings"] == counters["closures"]
    held = page["nvme"]["regions_held"]
    for seed in range(60, 72):
        rig.store(seed)
    page = rig.wait(lambda s: s["nvme"]["regions_held"] > held, RECOVERY_S)
    rig.wait_durable()
    rig.finish(latest)


# ---------------------------------------------------------------------------------- failing, slow


@pytest.fixture
def rig(make_daemon: MakeDaemon, tmp_path: Path, faulty: FaultyDisk) -> Iterator[Rig]:
    """Run a daemon over such a disk."""
    made = Rig(make_daemon, tmp_path / "nvme", tmp_path, "64MiB")
    yield made
    faulty.set()
    made.daemon.clean_up()
    made.client.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_nothing(rig: Rig, faulty: FaultyDisk, kind: str, code: int) -> None:
    """The tier closes, is still read, host memory takes all; it opens when the disk works again."""
    cold = rig.store(1)
    rig.wait_durable()
    rig.restart()
    faulty.set(**{kind: code})
    for seed in range(2, 20):  # 18 MiB
        newest = rig.store(seed)
        assert load(rig.client, newest) == len(newest)
    page = rig.wait(
        lambda s: (
            s["nvme"]["state"].startswith("closed") and s["counters"]["demotions_failed"] >= 1
        ),
        RECOVERY_S,
    )
    assert not page["nvme"]["demoting"]
    assert page["nvme"]["counters"]["closures"] >= 1
    assert load(rig.client, cold) == len(cold), "reads go on"
    faulty.set()
    newest = rig.store(30)
    page = rig.wait_durable()
    assert page["nvme"]["counters"]["openings"] == page["nvme"]["counters"]["closures"]
    rig.finish(cold, newest)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_disk_that_cannot_be_read(rig: Rig, faulty: FaultyDisk) -> None:
    """What is cold is a miss, at once after the first; what is warm is there; then all is back."""
    cold = rig.store(1)
    rig.wait_durable()
    rig.restart()
    warm = rig.store(2)
    rig.wait_durable()
    faulty.set(read=errno.EIO)
    assert load(rig.client, cold) == 0
    page = rig.wait(lambda s: s["counters"]["promotions_failed"] > 0, RECOVERY_S)
    assert page["nvme"]["counters"]["errors_read"] > 0
    deadline = time.monotonic() + RECOVERY_S
    while rig.client.lookup(cold).chunks:  # after five seconds it is tried again
        assert load(rig.client, cold) == 0
        assert time.monotonic() < deadline, "what cannot be had is offered"
    assert load(rig.client, warm) == len(warm)
    faulty.set()
    deadline = time.monotonic() + RECOVERY_S
    while load(rig.client, cold) != len(cold):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    rig.finish(cold, warm)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_disk_that_stalls(rig: Rig, faulty: FaultyDisk) -> None:
    """Every call takes two seconds more: nobody but who waits for the disk notices."""
    cold = rig.store(1)
    rig.wait_durable()
    rig.restart()
    warm = rig.store(2)
    rig.wait_durable()
    faulty.set(delay_ms=2000)
    reader = join(rig.daemon)
    ticket = reader.begin_acquire(cold)
    lags, waits = [], []
    states: set[str] = set()
    newest = warm
    begin = time.monotonic()
    seed = 2
    while time.monotonic() < begin + 6 or "slow" not in states:
        assert time.monotonic() < begin + RECOVERY_S, states
        start = time.monotonic()
        assert load(rig.client, warm) == len(warm)
        assert rig.client.lookup(cold).chunks == len(cold)
        waits.append(time.monotonic() - start)
        seed += 1
        newest = rig.store(seed, chunks=2)
        assert load(rig.client, newest) == 2
        page = rig.page()
        lags.append(page["loop_lag_ms"])
        states.add(page["nvme"]["state"])
        time.sleep(0.2)
    assert median(lags) < 500  # who waits for the disk waits for two seconds
    assert max(lags) < 1700, "the loop never waits for the disk"
    assert median(waits) < 1.0
    with reader.wait(ticket) as lease:
        assert lease.chunks <= len(cold), "as much as came up in time"
    reader.close()
    faulty.set()
    page = rig.wait_durable()
    assert page["nvme"]["counters"]["stalls"] >= 1
    assert load(rig.client, cold) == len(cold)
    rig.finish(cold, warm, newest)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stop_while_the_disk_stalls(rig: Rig, faulty: FaultyDisk) -> None:
    """The daemon goes down in a bounded time, and what was durable before is there again."""
    cold = rig.store(1)
    rig.wait_durable()
    faulty.set(delay_ms=200)
    rig.store(2)
    rig.client.close()
    assert rig.daemon.stop(timeout_s=40) == 0
    faulty.set()
    rig.start()
    rig.finish(cold)


HURRIED: Final = """
import sys
from kvd import daemon
from kvd.tiers import nvme
daemon.GIVE_UP_S, nvme.CLOSE_S = 4.0, 1.0
from kvd.cli import main
sys.exit(main())
"""
"""A daemon that does not wait half a minute for a disk that never answers."""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("hangs", ["write", "probe"])
def test_a_stop_while_the_disk_hangs(rig: Rig, faulty: FaultyDisk, hangs: str) -> None:
    """Calls that never return hold no stop up; what was durable before is there again."""
    rig.client.close()
    rig.daemon.stop()
    rig.daemon._command[1:3] = ["-c", HURRIED]
    rig.start()
    cold = rig.store(1)
    rig.wait_durable()
    if hangs == "probe":  # nobody waits for it, and nothing is to be written
        faulty.set(write=errno.EIO, sync=errno.EIO)
        rig.store(2)
        rig.wait(lambda s: s["nvme"]["state"].startswith("closed"), RECOVERY_S)
        faulty.set(delay_ms=3_600_000)
        rig.wait(lambda _: faulty.held > 0, RECOVERY_S)
    else:
        faulty.set(delay_ms=3_600_000)
        rig.store(2)
    rig.client.close()
    assert rig.daemon.stop(timeout_s=60) == EXIT_GAVE_UP
    faulty.set()
    rig.start()
    rig.finish(cold)
