"""What keeps a fleet from hurting itself: back-off, slow start, retry and refill budgets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

BACKOFF_S = (0.5, 60.0)
"""First and longest pause after a failure; each one doubles it."""
STRIKES = 3
"""Wrong bytes within STRIKE_WINDOW_S, and the host is not asked for STRIKE_PAUSE_S."""
STRIKE_WINDOW_S = 60.0
STRIKE_PAUSE_S = 60.0
_S = 1_000_000_000


class Breaker:
    """Whether one host may be asked, and for how much at once.

    Closed, open until a time, then half open: one ask as a probe, and twice as many with each
    success, so that a host that comes back is not flooded.
    """

    def __init__(self, most: int, random: Callable[[], float]) -> None:
        """Start closed, allowing `most` asks at once; `random` gives 0 to 1."""
        self._most = most
        self._random = random
        self._failures = 0
        self._strikes: list[int] = []
        self._until_ns = 0
        self.allowed = most

    def open(self, now_ns: int) -> bool:
        """Tell whether nothing may be asked now."""
        return now_ns < self._until_ns

    def succeeded(self) -> None:
        """Hear that an ask was served."""
        self._failures = 0
        self.allowed = min(self._most, 2 * self.allowed)

    def failed(self, now_ns: int) -> None:
        """Hear of a failure: time-out, dead mover, lost link.

        One that comes while it is open has the same cause, and says nothing new: reads fail in
        dozens.
        """
        if self.open(now_ns):
            return
        first, longest = BACKOFF_S
        pause = min(longest, first * 2 ** min(self._failures, 10))
        self._failures += 1
        self._pause(now_ns, pause * (0.5 + self._random()))

    def busy(self, now_ns: int, retry_ms: int) -> None:
        """Hear that the host wants to be left alone for a while; that is no failure."""
        pause = min(BACKOFF_S[1], retry_ms / 1e3)
        self._pause(now_ns, pause * (1.0 + self._random()))

    def struck(self, now_ns: int) -> None:
        """Hear of wrong bytes."""
        since = now_ns - int(STRIKE_WINDOW_S * _S)
        self._strikes = [at for at in self._strikes if at > since] + [now_ns]
        if len(self._strikes) >= STRIKES:
            self._strikes = []
            self._pause(now_ns, STRIKE_PAUSE_S)

    def _pause(self, now_ns: int, seconds: float) -> None:
        self._until_ns = max(self._until_ns, now_ns + int(seconds * _S))
        self.allowed = 1


class Bucket:
    """A budget that fills at a rate: of bytes fetched a second, or of retries an ask."""

    def __init__(self, rate_s: float, burst: float) -> None:
        """Start full; a rate of 0 fills only by `earn`."""
        self._rate_s = rate_s
        self._burst = burst
        self._level = burst
        self._at_ns = 0

    def earn(self, amount: float) -> None:
        """Fill by an amount."""
        self._level = min(self._burst, self._level + amount)

    def spend(self, now_ns: int, amount: float) -> bool:
        """Take an amount that is there; one above the burst leaves a debt."""
        self._level = min(
            self._burst, self._level + max(0, now_ns - self._at_ns) / _S * self._rate_s
        )
        self._at_ns = max(self._at_ns, now_ns)
        if self._level < min(amount, self._burst) and self._level < self._burst:
            return False
        self._level -= amount
        return True
