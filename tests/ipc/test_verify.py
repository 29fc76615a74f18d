"""Verified host memory, through a real daemon: an engine writes where it no longer may."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd import statpage
from kvd.daemon import EXIT_GAVE_UP
from kvd_client import Status
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import PATIENCE_S, join, load, small_layout, stamp, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bench._daemon import DaemonProcess

    Start = Callable[..., DaemonProcess]

OFTEN = 64
"""Of so many objects "sampled" verifies one."""


@pytest.fixture
def start(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> Start:
    """Start a daemon with `[host] verify`."""

    def make(verify: str, more: str = "", **options: Any) -> DaemonProcess:
        config = tmp_path / f"{verify}.toml"
        config.write_text(f'[host]\nverify = "{verify}"\n{more}')
        daemon = make_daemon(verify, arguments=["--config", str(config)], **options)
        daemon.start()
        return daemon

    return make


def stats(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the statistics page."""
    return statpage.read(stat_page_name(daemon.socket)).stats


def host(daemon: DaemonProcess) -> dict[str, Any]:
    """Read what it says of host memory."""
    found: dict[str, Any] = stats(daemon)["host"]
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@contextlib.contextmanager
def keeping_views(client: kvd_client.Client, hashes: list[bytes]) -> Iterator[list[memoryview]]:
    """Store stamped objects as a broken engine does: views of the slots outlive the publish."""
    views = []
    with client.reserve(hashes) as reservation:
        for slot in reservation.placed:
            assert slot.buffer is not None
            slot.buffer[:] = stamp(hashes[slot.chunk], len(slot.buffer))
            views.append(slot.buffer[:])
        assert client.publish(reservation).count(Status.OK) == len(hashes)
    try:
        yield views
    finally:
        for view in views:
            view.release()


def scribble(view: memoryview, at: int = 4321) -> None:
    """Change a byte of a published object."""
    view[at] ^= 1


def test_without_verification_what_was_scribbled_is_served(start: Start) -> None:
    """`off`, the default, believes the tenant's own engines: the bytes are what they left there."""
    daemon = start("off")
    with join(daemon) as writer, join(daemon) as reader:
        hashes = writer.chunk_hashes(tokens(4))
        with keeping_views(writer, hashes) as views:
            scribble(views[2])
            with reader.acquire(hashes) as lease:
                assert lease.chunks == 4
                assert bytes(lease.view(2)) != stamp(hashes[2], len(lease.view(2)))
    assert host(daemon)["verify"] == "off"
    assert "verified" not in host(daemon)


def test_always_turns_a_scribble_into_a_miss_and_says_so(start: Start) -> None:
    """Every object is summed when it is published and again before it is told of: what was changed
    is not served, is found no more, and its place is used by nobody; what is stored anew is.
    """
    daemon = start("always")
    with join(daemon) as writer, join(daemon) as reader:
        hashes = writer.chunk_hashes(tokens(4))
        with keeping_views(writer, hashes) as views:
            until(lambda: host(daemon)["summed"] == 4, "it does not sum")
            assert load(reader, hashes) == 4, "nobody has scribbled yet"
            scribble(views[2])
            assert load(reader, hashes) == 2, "the prefix ends before the changed chunk"
            assert reader.lookup(hashes).chunks == 2
            until(lambda: host(daemon)["differed"] == 1, "it does not say so")
            size = len(views[2])
            found = stats(daemon)
            assert found["host"]["damaged_bytes"] == size
            assert found["host"]["published_bytes"] == 3 * size
            assert found["host"]["used_bytes"] == 4 * size
            assert found["counters"]["evictions"] == {"damaged": 1}
            assert b"differs from what was published" in daemon.log.read_bytes()
            assert store(writer, hashes) == 1, "the engine computes it again"
            scribble(views[2], at=77)  # it goes on, but nobody is there any more
            assert load(reader, hashes) == 4
    assert daemon.stop() == 0


