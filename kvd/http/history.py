"""The last hour of a few figures, for the status page's curves. Pure: time is an argument.

Rates come from differences of counters. A daemon that was started anew begins at zero, which is
seen by its epoch and makes a gap, not a negative rate.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd.http.figures import figures
from kvd.measures import TIERS

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_S: Final = 10.0
"""Between two points."""
POINTS: Final = 360
"""An hour of them."""

PATHS: Final = {
    **{f"hit_{tier}": f"tenants.[tenant=name].hit_tokens.{tier}" for tier in TIERS},
    "asked": "tenants.[tenant=name].asked_tokens",
    "loaded": "counters.bytes_acquired",
    "stored": "counters.bytes_published",
    "demoted": "counters.bytes_demoted",
    "promoted": "counters.bytes_promoted",
    "evicted": "counters.bytes_evicted",
}
"""What is kept, summed over rows."""


class Point(NamedTuple):
    """The counters at one time."""

    at_s: float
    epoch: int
    counts: dict[str, float]


class History:
    """Points of the last hour, the oldest first; bounded."""

    def __init__(self) -> None:
        """Start empty."""
        self._points: deque[Point] = deque(maxlen=POINTS + 1)

    def note(self, stats: dict[str, Any], at_s: float) -> None:
        """Take a page's figures down, unless the last ones are younger than a step."""
        if self._points and at_s - self._points[-1].at_s < STEP_S * 0.9:
            return
        counts = {
            name: float(sum(sample.value for sample in figures(stats, path)))
            for name, path in PATHS.items()
        }
        epoch = stats.get("epoch")
        self._points.append(Point(at_s, epoch if isinstance(epoch, int) else 0, counts))

    def curves(self, name: str, now_s: float) -> list[list[tuple[float, float]]]:
        """Return a figure's rates over the last hour, in pieces without a gap.

        Returns:
            Pieces of (age in seconds, rate a second), the oldest first.
        """
        pieces: list[list[tuple[float, float]]] = []
        last: Point | None = None
        for before, after in self._steps():
            if now_s - after.at_s > POINTS * STEP_S:
                continue
            rate = (after.counts[name] - before.counts[name]) / (after.at_s - before.at_s)
            if before is not last:
                pieces.append([])
            pieces[-1].append((now_s - after.at_s, max(0.0, rate)))
            last = after
        return pieces

    def _steps(self) -> Iterator[tuple[Point, Point]]:
        points = list(self._points)
        for before, after in pairwise(points):
            if before.epoch == after.epoch and after.at_s - before.at_s < 3 * STEP_S:
                yield before, after

    def recent(self, name: str, now_s: float, span_s: float = 60.0) -> float:
        """Return a figure's rate a second over the last minute, 0 when not known."""
        used = [step for step in self._steps() if now_s - step[0].at_s <= span_s]
        seconds = sum(after.at_s - before.at_s for before, after in used)
        grown = sum(after.counts[name] - before.counts[name] for before, after in used)
        return max(0.0, grown / seconds) if seconds else 0.0
