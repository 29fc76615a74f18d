"""`kvd stat --watch`: rates from pages, a screen that fits, and a terminal left as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd.statpage import Snapshot, StatPage
from kvd.watch import CURVES, ENTER, LEAVE, PLAIN, History, screen, sparkline
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = [curve.name for curve in CURVES]


def page(lookups: int, epoch: int = 1, **more: Any) -> dict[str, Any]:
    """Make a page."""
    return {
        "epoch": epoch,
        "version": "9",
        "state": "serving",
        "counters": {"lookups": lookups, "bytes_acquired": 1024 * lookups},
        "host": {"capacity_bytes": 1 << 30, "used_bytes": 1 << 29, "pinned_bytes": 1},
        "nvme": {"capacity_bytes": 1 << 40, "state": "closed: No space left on device"},
        "tenants": [{"name": "t", "asked_tokens": 100, "hit_tokens": {"host": 30, "nvme": 10}}],
        **more,
    }


def snapshot(stats: dict[str, Any]) -> Snapshot:
    """Make what a reader gets."""
    return Snapshot(stats, 0.1, 42, alive=True, stopped=False)


def test_rates_are_differences_over_the_time_between_pages() -> None:
    """The first page gives none; the same page again adds nothing; one that is late counts so."""
    history = History()
    for lookups, at in ((100, 10.0), (150, 11.0), (150, 11.0), (450, 13.0)):
        history.take(page(lookups), at)
    assert list(history.rates[NAMES.index("look-ups")]) == [50.0, 150.0]
    assert list(history.rates[NAMES.index("loaded")]) == [50 * 1024, 150 * 1024]
    assert list(history.rates[NAMES.index("hit tokens, host")]) == [0.0, 0.0]


def test_another_life_begins_anew() -> None:
    """After a restart the counters fall; no rate is made of that."""
    history = History()
    history.take(page(100), 1.0)
    history.take(page(200), 2.0)
    history.take(page(5, epoch=2), 3.0)
    assert not any(history.rates)
    history.take(page(7, epoch=2), 4.0)
    assert list(history.rates[NAMES.index("look-ups")]) == [2.0]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([0, 0], "__"),
        ([0, 1, 8], "_.#"),
        ([3, 3], "##"),
        ([0, 1e-9, 1e9], "_.#"),
        ([5] * 9, "#" * 4),
    ],
)
def test_a_sparkline_shows_each_value(values: list[float], drawn: str) -> None:
    """The largest is full, nothing is the lowest, and anything above nothing is seen."""
    assert sparkline(values, 4, PLAIN) == drawn


@pytest.mark.parametrize("columns", [20, 80, 81, 200])
def test_the_screen_fits_the_window(columns: int) -> None:
    """No line is wider, whatever the pages hold; at 80 columns nothing is cut off."""
    history = History()
    for at in range(300):
        history.take(page(at * at * 10**7), float(at))
    lines = [text for _, text in screen(snapshot(page(10**12)), history, columns)]
    assert max(map(len, lines)) <= columns
    assert len(lines) <= 24
    if columns >= 80:
        table = "\n".join(lines)
        for word in ("HIT TOKENS", "OF NVME", "40.0 %", "25.0 %", "512 MiB", "closed", "/s"):
            assert word in table


def test_odd_pages_are_drawn() -> None:
    """A page without any of it is a screen all the same."""
    for stats in ({}, {"tenants": 5, "host": [], "counters": {"lookups": "x"}}):
        assert list(screen(snapshot(stats), History(), 80))


# ------------------------------------------------------------------------------------ a terminal


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon that has written its page."""
    path = str(tmp_path / "kvd.sock")
    made = StatPage.create(stat_page_name(path))
    made.write(page(5), time.monotonic_ns() + 60 * 10**9)  # new for the whole of a test
    yield path
    made.close()


class Terminal:
    """`kvd stat --watch` in a terminal of its own."""

    def __init__(self, socket: str, columns: int = 80) -> None:
        """Start it."""
        self.master, self.slave = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(self.slave)
        command = [sys.executable, "-m", "kvd", "stat", "--watch", "60", "--socket", socket]
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True
        )
        self.seen = ""

    def resize(self, columns: int) -> None:
        """Change the window."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def until(self, text: str, after: int = 0) -> None:
        """Read until something was written."""
        end = time.monotonic() + 45
        while text not in self.seen[after:]:
            assert time.monotonic() < end, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65_536).decode(errors="replace")

    def stopped(self) -> None:
        """Wait until it is stopped."""
        end = time.monotonic() + 45
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, "it is not stopped"
            time.sleep(0.01)

    def ended(self) -> int:
        """Wait for its end; return its code, the terminal being as before."""
        code = self.process.wait(45)
        self.until(LEAVE)
        assert termios.tcgetattr(self.slave) == self.before
        return code

    def close(self) -> None:
        """Give the terminal back."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(socket: str) -> Iterator[Terminal]:
    """Run it."""
    made = Terminal(socket)
    yield made
    made.close()


def test_q_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    """The second screen is entered, keys are not echoed, and all of it is put back."""
    terminal.until("q leaves")
    assert terminal.seen.startswith(ENTER)
    assert not termios.tcgetattr(terminal.slave)[3] & termios.ECHO
    os.write(terminal.master, b"xq")
    assert terminal.ended() == 0
    assert "x" not in terminal.seen.rpartition("q leaves")[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_the_terminal_as_it_was(terminal: Terminal, number: signal.Signals) -> None:
    """However it is ended."""
    terminal.until("q leaves")
    terminal.process.send_signal(number)
    assert terminal.ended() == 0


def test_a_changed_window_is_drawn_at_once(terminal: Terminal) -> None:
    """Narrower lines come before the interval is over; Ctrl-Z gives the terminal back until fg."""
    terminal.until("q leaves")
    terminal.until("\x1b[K\x1b[J")  # the whole of it
    before = len(terminal.seen)
    terminal.resize(40)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.until("\x1b[K\x1b[J", before)
    widths = [len(line.rstrip()) for line in terminal.seen[before:].split("\n")]
    assert max(widths) <= 40 + len("\x1b[H\x1b[31m\x1b[0m\x1b[K\x1b[K\x1b[J")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.until(LEAVE, before)
    before = len(terminal.seen)
    terminal.stopped()  # a SIGCONT that comes before the stop is lost
    assert termios.tcgetattr(terminal.slave) == terminal.before
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(ENTER, before)
    os.write(terminal.master, b"q")
    assert terminal.ended() == 0
