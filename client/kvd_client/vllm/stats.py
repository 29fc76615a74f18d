"""Counts of what the connector does. Pure but for a lock."""

from __future__ import annotations

import threading
from typing import Final, TypeVar

Key = TypeVar("Key")

NAMES: Final = {
    "lookups": "Look-ups that kvd answered",
    "asked_again": "Steps in which a request waited for kvd's answer",
    "given_up": "Waits for kvd that took too long, and leases not used in time",
    "loads_begun": "Loads promised to the engine",
    "loads": "Loads that worked, one a rank",
    "loads_failed": "Loads that did not: the engine computed those tokens",
    "loaded_bytes": "Bytes copied by loads",
    "load_micros": "Microseconds that loads took",
    "saves": "Saves, whole or in part, one a rank",
    "saves_cut": "Saves ended early: a block was taken again, or kvd had no room",
    "saved_bytes": "Bytes copied by saves",
    "save_micros": "Microseconds that saves took",
}
"""Name and meaning. The first four are the scheduler half's, the others the workers'."""


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


def added(one: dict[Key, int], other: dict[Key, int]) -> dict[Key, int]:
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
