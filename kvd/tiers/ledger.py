"""Commits of the NVMe store and what follows from them: accounts, deletes, reclaims.

The loop is the only caller. Accounts are kept in the order of the commits, whether the caller of a
commit still waits or not (E3).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvd import log
from kvd.tiers.disk import TierBusy, TierFailed
from kvd.tiers.extents import RegionState
from kvd.tiers.group_commit import IndexThread, Job, Withdrawn
from kvd.tiers.index import Change, Changes, IndexBroken, IndexFailed, IndexFull
from kvd.tiers.nvme_types import LiveKey, NvmeCounters, Victim
from kvd.tiers.region import BLOCK
from kvd.tiers.threads import Calls, settled

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable
    from concurrent.futures import Future

    from kvd.tiers.extents import Region
    from kvd.tiers.health import Health
    from kvd.tiers.recover import Recovered
    from kvd.tiers.rows import Row

_LOG = log.get("nvme")


class Ledger:
    """The part of an open store that changes its index."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        found: Recovered,
        health: Health,
        calls: Calls,
        index: IndexThread,
        counters: NvmeCounters,
    ) -> None:
        """Keep what commits need; everything belongs to the store."""
        self._loop = loop
        self._extents = found.extents
        self._health = health
        self._calls = calls
        self._index = index
        self._counters = counters
        self.spaces = set(found.spaces)

    async def commit(
        self, changes: Changes, region: Region | None = None, row: Row | None = None
    ) -> list[Row | None]:
        """Hand changes to the index's thread; account for them when they are durable (N1)."""
        job = Job(changes, None if region is None else region.id)
        job.done.add_done_callback(partial(self._calls.deliver, partial(self._committed, job, row)))
        self._index.submit(job)
        try:
            return await settled(self._loop, job.done, job.withdraw)
        except Withdrawn as error:
            raise TierFailed("the call was withdrawn") from error
        except (OSError, IndexFull, IndexFailed, IndexBroken) as error:
            if region is not None and isinstance(error, OSError):
                self._extents.seal(region)
            raise self._health.failed(error, self._loop.time()) from error

    def _committed(self, job: Job, row: Row | None, done: Future[list[Row | None]]) -> None:
        """Account for a commit, in the order of commits, whether anybody still waits or not."""
        if done.exception() is not None:
            return
        for old in done.result():
            self._extents.remove(old)
        if row is not None:
            self._extents.add(row)
        self.spaces.update(job.changes.spaces)

    async def delete(self, keys: Iterable[tuple[bytes, bytes, int]]) -> int:
        """As NvmeStore.delete."""
        changes = [Change(space + chunk, None, gen) for space, chunk, gen in keys]
        if not changes:
            return 0
        if self._health.ended:
            raise TierFailed(f"the NVMe tier is closed: {self._health.reason}")
        olds = await self.commit(Changes(changes))
        count = sum(old is not None for old in olds)
        self._counters.deletes += count
        return count

    def candidates(self) -> list[Victim]:
        """As NvmeStore.reclaim_candidates: what is empty, then what was begun longest ago."""
        held = [region for region in self._extents.held() if not region.writers]
        sealed = [region for region in held if region.state is RegionState.SEALED]
        victims = [
            Victim(r.id, r.live_bytes, r.live_count, r.tail_bytes - BLOCK - r.live_bytes)
            for r in sealed or held
        ]
        born = {region.id: region.incarnation or 0 for region in held}
        return sorted(victims, key=lambda v: (v.live_bytes > 0, born[v.region]))

    async def live_keys(self, use: Region) -> list[LiveKey]:
        """As NvmeStore.live_keys."""
        keys = self._extents.keys_of(use)
        try:
            rows = await settled(self._loop, self._index.call(lambda index: index.get(keys)))
        except (IndexFailed, IndexBroken) as error:
            raise self._health.failed(error, self._loop.time()) from error
        return [
            LiveKey(row.space_key, row.chunk, row.ref)
            for row in rows
            if row is not None and row.region == use.id and use.holds(row.generation)
        ]

    async def reclaim(self, use: Region) -> list[LiveKey]:
        """As NvmeStore.reclaim."""
        self._check_idle(use)
        self._extents.seal(use)
        incarnation = use.incarnation
        live = await self.live_keys(use)
        self._check_idle(use)
        if live:
            changes = [Change(key.space_key + key.chunk, None, key.ref.generation) for key in live]
            olds = await self.commit(Changes(changes))
            live = [key for key, old in zip(live, olds, strict=True) if old is not None]
        if use.state is RegionState.SEALED and use.incarnation == incarnation:
            self._check_idle(use)
            if use.live_count:
                _LOG.warning("nvme region miscounted", count=use.live_count)
            self._extents.drain(use)
            self._counters.reclaims += 1
        return live

    @staticmethod
    def _check_idle(use: Region) -> None:
        if use.writers:
            raise TierBusy("writes are under way in this region")
