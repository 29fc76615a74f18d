"""Which tasks and threads of the daemon still turn; what feeds the watchdog asks here. Pure.

A task that hangs in an `await`, or a thread that has died, leaves the loop turning and everything
looking well. So for each that has a queue of its own it is told at every tick when it last turned,
and it is late when that is longer ago than its limit. What waits for a disk or another host is not
in here: a restart would not make those faster, and their tiers close by themselves. Processes of
the daemon's own are not either: it kills and starts them anew itself.
"""

from __future__ import annotations

from typing import Final

TURN_S: Final = 5.0
"""Who has not turned for so long hangs: health is red, the watchdog unfed."""


class Pulse:
    """The last turn of everything with a queue. The loop is the only caller."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._parts: dict[str, tuple[int, int]] = {}  # name: (last turn, limit), ns

    def beat(self, name: str, now_ns: int, limit_s: float) -> None:
        """Note a turn; the next one has to come within `limit_s`. The first begins the watch."""
        self._parts[name] = (now_ns, int(limit_s * 1e9))

    def forget(self, name: str) -> None:
        """Stop watching what has ended as it should."""
        self._parts.pop(name, None)

    def late(self, now_ns: int) -> list[str]:
        """Return what has not turned for its limit, in order of name."""
        return sorted(n for n, (turn, limit) in self._parts.items() if now_ns - turn > limit)
