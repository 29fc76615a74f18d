"""Life tables: when blocks of one kind are used again, learned as it happens. Pure.

A row counts, for each bin of age since the last use, the blocks that reached the bin (`risk`) and
those used again in it (`events`). Their ratio, drawn towards what all rows together say while a
row has seen little, is the chance of reuse in that bin. From the chances follows what keeping a
block of a given age is worth: the best rate, over all ages at which one could give up, of expected
hits to expected seconds of keeping it.

H1. Bins adjoin and cover all ages; the first begins at 0.
H2. Each row's rates lie in [0, 1].
H3. Counts are never negative.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND_NS: Final = 10**9
EDGES_NS: Final = (0, *(SECOND_NS // 4 << power for power in range(19)))
"""Where the bins begin: 0, then from 0.25 s doubling to 65 536 s; the last has no end."""
BINS: Final = len(EDGES_NS)
WIDTHS_S: Final = (
    *((end - begin) / SECOND_NS for begin, end in pairwise(EDGES_NS)),
    EDGES_NS[-1] / SECOND_NS,  # as if it ended at twice its beginning, as the others do
)


class Row:
    """What is known about one kind of blocks.

    Attributes:
        events: Blocks used again, a bin of age each.
        risk: Blocks that reached the bin.
        rates: Chance of reuse in a bin for a block that reached it, at the last rebuild.
        worth: Expected hits a second of keeping a block that is in a bin, at the last rebuild.
    """

    __slots__ = ("events", "rates", "risk", "worth")

    def __init__(self, rates: list[float], worth: list[float]) -> None:
        """Start without observations, with the rates of all rows together."""
        self.events = [0.0] * BINS
        self.risk = [0.0] * BINS
        self.rates = rates
        self.worth = worth


class HazardTable:
    """The rows, made as kinds turn up, and what they have in common."""

    PRIOR: Final = 0.1
    """Chance of reuse in any bin before anything was seen; as bins double, a hazard of 1/age."""
    WEIGHT: Final = 50.0
    """How many blocks' worth of observations the prior stands for, and the pool for each row."""
    DECAY: Final = 0.98
    """What a rebuild leaves of the counts, so that the past fades."""

    def __init__(self) -> None:
        """Start with the prior."""
        self.rows: dict[int, Row] = {}
        self._pool = [self.PRIOR] * BINS
        self._pool_worth = worth_of(self._pool)

    def row(self, kind: int) -> Row:
        """Return the row of a kind, made when it is new."""
        row = self.rows.get(kind)
        if row is None:
            row = self.rows[kind] = Row(self._pool, self._pool_worth)
        return row

    def rebuild(self) -> None:
        """Take what was counted into rates and worth, then let it fade."""
        rows, weight = self.rows.values(), self.WEIGHT
        events = [sum(column) for column in zip(*(row.events for row in rows), strict=True)]
        risk = [sum(column) for column in zip(*(row.risk for row in rows), strict=True)]
        if not risk:
            return
        prior = weight * self.PRIOR
        self._pool = [
            min(1.0, (seen + prior) / (reached + weight))
            for seen, reached in zip(events, risk, strict=True)
        ]
        self._pool_worth = worth_of(self._pool)
        for row in rows:
            row.rates = [
                min(1.0, (seen + weight * pool) / (reached + weight))
                for seen, reached, pool in zip(row.events, row.risk, self._pool, strict=True)
            ]
            row.worth = worth_of(row.rates)
            row.events = [count * self.DECAY for count in row.events]
            row.risk = [count * self.DECAY for count in row.risk]

    def check(self) -> None:
        """Check H2 and H3."""
        for row in self.rows.values():
            assert all(0 <= rate <= 1 for rate in row.rates), "H2"
            assert all(count >= 0 for count in row.events), "H3"
            assert all(count >= 0 for count in row.risk), "H3"


def worth_of(rates: Sequence[float]) -> list[float]:
    """Return the best rate of hits to block-seconds from each bin on, over all bins to stop after.

    The points (seconds, hits) of stopping after each bin lie under a concave hull, and the best
    rate is the slope of its first edge. One bin earlier, the hull is the old one scaled by those
    who survive the new bin, with a new first edge that swallows every edge steeper than itself:
    linear work, as each edge is swallowed once.
    """
    worth = [0.0] * len(rates)
    edges: list[tuple[float, float, float]] = []  # hits, seconds, survivors; the nearest one last
    for index in range(len(rates) - 1, -1, -1):
        rate, width_s = rates[index], WIDTHS_S[index]
        hits, seconds, survivors = rate, (1 - rate / 2) * width_s, 1 - rate
        while edges and edges[-1][0] * seconds > hits * edges[-1][1]:
            more_hits, more_seconds, left = edges.pop()
            hits += survivors * more_hits
            seconds += survivors * more_seconds
            survivors *= left
        edges.append((hits, seconds, survivors))
        worth[index] = hits / seconds
    return worth


def reuse_within(rates: Sequence[float], first: int, span_ns: float) -> float:
    """Return the chance that a block in bin `first` is used again within a time from now."""
    unused, left_s = 1.0, span_ns / SECOND_NS
    for index in range(first, len(rates)):
        if left_s <= 0:
            break
        unused *= 1 - rates[index] * min(1.0, left_s / WIDTHS_S[index])
        left_s -= WIDTHS_S[index]
    return 1 - unused
