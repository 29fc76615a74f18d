"""Opens a closed NVMe tier again: probes the disk, then reopens or rebuilds the index.

The loop calls `tick`; the probe runs in an I/O thread, the index in its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvd import log
from kvd.tiers import recover, storefiles

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from kvd.tiers.disk import Disk
    from kvd.tiers.group_commit import IndexThread
    from kvd.tiers.health import Health
    from kvd.tiers.index import Index, IndexPlace
    from kvd.tiers.threads import Calls, Watch

_LOG = log.get("nvme")


class Upkeep:
    """The part of an open store that mends it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        disk: Disk,
        place: IndexPlace,
        directory: Path,
        found: recover.Recovered,
        health: Health,
        calls: Calls,
        index: IndexThread,
        watches: Sequence[Watch],
    ) -> None:
        """Keep what mending needs; everything belongs to the store."""
        self._loop = loop
        self._disk = disk
        self._place = place
        self._directory = directory
        self._identity = found.identity
        self._life = found.life
        self._extents = found.extents
        self._direct = found.report.direct
        self._health = health
        self._calls = calls
        self._index = index
        self._watches = watches

    def tick(self, now: float) -> None:
        """Let time pass: stalls, probes."""
        if self._health.turn(now, max(watch.oldest_s() for watch in self._watches)):
            self._calls.submit(self._probe, self._probed)

    def _probe(self) -> None:
        storefiles.probe_disk(self._disk, self._directory, direct=self._direct)

    def _probed(self, probe: Future[None]) -> None:
        if probe.exception() is not None:
            self._health.again(self._loop.time())
        elif self._health.index_broken:
            future = self._index.call(self._reopen)
            future.add_done_callback(partial(self._calls.deliver, self._reopened))
        else:
            self._health.opened()

    def _reopen(self, index: Index) -> None:
        """Open the index again, or rebuild it; in its thread. Whatever it raises: not yet."""
        index.close()
        found = (self._extents, recover.Report(regions=1))
        fresh, life = recover.open_index(self._disk, self._place, b"", self._identity, found)
        if life != self._life:  # rebuilt from regions that this life has not written to yet
            recover.begin_life(fresh, self._identity.uuid, self._life, [])
        self._index.replace(fresh)

    def _reopened(self, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._health.opened()
        else:
            _LOG.limited("nvme index does not open", why=str(error))
            self._health.again(self._loop.time())
