"""The tier below the host tier: what moves down, what moves up, and when.

The loop decides and owns all state; the store's threads move bytes to and from disk, the codec's
threads change their form. After every wait the chunk is looked at again.

K1. A chunk moves with all the objects it has, or not at all.
K2. Host slots are not freed while they are written down (a move under way, C2), and slots that are
    being read into are not found before they are whole (E1).
K3. One promotion a chunk: everybody else waits for the same one, and who leaves takes only itself.
K4. A failed demotion leaves the chunk as it was (C6); a failed promotion is a miss.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING

from kvd import codec, log, rates
from kvd.admission import Admissions
from kvd.cost import Rate, Rates
from kvd.failpoints import maybe_fault, maybe_stall
from kvd.forms import FORM_FRAME, DiskRates, Forms, as_published
from kvd.pulse import TURN_S
from kvd.restore import HINT_LOSSY, restore
from kvd.stored import StoredNames, above
from kvd.tiers.disk import Corrupt, NoSpace, TierError, TierFailed
from kvd.tiers.region import Bundle, Part, Ref

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from kvd.catalog import Catalog
    from kvd.config_nvme import NvmeKnobs
    from kvd.entry import Chunk, Slot
    from kvd.pulse import Pulse
    from kvd.tiers.host import HostTier
    from kvd.tiers.nvme import NvmeStore
    from kvd.tiers.transfer import Loaded
    from kvd.types import Tenant

    Done = Callable[[bool], None]
    Sure = Callable[[Sequence[Slot]], Awaitable[None]]

_LOG = log.get("cold")

DEMOTIONS_MAX = 8
"""Under way at once: enough to keep the disk's queue filled."""
PROMOTIONS_MAX = 16
"""Reading at once; more wait their turn."""
WAKE_S = 0.1
"""Longest sleep of the mover while there may be something to do."""
FULL_S = 2.0
"""After so long without room below, stores no longer wait for it."""
UNREADABLE_S = 5.0
"""For how long nothing cold is offered after a read that the disk failed."""
CODEC_S = 30.0
"""Longest change of form of one object: they may have hundreds of MiB, and the host little CPU."""
WARM_S = 300.0
"""Longest time to compile the codec, which is some seconds."""
RETRY_S = 1.0
"""Pause after a failure of the tier."""


