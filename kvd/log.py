"""Records for people and journald: one line on stderr, an event and its fields as key=value.

L1. A record is one line of printable text, whatever its fields hold.
L2. Bytes are never written, only how many: they may be a key, a salt or a payload.
L3. Writing never raises: a daemon does not die of its log.

Any thread.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}
VALUE_CHARS_MAX = 256
PER_MINUTE = 10
"""Records of one event that `Log.limited` writes in a minute."""
OFTEN_PER_MINUTE = 60
"""The same for `Log.often`."""
EVENTS_MAX = 256
"""Events a limiter keeps apart; those beyond share one allowance."""
_QUOTED = frozenset(" =\"'\\")
_start_ns = time.monotonic_ns()


class Threshold:
    """What is written; `kvd serve` may lower it."""

    priority = PRIORITIES["info"]


def _journald() -> bool:
    """Whether stderr is the stream that systemd opened for us, and not a file or pipe since."""
    named = os.environ.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        here = os.fstat(2)
    except OSError:
        return False
    return named == f"{here.st_dev}:{here.st_ino}"


def _value(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case bytes() | bytearray() | memoryview():
            return f"bytes[{len(value)}]"  # L2
        case _:
            text = str(value)
    if len(text) > VALUE_CHARS_MAX:
        text = f"{text[: VALUE_CHARS_MAX - 3]}..."
    if text and text.isprintable() and not _QUOTED.intersection(text):
        return text
    escaped = (ascii(c)[1:-1] if not c.isprintable() or c == "\\" else c for c in text)
    return '"' + "".join(escaped).replace('"', '\\"') + '"'


def format_record(name: str, level: str, event: str, fields: dict[str, object]) -> str:
    """Return a record as one line, without its prefix."""
    pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items())
    line = f"{name}: {event}{pairs}"
    line = line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)
    return line if level == "info" else f"{level}: {line}"


class Limiter:
    """At most so many of the same event a minute."""

    def __init__(self, per_minute: int, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Allow `per_minute` of each event at once, and as many again a minute later."""
        assert per_minute > 0
        self._per_minute = per_minute
        self._now_ns = now_ns
        self._windows: dict[str, list[int]] = {}  # event: [start_ns, written, suppressed]

    def admit(self, event: str) -> int | None:
        """Return how many were suppressed since the last admitted one; None for one more."""
        now_ns = self._now_ns()
        if event not in self._windows and len(self._windows) >= EVENTS_MAX:
            event = ""
        window = self._windows.setdefault(event, [now_ns, 0, 0])
        if now_ns - window[0] >= 60 * 10**9:
            window[0], window[1] = now_ns, 0
        if window[1] >= self._per_minute:
            window[2] += 1
            return None
        window[1] += 1
        suppressed, window[2] = window[2], 0
        return suppressed


class Log:
    """Writes the records of one part of the daemon."""

    def __init__(self, name: str, limiter: Limiter | None = None) -> None:
        """Name the part, as records show it; `limiter` is for `limited`."""
        self._name = name
        self._limiter = limiter or Limiter(PER_MINUTE)
        self._often = Limiter(OFTEN_PER_MINUTE)

    def debug(self, event: str, /, **fields: object) -> None:
        """Write what only helps with finding a fault in kvd."""
        self._write("debug", event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Write what an operator may want to read later."""
        self._write("info", event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Write what an operator should know: something is refused, closed or lost."""
        self._write("warning", event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Write what ends the daemon or needs somebody now."""
        self._write("error", event, fields)

    def limited(self, event: str, /, **fields: object) -> None:
        """Write a warning that a client can cause at will: the same event 10 times a minute.

        The next one written says how many were not: ``suppressed=12``.
        """
        suppressed = self._limiter.admit(event)
        if suppressed is not None:
            self._write(
                "warning", event, {**fields, "suppressed": suppressed} if suppressed else fields
            )

    def often(self, event: str, /, **fields: object) -> None:
        """Write what is good to know and a client can cause at will: as `limited`, 60 a minute."""
        suppressed = self._often.admit(event)
        if suppressed is not None:
            self._write(
                "info", event, {**fields, "suppressed": suppressed} if suppressed else fields
            )

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        priority = PRIORITIES[level]
        if priority > Threshold.priority:
            return
        if _journald():
            prefix = f"<{priority}>"
        else:
            prefix = f"{(time.monotonic_ns() - _start_ns) / 1e9:10.3f}  "
        try:
            sys.stderr.write(prefix + format_record(self._name, level, event, fields) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # full, gone or closed: L3
            pass


def get(name: str) -> Log:
    """Return the log of a part of the daemon."""
    return Log(name)
