"""Every object of the daemon: look-up, hold, reserve, publish, evict. Pure.

One prefix tree a space. The loop is the only caller, so nothing here locks, waits or does I/O;
time arrives as an argument.

Invariants:

C2. A chunk with a pin or a reserved slot is never evicted.
C3. Charges equal what is held: pinned bytes, reserved and quarantined bytes, a tenant each.
C8. Every reserved or quarantined slot has an owner, and an owner that is gone has none.
T1. Every chunk's parent is in the tree, and knows it as a child.
T2. A chunk without objects, reservations, pins and children is not in the tree.
T3. A chunk's mask names exactly its published slots, each of the space's tenant.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvd.entry import Chunk, Slot, SlotEvent, SlotState, Space
from kvd.identity import presence, rules_of, usable_prefix
from kvd.policy import LeafLru
from kvd.quota import Quota, Resource
from kvd.tiers.slab import stride_of
from kvd_client.wire import NOWHERE, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.metrics import Counters
    from kvd.tiers.slab import Slab, SlabPool
    from kvd.types import Generation, OwnerId, Tenant
    from kvd_client.identity import Layout

PlaceRecord = tuple[int, int, int, int, int, int, int]
"""The fields of `wire.Place`."""


class Catalog:
    """What is where, and who holds it."""

    SLACK = 1024
    """Deadlines of ended reservations kept beyond as many as there are live ones."""

    def __init__(self, pool: SlabPool, quota: Quota, counters: Counters) -> None:
        """Start empty over an empty pool."""
        self.pool = pool
        self.quota = quota
        self.counters = counters
        self.spaces: dict[tuple[Tenant, bytes, bytes], Space] = {}
        self._filling: dict[Generation, Slot] = {}
        self._by_owner: dict[OwnerId, dict[Generation, Slot]] = {}
        self._deadlines: list[tuple[int, Generation]] = []
        self._lrus: dict[tuple[Tenant, frozenset[int]], LeafLru] = {}
        self._tick = 0
        self.quarantined_bytes = 0

    # ---------------------------------------------------------------- spaces

    def enter(self, tenant: Tenant, namespace: bytes, label: str, layout: Layout) -> Space:
        """Return the space of a new session, made when it is the first."""
        key = (tenant, namespace, layout.id)
        space = self.spaces.get(key)
        if space is None:
            space = self.spaces[key] = Space(tenant, namespace, label, layout, rules_of(layout))
        space.sessions += 1
        return space

    def leave(self, space: Space) -> None:
        """Let a session go; a space that is empty is forgotten."""
        assert space.sessions > 0
        space.sessions -= 1
        self._forget(space)

    def _forget(self, space: Space) -> None:
        if not space.sessions and not space.chunks:
            self.spaces.pop((space.tenant, space.namespace, space.layout.id), None)

    def _lru(self, space: Space) -> LeafLru:
        strides = frozenset(stride_of(group.object_bytes) for group in space.layout.groups)
        return self._lrus.setdefault((space.tenant, strides), LeafLru())

    # ---------------------------------------------------------------- reading

    def usable(self, space: Space, hashes: Sequence[bytes]) -> int:
        """Return the chunks of the usable prefix of a chain."""
        chunks = space.chunks
        full = space.full_mask
        complete = 0
        for key in hashes:
            chunk = chunks.get(key)
            if chunk is None or chunk.mask != full:
                break
            complete += 1
        if complete == len(hashes) or space.prefix_only:
            return complete  # all of it, or cut at the first hole: no rule says otherwise
        masks = [chunk.mask if (chunk := chunks.get(key)) else 0 for key in hashes]
        return usable_prefix(presence(masks, space.layout.columns), space.rules)

    def hold(self, space: Space, hashes: Sequence[bytes], first: int) -> tuple[Chunk, ...]:
        """Pin chunks `first` and later of the usable prefix, as far as the quota goes.

        Returns:
            The pinned chunks, none for a miss; the caller owns the pins and ends them by `unpin`.
        """
        chain, usable = hashes, self.usable(space, hashes)
        chunks = space.chunks
        held = [chunk for key in chain[first:usable] if (chunk := chunks.get(key))]
        if len(held) != max(0, usable - first):
            return ()  # hashes that are no chain: T1 says that a real one has every node
        left = self.quota.left(space.tenant, Resource.PINNED_BYTES)
        while sum([chunk.size_bytes for chunk in held if not chunk.pins]) > left:
            self.counters.acquires_over_quota += 1
            chain = chain[: first + _fitting(held, left)]
            usable = self.usable(space, chain)
            held = held[: max(0, usable - first)]
        self.pin(held)
        return tuple(held)

    def pin(self, chunks: Sequence[Chunk]) -> None:
        """Hold chunks in place; the first pin of each charges its bytes."""
        charge = 0
        for chunk in reversed(chunks):
            if not chunk.pins:
                charge += chunk.size_bytes
                chunk.pinned_bytes = chunk.size_bytes
            chunk.pins += 1
            self._touch(chunk)
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
                self._settle(chunk)
        if discharge:
            self.quota.discharge(chunks[0].space.tenant, Resource.PINNED_BYTES, discharge)

    def places(
        self, space: Space, chunks: Iterable[Chunk], first: int, rank: int
    ) -> list[PlaceRecord]:
        """Say where a rank's objects of pinned chunks are."""
        layout = space.layout
        columns = [(group, layout.column(group, rank)) for group in range(len(layout.groups))]
        found = []
        for index, chunk in enumerate(chunks, first):
            for group, column in columns:
                if chunk.mask >> column & 1:
                    found.append(_record(index, group, chunk.slots[column]))
        return found

    def _touch(self, chunk: Chunk) -> None:
        self._tick += 1
        chunk.tick = self._tick
        for slot in chunk.slots.values():
            self.pool.slab(slot.slab).touched = self._tick

    def _settle(self, chunk: Chunk) -> None:
        """Offer a chunk that may be evicted now, or take it out of the tree if it is nothing."""
        if chunk.evictable:
            self._lru(chunk.space).offer(chunk)
            return
        node: Chunk | None = chunk
        while node is not None and not (node.mask or node.filling or node.pins or node.children):
            del node.space.chunks[node.hash]  # T2
            parent = node.parent
            if parent is not None:
                parent.children.discard(node)
                parent.tick = max(parent.tick, node.tick)
                if parent.evictable:
                    self._lru(parent.space).offer(parent)
            self._forget(node.space)
            node = parent

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
        refusal = Status.OK
        if above is None and parent != space.namespace:
            refusal = Status.ORPHAN
        records = []
        for index, key in enumerate(hashes):
            if refusal is Status.OK:
                chunk = space.chunks.get(key) or self._graft(space, key, above)
                for group, column in columns:
                    status, slot = self._reserve_one(chunk, column, group, owner, deadline_ns)
                    records.append(_record(index, group, slot, status))
                    if status in {Status.NO_SPACE, Status.OVER_QUOTA}:
                        refusal = status  # no later chunk could be used without this one
                self._settle(chunk)
                above = chunk
            else:
                records += [_record(index, group, None, refusal) for group, _ in columns]
        refused = sum(record[2] == refusal for record in records) if refusal else 0
        self.counters.reserves_refused += refused
        return records

    def _graft(self, space: Space, key: bytes, above: Chunk | None) -> Chunk:
        chunk = space.chunks[key] = Chunk(key, space, above)
        if above is not None:
            above.children.add(chunk)  # T1; protects the chain that is being stored
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
            return Status.OVER_QUOTA, None
        chunk.filling += 1  # before making room: C2 keeps this chunk
        slot = self.pool.take(tenant, size, owner) or self._make_room(tenant, size, owner)
        if slot is None:
            chunk.filling -= 1
            self.quota.discharge(tenant, Resource.FILLING_BYTES, size)
            return Status.NO_SPACE, None
        slot.chunk, slot.column, slot.deadline_ns = chunk, column, deadline_ns
        chunk.slots[column] = slot
        self.counters.objects_reserved += 1
        self._filling[slot.generation] = slot
        self._by_owner.setdefault(owner, {})[slot.generation] = slot
        heapq.heappush(self._deadlines, (deadline_ns, slot.generation))
        if len(self._deadlines) > 2 * len(self._filling) + self.SLACK:
            self._deadlines = [(s.deadline_ns, s.generation) for s in self._filling.values()]
            heapq.heapify(self._deadlines)
        return Status.OK, slot

    def publish(self, owner: OwnerId, generation: Generation, now_ns: int) -> Status:
        """Make a filled slot findable; says why not, and frees or keeps the slot accordingly."""
        slot = self._by_owner.get(owner, {}).get(generation)
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
        chunk.size_bytes += slot.size_bytes
        chunk.filling -= 1
        self.counters.objects_published += 1
        self.counters.bytes_published += slot.size_bytes
        self._touch(chunk)
        self._settle(chunk)
        return Status.OK

    def abort(self, owner: OwnerId, generation: Generation) -> Status:
        """Free a reserved or quarantined slot whose writer says that it is done."""
        slot = self._by_owner.get(owner, {}).get(generation)
        if slot is None:
            return Status.STALE
        quarantined = slot.state is SlotState.QUARANTINED
        self._free_filling(slot, SlotEvent.CONFIRM if quarantined else SlotEvent.ABORT)
        return Status.EXPIRED if quarantined else Status.OK

    def _forget_filling(self, slot: Slot) -> None:
        del self._filling[slot.generation]
        owned = self._by_owner[slot.owner]
        del owned[slot.generation]
        if not owned:
            del self._by_owner[slot.owner]
        self.quota.discharge(slot.tenant, Resource.FILLING_BYTES, slot.size_bytes)

    def _detach(self, slot: Slot) -> None:
        """Take a slot that will not be published off its chunk."""
        chunk, slot.chunk = slot.chunk, None
        if chunk is not None:
            del chunk.slots[slot.column]
            chunk.filling -= 1
            self._settle(chunk)

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
        while self._deadlines and self._deadlines[0][0] < now_ns:
            _, generation = heapq.heappop(self._deadlines)
            slot = self._filling.get(generation)
            if slot is not None and slot.state is SlotState.RESERVED:
                self.counters.reserves_expired += 1
                self._quarantine(slot)

    def abandon(self, owner: OwnerId, *, dead: bool) -> None:
        """Take back an owner's slots: for reuse if it is dead or done, else into quarantine."""
        for slot in list(self._by_owner.get(owner, {}).values()):
            if dead:
                self._free_filling(slot, SlotEvent.HOLDER_DEAD)
            elif slot.state is SlotState.RESERVED:
                self._quarantine(slot)

    def filling_count(self, owner: OwnerId) -> int:
        """Count an owner's reserved and quarantined slots."""
        return len(self._by_owner.get(owner, {}))

    # ---------------------------------------------------------------- eviction

    def _make_room(self, tenant: Tenant, size_bytes: int, owner: OwnerId) -> Slot | None:
        """Evict until a slot of a size is free; None when nothing may go.

        The coldest of two candidates goes: the chunk used longest ago among those with objects
        of this size, or the slab of another size with all that depends on its chunks.
        """
        if size_bytes > self.pool.slab_bytes:
            return None  # no eviction helps
        slot = None
        while slot is None:
            leaf = self._coldest_leaf(tenant, size_bytes)
            cold = self._coldest_slab(tenant, size_bytes)
            if cold is not None and (leaf is None or cold[0] < leaf.tick):
                for held in {s.chunk for s in cold[1].slots.values()}:
                    if held is not None and held.mask:
                        self._evict_subtree(held)
            elif leaf is not None:
                self.evict(leaf, "capacity")
            else:
                return None
            slot = self.pool.take(tenant, size_bytes, owner)
        return slot

    def _coldest_leaf(self, tenant: Tenant, size_bytes: int) -> Chunk | None:
        stride = stride_of(size_bytes)
        leaves = [
            leaf
            for (whose, strides), lru in self._lrus.items()
            if whose == tenant and stride in strides and (leaf := lru.victim())
        ]
        return min(leaves, key=lambda leaf: leaf.tick, default=None)

    def _coldest_slab(self, tenant: Tenant, size_bytes: int) -> tuple[int, Slab] | None:
        """Return the coldest slab of another size that could be emptied whole, with its tick."""
        best: tuple[int, Slab] | None = None
        for slab in self.pool.others(tenant, size_bytes):
            if best is not None and best[0] <= slab.touched:
                break  # the rest are no colder
            tick = slab.touched
            for chunk in {slot.chunk for slot in slab.slots.values()}:
                latest = self._latest(chunk) if chunk is not None else None
                if latest is None:
                    break
                tick = max(tick, latest)
            else:
                if best is None or tick < best[0]:
                    best = (tick, slab)
        return best

    @staticmethod
    def _latest(top: Chunk) -> int | None:
        """Return the last use of a chunk or anything below it; None if one is held or filled."""
        tick = 0
        stack = [top]
        while stack:
            chunk = stack.pop()
            if chunk.pins or chunk.filling:
                return None
            tick = max(tick, chunk.tick)
            stack.extend(chunk.children)
        return tick

    def _evict_subtree(self, top: Chunk) -> None:
        """Evict a removable chunk with everything that is useless without it, leaves first."""
        order = [top]
        for chunk in order:
            order.extend(chunk.children)
        for chunk in reversed(order):
            if chunk.mask:
                self.evict(chunk, "capacity")

    def evict(self, chunk: Chunk, reason: str) -> None:
        """Drop the objects of a chunk that nobody holds or fills; counted with its reason."""
        assert not chunk.pins  # C2
        assert not chunk.filling  # C2
        self.counters.count_eviction(reason, len(chunk.slots), chunk.size_bytes)
        for slot in chunk.slots.values():
            slot.step(SlotEvent.EVICT)
            slot.chunk = None
            self.pool.give_back(slot)
        chunk.slots.clear()
        chunk.mask = 0
        chunk.size_bytes = 0
        self._settle(chunk)

    # ---------------------------------------------------------------- accounts

    def chunk_count(self) -> int:
        """Count the chunks in all trees."""
        return sum(len(space.chunks) for space in self.spaces.values())

    def check(self) -> None:
        """Recount everything; raises AssertionError naming the invariant that does not hold."""
        self.pool.check()
        pinned = dict.fromkeys(self.pool.shares, 0)
        published = set()
        for (tenant, namespace, layout), space in self.spaces.items():
            assert (space.tenant, space.namespace, space.layout.id) == (tenant, namespace, layout)
            for key, chunk in space.chunks.items():
                assert chunk.hash == key, "T1"
                chunk.check()
                pinned[tenant] += chunk.pinned_bytes
                published |= {s for s in chunk.slots.values() if s.state is SlotState.PUBLISHED}
        filling = dict.fromkeys(self.pool.shares, 0)
        for slot in self._filling.values():
            assert slot.state in {SlotState.RESERVED, SlotState.QUARANTINED}, "E1"
            filling[slot.tenant] += slot.size_bytes
        for tenant in self.pool.shares:
            held = {s for slab in self.pool.slabs_of(tenant) for s in slab.slots.values()}
            assert {s for s in published if s.tenant == tenant} == held - set(
                self._filling.values()
            ), "C3"
            assert self.quota.used(tenant, Resource.PINNED_BYTES) == pinned[tenant], "C3"
            assert self.quota.used(tenant, Resource.FILLING_BYTES) == filling[tenant], "C3"
        quarantined = [s for s in self._filling.values() if s.state is SlotState.QUARANTINED]
        assert sum(slot.size_bytes for slot in quarantined) == self.quarantined_bytes, "C3"
        owned = {slot for slots in self._by_owner.values() for slot in slots.values()}
        assert owned == set(self._filling.values()), "C8"


def _fitting(chunks: Sequence[Chunk], left: int) -> int:
    """Return how many chunks from the first on can be pinned with so many bytes."""
    for count, chunk in enumerate(chunks):
        if not chunk.pins:
            left -= chunk.size_bytes
            if left < 0:
                return count
    return len(chunks)


def _record(index: int, group: int, slot: Slot | None, status: Status = Status.OK) -> PlaceRecord:
    if slot is None:
        return (index, group, status, *NOWHERE)
    return (index, group, status, slot.slab, slot.offset_bytes, slot.size_bytes, slot.generation)
