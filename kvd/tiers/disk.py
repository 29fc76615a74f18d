"""The I/O seam of the NVMe tier."""

from __future__ import annotations

from kvd_client.errors import KvdError


class TierError(KvdError):
    """Root of what the NVMe store raises; always a miss or a refusal, never a wrong answer."""


class TierFailed(TierError):
    """The disk or the index failed, or the tier is closed; the text says why."""


class TierBusy(TierError):
    """Refused at once: too much in flight, or the disk is stalling."""


class NoSpace(TierError):
    """No region is free (reclaim one), or the file system is full."""


class Corrupt(TierError):
    """What lies there is not that bundle, or not whole: a miss, and the caller deletes the key."""
