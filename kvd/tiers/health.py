"""Whether the NVMe tier may be used: failures, closing, stalls, probes. Pure; time is an argument.

    open -> slow (a call is older than `slow_s`: writes refused) -> open
    open -> closed: REASON (writes refused, reads go on) -> open, by a probe
    any  -> closed: closing -> gone

Two failures in a row close the tier; one that cannot be worked around does so at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd import log
from kvd.tiers.disk import FULL_ERRNOS, NoSpace, TierBusy, TierError, TierFailed
from kvd.tiers.group_commit import SyncFailed
from kvd.tiers.index import IndexBroken, IndexFull

if TYPE_CHECKING:
    from kvd.tiers.nvme_types import NvmeConfig, NvmeCounters

_LOG = log.get("nvme")
STRIKES: Final = 2


class Health:
    """The state of one tier. The loop is the only caller."""

    def __init__(self, config: NvmeConfig, counters: NvmeCounters) -> None:
        """Begin closed: not yet open."""
        self._config = config
        self._counters = counters
        self._last: Exception | None = None
        self._strikes = 0
        self._probe_at = 0.0
        self._probing = False
        self._ended = True
        self.reason = "not yet open"
        self.slow = False
        self.grow = True
        self.index_broken = False

    @property
    def state(self) -> str:
        """What `kvd stat` shows: `open`, `slow` or `closed: REASON`."""
        if self.reason:
            return f"closed: {self.reason}"
        return "slow" if self.slow else "open"

    @property
    def ended(self) -> bool:
        """Whether the tier is closed for good, or closing."""
        return self._ended

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probing

    def begin(self) -> None:
        """Open for the first time."""
        self.reason = ""
        self._ended = False

    def end(self, reason: str) -> None:
        """Close for good."""
        self.reason = reason
        self._ended = True

    def admit(self, depth: int) -> None:
        """Let a write begin, or raise TierFailed or TierBusy."""
        if self.reason:
            self._counters.refused_closed += 1
            raise TierFailed(f"the NVMe tier is closed: {self.reason}")
        if self.slow or depth >= self._config.writes_max:
            self._counters.refused_busy += 1
            why = "the disk stalls" if self.slow else "too many writes are under way"
            raise TierBusy(f"the NVMe tier takes no more for now: {why}")

    def worked(self) -> None:
        """Take note of a write that became durable."""
        self._strikes = 0

    def no_room(self, now: float) -> NoSpace:
        """Take note that the file system had no room for one region more."""
        self.grow = False
        self._probe_at = now + self._config.probe_s
        self._counters.refused_space += 1
        return NoSpace("the NVMe file system is full: reclaim a region")

    def failed(self, error: Exception, now: float) -> TierError:
        """Take note of a failure; return what the caller is to raise.

        One failure that several calls share (a sync, a transaction) counts once.
        """
        full = isinstance(error, IndexFull)
        if isinstance(error, OSError):
            full = error.errno in FULL_ERRNOS
            if isinstance(error, SyncFailed):
                self._counters.errors_sync += 1
            else:
                self._counters.errors_write += 1
            text = error.strerror or "I/O error"
        else:
            self._counters.errors_index += 1
            text = str(error)
            self.index_broken |= isinstance(error, IndexBroken)
        if error is not self._last:
            self._last = error
            self._strikes += 1
            _LOG.limited("nvme failed", why=text)
        if (full or self.index_broken or self._strikes >= STRIKES) and not self.reason:
            self.reason = text
            self._counters.closures += 1
            self._probe_at = now + self._config.probe_s
            _LOG.warning("nvme closed to writes", why=text)
        return NoSpace(f"NVMe: {text}") if full else TierFailed(f"NVMe: {text}")

    def turn(self, now: float, oldest_s: float) -> bool:
        """Let time pass; returns whether to probe now: then `again` or `opened` must follow."""
        slow = oldest_s > self._config.slow_s
        if slow and not self.slow:
            self._counters.stalls += 1
            _LOG.warning("nvme slow", seconds=round(oldest_s, 1))
        self.slow = slow
        wanted = not self._ended and (bool(self.reason) or not self.grow)
        if not wanted or self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True

    def again(self, now: float) -> None:
        """Take note of a probe that failed."""
        self._probing = False
        self._probe_at = now + self._config.probe_s

    def opened(self) -> None:
        """Take note of a probe that went well."""
        self._probing = False
        self.grow = True
        self.index_broken = False
        self._strikes = 0
        if self.reason and not self._ended:
            self.reason = ""
            self._counters.openings += 1
            _LOG.info("nvme open again")
