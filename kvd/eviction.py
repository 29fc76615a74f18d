"""What goes first when a tenant's host slots are full, and what is written down before it must go.

A policy (`kvd.policies`) a (tenant, set of slot sizes) orders the evictable chunks, and a queue the
chunks to write to the tier below, oldest first.

While the tier below takes in (`demoting`), only chunks that cost nothing to free are evicted: those
it has, or does not want. What is dirty waits for its demotion: the policy's choice is passed over
until then, and a store that finds nothing clean is refused in part and wakes the demoter
(`pressed`). Without a tier below, or when it takes nothing, dirty ones go as well: the host tier
never stands still because of a disk.

V1. The policy knows exactly the chunks with objects, and as evictable all that are, except for
    those passed over; what is pinned or moves may still count as evictable, and is skipped.
V2. The bytes counted as dirty are those of chunks that are neither clean nor unwanted.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd import policies
from kvd.entry import stride_of
from kvd.policies import Request
from kvd.policy import LeafLru

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvd.entry import Chunk, Slot, Space
    from kvd.policies import Policy
    from kvd.tiers.slab import Slab, SlabPool
    from kvd.types import OwnerId, Tenant

    Key = tuple[Space, bytes]
    """A chunk's name to a policy, which remembers it beyond its eviction."""


def _free_to_go(chunk: Chunk) -> bool:
    return chunk.clean or chunk.unwanted


def _is_demotable(chunk: Chunk) -> bool:
    return bool(chunk.mask) and not (_free_to_go(chunk) or chunk.filling or chunk.moves)


class _Orders(NamedTuple):
    policy: Policy[Key]
    passed_over: set[Chunk]
    demotable: LeafLru


class Eviction:
    """The orders of all tenants, and the decision what to evict."""

    def __init__(self, pool: SlabPool, evict: Callable[[Chunk], None], policy: str = "lru") -> None:
        """Start empty.

        Args:
            pool: Where slots come from.
            evict: Frees the host slots of an evictable chunk.
            policy: One of `kvd.policies.POLICIES`.
        """
        self.now_ns = 1
        """The time, told by whoever has a clock; never goes back."""
        self._policy = policy
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
            orders = _Orders(policies.make(self._policy), set(), LeafLru(_is_demotable))
            self._orders[key] = orders
        return orders

    def offer(self, chunk: Chunk) -> None:
        """Take in a chunk whose state or tick has changed (V1)."""
        dirty = 0 if _free_to_go(chunk) else chunk.size_bytes
        if dirty != chunk.dirty_bytes:
            self.dirty_bytes[chunk.space.tenant] += dirty - chunk.dirty_bytes
            chunk.dirty_bytes = dirty
        orders = self._of(chunk.space)
        self._tell(chunk, orders)
        if _is_demotable(chunk) and self.demoting:
            orders.demotable.offer(chunk)

    def _tell(self, chunk: Chunk, orders: _Orders) -> None:
        """Bring the policy up to date with a chunk (V1)."""
        policy, key = orders.policy, (chunk.space, chunk.hash)
        orders.passed_over.discard(chunk)
        if not chunk.mask:
            if chunk.told:
                chunk.told = False
                policy.removed(key)
            return
        if not chunk.told:
            chunk.told = True
            above = chunk.parent
            parent = (above.space, above.hash) if above is not None and above.told else None
            policy.inserted(key, parent, self.now_ns)
        if chunk.evictable:
            policy.evictable(key)
        else:
            policy.held(key)

    def touched(self, space: Space, hashes: Sequence[bytes]) -> None:
        """Hear of a request's use of a chain, hits and misses; once a request."""
        chain = [(space, key) for key in hashes]
        self._of(space).policy.touched(Request(self.now_ns, chain))

    def _victim(self, orders: _Orders) -> Chunk | None:
        """Return what the policy would evict next among what may go now."""
        policy, passed_over = orders.policy, orders.passed_over
        if not self.demoting:
            for chunk in passed_over:
                if chunk.told and chunk.evictable:
                    policy.evictable((chunk.space, chunk.hash))
            passed_over.clear()
        while (key := policy.victim()) is not None:
            chunk = key[0].chunks[key[1]]
            if not chunk.evictable:
                policy.held(key)  # it was pinned or began to move; it is told again at the end
                continue
            if _free_to_go(chunk) or not self.demoting:
                return chunk
            policy.held(key)
            passed_over.add(chunk)  # until it is clean, or the tier below takes nothing in
        return None

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
        """Return the leaf worth least among the policies whose chunks have such objects."""
        stride = stride_of(size_bytes)
        leaves = [
            (orders.policy.worth((leaf.space, leaf.hash)) or 0.0, leaf.tick, leaf)
            for (whose, strides), orders in self._orders.items()
            if whose == tenant and stride in strides and (leaf := self._victim(orders))
        ]
        return min(leaves)[2] if leaves else None  # ticks differ: leaves are not compared

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

    def check(self, spaces: Iterable[Space]) -> None:
        """Recount V1; raises AssertionError."""
        for orders in self._orders.values():
            orders.policy.check()
        for space in spaces:
            for chunk in space.chunks.values():
                assert chunk.told == bool(chunk.mask), "V1"
