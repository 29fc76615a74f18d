"""What goes first when a tenant's host slots are full, and what is written down before it must go.

Three orders a (tenant, set of slot sizes), each least lately used first:

- *clean*: evictable chunks that cost nothing to free: the tier below has them, or does not want
  them;
- *dirty*: evictable chunks whose host slots are the only copy;
- *demotable*: chunks to write to the tier below, evictable or not, oldest first.

While the tier below takes in (`demoting`), only clean chunks are evicted: what is dirty waits for
its demotion, and a store that finds nothing clean is refused in part and wakes the demoter
(`pressed`). Without a tier below, or when it takes nothing, dirty ones go as well: the host tier
never stands still because of a disk.

V1. Every evictable chunk is in the clean or the dirty order with its present tick.
V2. The bytes counted as dirty are those of chunks that are neither clean nor unwanted.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.entry import stride_of
from kvd.policy import LeafLru

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.entry import Chunk, Slot, Space
    from kvd.tiers.slab import Slab, SlabPool
    from kvd.types import OwnerId, Tenant


def _free_to_go(chunk: Chunk) -> bool:
    return chunk.clean or chunk.unwanted


def _is_clean(chunk: Chunk) -> bool:
    return chunk.evictable and _free_to_go(chunk)


def _is_dirty(chunk: Chunk) -> bool:
    return chunk.evictable and not _free_to_go(chunk)


def _is_demotable(chunk: Chunk) -> bool:
    return bool(chunk.mask) and not (_free_to_go(chunk) or chunk.filling or chunk.moves)


class _Orders(NamedTuple):
    clean: LeafLru
    dirty: LeafLru
    demotable: LeafLru


class Eviction:
    """The orders of all tenants, and the decision what to evict."""

    def __init__(self, pool: SlabPool, evict: Callable[[Chunk], None]) -> None:
        """Start empty.

        Args:
            pool: Where slots come from.
            evict: Frees the host slots of an evictable chunk.
        """
        self._pool = pool
        self._evict = evict
        self._orders: dict[tuple[Tenant, frozenset[int]], _Orders] = {}
        self.demoting = False
        self.dirty_bytes: dict[Tenant, int] = dict.fromkeys(pool.shares, 0)
        """Bytes in host slots that are the only copy and wanted below, a tenant."""
        self.pressed: set[Tenant] = set()
        """Tenants that found no room since the demoter looked last."""

    def _of(self, space: Space) -> _Orders:
        key = (space.tenant, space.strides)
        orders = self._orders.get(key)
        if orders is None:
            orders = _Orders(LeafLru(_is_clean), LeafLru(_is_dirty), LeafLru(_is_demotable))
            self._orders[key] = orders
        return orders

    def offer(self, chunk: Chunk) -> None:
        """Take in a chunk whose state or tick has changed (V1)."""
        dirty = 0 if _free_to_go(chunk) else chunk.size_bytes
        if dirty != chunk.dirty_bytes:
            self.dirty_bytes[chunk.space.tenant] += dirty - chunk.dirty_bytes
            chunk.dirty_bytes = dirty
        orders = self._of(chunk.space)
        if chunk.evictable:
            (orders.clean if _free_to_go(chunk) else orders.dirty).offer(chunk)
        if _is_demotable(chunk) and self.demoting:
            orders.demotable.offer(chunk)

    def demotable(self, tenant: Tenant) -> Chunk | None:
        """Return the tenant's chunk to demote next."""
        found = [
            chunk
            for (whose, _), orders in self._orders.items()
            if whose == tenant and (chunk := orders.demotable.victim())
        ]
        return min(found, key=lambda chunk: chunk.tick, default=None)

    def begin_demoting(self, chunks: Iterable[Chunk]) -> None:
        """The tier below takes in from now on: what is dirty waits for it."""
        self.demoting = True
        for chunk in chunks:
            if _is_demotable(chunk):
                self.offer(chunk)

    def make_room(self, tenant: Tenant, size_bytes: int, owner: OwnerId) -> Slot | None:
        """Evict until a slot of a size is free; None when nothing may go.

        The coldest of two candidates goes: the chunk used longest ago among those with objects
        of this size, or the slab of another size with all that depends on its chunks.
        """
        if size_bytes > self._pool.slab_bytes:
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
                self._evict(leaf)
            else:
                self.pressed.add(tenant)
                return None
            slot = self._pool.take(tenant, size_bytes, owner)
        return slot

    def _coldest_leaf(self, tenant: Tenant, size_bytes: int) -> Chunk | None:
        stride = stride_of(size_bytes)
        leaves = []
        for (whose, strides), orders in self._orders.items():
            if whose == tenant and stride in strides:
                leaves.append(orders.clean.victim())
                if not self.demoting:
                    leaves.append(orders.dirty.victim())
        return min(filter(None, leaves), key=lambda leaf: leaf.tick, default=None)

    def _coldest_slab(self, tenant: Tenant, size_bytes: int) -> tuple[int, Slab] | None:
        """Return the coldest slab of another size that could be emptied whole, with its tick."""
        best: tuple[int, Slab] | None = None
        for slab in self._pool.others(tenant, size_bytes):
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

    def _latest(self, top: Chunk) -> int | None:
        """Return the last use of a chunk or anything warm below it; None if one has to stay."""
        tick = 0
        stack = [top]
        while stack:
            chunk = stack.pop()
            if chunk.pins or chunk.filling or chunk.moves:
                return None
            if self.demoting and chunk.mask and not _free_to_go(chunk):
                return None
            tick = max(tick, chunk.tick)
            if chunk.warm_children:
                stack.extend(child for child in chunk.children() if child.warm)
        return tick

    def _evict_subtree(self, top: Chunk) -> None:
        """Evict a chunk with everything warm that is useless without it, leaves first."""
        order = [top]
        for chunk in order:
            if chunk.warm_children:
                order.extend(child for child in chunk.children() if child.warm)
        for chunk in reversed(order):
            if chunk.mask:
                self._evict(chunk)
