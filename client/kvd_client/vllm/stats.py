"""Counts of what the connector does, as vLLM's logger and metrics take them. Pure but for a lock.

| name | counted in | meaning |
| --- | --- | --- |
| `lookups` | scheduler | look-ups that were answered |
| `asked_again` | scheduler | steps in which a request waited for an answer |
| `given_up` | scheduler | waits that took too long, and leases that were not used in time |
| `loads_begun` | scheduler | loads promised to the engine |
| `loads` | worker | loads that worked |
| `loads_failed` | worker | loads that did not: the engine computes those tokens |
| `loaded_bytes`, `load_micros` | worker | copied by loads that worked, and how long they took |
| `saves` | worker | saves, whole or in part |
| `saves_cut` | worker | saves ended early: a block was taken again, or kvd had no room |
| `saved_bytes`, `save_micros` | worker | copied by saves, and how long they took |
"""

from __future__ import annotations

import threading
from typing import Final

NAMES: Final = (
    "lookups",
    "asked_again",
    "given_up",
    "loads_begun",
    "loads",
    "loads_failed",
    "loaded_bytes",
    "load_micros",
    "saves",
    "saves_cut",
    "saved_bytes",
    "save_micros",
)


class Counts:
    """Counters since the last `take`. Any thread."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        assert name in NAMES
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, int]:
        """Return what was counted, and start anew."""
        with self._lock:
            taken, self._counts = self._counts, {}
        return taken


def added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Add two sets of counts."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}


def summary(counts: dict[str, int]) -> dict[str, int | float]:
    """Counts for a line of the log: rates in MB and milliseconds."""
    line: dict[str, int | float] = {}
    for name in NAMES:
        count = counts.get(name, 0)
        if name.endswith("_bytes") and count:
            line[name.replace("_bytes", "_MB")] = round(count / 1e6, 1)
        elif name.endswith("_micros") and count:
            line[name.replace("_micros", "_ms")] = round(count / 1e3, 1)
        elif count:
            line[name] = count
    return line
