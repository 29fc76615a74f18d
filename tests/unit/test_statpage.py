"""The statistics page: whatever its writer does, a reader gets a whole snapshot or an error."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import posix_ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import statpage
from kvd.errors import StartError
from kvd.statpage import PAGE_BYTES, PAYLOAD_BYTES_MAX, NoStatPage, StatPage, read

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITER = """
import sys, time
from kvd.statpage import StatPage
page = StatPage.create(sys.argv[1])
n = 0
while True:
    n += 1
    page.write({"n": n, "text": "x" * (n * 37 % 30_000), "twice": 2 * n}, time.monotonic_ns())
    if n == 2:
        print("up", flush=True)
"""


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this test's own, free afterwards."""
    own = f"/kvd-test-{os.getpid()}-{time.monotonic_ns()}"
    yield own
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(own)


def file_of(name: str) -> Path:
    """Where Linux shows a name."""
    return Path(f"/dev/shm{name}")


# ------------------------------------------------------------------------------ writing and reading


def test_reads_what_was_written(name: str) -> None:
    """A reader gets the latest of several snapshots, its age and its writer."""
    page = StatPage.create(name)
    for n in range(5):
        page.write({"n": n, "list": [1, "é", 2.5, None]}, time.monotonic_ns() - 3 * 10**9)
        assert read(name).stats == {"n": n, "list": [1, "é", 2.5, None]}
    snapshot = read(name)
    assert 3 <= snapshot.age_s < 60
    assert (snapshot.pid, snapshot.alive, snapshot.stopped) == (os.getpid(), True, False)
    page.close()
    with pytest.raises(NoStatPage, match="kvd serve"):
        read(name)


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_mode_is_as_asked(name: str, mode: int) -> None:
    """The umask does not change who may read, and nobody else may write."""
    before = os.umask(0o077)
    try:
        page = StatPage.create(name, mode)
    finally:
        os.umask(before)
    status = file_of(name).stat()
    assert status.st_mode & 0o777 == mode
    assert status.st_size == PAGE_BYTES
    page.close()


def test_replaces_a_stale_page_and_spares_a_new_one(name: str) -> None:
    """A new daemon takes the place of a page left behind; the old one's end leaves it alone."""
    old = StatPage.create(name)
    old.write({"n": "old"}, time.monotonic_ns())
    new = StatPage.create(name)
    new.write({"n": "new"}, time.monotonic_ns())
    old.close()
    assert read(name).stats == {"n": "new"}
    new.close()
    assert not file_of(name).exists()


def test_no_room_is_a_start_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be made stops the start with what to do."""

    def refuse(*_: object, **__: object) -> None:
        raise posix_ipc.ExistentialError("taken")

    monkeypatch.setattr(posix_ipc, "SharedMemory", refuse)
    with pytest.raises(StartError, match="other user"):
        StatPage.create(name)


def test_nothing_written_yet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without a snapshot is an error after a bounded wait."""
    monkeypatch.setattr(statpage, "_TRY_S", 0)
    page = StatPage.create(name)
    with pytest.raises(NoStatPage, match="not written"):
        read(name)
    page.close()


@pytest.mark.parametrize(("at", "content"), [(0, b"other"), (8, b"\xff")])
def test_another_format_is_named(name: str, at: int, content: bytes) -> None:
    """A page of another program or version is refused, never read as ours."""
    page = StatPage.create(name)
    page.write({}, time.monotonic_ns())
    page._memory[at : at + len(content)] = content
    with pytest.raises(NoStatPage, match="version"):
        read(name)
    page.close()


def test_another_size_is_named(name: str) -> None:
    """A page that is not of our size is not even mapped."""
    shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096)
    shared.close_fd()
    with pytest.raises(NoStatPage, match="version"):
        read(name)


