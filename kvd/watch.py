"""`kvd stat --watch`: a live screen. Rates between two pages, sparklines of the last ones.

The screen is the terminal's second one, and what was set on the terminal is put back however it
ends: Ctrl-C, `q`, SIGTERM, a closed pipe; Ctrl-Z gives the first screen back until `fg`. It fits
the window, and is drawn anew when that changes.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd import stattables
from kvd.health import SILENT_S
from kvd.sizes import about
from kvd.statfields import list_of, map_of, number_of, rows_of, text_of
from kvd.statview import warnings
from kvd.tables import aligned, cut, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.statpage import Snapshot

ENTER: Final = "\x1b[?1049h\x1b[?25l"
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
KEPT: Final = 240
"""Samples kept: more than a wide window shows."""
BLOCKS: Final = "▁▂▃▄▅▆▇█"
PLAIN: Final = "_.-=+*%#"
"""For terminals that are not UTF-8."""
NAME_CHARS: Final = 17
VALUE_CHARS: Final = 12
_SGR: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Curve(NamedTuple):
    """A line of the screen: what it is called, what of a page it follows, and in which unit.

    One with a tier is shown where there is that tier.
    """

    name: str
    total: Callable[[dict[str, Any]], float]
    unit: str = ""
    tier: str = ""


def _counter(*names: str) -> Callable[[dict[str, Any]], float]:
    return lambda stats: sum(number_of(map_of(stats, "counters"), name) for name in names)


def _tokens(tier: str) -> Callable[[dict[str, Any]], float]:
    return lambda stats: sum(
        number_of(map_of(tenant, "hit_tokens"), tier) for tenant in rows_of(stats, "tenants")
    )


CURVES: Final = (
    Curve("look-ups", _counter("lookups")),
    *(Curve(f"hit tokens, {tier}", _tokens(tier), tier=tier) for tier in stattables.TIERS),
    Curve("loaded", _counter("bytes_acquired"), "B"),
    Curve("stored", _counter("bytes_published"), "B"),
    Curve("refused", _counter("reserves_refused")),
    Curve("evicted", _counter("bytes_evicted"), "B"),
    Curve("demoted", _counter("bytes_demoted"), "B", tier="nvme"),
    Curve("promoted", _counter("bytes_promoted"), "B", tier="nvme"),
)


class History:
    """What pages said, one after the other, as rates. Pure but for what it is given."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._life: object = None
        self._last: tuple[float, list[float]] | None = None
        self.rates: list[deque[float]] = [deque(maxlen=KEPT) for _ in CURVES]
        self.lags_ms: deque[float] = deque(maxlen=KEPT)

    def take(self, stats: dict[str, Any], written_s: float) -> None:
        """Take in a page written at a time; the same, or the first of a life, adds nothing."""
        totals = [curve.total(stats) for curve in CURVES]
        if stats.get("epoch") != self._life:
            self.__init__()  # type: ignore[misc]
            self._life = stats.get("epoch")
        elif self._last is not None:
            passed_s = written_s - self._last[0]
            if passed_s <= 0.01:  # noqa: PLR2004 - the same page: ages are told to a millisecond
                return
            for rates, now, before in zip(self.rates, totals, self._last[1], strict=True):
                rates.append(max(0.0, now - before) / passed_s)
            self.lags_ms.append(number_of(stats, "loop_lag_ms"))
        self._last = (written_s, totals)


def sparkline(values: list[float], chars: int, blocks: str = BLOCKS) -> str:
    """Draw the last values, one a character, the largest of them full height."""
    shown = values[-chars:]
    top = max(shown, default=0.0)
    if top <= 0:
        return blocks[0] * len(shown)
    steps = len(blocks) - 1
    return "".join(blocks[min(steps, math.ceil(value * steps / top))] for value in shown)


def screen(
    snapshot: Snapshot, history: History, columns: int, *, blocks: str = BLOCKS
) -> Iterator[tuple[str, str]]:
    """Yield the lines as (style, text), none wider than the window."""
    stats = snapshot.stats
    state = text_of(stats, "state") or "state unknown"
    title = f"kvd {text_of(stats, 'version')}  {state}  pid {snapshot.pid}"
    title += f"  up {duration(number_of(stats, 'uptime_s'))}  page {snapshot.age_s:.1f} s old"
    yield "bold", title[:columns]
    for style, text in warnings(snapshot):
        yield style, text[:columns]
    yield "", ""
    for number, line in enumerate(aligned(stattables.tiers(stats), columns=columns)):
        yield ("bold" if number == 0 else ""), line[:columns]
    yield "", ""
    room = max(0, columns - NAME_CHARS - VALUE_CHARS - 2)
    there = ["", *stattables.tiers_of(stats)]
    for curve, rates in zip(CURVES, history.rates, strict=True):
        if curve.tier not in there:
            continue
        now = rates[-1] if rates else 0.0
        value = f"{about(now)}/s" if curve.unit else f"{now:,.0f}/s"
        line = f"{curve.name:<{NAME_CHARS}}{value:>{VALUE_CHARS}}  "
        yield "", (line + sparkline(list(rates), room, blocks))[:columns]
    lag = f"{history.lags_ms[-1] if history.lags_ms else 0:.1f} ms"
    line = f"{'loop behind':<{NAME_CHARS}}{lag:>{VALUE_CHARS}}  "
    yield "", (line + sparkline(list(history.lags_ms), room, blocks))[:columns]
    yield "", ""
    yield from _tenants(stats, columns)