class ColdTier:
    """Moves chunks between host slots and the store."""

    def __init__(
        self,
        catalog: Catalog,
        host: HostTier,
        store: NvmeStore,
        knobs: NvmeKnobs,
        begin: rates.HostRates = rates.NONE,
        *,
        sure: Sure | None = None,
    ) -> None:
        """Share the loop's state; own codec threads and store.

        Args:
            catalog: What is where.
            host: The bytes of slots.
            store: The bytes below.
            knobs: What to move, and how.
            begin: A first guess of the rates.
            sure: Verifies slots that are written down; raises TierError. None: nothing does.
        """
        self._sure = sure
        self._catalog = catalog
        self._host = host
        self.store = store
        self._knobs = knobs
        self.forms = Forms(knobs.form, knobs.codec_threads, self._view, store.buffers.take)
        self._admission = Admissions(knobs.admission, knobs.admission_threshold)
        self._wake = asyncio.Event()
        self._turn = asyncio.Semaphore(PROMOTIONS_MAX)
        self._promotions: dict[Chunk, list[Done]] = {}
        self._names = StoredNames(catalog)
        self._unreadable_until_ns = self._full_since_ns = self.turned_ns = self._opened_ns = 0
        self._closing = self._reclaiming = self._flushing = False
        self._broken: list[tuple[bytes, bytes, int]] = []
        self._group: asyncio.TaskGroup | None = None
        self._demotions = 0
        self.read_rate = Rate()
        """Stored bytes of promotions a second, one at a time."""
        self.queued_bytes = 0
        self._begin = begin
        """Stored bytes of promotions that wait or are under way."""

    # ---------------------------------------------------------------- start and end

    def open(self) -> None:
        """Open the store and put what it holds into the catalog; blocks.

        Raises:
            StartError: The directory cannot be used; the text says what to change.
        """
        maybe_fault("open.before")
        opened = self.store.open()
        self.forms.begin_warm_up()  # while the trees are put up: the first promotion needs it
        maybe_fault("open.before_restore")
        self._opened_ns = time.monotonic_ns()
        count, self._broken = restore(self._catalog, opened, self._names.space)
        maybe_fault("open.after_restore")
        self._catalog.cold_readable = True
        self._catalog.eviction.demoting = True
        _LOG.info("restored", chunks=count, broken=len(self._broken), **_brief(opened.report))

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Move what is to be moved until cancelled; every move is a task of `group`."""
        self._group = group
        if self._broken:
            group.create_task(self._delete(self._broken))
        await self.forms.warmed_up()
        while True:
            self.turned_ns = self._now_ns()
            await maybe_stall("mover.turn")
            self._look_at_health()
            if self.store.state == "open":
                if self._short_of_regions() and not self._reclaiming:
                    self._reclaiming = True
                    group.create_task(self._reclaim())
                self._demote_some(group)
            with suppress(TimeoutError):
                async with asyncio.timeout(WAKE_S):
                    await self._wake.wait()
            self._wake.clear()

    def wake(self) -> None:
        """Look again at once: a store found no room."""
        self._wake.set()

    async def flush(self, deadline_s: float) -> int:
        """Write down what is dirty, for at most `deadline_s`; return the bytes that are left."""
        maybe_fault("flush.begin")
        self._flushing = True
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while self._dirty_bytes() and self.store.state == "open" and loop.time() < end:
            self.wake()
            await asyncio.sleep(0.01)
        while self._demotions and loop.time() < end:  # noqa: ASYNC110 - a drain
            await asyncio.sleep(0.005)
        maybe_fault("flush.end")
        return self._dirty_bytes()

    def _dirty_bytes(self) -> int:
        return sum(self._catalog.eviction.dirty_bytes.values())

    async def close(self) -> None:
        """Close the store, marked clean; wait for the threads."""
        self._closing = True
        self._catalog.cold_readable = False
        self._catalog.eviction.demoting = False
        maybe_fault("close.before")
        await self.store.close()
        maybe_fault("close.after")
        self.forms.close()

    def tick(self) -> None:
        """Let time pass, whatever the mover waits for; call it some five times a second."""
        self.store.tick()
        self._look_at_health()

    def beat(self, pulse: Pulse) -> None:
        """Say when mover and threads last turned."""
        if self.turned_ns:
            pulse.beat("mover", self.turned_ns, TURN_S)
            pulse.beat("codec pool", int(self.forms.workers.turned_s() * 1e9), CODEC_S)
        else:  # it waits for the codec, which compiles
            pulse.beat("mover", self._opened_ns, WARM_S)
        for name, workers in self.store.workers.items():
            pulse.beat(name, int(workers.turned_s() * 1e9), TURN_S)

    def _look_at_health(self) -> None:
        """Let the catalog rely on the tier as far as its state allows."""
        state, eviction, now_ns = self.store.state, self._catalog.eviction, self._now_ns()
        self._catalog.cold_readable = not (now_ns < self._unreadable_until_ns or self._closing)
        full = self._full_since_ns and now_ns - self._full_since_ns > FULL_S * 1e9
        takes_in = state == "open" and not (full and self._short_of_regions())
        if takes_in and not eviction.demoting:
            pool = self._catalog.pool  # of a million chunks, those in host slots are few
            slots = [s for t in pool.shares for b in pool.slabs_of(t) for s in b.slots.values()]
            eviction.begin_demoting({slot.chunk for slot in slots if slot.chunk is not None})
            _LOG.info("nvme takes in again")
        elif not takes_in and eviction.demoting:
            eviction.demoting = False
            _LOG.warning("nvme takes nothing in", state="full" if state == "open" else state)

    # ---------------------------------------------------------------- down

    def _demote_some(self, group: asyncio.TaskGroup) -> None:
        """Begin demotions: where room is short, and otherwise whenever the disk is idle."""
        eviction = self._catalog.eviction
        for tenant, slabs in self._catalog.pool.shares.items():
            share = slabs * self._catalog.pool.slab_bytes
            short = (
                tenant in eviction.pressed
                or eviction.dirty_bytes[tenant] > self._knobs.dirty_share * share
            )
            behind = self._knobs.write_behind and self._knobs.admission == "all"
            idle = behind and not self._promotions
            while (short or idle or self._flushing) and self._demotions < DEMOTIONS_MAX:
                if not self.store.writable:
                    break
                chunk = eviction.demotable(tenant, heads=self._flushing or not short)
                if chunk is None:
                    break
                if not self._admission.admits(chunk):
                    self._catalog.counters.chunks_not_admitted += 1
                    self._catalog.reject(chunk)
                    continue
                slots = self._catalog.begin_demotion(chunk)
                self._demotions += 1
                group.create_task(self._demote(chunk, slots))
            eviction.pressed.discard(tenant)

    async def _demote(self, chunk: Chunk, slots: list[Slot]) -> None:
        """Write one chunk down, and pause if there was no room: the reclaim is on its way."""
        try:
            written = await self._write_down(chunk, slots)
            if not written and self.store.state == "open":
                await asyncio.sleep(RETRY_S)
        finally:
            self._demotions -= 1
            self.wake()

    async def _write_down(self, chunk: Chunk, slots: list[Slot]) -> bool:
        """Write one chunk down; whatever fails, it stays as it was (K4). False: try again later."""
        mask = sum(1 << slot.column for slot in slots)
        form = self.forms.of(chunk.space)
        start, cold, old, kept = self._now_ns(), None, chunk.cold, chunk.cold_mask & ~mask
        try:
            maybe_fault("demote.before_encode")
            rates = DiskRates(self.store.reading.rate, self.store.writing.rate)
            parts = await self.forms.encode(chunk.space, form, slots, rates)
            lossy = form == "fp8" and any(part.form == FORM_FRAME for part in parts)
            lossy = lossy or bool(chunk.lossy_mask & mask) or bool(kept and chunk.cold_lossy)
            if old is not None and kept:  # objects that came after the others went down (K1)
                parts += await self._as_stored(chunk, Ref(*old), kept)
                parts.sort(key=itemgetter(0))
            stored, hint = self._names.space(chunk.space), HINT_LOSSY if lossy else 0
            bundle = Bundle(stored, chunk.hash, above(chunk), parts, hint)
            ref = await self._write(chunk, slots, bundle)
            cold = (ref, mask | kept, lossy)
            self._full_since_ns = 0
            self._admission.entered(ref.region, self._now_ns())
            took_s = (self._now_ns() - start) / 1e9
            self._catalog.counters.count_demotion(chunk.size_bytes, ref.length_bytes, took_s)
        except ValueError as error:  # larger than a region, whatever its objects became
            self._catalog.counters.chunks_not_admitted += 1
            _LOG.limited("demotion refused", why=str(error))
            self._catalog.reject(chunk)
        except TierError as error:
            self._catalog.counters.demotions_failed += 1
            _LOG.limited("demotion failed", why=str(error))
            if isinstance(error, NoSpace):
                self._full_since_ns = self._full_since_ns or self._now_ns()
            if isinstance(error, Corrupt) and old is not None:
                await self._forget(chunk, Ref(*old))
            return False
        finally:
            self._catalog.end_demotion(chunk, cold)
            maybe_fault("demote.after_end")
        return True

    async def _write(self, chunk: Chunk, slots: Sequence[Slot], bundle: Bundle) -> Ref:
        """Write a bundle made of slots that are verified, each time behind what has read them.

        Before the write, whose record has the sums of then, so that nothing wrong that a crash
        leaves behind is believed; and after it, because a raw object is read by the write itself.
        What was written in vain is deleted.
        """
        if self._sure is not None:
            await self._sure(slots)
            bundle = bundle._replace(parts=as_published(bundle.parts, slots))
        maybe_fault("demote.before_write")
        ref = await self.store.write(bundle)
        maybe_fault("demote.after_write")
        if self._sure is not None:
            try:
                await self._sure(slots)
            except TierError:
                await self._delete([(bundle.space.key, chunk.hash, ref.generation)])
                if chunk.cold is not None:  # its row was replaced by the one that is deleted
                    self._catalog.drop_cold(chunk, "damaged")
                raise
        return ref

    @staticmethod
    def _now_ns() -> int:
        return int(asyncio.get_running_loop().time() * 1e9)

    def touched(self, tenant: Tenant, hashes: Sequence[bytes]) -> None:
        """Hear of a request's chain, once; admission learns from it."""
        self._admission.touched(tenant, hashes, self._now_ns())

    def served(self, chunk: Chunk) -> None:
        """Hear that another host takes a copy; admission learns from it."""
        self._admission.served(chunk.space.tenant, chunk.hash)

    def _view(self, slot: Slot) -> memoryview:
        return self._host.view(slot.slab, slot.offset_bytes, slot.size_bytes)

    # ---------------------------------------------------------------- up

    def promote(self, chunk: Chunk, done: Done) -> bool:
        """Bring a chunk up; `done` hears whether it is there. False when there is no room.

        The caller holds a pin until then. A chunk that is on its way already is waited for (K3).
        """
        waiters = self._promotions.get(chunk)
        if waiters is not None:
            waiters.append(done)
            return True
        slots = self._catalog.begin_promotion(chunk)
        if slots is None:
            self.wake()
            return False
        assert chunk.cold_bytes
        self._promotions[chunk] = [done]
        self.queued_bytes += chunk.cold_bytes
        assert self._group is not None
        self._group.create_task(self._promote(chunk, slots, chunk.cold_bytes))
        return True

    def leave(self, chunk: Chunk, done: Done) -> None:
        """Stop waiting (K3); without anybody left, a promotion that has not begun ends."""
        waiters = self._promotions.get(chunk)
        if waiters is not None and done in waiters:
            waiters.remove(done)

    def cost(self) -> Rates:
        """Return the rates: measured while serving, or before (`kvd doctor --measure`)."""
        begin = self._begin
        rate = self.store.reading.rate or begin.nvme_read_bytes_s
        latency_s = self.read_rate.seconds or begin.nvme_read_s
        return Rates(0.0, rate, latency_s, self.queued_bytes)

    async def _promote(self, chunk: Chunk, slots: list[Slot], queued_bytes: int) -> None:
        read, ref, took_s = False, None, 0.0
        try:
            async with self._turn:
                place = chunk.cold  # it may have moved meanwhile
                if self._promotions[chunk] and place is not None:
                    start, ref = self._now_ns(), Ref(*place)
                    maybe_fault("promote.before_read")
                    await self._read(chunk, slots, ref)
                    maybe_fault("promote.after_read")
                    took_s = (self._now_ns() - start) / 1e9
                    self.read_rate.observe(ref.length_bytes, took_s)
                    read = True
        except (Corrupt, codec.CorruptFrame, codec.CodecMissing) as error:
            self._catalog.counters.promotions_failed += 1
            _LOG.limited("cold copy refused", why=str(error))
            if ref is not None and not isinstance(error, codec.CodecMissing):
                await self._forget(chunk, ref)
        except TierError as error:
            self._catalog.counters.promotions_failed += 1
            _LOG.limited("promotion failed", why=str(error))
            if isinstance(error, TierFailed):
                self._unreadable_until_ns = self._now_ns() + int(UNREADABLE_S * 1e9)
        finally:
            self.queued_bytes -= queued_bytes
            waiters = self._promotions.pop(chunk)
            self._catalog.end_promotion(chunk, slots, read=read)
            maybe_fault("promote.after_end")
            if read:
                self._catalog.counters.count_promotion(chunk.size_bytes, queued_bytes, took_s)
            for done in waiters:
                done(read)

    async def _read(self, chunk: Chunk, slots: Sequence[Slot], ref: Ref) -> None:
        """Read and decode a chunk's objects into their slots."""
        into = {slot.column: self._view(slot) for slot in slots}
        stored = self._names.space(chunk.space)
        loaded = await self.store.read(ref, stored, chunk.hash, above(chunk), into)
        for slot in slots:
            await self.forms.decode(chunk.space, slot, loaded[slot.column], into[slot.column])

    async def _forget(self, chunk: Chunk, ref: Ref) -> None:
        """Give up a copy that cannot be read."""
        if chunk.cold == ref:
            self._catalog.drop_cold(chunk, "damaged")
        maybe_fault("forget.before_delete")
        await self._delete([(self._names.space(chunk.space).key, chunk.hash, ref.generation)])
        maybe_fault("forget.after_delete")

    async def _delete(self, keys: Sequence[tuple[bytes, bytes, int]]) -> None:
        try:
            await self.store.delete(keys)
        except TierError as error:
            _LOG.limited("delete failed", why=str(error))

    # ---------------------------------------------------------------- room below

    def _short_of_regions(self) -> bool:
        return self.store.free_regions <= self.store.config.spare_regions

    async def _reclaim(self) -> None:
        """Free the oldest region; what was asked for since it was written is rewritten."""
        try:
            victims = self.store.reclaim_candidates()
            if victims:
                await self._reclaim_region(victims[0].region)
        finally:
            self._reclaiming = False
            self.wake()

    async def _reclaim_region(self, region: int) -> None:
        try:
            for key in await self.store.live_keys(region):
                chunk = self._names.find(key.space_key, key.chunk)
                if chunk is not None and chunk.cold == key.ref and self._keep(chunk):
                    await self._rewrite(chunk, key.ref)
            maybe_fault("reclaim.before_delete")
            gone = await self.store.reclaim(region)
            self._admission.left(region, self._now_ns())
            maybe_fault("reclaim.after_delete")
            for key in gone:
                chunk = self._names.find(key.space_key, key.chunk)
                if chunk is not None and chunk.cold == key.ref:
                    self._catalog.counters.count_cold_drop(key.ref.length_bytes)
                    if chunk.mask and not chunk.cold_used:
                        self._catalog.reject(chunk)  # it had its time; a use makes it wanted again
                    chunk.cold_used = False
                    self._catalog.drop_cold(chunk)
            maybe_fault("reclaim.after_drop")
        except TierError as error:
            _LOG.limited("reclaim failed", why=str(error))
            await asyncio.sleep(RETRY_S)

    @staticmethod
    def _keep(chunk: Chunk) -> bool:
        """Whether to rewrite: cold only, and asked for since (a warm one is demoted again)."""
        return chunk.cold_used and not chunk.mask

    async def _rewrite(self, chunk: Chunk, ref: Ref) -> None:
        """Write a bundle as it is to another region."""
        chunk.moves += 1
        cold, mask, lossy = None, chunk.cold_mask, chunk.cold_lossy
        try:
            parts = await self._as_stored(chunk, ref, mask)
            stored, hint = self._names.space(chunk.space), HINT_LOSSY if lossy else 0
            bundle = Bundle(stored, chunk.hash, above(chunk), parts, hint)
            maybe_fault("rewrite.before_write")
            new = await self.store.write(bundle, rewrite=True)
            maybe_fault("rewrite.after_write")
            chunk.cold_used = False
            self._catalog.counters.bytes_rewritten += new.length_bytes
            if chunk.cold == ref:
                cold = (new, mask, lossy)
            else:  # it was given up meanwhile: that wins
                await self._delete([(stored.key, chunk.hash, new.generation)])
        except TierError as error:
            _LOG.limited("rewrite failed", why=str(error))
        finally:
            self._catalog.end_demotion(chunk, cold)

    async def _as_stored(self, chunk: Chunk, ref: Ref, mask: int) -> list[Part]:
        """Read objects of a cold copy in the form in which they lie there."""
        into: dict[int, None] = dict.fromkeys(_columns(mask))
        stored = self._names.space(chunk.space)
        loaded = await self.store.read(ref, stored, chunk.hash, above(chunk), into)
        return [_again(column, item) for column, item in sorted(loaded.items())]


def _columns(mask: int) -> Iterator[int]:
    return (column for column in range(mask.bit_length()) if mask >> column & 1)


def _again(column: int, item: Loaded) -> Part:
    return Part(column, item.form, item.raw_bytes, item.stored)


def _brief(report: object) -> dict[str, object]:
    return {name: getattr(report, name) for name in ("how", "entries", "dropped", "direct")}
