"""The NVMe store: bundles written once, durable when acknowledged, verified when read.

Order (C5): record written -> its region synced (the directory too, for a new file) -> index commit
-> `write` returns. Reclaim: keys deleted and committed -> the region opened anew.

Invariants:

N1. `write` returns only after the commit that names the record, which began only after the record
    was durable.
N2. `read` returns only bytes whose record passed D1, for exactly the bundle asked for.
N3. A region is opened anew only after the commit that deleted its keys, and with nobody in it (E1).
N4. A buffer given to a call belongs to the store until that call has returned or raised, also when
    it was cancelled (K1).
N5. Whatever fails, it fails as a TierError; an OSError or an LMDB error never leaves this module.

The loop's thread is the only one for every method, but for `open`, which blocks and comes first.
I/O runs in `nvme-N` threads, the index in `index-1`. What a failure does: `health.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvd import log
from kvd.tiers import recover, storefiles
from kvd.tiers.buffers import Buffers
from kvd.tiers.disk import (
    BLOCK,
    FULL_ERRNOS,
    Corrupt,
    Disk,
    NoSpace,
    RealDisk,
    TierBusy,
    TierError,
    TierFailed,
    aligned_memory,
    replace_file,
)
from kvd.tiers.group_commit import IndexThread
from kvd.tiers.health import Health
from kvd.tiers.index import Change, Changes, Index, IndexPlace, LmdbPlace
from kvd.tiers.ledger import Ledger
from kvd.tiers.nvme_types import LiveKey, NvmeConfig, NvmeCounters, Opened, Victim
from kvd.tiers.region import (
    FORM_RAW,
    BadRecord,
    Bundle,
    Origin,
    Part,
    Plan,
    Ref,
    RegionHeader,
    Space,
    plan_record,
)
from kvd.tiers.rows import KEY_BYTES, encode_row, planned_row
from kvd.tiers.threads import Calls, Inflight, Watch, Workers, settled
from kvd.tiers.transfer import Loaded, Want, read_bundle, write_record
from kvd.tiers.upkeep import Upkeep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Executor

    from _typeshed import WriteableBuffer

    from kvd.tiers.extents import Extents, Region


__all__ = [
    "FORM_RAW",
    "Bundle",
    "Corrupt",
    "LiveKey",
    "Loaded",
    "NoSpace",
    "NvmeConfig",
    "NvmeStore",
    "Opened",
    "Part",
    "Ref",
    "Space",
    "TierBusy",
    "TierError",
    "TierFailed",
    "Victim",
    "aligned_memory",
]

_LOG = log.get("nvme")
CLOSE_S: Final = 30.0
"""How long `close` waits for calls under way."""


class NvmeStore:
    """A store of bundles in a directory of its own."""

    def __init__(
        self,
        config: NvmeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        disk: Disk | None = None,
        place: IndexPlace | None = None,
        pools: tuple[Executor, Executor] | None = None,
    ) -> None:
        """Plan; nothing is touched before `open`.

        Args:
            config: Sizes and wishes.
            loop: The loop of every later call.
            disk: The host's files, or a simulation of them.
            place: Where the index is kept; LMDB in the directory.
            pools: For payload I/O, and one thread for the index; the store's own when left out.
        """
        self.config = config
        self.counters = NvmeCounters()
        self.health = Health(config, self.counters)
        self.buffers = Buffers()
        self.reading = Inflight()
        self.writing = Inflight()
        self._loop = loop
        self._disk: Disk = disk or RealDisk()
        self._place = place or LmdbPlace(self._disk, config.directory, config.map_bytes)
        self._watch, self._index_watch = Watch(), Watch()
        self.workers = {
            "nvme pool": Workers(config.threads, "nvme", self._watch),
            "index thread": Workers(1, "index", self._index_watch),
        }
        """Threads, by what health calls them; they start with their first call."""
        self._pool: Executor
        self._index_pool: Executor
        self._pool, self._index_pool = pools or self.workers.values()
        self.hangs = False
        """Calls had not returned when `close` did."""
        self._calls = Calls(loop, self._pool, self._watch)
        self._rolling = asyncio.Lock()
        self._sequence = 0

    # ---------------------------------------------------------------- start and end

    def open(self) -> Opened:
        """Recover and open for use; blocks.

        Raises:
            StartError: In use, of another format or region size, or an unusable directory; the text
                says what to change. Nothing is held.
        """
        config = self.config
        found = recover.recover(
            self._disk,
            self._place,
            config.directory,
            regions=config.regions,
            region_bytes=config.region_bytes,
            spare=config.spare_regions,
            direct=config.direct,
        )
        self._lock = found.lock
        self._uuid = found.identity.uuid
        self._life = found.life
        self._direct = found.report.direct
        self.extents: Extents = found.extents
        self._index = IndexThread(
            found.index,
            self._index_pool,
            self._sync,
            self._relieve,
            self._index_watch,
            turn=self.workers["index thread"].turn,
        )
        self._ledger = Ledger(
            self._loop,
            found=found,
            health=self.health,
            calls=self._calls,
            index=self._index,
            counters=self.counters,
        )
        self._upkeep = Upkeep(
            self._loop,
            disk=self._disk,
            place=self._place,
            directory=config.directory,
            found=found,
            health=self.health,
            calls=self._calls,
            index=self._index,
            watches=(self._watch, self._index_watch),
        )
        self.health.begin()
        _LOG.info("nvme open", how=found.report.how, entries=found.report.entries)
        return Opened(found.spaces, recover.entries_of(found.batches), found.report)

    async def close(self) -> None:
        """Refuse new work, wait for what is under way, close the index, mark it clean, let go.

        Waits for CLOSE_S at most; what still hangs then keeps its thread and its file.
        """
        self.health.end("closing")
        deadline = self._loop.time() + CLOSE_S
        while self._busy() and self._loop.time() < deadline:  # noqa: ASYNC110 - a drain
            await asyncio.sleep(0.005)
        hangs = self.hangs = self._busy()
        if not hangs:
            await settled(self._loop, self._index.call(self._finish))
            for region in self.extents.regions.values():
                if region.handle >= 0:
                    self._disk.close(region.handle)
            self._disk.close(self._lock)
        self._pool.shutdown(wait=not hangs)
        self._index_pool.shutdown(wait=not hangs)
        self.health.end("closed")

    def _busy(self) -> bool:
        return bool(
            self.reading.depth or self.writing.depth or self.health.probing or self._index.busy
        )

    def _finish(self, index: Index) -> None:
        """Close the index and write the clean mark; in the index's thread."""
        mark = index.close()
        if mark and not self.health.index_broken:
            try:
                content = storefiles.encode_clean(self._uuid, mark)
                replace_file(self._disk, self.config.directory / "clean", content, sync=False)
            except OSError as error:  # then the next start copies the index
                _LOG.warning("nvme not marked clean", why=error.strerror)

    # ---------------------------------------------------------------- writing

    async def write(self, bundle: Bundle, *, rewrite: bool = False) -> Ref:
        """Store a bundle; it is durable when this returns. A key that is there is replaced.

        Args:
            bundle: Its buffers belong to the store until this returns or raises (N4).
            rewrite: May use the spare regions: for saving bundles from a region to be reclaimed.

        Raises:
            ValueError: The bundle breaks a rule, or is larger than a region.
            TierBusy: Too much is under way, or the disk stalls.
            NoSpace: No region is free, or the file system is full.
            TierFailed: Not written, or closed.
            asyncio.CancelledError: As ever; the bundle may be durable all the same.

        After an error the key's earlier bundle, if there was one, is still good; unless the error
        was the transaction's or a cancellation, what is read after a restart may be either.
        """
        plan = plan_record(bundle)
        if plan.length_bytes > self.config.region_bytes - BLOCK:
            raise ValueError("the bundle is larger than a region")
        self.health.admit(self.writing.depth)
        self.writing.begin(self._loop.time())
        moved = 0
        try:
            region, offset = await self._room(plan.length_bytes, rewrite=rewrite)
            try:
                ref = await self._write(bundle, plan, region, offset)
            finally:
                self.extents.leave(region, writer=True)
            moved = plan.length_bytes
        finally:
            self.writing.end(self._loop.time(), moved)
        self.health.worked()
        self.counters.writes += 1
        self.counters.write_bytes += plan.length_bytes
        return ref

    def _next(self) -> int:
        """Return a generation, or incarnation, that was never used (D2)."""
        self._sequence += 1
        assert self._sequence < 1 << recover.LIFE_SHIFT
        return self._life << recover.LIFE_SHIFT | self._sequence

    async def _room(self, length_bytes: int, *, rewrite: bool) -> tuple[Region, int]:
        """Take room in a region; opens the next one when it must."""
        while True:
            place = self.extents.place(length_bytes, rewrite=rewrite)
            if place is not None:
                return place
            async with self._rolling:
                if not self.extents.fits(length_bytes, rewrite=rewrite):
                    await self._roll(rewrite=rewrite)

    async def _roll(self, *, rewrite: bool) -> None:
        """Open a region for appending; under the lock. The one before is sealed."""
        region = self.extents.take_free(rewrite=rewrite, grow=self.health.grow)
        if region is None:
            self.counters.refused_space += 1
            raise NoSpace("no NVMe region is free: reclaim one")
        fresh = region.handle < 0
        header = RegionHeader(self._uuid, region.id, self.config.region_bytes, self._next())
        opened = False
        try:
            await self._calls.run(self._prepare, region, header)
            self._index.pardon(region.id)
            self.extents.open(region, header.incarnation, rewrite=rewrite)
            opened = True
        except OSError as error:
            now = self._loop.time()
            if fresh and error.errno in FULL_ERRNOS:
                raise self.health.no_room(now) from error
            raise self.health.failed(error, now) from error
        finally:
            if not opened:
                self.extents.put_back(region)

    def _prepare(self, region: Region, header: RegionHeader) -> None:
        directory = self.config.directory
        storefiles.prepare_region(self._disk, directory, region, header, direct=self._direct)

    async def _write(self, bundle: Bundle, plan: Plan, region: Region, offset: int) -> Ref:
        assert region.incarnation is not None
        origin = Origin(self._uuid, region.id, region.incarnation, self._next())
        try:
            await self._calls.run(
                write_record, self._disk, region.handle, offset, bundle, plan, origin
            )
        except OSError as error:
            self.extents.seal(region)
            raise self.health.failed(error, self._loop.time()) from error
        row = planned_row(bundle, plan, origin, offset)
        changes = Changes([Change(row.key, encode_row(row)[KEY_BYTES:])])
        if row.space_key not in self._ledger.spaces:
            changes.spaces[row.space_key] = plan.space_blob
        await self._ledger.commit(changes, region, row)
        return row.ref

    # ---------------------------------------------------------------- reading

    async def read(
        self,
        ref: Ref,
        space: Space,
        chunk: bytes,
        parent: bytes,
        into: Mapping[int, WriteableBuffer | None],
    ) -> dict[int, Loaded]:
        """Read and verify the objects of a bundle whose columns are named in `into`.

        Args:
            ref: Where it is.
            space: Whose it must be (its label and layout fields don't count).
            chunk: Which it must be (N2).
            parent: What must come before it.
            into: By column, a buffer for a raw object (page-aligned, else it takes a copy more;
                at least as long as the object), or None. What is not raw, or has no buffer, comes
                back in memory of its own. The buffers belong to the store until the call ends (N4).

        Raises:
            Corrupt: Something else lies there, or it is damaged: a miss; delete the key.
            TierBusy: Too many reads are under way.
            TierFailed: The disk failed; it may be read later.
            ValueError: A buffer is too short, or read-only.

        After an error the buffers hold rubbish.
        """
        if self.health.reason == "closed":
            raise TierFailed("the NVMe tier is closed")
        if self.reading.depth >= self.config.reads_max:
            self.counters.refused_busy += 1
            raise TierBusy("the NVMe tier takes no more reads for now")
        region = self.extents.regions.get(ref.region)
        if region is None or not region.holds(ref.generation):
            self.counters.gone += 1
            raise Corrupt("the bundle's place was given up")
        known = region.incarnation is not None
        origin = Origin(self._uuid, region.id, region.incarnation or 0, ref.generation)
        want = Want(origin, known, ref, space, chunk, parent)
        region.users += 1
        self.reading.begin(self._loop.time())
        moved = 0
        try:
            loaded = await self._calls.run(
                read_bundle, self._disk, region.handle, want, into, self.buffers.take
            )
            moved = sum(item.stored.nbytes for item in loaded.values())
        except BadRecord as error:
            self.counters.corrupt += 1
            _LOG.limited("nvme record refused", why=str(error))
            raise Corrupt(str(error)) from error
        except OSError as error:
            self.counters.errors_read += 1
            raise TierFailed(f"NVMe read: {error.strerror}") from error
        finally:
            self.reading.end(self._loop.time(), moved)
            self.extents.leave(region)
        self.counters.reads += 1
        self.counters.read_bytes += moved
        return loaded

    # ---------------------------------------------------------------- deleting

    async def delete(self, keys: Iterable[tuple[bytes, bytes, int]]) -> int:
        """Delete keys durably; return how many there were. Works on a full disk, and when closed.

        Args:
            keys: (space key, chunk, generation); 0 as the generation: whichever is there, otherwise
                that one only. A write of the same key that has not returned may still come after.

        Raises:
            TierFailed, NoSpace: The transaction failed; after a restart they may be there or not.
        """
        return await self._ledger.delete(keys)

    def reclaim_candidates(self) -> list[Victim]:
        """Return the regions that may be reclaimed, those with the least to lose first.

        Sealed ones without writes under way; with no such region, those being appended to.
        """
        return self._ledger.candidates()

    async def live_keys(self, region: int) -> list[LiveKey]:
        """Return what lies in a region and counts; empty for one that holds nothing.

        Raises:
            TierFailed: The index does not answer.
        """
        return await self._ledger.live_keys(self.extents.regions[region])

    async def reclaim(self, region: int) -> list[LiveKey]:
        """Delete what still lies in a region and free it; returns what was deleted.

        The caller forgets those keys at once; reads under way end as they would have.

        Raises:
            TierBusy: Writes are under way in it.
            TierFailed, NoSpace: The transaction failed; nothing was freed.
        """
        return await self._ledger.reclaim(self.extents.regions[region])

    # ---------------------------------------------------------------- failing, opening again

    def _sync(self, region: int) -> None:
        """Make a region durable; in the index's thread."""
        self._disk.fdatasync(self.extents.regions[region].handle)

    def _relieve(self) -> None:
        """Let go of the ballast; in the index's thread."""
        self._disk.unlink(self.config.directory / "ballast")

    def tick(self) -> None:
        """Let time pass: stalls, measured rates, probes. Call it some five times a second."""
        now = self._loop.time()
        self.reading.turn(now)
        self.writing.turn(now)
        self._upkeep.tick(now)
        self.buffers.trim()

    # ---------------------------------------------------------------- what is shown

    @property
    def state(self) -> str:
        """`open`, `slow` or `closed: REASON`."""
        return self.health.state

    @property
    def writable(self) -> bool:
        """Whether a write would be let in now."""
        return self.health.state == "open" and self.writing.depth < self.config.writes_max

    @property
    def free_regions(self) -> int:
        """Regions that could be opened for rewrites; `spare_regions` of them for nothing else."""
        return self.extents.free_count(grow=self.health.grow)

    def stats(self) -> dict[str, Any]:
        """Return what the statistics page shows; loop only, some microseconds a region."""
        held = list(self.extents.held())
        used = sum(region.tail_bytes - BLOCK for region in held)
        live = sum(region.live_bytes for region in held)
        return {
            "state": self.state,
            "capacity_bytes": self.config.regions * self.config.region_bytes,
            "used_bytes": used,
            "live_bytes": live,
            "garbage_bytes": used - live,
            "live_count": sum(region.live_count for region in held),
            "regions_held": len(held),
            "regions_free": self.free_regions,
            "direct": self._direct,
            "reads_queued": self.reading.depth,
            "writes_queued": self.writing.depth,
            "index_queued": self._index.depth,
            "read_bytes_per_s": round(self.reading.rate),
            "write_bytes_per_s": round(self.writing.rate),
            "index_commits": self._index.commits,
            "index_jobs": self._index.jobs,
            "counters": asdict(self.counters),
        }
