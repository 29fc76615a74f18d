"""Load or recompute: measured rates and a gate with hysteresis. Pure.

The gate offers the prefix whose loading saves the most time: computing n tokens takes
``n / prefill``; loading them takes a latency, what is queued, and their bytes at the rate of the
tier they are in. Loading must be clearly faster to be offered, and clearly slower to be taken back,
so that the answer does not flip with every sample.

Until the engine has reported how fast it computes, all is worth loading: not to know is no reason
to recompute.
"""

from __future__ import annotations

from typing import NamedTuple

LOAD_BELOW = 0.8
"""Offer a load that takes less than this share of computing."""
KEEP_BELOW = 1.1
"""Go on offering until it takes more than this share."""
WEIGHT = 0.25
"""Of a new sample in a rate."""


class Rate:
    """A rate in units a second: a moving mean of samples, weighted by their size."""

    __slots__ = ("_seconds", "_units", "_weight", "samples")

    def __init__(self) -> None:
        """Start without samples."""
        self._units = 0.0
        self._seconds = 0.0
        self._weight = 0.0
        self.samples = 0

    def observe(self, units: float, seconds: float) -> None:
        """Take in that `units` took `seconds`."""
        if units <= 0 or seconds <= 0:
            return
        self._units = (1 - WEIGHT) * self._units + WEIGHT * units
        self._seconds = (1 - WEIGHT) * self._seconds + WEIGHT * seconds
        self._weight = (1 - WEIGHT) * self._weight + WEIGHT  # less than 1 while samples are few
        self.samples += 1

    @property
    def seconds(self) -> float:
        """What one sample takes; 0 while nothing is known."""
        return self._seconds / self._weight if self.samples else 0.0

    @property
    def per_s(self) -> float:
        """Units a second; 0 while nothing is known."""
        return self._units / self._seconds if self._seconds else 0.0


class Load(NamedTuple):
    """What loading a prefix takes.

    Attributes:
        tokens: Of the prefix.
        host_bytes: To copy from host slots.
        cold_bytes: To bring up from the tier below first, as stored there.
        peer_bytes: To fetch from other hosts first.
    """

    tokens: int
    host_bytes: int
    cold_bytes: int
    peer_bytes: int = 0


class Rates(NamedTuple):
    """What the daemon has measured; a rate of 0 is not known yet and costs nothing.

    Attributes:
        host_bytes_s: Copies out of host slots.
        cold_bytes_s: The tier below, at the depth it is used with.
        cold_latency_s: Of one read there.
        cold_queued_bytes: Waiting there before this load.
        peer_bytes_s: The link to the other host.
        peer_latency_s: Of one chunk over it.
        peer_queued_bytes: Asked for there before this load.
    """

    host_bytes_s: float
    cold_bytes_s: float
    cold_latency_s: float
    cold_queued_bytes: int
    peer_bytes_s: float = 0.0
    peer_latency_s: float = 0.0
    peer_queued_bytes: float = 0.0


def load_s(load: Load, rates: Rates) -> float:
    """Return how long a load is expected to take."""
    seconds = load.host_bytes / rates.host_bytes_s if rates.host_bytes_s else 0.0
    if load.cold_bytes:
        seconds += rates.cold_latency_s
        if rates.cold_bytes_s:
            seconds += (load.cold_bytes + rates.cold_queued_bytes) / rates.cold_bytes_s
    if load.peer_bytes:
        seconds += rates.peer_latency_s
        if rates.peer_bytes_s:
            seconds += (load.peer_bytes + rates.peer_queued_bytes) / rates.peer_bytes_s
    return seconds


def sooner_by_peer(cold_bytes: int, peer_bytes: int, rates: Rates) -> bool:
    """Tell whether other hosts would give clearly sooner what also lies in this one's tier below.

    Args:
        cold_bytes: As stored there.
        peer_bytes: As they travel.
        rates: As measured; what was never measured is not preferred.
    """
    if not rates.cold_bytes_s or not rates.peer_bytes_s:
        return False
    here_s = load_s(Load(0, 0, cold_bytes), rates)
    there_s = load_s(Load(0, 0, 0, peer_bytes), rates)
    return there_s < LOAD_BELOW * here_s


class Gate:
    """One namespace's gate."""

    __slots__ = ("loading", "prefill", "why")

    def __init__(self) -> None:
        """Start by loading."""
        self.prefill = Rate()
        self.loading = True
        self.why = "no prefill rate reported yet: loads all"

    def worth(self, offers: list[tuple[int, Load]], rates: Rates) -> int:
        """Return how many chunks of a usable prefix are worth loading.

        Args:
            offers: Legal lengths in chunks and what loading them takes, the longest last.
            rates: As measured.
        """
        if not self.prefill.samples:
            return offers[-1][0]
        share = KEEP_BELOW if self.loading else LOAD_BELOW
        best, best_saved = 0, 0.0
        for count, load in offers:
            saved = share * load.tokens / self.prefill.per_s - load_s(load, rates)
            if saved > best_saved:
                best, best_saved = count, saved
        longest, whole = offers[-1]
        self.loading = best == longest
        self.why = (
            f"{whole.tokens} tokens: compute {whole.tokens / self.prefill.per_s * 1e3:.1f} ms, "
            f"load {load_s(whole, rates) * 1e3:.1f} ms"
        )
        return best
