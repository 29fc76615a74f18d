"""The loop's side of the GPU tier: who gets places there, and what is copied when.

    store   an engine fills a twin and publishes; the daemon copies it down into the host slot that
            was reserved with it, and only then is the object found
    load    an engine is told of twins where they are, and of host slots elsewhere
    up      an object that engines with this GPU asked for twice gets a twin, behind their backs

Only sessions that said which GPU they use are told of places on it. All on the loop.

Invariants:

U1. What is found has its bytes in host memory: an object is published in the catalog after the
    copy down has ended, never before.
U2. While the daemon copies into or out of a twin, its chunk is filling or moving, and stays.
U3. Where the outcome of a copy is not known, nothing that it may still write is used again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd import log
from kvd.catalog import DAEMON, NEVER_NS
from kvd.entry import SlotState
from kvd.places import place_record, slots_of
from kvd.pulse import TURN_S
from kvd.tiers.gpu import Copy, GpuTier, Outcome
from kvd.tiers.slab import SlabPool
from kvd.twins import Twins
from kvd_client import wire_gpu
from kvd_client.wire import Status

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from kvd.catalog import Catalog
    from kvd.config_gpu import GpuKnobs
    from kvd.entry import Chunk, Slot
    from kvd.places import PlaceRecord
    from kvd.pulse import Pulse
    from kvd.tiers.gpu import HostMemory
    from kvd.types import Generation, OwnerId, SlabId, Tenant
    from kvd.verifier import Verifier

SEEN_MAX: Final = 1 << 16
"""Objects remembered as asked for once."""
RISING_MAX: Final = 64
"""Most objects on their way up."""
_LOG = log.get("gpu")


class GpuSide:
    """What the loop does about the GPU tier."""

    def __init__(
        self,
        catalog: Catalog,
        knobs: GpuKnobs,
        host: HostMemory,
        host_slab_bytes: int,
        *,
        epoch: int,
        loop: asyncio.AbstractEventLoop,
        verifier: Verifier | None = None,
    ) -> None:
        """Build the tier; `start` takes the GPU into use."""
        self._verifier = verifier
        self._epoch = epoch
        self._catalog = catalog
        self._loop = loop
        self._promote = knobs.promote
        count, size = knobs.slab_count, knobs.slab_bytes
        total = sum(catalog.pool.shares.values())
        shares = {t: count * slabs // total for t, slabs in catalog.pool.shares.items()}
        self.twins = Twins(SlabPool(size, shares))
        catalog.pool.on_free = self.twins.drop
        catalog.on_damage = self.twins.set_aside
        self._seen: dict[Generation, None] = {}
        self._rising = 0
        self.falling = 0
        self.lost = 0
        self.tier = GpuTier(
            knobs,
            host,
            host_slab_bytes,
            on_slab=lambda slab: self._call(self._add_slab, slab),
            on_failed=lambda why: self._call(self._failed, why),
        )

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(what, *arguments)

    def _add_slab(self, slab: SlabId) -> None:
        self.twins.pool.add_blank(slab)

    def _failed(self, why: str) -> None:
        self.twins.freeze()
        _LOG.error("gpu tier closed", why=why)

    # ---------------------------------------------------------------- for the sessions

    def use(self, uuid: bytes) -> Status:
        """Tell whether this is the tier's GPU."""
        return Status.OK if self.tier.state == "open" and uuid == self.tier.uuid else Status.MISS

    def slab(self, request: int, tenant: Tenant, slab: int) -> wire_gpu.GpuSlabReply:
        """Say how a slab is mapped; nothing if it is not the tenant's."""
        handle = self.tier.handle(slab)
        if handle is None or self.twins.pool.tenant_of(slab) != tenant or self.twins.frozen:
            return wire_gpu.GpuSlabReply(request, self._epoch, 0, b"")
        return wire_gpu.GpuSlabReply(request, self._epoch, self.tier.knobs.slab_bytes, handle)

    def reserved(self, owner: OwnerId, places: list[PlaceRecord]) -> list[PlaceRecord]:
        """Give reserved host slots twins as far as there is room, and tell of those instead."""
        told = []
        for place in places:
            slot = self._filling(owner, place[6]) if place[2] == Status.OK else None
            if slot is not None and self.twins.attach(slot):
                told.append(place_record(place[0], place[1], slot, at=slot.twin))
            else:
                told.append(place)
        return told

    def _filling(self, owner: OwnerId, generation: int) -> Slot | None:
        return self._catalog.fillings.get(owner, generation)  # type: ignore[arg-type]

    def publish(
        self, owner: OwnerId, generations: Sequence[Generation], now_ns: int
    ) -> list[Status]:
        """Publish slots; those with a twin when their bytes have come down (U1)."""
        results: dict[Generation, Status] = {}
        plain: list[Generation] = []
        for generation in generations:
            slot = self._filling(owner, generation)
            due = slot is not None and slot.state is SlotState.RESERVED
            if slot is None or slot.twin is None or not due or now_ns > slot.deadline_ns:
                plain.append(generation)
            else:
                self._catalog.fillings.adopt(slot, DAEMON, NEVER_NS)
                self._catalog.counters.objects_published += 1
                self._catalog.counters.bytes_published += slot.size_bytes
                self._bring_down(slot)
                results[generation] = Status.OK
        done = self._catalog.publish_all(owner, plain, now_ns)
        results.update(zip(plain, done, strict=True))
        return [results[generation] for generation in generations]

    def places(
        self, chunks: Sequence[Chunk], first: int, rank: int, places: list[PlaceRecord]
    ) -> list[PlaceRecord]:
        """Tell of twins instead of host slots, and bring up what was asked for before."""
        layout = chunks[0].space.layout
        told = []
        for place in places:
            slot = chunks[place[0] - first].slots[layout.column(place[1], rank)]
            if self.twins.readable(slot):
                self.twins.touch(slot)
                told.append(place_record(place[0], place[1], slot, at=slot.twin))
            else:
                self._wanted(slot)
                told.append(place)
        return told

    def whole(self, chunk: Chunk) -> bool:
        """Tell whether all that rank 0 reads of a chunk may be read from GPU memory."""
        slots = slots_of(chunk, 0)
        return bool(slots) and all(self.twins.readable(slot) for slot in slots)

    # ---------------------------------------------------------------- copies

    def _bring_down(self, slot: Slot) -> None:
        self.falling += 1
        self.tier.submit(_copy(slot, lambda o: self._call(self._came_down, slot, o), up=False))

    def _came_down(self, slot: Slot, outcome: Outcome) -> None:
        self.falling -= 1
        if outcome is Outcome.OK:
            self.twins.settle(slot)
            status = self._catalog.publish(DAEMON, slot.generation, 0)
            assert status is Status.OK
        elif outcome is Outcome.REFUSED:
            self.lost += 1
            self._catalog.abort(DAEMON, slot.generation)
        else:
            self.lost += 1  # U3: it stays reserved, the daemon's, until the daemon ends

    def _wanted(self, slot: Slot) -> None:
        """Bring an object up at its second use."""
        if slot.twin is not None or not self._promote or slot.chunk is None:
            return
        if slot.generation not in self._seen:
            self._seen[slot.generation] = None
            if len(self._seen) > SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            return
        if self._rising >= RISING_MAX or not self.twins.attach(slot):
            return
        del self._seen[slot.generation]
        self._rising += 1
        chunk = slot.chunk
        self._catalog.begin_demotion(chunk)  # U2: it is copied and stays as it is
        self.tier.submit(_copy(slot, lambda o: self._call(self._came_up, slot, chunk, o), up=True))

    def _came_up(self, slot: Slot, chunk: Chunk, outcome: Outcome) -> None:
        if outcome is Outcome.OK and slot.watched and self._verifier is not None:
            self._verifier.check([slot], lambda: self._is_up(slot, chunk, outcome))
        else:
            self._is_up(slot, chunk, outcome)

    def _is_up(self, slot: Slot, chunk: Chunk, outcome: Outcome) -> None:
        """End a copy up, whose source was verified after it was copied."""
        self._rising -= 1
        same = slot.state is SlotState.PUBLISHED
        if outcome is Outcome.OK and same:
            self.twins.settle(slot)
        elif outcome is not Outcome.LOST:
            self.twins.drop(slot)
        self._catalog.end_demotion(chunk, None)

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Take the GPU into use, in the background."""
        self.tier.start()

    def beat(self, pulse: Pulse) -> None:
        """Say when the thread last turned."""
        pulse.beat("gpu thread", int(self.tier.turned_s() * 1e9), TURN_S)

    def close(self) -> None:
        """End the copies and free the memory; before the host tier closes."""
        self.tier.close()

    def stats(self) -> dict[str, object]:
        """Describe the tier."""
        pool, tier = self.twins.pool, self.tier
        return {
            "state": tier.state,
            "note": tier.note,
            "device": tier.knobs.device,
            "capacity_bytes": tier.knobs.slab_count * tier.knobs.slab_bytes,
            "ready_bytes": tier.ready_bytes,
            "used_bytes": sum(pool.used_bytes(tenant) for tenant in pool.shares),
            "objects": len(self.twins),
            "evicted": self.twins.evicted,
            "rising": self._rising,
            "falling": self.falling,
            "lost": self.lost,
            "verified": tier.verified,
            "differed": tier.differed,
            "bytes_up": tier.copied_bytes[True],
            "bytes_down": tier.copied_bytes[False],
            "pinned_bytes": tier.pinned_bytes,
        }


def _copy(slot: Slot, done: Callable[[Outcome], None], *, up: bool) -> Copy:
    twin = slot.twin
    assert twin is not None
    return Copy(
        up, slot.slab, slot.offset_bytes, twin.slab, twin.offset_bytes, slot.size_bytes, done
    )
