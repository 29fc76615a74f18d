"""The only source of time for decisions: the monotonic clock, or a test's own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds that never go back."""

    def now_ns(self) -> int:
        """Return the time since some fixed point, in nanoseconds."""
        ...


class MonotonicClock:
    """The kernel's monotonic clock."""

    def now_ns(self) -> int:
        """Return nanoseconds since the host's start, suspend not counted."""
        return time.monotonic_ns()


class SimClock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        """Start at one second, so that zero stays `never`."""
        self._now_ns = 1_000_000_000

    def now_ns(self) -> int:
        """Return the simulated time."""
        return self._now_ns

    def advance_ms(self, ms: float) -> None:
        """Move on."""
        assert ms >= 0
        self._now_ns += int(ms * 1e6)


def epoch_now() -> int:
    """Return a number for a daemon's life: larger at each start, also across reboots.

    Wall-clock nanoseconds: a clock set back between two lives could repeat an order, not a value,
    and epochs are only compared for being equal.
    """
    return time.time_ns()
