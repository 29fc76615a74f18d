"""Which of the loop's own tasks still turn; what feeds the watchdog asks here first. Pure.

A task that hangs in an `await` leaves the loop turning and everything looking well. So each task
that has a queue of its own says so at every turn, and is late when it has not for its limit. What
waits for a disk or another host is not in here: a restart would not make those faster, and their
tiers close by themselves.
"""

from __future__ import annotations


class Pulse:
    """The last turn of every task with a queue. The loop is the only caller."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._parts: dict[str, tuple[int, int]] = {}  # name: (last turn, limit), ns

    def beat(self, name: str, now_ns: int, limit_s: float) -> None:
        """Note a turn; the next one has to come within `limit_s`. The first begins the watch."""
        self._parts[name] = (now_ns, int(limit_s * 1e9))

    def forget(self, name: str) -> None:
        """Stop watching a task that has ended as it should."""
        self._parts.pop(name, None)

    def late(self, now_ns: int) -> list[str]:
        """Return the tasks that have not turned for their limit, in order of name."""
        return sorted(n for n, (turn, limit) in self._parts.items() if now_ns - turn > limit)