def test_sampled_catches_what_it_samples_and_no_other(start: Start) -> None:
    """One object of 64 is verified: a scribble is caught in it, and served in its neighbour."""
    daemon = start("sampled")
    with join(daemon) as writer, join(daemon) as reader:
        hashes = writer.chunk_hashes(tokens(OFTEN))
        with keeping_views(writer, hashes) as views:
            until(lambda: host(daemon)["summed"] == 1, "one of them is summed")
            scribble(views[OFTEN - 2])
            with reader.acquire(hashes) as lease:
                assert lease.chunks == OFTEN
            scribble(views[OFTEN - 1])
            with reader.acquire(hashes) as lease:
                assert lease.chunks == OFTEN - 1
            until(lambda: host(daemon)["differed"] == 1, "the sampled one")


def test_a_scheduler_s_lease_covers_its_workers(start: Start) -> None:
    """A lease that others attach to was checked for all ranks, and ends where one differs."""
    daemon = start("always")
    layout = small_layout(tp=2)
    with join(daemon, layout=layout) as zero, join(daemon, layout=layout, rank=1) as one:
        hashes = zero.chunk_hashes(tokens(3))
        assert store(zero, hashes) == 3
        with keeping_views(one, hashes) as views:
            until(lambda: host(daemon)["summed"] == 6, "all ranks are summed")
            scribble(views[2])
            with zero.acquire(hashes, read=False) as lease:
                assert lease.chunks == 2
                with one.attach(lease.token) as mine:
                    assert mine.chunks == 2


def test_a_check_that_hangs_is_a_miss_and_holds_nobody_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a check hangs the daemon answers everybody else at once; the acquire ends as a miss
    when its time is up, and gives back what it held.
    """
    monkeypatch.setenv("KVD_STALL", "verify.call:1")
    daemon = start("always", "[limits]\npromote_s = 1.0\n")
    monkeypatch.delenv("KVD_STALL")
    with join(daemon) as writer, join(daemon) as reader, join(daemon) as other:
        hashes = writer.chunk_hashes(tokens(4))
        assert store(writer, hashes) == 4
        ended: list[tuple[int, float]] = []

        def acquire() -> None:
            begun = time.monotonic()
            with reader.acquire(hashes) as lease:
                ended.append((lease.chunks, time.monotonic() - begun))

        thread = threading.Thread(target=acquire)
        thread.start()
        slowest = 0.0
        while thread.is_alive():
            begun = time.monotonic()
            assert other.lookup(hashes).chunks == 4, "it is there, and cannot be served"
            slowest = max(slowest, time.monotonic() - begun)
        thread.join()
        chunks, took_s = ended[0]
        assert chunks == 0
        assert 0.9 < took_s < 3.0, "after promote_s, and soon after it"
        assert slowest < 0.5, "the loop went on"
        counters = stats(daemon)["counters"]
        until(lambda: host(daemon)["pinned_bytes"] == 0, "what it held is given back")
        assert counters["acquires_unverified"] >= 1
    daemon.kill()


def test_who_leaves_while_it_is_checked_leaves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is killed with an acquire under check holds nothing any more."""
    monkeypatch.setenv("KVD_STALL", "verify.call:1")
    daemon = start("always")
    monkeypatch.delenv("KVD_STALL")
    actor = [sys.executable, "-m", "tests.actor", daemon.socket, "lease"]
    with subprocess.Popen(actor, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        until(lambda: host(daemon)["pinned_bytes"] > 0, "it is not checked")
        assert stats(daemon)["leases"] == 0, "there is no lease before the check has ended"
        child.kill()
    until(lambda: host(daemon)["pinned_bytes"] == 0, "what it waited for is still held")
    assert stats(daemon)["leases"] == 0
    daemon.kill()


def test_the_pool_that_hangs_turns_health_red(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that sum are watched like the others: what hangs in them is named."""
    monkeypatch.setenv("KVD_STALL", "verify.call:1")
    daemon = start("always")
    monkeypatch.delenv("KVD_STALL")
    with join(daemon) as writer:
        assert store(writer, writer.chunk_hashes(tokens(1))) == 1
        until(lambda: stats(daemon)["late"] == ["verify pool"], "nobody sees it")
    assert daemon.stop() == EXIT_GAVE_UP, "and are left when the daemon is told to stop"