def test_too_much_is_cut_short(name: str) -> None:
    """Statistics larger than the page lose the ends of their longest lists and say so."""
    page = StatPage.create(name)
    sessions = [{"id": n, "label": "x" * 250} for n in range(1000)]
    page.write({"sessions": sessions, "spaces": [1, 2], "chunks": 7}, time.monotonic_ns())
    stats = read(name).stats
    assert stats["cut_short"] is True
    assert stats["sessions"] == sessions[: len(stats["sessions"])]
    assert len(stats["sessions"]) > 100
    assert (stats["spaces"], stats["chunks"]) == ([1, 2], 7)
    page.close()


@pytest.mark.parametrize("payload", [b"\xc1", b"\x93\x01", msgpack.packb([1]), b""])
def test_nonsense_is_an_error(payload: bytes) -> None:
    """A payload that is no map is an error, whatever it is."""
    with pytest.raises(NoStatPage, match="sense"):
        statpage._unpack(payload)


# ----------------------------------------------------------------------------------------- torn


def snapshots(sizes: list[int]) -> list[tuple[bytes, int]]:
    """Payloads that can be told apart, with their times."""
    return [(bytes([n % 256]) * size, 1000 + n) for n, size in enumerate(sizes)]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=2, max_size=6),
    chosen=st.randoms(use_true_random=False),
    part=st.floats(0, 1),
)
def test_torn_write_leaves_a_whole_snapshot(sizes: list[int], chosen: Any, part: float) -> None:
    """Stopped at any store, or with its stores seen in any order, a write harms no reader.

    The last write is applied as any subset of the bytes that it changes.
    """
    memory = bytearray(PAGE_BYTES)
    written = snapshots(sizes)
    sequence = 0
    for payload, now_ns in written[:-1]:
        sequence = statpage.write_half(memory, sequence, payload, now_ns)
    after = bytearray(memory)
    statpage.write_half(after, sequence, *written[-1])
    for at in [at for at in _changes(memory, after) if chosen.random() < part]:
        memory[at] = after[at]
    assert statpage.read_halves(memory) in written[-2:]


def _changes(before: bytearray, after: bytearray) -> list[int]:
    used = [range(256)] + [range(at, at + 512) for at in statpage._PAYLOAD_AT]
    return [at for part in used for at in part if before[at] != after[at]]


@pytest.mark.parametrize("at", [64 + 8, 64 + 20, 4096, 4096 + 99])
def test_damage_falls_back_to_the_other_half(at: int) -> None:
    """A flipped bit in time, checksum or payload makes that half unbelievable, not the page."""
    memory = bytearray(PAGE_BYTES)
    sequence = statpage.write_half(memory, 0, b"a" * 100, 1)
    statpage.write_half(memory, sequence, b"b" * 100, 2)
    assert statpage.read_halves(memory) == (b"b" * 100, 2)
    memory[at] ^= 1
    assert statpage.read_halves(memory) == (b"a" * 100, 1)


def test_reader_gives_up() -> None:
    """When no half is ever whole, reading ends after a bounded number of short sleeps."""
    memory = bytearray(PAGE_BYTES)
    statpage.write_half(memory, 0, b"a", 1)
    memory[statpage._PAYLOAD_AT[1]] ^= 1
    slept: list[float] = []
    with pytest.raises(NoStatPage):
        statpage.read_halves(memory, slept.append)
    assert 0 < len(slept) <= 1000
    assert sum(slept) <= 0.5


def test_reader_waits_for_a_moving_page() -> None:
    """A page whose halves are both in motion is read as soon as one is whole."""
    memory = bytearray(PAGE_BYTES)
    statpage.write_half(memory, 0, b"a", 1)
    memory[statpage._PAYLOAD_AT[1]] ^= 1

    def finish(_: float) -> None:
        memory[statpage._PAYLOAD_AT[1]] ^= 1

    assert statpage.read_halves(memory, finish) == (b"a", 1)


