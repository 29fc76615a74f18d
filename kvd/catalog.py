"""Every object of the daemon: look-up, hold, reserve, publish, evict. Pure.

One prefix tree a space. The loop is the only caller; nothing here locks, waits or does I/O.

Invariants:

C2. A chunk with a pin or a reserved slot is never evicted.
C3. Charges equal what is held: pinned bytes, reserved and quarantined bytes, a tenant each.
C8. Every reserved or quarantined slot has an owner, and an owner that is gone has none.
T1. Every chunk's parent is in the tree, and knows it as a child.
T2. A chunk without objects, reservations, pins and children is not in the tree.
T3. A chunk's mask names exactly its published slots, each of the space's tenant.
T4. A chunk counts its warm children, and has a cold copy exactly if it names columns of one.
C6. A failed demotion leaves the chunk as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.audit import check_catalog
from kvd.changes import HOST, NVME, Changes
from kvd.entry import Chunk, Slot, SlotEvent, SlotState, Space, columns_of
from kvd.eviction import Eviction, keep
from kvd.filling import Fillings
from kvd.identity import rules_of
from kvd.places import PlaceRecord, place_record
from kvd.prefix import pinnable, usable_chunks
from kvd.quota import Quota, Resource
from kvd.types import OwnerId
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.metrics import Counters
    from kvd.tiers.slab import SlabPool
    from kvd.trees import Cold
    from kvd.types import Generation, Tenant
    from kvd_client.identity import Layout

DAEMON = OwnerId(0)
"""Owner of the slots that promotions fill; sessions are above it, movers of peers below."""
NEVER_NS = 1 << 62
"""Later than any deadline."""


class Catalog:
    """What is where, and who holds it."""

    def __init__(
        self, pool: SlabPool, quota: Quota, counters: Counters, policy: str = "lru"
    ) -> None:
        """Start empty over an empty pool; `policy` orders evictions."""
        self.pool = pool
        self.quota = quota
        self.counters = counters
        self.spaces: dict[tuple[Tenant, bytes, bytes], Space] = {}
        self.fillings = Fillings()
        self.eviction = Eviction(pool, self.evict, policy)
        self.changes = Changes()
        self.cold_readable = False
        self._tick = 0
        self.quarantined_bytes = 0
        self.damaged: set[Slot] = set()
        """Slots whose bytes differed (`verifying.take_out`): used by nobody again."""
        self.on_publish: Callable[[Slot], None] = _nothing
        """Hears of a slot whose bytes can be found from now on."""
        self.on_damage: Callable[[Slot], None] = _nothing
        """Hears of a slot that is out of use for good."""

    @property
    def tick(self) -> int:
        """The number of the last use; it only rises."""
        return self._tick

    # ---------------------------------------------------------------- spaces

    def enter(
        self, tenant: Tenant, namespace: bytes, label: str, layout: Layout, *, lossy: bool = False
    ) -> Space:
        """Return the space of a new session, made when it is the first."""
        key = (tenant, namespace, layout.id)
        space = self.spaces.get(key)
        if space is None:
            space = self.spaces[key] = Space(tenant, namespace, label, layout, rules_of(layout))
        space.sessions += 1
        space.lossy = lossy
        return space

    def leave(self, space: Space) -> None:
        """Let a session go; a space that is empty is forgotten."""
        assert space.sessions > 0
        space.sessions -= 1
        self._forget(space)

    def _forget(self, space: Space) -> None:
        if not space.sessions and not space.chunks:
            self.spaces.pop((space.tenant, space.namespace, space.layout.id), None)

    # ---------------------------------------------------------------- reading

    def usable(self, space: Space, hashes: Sequence[bytes]) -> int:
        """Return the chunks of the usable prefix of a chain, warm or cold."""
        return usable_chunks(space, hashes, cold=self.cold_readable)

    def hold(self, space: Space, hashes: Sequence[bytes], first: int) -> tuple[Chunk, ...]:
        """Pin chunks `first` and later of the usable prefix, as far as the quota goes.

        Returns:
            The pinned chunks, none for a miss; the caller owns the pins and ends them by `unpin`.
        """
        self.eviction.touched(space, hashes)
        chain, usable = hashes, self.usable(space, hashes)
        held = [chunk for key in chain[first:usable] if (chunk := space.chunks.get(key))]
        if len(held) != max(0, usable - first):
            return ()  # hashes that are no chain: T1 says that a real one has every node
        left = self.quota.left(space.tenant, Resource.PINNED_BYTES)
        while sum([chunk.weight_bytes for chunk in held if not chunk.pins]) > left:
            self.counters.acquires_over_quota += 1
            chain = chain[: first + pinnable(held, left)]
            usable = self.usable(space, chain)
            held = held[: max(0, usable - first)]
        self.pin(held)
        return tuple(held)

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """Hold chunks in place; the first pin of each charges its bytes."""
        charge = 0
        for chunk in reversed(chunks):
            if not chunk.pins:
                chunk.pinned_bytes = chunk.weight_bytes
                charge += chunk.pinned_bytes
                chunk.spare = max(0, chunk.spare - 1)
            chunk.pins += 1
            chunk.cold_used = True
            self.touch(chunk)
            if chunk.unwanted or chunk.dirty_bytes:  # wanted after all; in order by its new tick
                chunk.unwanted = chunk.spare > 0
                self.settle(chunk, chunk.warm)
        if charge:
            charged = self.quota.charge(chunks[0].space.tenant, Resource.PINNED_BYTES, charge)
            assert charged  # C3: `hold` takes what fits; who attaches finds it pinned

    def unpin(self, chunks: Sequence[Chunk]) -> None:
        """End one pin of each chunk."""
        discharge = 0
        for chunk in chunks:
            assert chunk.pins > 0  # C2
            chunk.pins -= 1
            if not chunk.pins:
                discharge += chunk.pinned_bytes
                chunk.pinned_bytes = 0
                self.settle(chunk, chunk.warm)
        if discharge:
            self.quota.discharge(chunks[0].space.tenant, Resource.PINNED_BYTES, discharge)

    def touch(self, chunk: Chunk) -> None:
        """Note a use of a chunk; `settle` has to follow."""
        self._tick += 1
        chunk.tick = self._tick
        for slot in chunk.slots.values():
            self.pool.slab(slot.slab).touched = self._tick

    def settle(self, chunk: Chunk, was_warm: bool) -> None:  # noqa: FBT001 - a state, no option
        """Draw the consequences of a change: orders (V1), warmth of ancestors (T4), nodes (T2).

        Args:
            chunk: What has changed.
            was_warm: Whether it was warm before.
        """
        node: Chunk | None = chunk
        while node is not None:
            parent = node.parent
            warm, parent_was = node.warm, parent is not None and parent.warm
            if parent is not None and warm != was_warm:
                parent.warm_children += 1 if warm else -1
                parent.tick = max(parent.tick, node.tick)
            self.eviction.offer(node)
            if not node.needed:
                del node.space.chunks[node.hash]
                node.leave()
                self._forget(node.space)
            elif warm == was_warm:
                return
            node, was_warm = parent, parent_was

    # ---------------------------------------------------------------- writing

    def reserve(
        self,
        space: Space,
        owner: OwnerId,
        rank: int,
        *,
        parent: bytes,
        hashes: Sequence[bytes],
        groups: int,
        deadline_ns: int,
        lossy: bool = False,
    ) -> list[PlaceRecord]:
        """Take slots for a rank's objects of a chain's next chunks.

        Args:
            space: Where.
            owner: Who will fill them.
            rank: Whose shard.
            parent: Hash of the chunk before the first, or the namespace's id.
            hashes: The chunks, in chain order.
            groups: Bit mask of layer groups.
            deadline_ns: Until when they may be published.
            lossy: What comes in was computed from a lossy copy.

        Returns:
            One record for each (chunk, group of the mask), in that order.
        """
        columns = [
            (group, space.layout.column(group, rank))
            for group in range(len(space.layout.groups))
            if groups >> group & 1
        ]
        if not columns:
            return []  # and no node either: nothing would hold it in the tree
        above = space.chunks.get(parent)
        refusal: Status = Status.OK
        if above is None and parent != space.namespace:
            refusal = Status.ORPHAN
        records = []
        for index, key in enumerate(hashes):
            if not refusal:
                chunk = space.chunks.get(key) or self._graft(space, key, above)
                for group, column in columns:
                    status: Status = refusal
                    slot = None
                    if not refusal:
                        status, slot = self._reserve_one(chunk, column, group, owner, deadline_ns)
                        if slot is not None:
                            slot.lossy = lossy
                    records.append(place_record(index, group, slot, status))
                    if status in {Status.NO_SPACE, Status.OVER_QUOTA}:
                        refusal = status  # nothing later could be used without this one
                above = chunk
            else:
                records += [place_record(index, group, None, refusal) for group, _ in columns]
        refused = sum(record[2] == refusal for record in records) if refusal else 0
        self.counters.reserves_refused += refused if owner > DAEMON else 0
        return records

    def _graft(self, space: Space, key: bytes, above: Chunk | None) -> Chunk:
        chunk = space.chunks[key] = Chunk(key, space, above)  # T1
        return chunk

    def _reserve_one(
        self, chunk: Chunk, column: int, group: int, owner: OwnerId, deadline_ns: int
    ) -> tuple[Status, Slot | None]:
        if chunk.mask >> column & 1:
            return Status.EXISTS, None
        if column in chunk.slots:
            return Status.BUSY, None
        tenant = chunk.space.tenant
        size = chunk.space.layout.groups[group].object_bytes
        if not self.quota.charge(tenant, Resource.FILLING_BYTES, size):
            self.settle(chunk, chunk.warm)  # a node just made for this goes again
            return Status.OVER_QUOTA, None
        was_warm = chunk.warm
        chunk.filling += 1  # before making room: C2 keeps this chunk, and its warmth the chain
        self.settle(chunk, was_warm)
        slot = self.pool.take(tenant, size, owner) or self.eviction.make_room(tenant, size, owner)
        if slot is None:
            self.quota.discharge(tenant, Resource.FILLING_BYTES, size)
            chunk.filling -= 1
            self.settle(chunk, was_warm=True)
            return Status.NO_SPACE, None
        slot.chunk, slot.column, slot.deadline_ns = chunk, column, deadline_ns
        chunk.put(column, slot)
        self.counters.objects_reserved += owner > DAEMON
        self.fillings.add(slot)
        return Status.OK, slot

    def publish_all(
        self, owner: OwnerId, generations: Sequence[Generation], now_ns: int
    ) -> list[Status]:
        """Publish slots, in chain order, and use them tail first: a head outlives what needs it."""
        chunks = [
            slot.chunk if (slot := self.fillings.get(owner, generation)) else None
            for generation in generations
        ]
        results = [self.publish(owner, generation, now_ns) for generation in generations]
        for chunk, status in zip(reversed(chunks), reversed(results), strict=True):
            if chunk is not None and status is Status.OK:
                self.touch(chunk)
                self.settle(chunk, chunk.warm)
        return results

    def publish(self, owner: OwnerId, generation: Generation, now_ns: int) -> Status:
        """Make a filled slot findable; says why not, and frees or keeps the slot accordingly."""
        slot = self.fillings.get(owner, generation)
        if slot is None:
            return Status.STALE
        if slot.state is SlotState.QUARANTINED:
            self._free_filling(slot, SlotEvent.CONFIRM)
            return Status.EXPIRED
        chunk = slot.chunk
        assert chunk is not None
        if now_ns > slot.deadline_ns:
            self.counters.reserves_expired += 1
            self._free_filling(slot, SlotEvent.ABORT)
            return Status.EXPIRED
        slot.step(SlotEvent.PUBLISH)
        self._forget_filling(slot)
        chunk.mask |= 1 << slot.column
        chunk.lossy_mask |= slot.lossy << slot.column
        chunk.size_bytes += slot.size_bytes
        chunk.filling -= 1
        if owner > DAEMON:  # promotions and fetches have counters of their own
            self.counters.objects_published += 1
            self.counters.bytes_published += slot.size_bytes
            self.eviction.stored(chunk)
        if self.changes.heard and chunk.mask == chunk.space.full_mask:
            self.changes.stored(chunk, HOST)
        self.on_publish(slot)
        self.touch(chunk)
        self.settle(chunk, was_warm=True)
        return Status.OK

    def abort(self, owner: OwnerId, generation: Generation) -> Status:
        """Free a reserved or quarantined slot whose writer says that it is done."""
        slot = self.fillings.get(owner, generation)
        if slot is None:
            return Status.STALE
        quarantined = slot.state is SlotState.QUARANTINED
        self._free_filling(slot, SlotEvent.CONFIRM if quarantined else SlotEvent.ABORT)
        return Status.EXPIRED if quarantined else Status.OK

    def _forget_filling(self, slot: Slot) -> None:
        self.fillings.forget(slot)
        self.quota.discharge(slot.tenant, Resource.FILLING_BYTES, slot.size_bytes)

    def _detach(self, slot: Slot) -> None:
        """Take a slot that will not be published off its chunk."""
        chunk, slot.chunk = slot.chunk, None
        if chunk is not None:
            chunk.take(slot.column)
            chunk.filling -= 1
            self.settle(chunk, was_warm=True)

    def _quarantine(self, slot: Slot) -> None:
        slot.step(SlotEvent.DEADLINE)
        self.quarantined_bytes += slot.size_bytes
        self._detach(slot)

    def _free_filling(self, slot: Slot, event: SlotEvent) -> None:
        if slot.state is SlotState.QUARANTINED:
            self.quarantined_bytes -= slot.size_bytes
        slot.step(event)
        self._forget_filling(slot)
        self._detach(slot)
        self.pool.give_back(slot)

    def sweep(self, now_ns: int) -> None:
        """Quarantine reservations whose deadline has passed."""
        for slot in self.fillings.due(now_ns):
            if slot.state is SlotState.RESERVED:
                self.counters.reserves_expired += 1
                self._quarantine(slot)

    def quarantine(self, owner: OwnerId, generation: Generation) -> None:
        """Give a reservation up whose writer may go on; `abort` says later that it does not."""
        if (slot := self.fillings.get(owner, generation)) is not None:
            self._quarantine(slot)

    def abandon(self, owner: OwnerId, *, dead: bool) -> None:
        """Take back an owner's slots: for reuse if it is dead or done, else into quarantine."""
        for slot in self.fillings.of(owner):
            if dead:
                self._free_filling(slot, SlotEvent.HOLDER_DEAD)
            elif slot.state is SlotState.RESERVED:
                self._quarantine(slot)

    # ---------------------------------------------------------------- the tier below

    def evict(self, chunk: Chunk, reason: str = "") -> None:
        """Free the host slots of a chunk that nobody holds, fills or moves.

        Without a cold copy that is a drop: the only loss, counted by its reason ("capacity" unless
        told otherwise).
        """
        assert not chunk.pins  # C2
        assert not chunk.filling  # C2
        assert not chunk.moves  # C2
        dropped = "spare" if chunk.spare else "unwanted" if chunk.unwanted else "capacity"
        why = "clean" if chunk.clean else dropped
        self.counters.count_eviction(reason or why, len(chunk.slots), chunk.size_bytes)
        was_warm, was_whole = chunk.warm, chunk.mask == chunk.space.full_mask
        for column, slot in list(chunk.slots.items()):
            slot.step(SlotEvent.EVICT)
            slot.chunk = None
            self.pool.give_back(slot)
            chunk.take(column)
        chunk.mask = chunk.lossy_mask = chunk.size_bytes = 0
        chunk.unwanted, chunk.spare = False, 0  # that was about the copy that goes
        if was_whole and self.changes.heard:
            self.changes.removed(chunk, HOST, reason or why)
        self.settle(chunk, was_warm)

    def begin_demotion(self, chunk: Chunk) -> list[Slot]:
        """Keep a chunk's host slots as they are while they are copied down."""
        chunk.moves += 1
        return [slot for slot in chunk.slots.values() if slot.state is SlotState.PUBLISHED]

    def end_demotion(self, chunk: Chunk, cold: Cold | None) -> None:
        """Take in the copy, or its failure: then the chunk is as it was (C6)."""
        assert chunk.moves > 0
        chunk.moves -= 1
        if cold is not None:
            self.set_cold(chunk, cold)
        else:
            self.settle(chunk, chunk.warm)

    def set_cold(self, chunk: Chunk, cold: Cold) -> None:
        """Note that a copy lies in the tier below."""
        was_whole = chunk.cold_mask == chunk.space.full_mask
        chunk.cold, chunk.cold_mask, chunk.cold_lossy = cold
        chunk.cold_used = False
        self._tell_cold(chunk, "replaced", was_whole=was_whole)
        self.settle(chunk, chunk.warm)
        if chunk.parent is not None and keep(chunk.parent):  # of no use without it after a restart
            self.settle(chunk.parent, chunk.parent.warm)

    def reject(self, chunk: Chunk) -> None:
        """Note that a chunk is not to be written down: it goes like a clean one."""
        chunk.unwanted = True
        self.settle(chunk, chunk.warm)

    def drop_cold(self, chunk: Chunk, reason: str = "capacity") -> None:
        """Forget the copy in the tier below."""
        was_whole = chunk.cold_mask == chunk.space.full_mask
        chunk.cold, chunk.cold_mask, chunk.cold_lossy = None, 0, False
        self._tell_cold(chunk, reason, was_whole=was_whole)
        self.settle(chunk, chunk.warm)

    def _tell_cold(self, chunk: Chunk, reason: str, *, was_whole: bool) -> None:
        whole = chunk.cold_mask == chunk.space.full_mask
        if whole != was_whole and self.changes.heard:
            if whole:
                self.changes.stored(chunk, NVME)
            else:
                self.changes.removed(chunk, NVME, reason)

    def begin_promotion(self, chunk: Chunk) -> list[Slot] | None:
        """Reserve host slots for what only the cold copy has; None when there is no room."""
        slots: list[Slot] = []
        chunk.moves += 1
        for column in columns_of(chunk.cold_mask & ~chunk.mask):
            if column in chunk.slots:
                continue  # an engine is filling it: what it publishes is as good
            group = chunk.space.layout.group_of(column)
            status, slot = self._reserve_one(chunk, column, group, DAEMON, NEVER_NS)
            if slot is None:
                assert status in {Status.NO_SPACE, Status.OVER_QUOTA}
                self.end_promotion(chunk, slots, read=False)
                return None
            slot.lossy = chunk.cold_lossy
            slots.append(slot)
        return slots

    def end_promotion(self, chunk: Chunk, slots: Sequence[Slot], *, read: bool) -> None:
        """Publish the slots that were read, or give them back."""
        for slot in slots:
            if read:
                status = self.publish(DAEMON, slot.generation, 0)
                assert status is Status.OK
            else:
                self._free_filling(slot, SlotEvent.ABORT)
        assert chunk.moves > 0
        chunk.moves -= 1
        self.settle(chunk, chunk.warm)

    # ---------------------------------------------------------------- accounts

    def chunk_count(self) -> int:
        """Count the chunks in all trees."""
        return sum(len(space.chunks) for space in self.spaces.values())

    def check(self) -> None:
        """Recount everything; raises AssertionError with the invariant's name."""
        check_catalog(self)


def _nothing(slot: Slot) -> None:
    """Stand in where nothing is verified."""
