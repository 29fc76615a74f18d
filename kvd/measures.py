"""What the loop measures beside its counters: distributions, and what tenants and namespaces got.

Pure.

A distribution is kept as counts in fixed classes, so that noting a value costs some hundred
nanoseconds, whatever was noted before, and two pages can be subtracted.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvd.types import Tenant

SECONDS: Final = (1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper ends of classes of time: a load takes milliseconds, a stalled disk seconds."""
SIZES: Final = tuple(float(1 << bits) for bits in range(12, 37, 2))
"""Upper ends of classes of bytes: 4 KiB to 64 GiB, four times each."""
TIERS: Final = ("gpu", "host", "nvme", "peer")
"""Where what a lease gives can have lain when it was asked for (`kvd.hits`); also in this order."""


class Histogram:
    """How often values fell into each class.

    H1. `counts` has a class more than there are ends, for what is above the last.
    """

    __slots__ = ("counts", "ends", "total")

    def __init__(self, ends: Sequence[float]) -> None:
        """Start empty; `ends` rise, and each belongs to the class below it."""
        assert list(ends) == sorted(set(ends))
        self.ends = tuple(ends)
        self.counts = [0] * (len(self.ends) + 1)
        self.total = 0.0

    def note(self, value: float) -> None:
        """Note a value."""
        self.counts[bisect_left(self.ends, value)] += 1
        self.total += value

    def page(self) -> dict[str, Any]:
        """Return it for the statistics page."""
        return {"ends": self.ends, "counts": self.counts, "total": self.total}


def by_tier() -> dict[str, int]:
    """Return a count of 0 for each tier."""
    return dict.fromkeys(TIERS, 0)


@dataclass(slots=True)
class Usage:
    """What a tenant, or a namespace, asked for and got since the start.

    Attributes:
        asked_tokens: Of chains looked up or acquired, each chain once, by rank 0.
        hit_tokens: Of them, tokens under its leases, by the tier they lay in when asked for.
        hit_bytes: Told to its readers, each time and rank, by the same tier.
        stored_bytes: Published by it.
    """

    asked_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=by_tier)
    hit_bytes: dict[str, int] = field(default_factory=by_tier)
    stored_bytes: int = 0

    def hit(self, tokens: Mapping[str, int]) -> None:
        """Count tokens of a lease, by the tier they lay in."""
        for tier, count in tokens.items():
            self.hit_tokens[tier] += count

    def page(self) -> dict[str, Any]:
        """Return it for the statistics page."""
        return {
            "asked_tokens": self.asked_tokens,
            "hit_tokens": dict(self.hit_tokens),
            "hit_bytes": dict(self.hit_bytes),
            "stored_bytes": self.stored_bytes,
        }


class Measures:
    """All of it; the loop is the only caller."""

    def __init__(self) -> None:
        """Start empty."""
        self._usage: dict[Tenant, Usage] = {}
        self.seconds = {
            name: Histogram(SECONDS) for name in ("acquire_wait", "demote", "promote", "loop_lag")
        }
        self.sizes = {name: Histogram(SIZES) for name in ("load", "store", "demote", "promote")}

    def usage(self, tenant: Tenant) -> Usage:
        """Return a tenant's."""
        found = self._usage.get(tenant)
        if found is None:
            found = self._usage[tenant] = Usage()
        return found

    def loaded(self, usages: Iterable[Usage], sizes: Mapping[str, int]) -> None:
        """Count what a lease told a reader, by tier; nothing for one that only holds."""
        if size_bytes := sum(sizes.values()):
            for usage in usages:
                for tier, size in sizes.items():
                    usage.hit_bytes[tier] += size
            self.sizes["load"].note(size_bytes)

    def stored(self, usages: Iterable[Usage], size_bytes: int) -> None:
        """Count what a publish made findable, if anything."""
        if size_bytes:
            for usage in usages:
                usage.stored_bytes += size_bytes
            self.sizes["store"].note(size_bytes)

    def page(self) -> dict[str, Any]:
        """Return the distributions for the statistics page."""
        return {
            "seconds": {name: held.page() for name, held in self.seconds.items()},
            "bytes": {name: held.page() for name, held in self.sizes.items()},
        }