def test_length_is_bounded() -> None:
    """The largest payload fits exactly into its half."""
    memory = bytearray(PAGE_BYTES)
    first = b"a" * PAYLOAD_BYTES_MAX
    second = b"b" * PAYLOAD_BYTES_MAX
    statpage.write_half(memory, statpage.write_half(memory, 0, first, 1), second, 2)
    assert len(memory) == PAGE_BYTES
    assert statpage.read_halves(memory) == (second, 2)
    memory[statpage._PAYLOAD_AT[0]] ^= 1
    assert statpage.read_halves(memory) == (first, 1)


# --------------------------------------------------------------------------------- another process


@pytest.fixture
def writer(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes without pause."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, name], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_reader_beside_a_busy_writer(writer: subprocess.Popen[str], name: str) -> None:
    """Each of many reads beside a writer without pause is consistent, and none goes back."""
    before = reads = 0
    while reads < 200 or before < 20:  # whichever of the two is slower
        reads += 1
        stats = read(name).stats
        assert stats["twice"] == 2 * stats["n"]
        assert len(stats["text"]) == stats["n"] * 37 % 30_000
        assert stats["n"] >= before
        before = stats["n"]


def test_stopped_and_killed_writers(writer: subprocess.Popen[str], name: str) -> None:
    """A stopped daemon's page is readable at once and says so; a killed one's says that, too."""
    for _ in range(20):
        writer.send_signal(signal.SIGSTOP)
        _until(lambda: read(name).stopped)
        first, second = read(name), read(name)
        assert first.stats["twice"] == 2 * first.stats["n"]
        assert first.stats == second.stats
        assert first.age_s < second.age_s
        assert (first.alive, first.pid) == (True, writer.pid)
        writer.send_signal(signal.SIGCONT)
    writer.kill()
    writer.wait()
    last = read(name)
    assert (last.alive, last.stopped) == (False, False)
    assert last.stats["twice"] == 2 * last.stats["n"]


def test_a_writer_of_another_container_is_alive(writer: subprocess.Popen[str], name: str) -> None:
    """Its process id means another process here, or none: not to be swept, nor called stopped."""
    writer.send_signal(signal.SIGSTOP)
    _until(lambda: read(name).stopped)
    shared = posix_ipc.SharedMemory(name)
    memory = mmap.mmap(shared.fd, PAGE_BYTES)
    shared.close_fd()
    for at in (24, 32):  # a bit of the start time, one of the boot id
        memory[at] ^= 1
        assert (read(name).alive, read(name).stopped) == (True, False)
        assert statpage.sweep(name) == 0
        memory[at] ^= 1
    assert read(name).stopped
    memory.close()
    writer.kill()
    writer.wait()
    assert not read(name).alive
    assert statpage.sweep(name) == 1


def test_readers_do_not_keep_a_daemon_from_its_page(name: str) -> None:
    """Also while one looks at every moment whether the page is locked."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            with suppress(NoStatPage):
                read(name)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(30):
        page = StatPage.create(name)
        page.write({}, time.monotonic_ns())
        assert read(name).alive
        page.close()
    over.set()
    for reader in readers:
        reader.join()


def _until(holds: Any) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Recorded(bytearray):
    """Memory that keeps what it was after each write."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.seen: list[bytes] = []

    def __setitem__(self, where: Any, what: Any) -> None:
        super().__setitem__(where, what)
        self.seen.append(bytes(self))


def test_the_magic_shows_a_whole_head() -> None:
    """Whoever finds the magic, as another daemon that sweeps may at any moment, finds the pid with
    it: a live daemon's page was swept when the pid came later.
    """
    memory = Recorded(4096)
    statpage.write_head(memory, os.getpid())
    whole = memory.seen[-1]
    assert whole.startswith(statpage.MAGIC)
    assert all(seen == whole for seen in memory.seen if seen.startswith(statpage.MAGIC))
    assert statpage._HEAD.unpack_from(whole)[3] == os.getpid()