def _tenants(stats: dict[str, Any], columns: int) -> Iterator[tuple[str, str]]:
    shown = [name for name in stattables.tiers_of(stats) if name != "host"]
    rows = [
        [
            "TENANT",
            "SESSIONS",
            "HELD",
            "OF",
            "LEASED",
            "HIT RATE",
            *(f"OF {n.upper()}" for n in shown),
        ]
    ]
    for tenant in rows_of(stats, "tenants"):
        hits = map_of(tenant, "hit_tokens")
        total, asked = stattables.hits_of(tenant), number_of(tenant, "asked_tokens")
        rows.append(
            [
                cut(text_of(tenant, "name"), 20),
                f"{number_of(tenant, 'sessions'):.0f}",
                about(number_of(tenant, "held_bytes")),
                about(number_of(tenant, "share_bytes")),
                about(number_of(tenant, "pinned_bytes")),
                f"{100 * total / asked:.1f} %" if asked else "-",
                *(
                    f"{100 * number_of(hits, name) / total:.1f} %" if total else "-"
                    for name in shown
                ),
            ]
        )
    for number, line in enumerate(aligned(rows, columns=columns)):
        yield ("bold" if number == 0 else ""), line[:columns]
    sessions = number_of(stats, "session_count")
    chunks, leases = number_of(stats, "chunks"), number_of(stats, "leases")
    spaces = len(list_of(stats, "spaces"))
    text = f"{chunks:,.0f} chunks in {spaces} namespaces, {leases:,.0f} leases, {sessions:.0f}"
    yield "dim", f"{text} sessions; q leaves"[:columns]


# ------------------------------------------------------------------------------------ the terminal


def run(
    look: Callable[[], Snapshot | str], interval_s: float, *, colours: bool, blocks: str = BLOCKS
) -> int:
    """Show pages until `q` or Ctrl-C; return the exit code.

    Args:
        look: Reads the page, or says why there is none.
        interval_s: Between two looks.
        colours: Whether the terminal may get any.
        blocks: Characters of the sparklines.
    """
    history = History()
    with suppress(KeyboardInterrupt), _terminal() as woken:
        while True:
            found = look()
            if not isinstance(found, str) and found.age_s < SILENT_S:
                history.take(found.stats, time.monotonic() - found.age_s)
            until_s = time.monotonic() + interval_s
            _draw(found, history, colours=colours, blocks=blocks)
            while (left_s := until_s - time.monotonic()) > 0:
                key = woken(left_s)
                if key in {b"q", b"Q"}:
                    return 0
                if key is not None:
                    _draw(found, history, colours=colours, blocks=blocks)
    return 0


def _draw(found: Snapshot | str, history: History, *, colours: bool, blocks: str) -> None:
    """Draw one frame over the last."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    if isinstance(found, str):
        drawn = [("yellow", found[:columns])]
    else:
        drawn = list(screen(found, history, columns, blocks=blocks))
    painted = [
        f"\x1b[{_SGR[style]}m{text}\x1b[0m" if colours and style and text else text
        for style, text in drawn[: max(1, lines)]
    ]
    sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(painted) + "\x1b[K\x1b[J")
    sys.stdout.flush()


@contextmanager
def _terminal() -> Iterator[Callable[[float], bytes | None]]:
    """Take the terminal over, and give it back as it was.

    Yields:
        What waits for so many seconds: None when they are over, b"" after a signal, or a key.
    """
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin) if os.isatty(stdin) else None
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)  # noqa: FBT003 - its signature
    old_fd = signal.set_wakeup_fd(writer.fileno())
    handlers = {
        signal.SIGWINCH: lambda *_: None,
        signal.SIGTERM: _interrupt,
        signal.SIGHUP: _interrupt,
    }
    handlers[signal.SIGTSTP] = lambda *_: _pause(stdin, before)
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def wait(seconds: float) -> bytes | None:
        inputs = [reader, *([stdin] if before is not None else [])]
        ready, _, _ = select.select(inputs, [], [], seconds)
        if stdin in ready:
            return os.read(stdin, 1)
        if not ready:
            return None
        with suppress(BlockingIOError):
            reader.recv(64)
        return b""

    try:
        _enter(stdin, before)
        yield wait
    finally:
        _leave(stdin, before)
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _enter(stdin: int, before: list[Any] | None) -> None:
    if before is not None:
        tty.setcbreak(stdin)
    sys.stdout.write(ENTER)
    sys.stdout.flush()


def _leave(stdin: int, before: list[Any] | None) -> None:
    with suppress(OSError, ValueError):  # the terminal is gone
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
    if before is not None:
        with suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _pause(stdin: int, before: list[Any] | None) -> None:
    """Ctrl-Z: give the terminal back, stop, and take it again when continued."""
    _leave(stdin, before)
    os.kill(os.getpid(), signal.SIGSTOP)
    _enter(stdin, before)
