"""What goes first when a tenant's host slots are full, and what is written down before it must go.

A policy (`kvd.policies`) a (tenant, set of slot sizes) orders the evictable chunks, and a queue the
chunks to write to the tier below, oldest first.

While the tier below takes in (`demoting`), only chunks that cost nothing to free are evicted: those
it has, or does not want. What is dirty waits for its demotion: the policy's choice is passed over
until then, and a store that finds nothing clean is refused in part and wakes the demoter
(`pressed`). Without a tier below, or when it takes nothing, dirty ones go as well: the host tier
never stands still because of a disk.

What a session has just stored is *young* for GRACE_S: another rank, or the next batch, may be about
to add what makes it whole, and a policy that learns may rank the newest lowest. So young chunks are
held back from the policy; when there is nothing else, the one used longest ago stops being young.

What was fetched from another host although enough failure domains have it is *spare*: unwanted
below, and the first to go once the request that fetched it has used it. It ceases to be when it is
used again, or has a part that was stored here, or when what is written down depends on it.

V1. The policy knows exactly the chunks with objects, and as evictable all that are, except for
    those passed over and those that are young; what is pinned or moves may still count as
    evictable, and is skipped.
V2. The bytes counted as dirty are those of chunks that are neither clean nor unwanted.
V3. What is spare is unwanted; a spare leaf that was used is in the order of those.

Pure.
"""

from __future__ import annotations

from collections import deque
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


def _is_spare_leaf(chunk: Chunk) -> bool:
    return chunk.spare == USED and chunk.evictable


def _is_demotable(chunk: Chunk) -> bool:
    return bool(chunk.mask) and not (_free_to_go(chunk) or chunk.filling or chunk.moves)


AWAITED, USED = 2, 1
"""Uses until a spare chunk is one no more: before and after the request that fetched it."""
GRACE_S = 5.0
"""How long the parts of a chain may be apart: some batches, or ranks one after the other."""


def keep(chunk: Chunk) -> bool:
    """Keep a spare chunk like what was stored here; tell whether it was one."""
    if not chunk.spare:
        return False
    chunk.spare, chunk.unwanted = 0, False
    return True


class _Orders(NamedTuple):
    policy: Policy[Key]
    passed_over: set[Chunk]
    demotable: LeafLru
    young: LeafLru
    spare: LeafLru


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
        self._young: dict[Chunk, int] = {}
        self._ages: deque[tuple[int, Chunk]] = deque()
        self.demoting = False
        self.dirty_bytes: dict[Tenant, int] = dict.fromkeys(pool.shares, 0)
        """Bytes in host slots that are the only copy and wanted below, a tenant."""
        self.pressed: set[Tenant] = set()
        """Tenants that found no room since the demoter looked last."""

    def _is_young_leaf(self, chunk: Chunk) -> bool:
        return chunk.evictable and chunk in self._young

    def _of(self, space: Space) -> _Orders:
        key = (space.tenant, space.strides)
        orders = self._orders.get(key)
        if orders is None:
            orders = _Orders(
                policies.make(self._policy),
                set(),
                LeafLru(_is_demotable),
                LeafLru(self._is_young_leaf),
                LeafLru(_is_spare_leaf),
            )
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
        if _is_spare_leaf(chunk):
            orders.spare.offer(chunk)
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
            self._young.pop(chunk, None)
            return
        if not chunk.told:
            chunk.told = True
            above = chunk.parent
            parent = (above.space, above.hash) if above is not None and above.told else None
            policy.inserted(key, parent, self.now_ns)
        if not chunk.evictable:
            policy.held(key)
        elif chunk in self._young:
            policy.held(key)
            orders.young.offer(chunk)
        else:
            policy.evictable(key)

    def stored(self, chunk: Chunk) -> None:
        """Hear that a session has published objects of a chunk; before it is offered."""
        keep(chunk)
        self._young[chunk] = until_ns = self.now_ns + int(GRACE_S * 1e9)
        self._ages.append((until_ns, chunk))
        self._let_grow()  # here as well, where the tier may never be full

    def _let_grow(self) -> None:
        """Let time pass over the young."""
        while self._ages and self._ages[0][0] <= self.now_ns:
            until_ns, chunk = self._ages.popleft()
            if self._young.get(chunk) == until_ns:
                self._grown(chunk, self._of(chunk.space))

    def _grown(self, chunk: Chunk, orders: _Orders) -> None:
        """Treat a young chunk as any other from now on."""
        del self._young[chunk]
        if chunk.evictable and chunk not in orders.passed_over:
            orders.policy.evictable((chunk.space, chunk.hash))

    def touched(self, space: Space, hashes: Sequence[bytes]) -> None:
        """Hear of a request's use of a chain, hits and misses; once a request."""
        chain = [(space, key) for key in hashes]
        self._of(space).policy.touched(Request(self.now_ns, chain))

    def served(self, chunk: Chunk) -> None:
        """Hear that another host takes a copy."""
        self._of(chunk.space).policy.served((chunk.space, chunk.hash))

    def _victim(self, orders: _Orders) -> Chunk | None:
        """Return what the policy would evict next among what may go now."""
        policy, passed_over = orders.policy, orders.passed_over
        if not self.demoting:
            for chunk in passed_over:
                if chunk.told and chunk.evictable and chunk not in self._young:
                    policy.evictable((chunk.space, chunk.hash))
            passed_over.clear()
        self._let_grow()
        while True:
            key = policy.victim()
            if key is None:
                young = orders.young.victim()
                if young is None:
                    return None
                self._grown(young, orders)
                continue
            chunk = key[0].chunks[key[1]]
            if not chunk.evictable:
                policy.held(key)  # it was pinned or began to move; it is told again at the end
                continue
            if _free_to_go(chunk) or not self.demoting:
                return chunk
            policy.held(key)
            passed_over.add(chunk)  # until it is clean, or the tier below takes nothing in

    def demotable(self, tenant: Tenant, *, heads: bool = False) -> Chunk | None:
        """Return the tenant's chunk to demote next: the one used longest ago.

        Args:
            tenant: Whose.
            heads: Begin with the first chunk of its prefix that could be demoted as well, so that
                what was written is of use if the rest never is (ADR 0014). Else tails come first,
                as they are the first that can be evicted.
        """
        found = [
            chunk
            for (whose, _), orders in self._orders.items()
            if whose == tenant and (chunk := orders.demotable.victim())
        ]
        chunk = min(found, key=lambda chunk: chunk.tick, default=None)
        while heads and chunk is not None and chunk.parent and _is_demotable(chunk.parent):
            chunk = chunk.parent
        return chunk

    def begin_demoting(self, chunks: Iterable[Chunk]) -> None:
        """The tier below takes in from now on: what is dirty waits for it."""
        self.demoting = True
        for chunk in chunks:
            if _is_demotable(chunk):
                self.offer(chunk)

    def make_room(self, tenant: Tenant, size_bytes: int, owner: OwnerId) -> Slot | None:
        """Evict until a slot of a size is free; None when nothing may go.

        What is spare and has objects of this size goes first. Then the coldest of two candidates:
        the chunk used longest ago among those with objects of this size, or the slab of another
        size with all that depends on its chunks.
        """
        if size_bytes > self._pool.slab_bytes:
            return None  # no eviction helps
        slot = None
        while slot is None:
            leaf, cold = self._spare_leaf(tenant, size_bytes), None
            if leaf is None:
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

    def _of_size(self, tenant: Tenant, size_bytes: int) -> list[_Orders]:
        """Return the orders of a tenant's chunks that have such objects."""
        stride = stride_of(size_bytes)
        return [
            orders
            for (whose, strides), orders in self._orders.items()
            if whose == tenant and stride in strides
        ]

    def _spare_leaf(self, tenant: Tenant, size_bytes: int) -> Chunk | None:
        """Return the spare leaf with such objects that was used longest ago."""
        found = [o.spare.victim() for o in self._of_size(tenant, size_bytes)]
        return min(filter(None, found), key=lambda leaf: leaf.tick, default=None)

    def _coldest_leaf(self, tenant: Tenant, size_bytes: int) -> Chunk | None:
        """Return the leaf worth least among the policies whose chunks have such objects."""
        leaves = [
            (orders.policy.worth((leaf.space, leaf.hash)) or 0.0, leaf.tick, leaf)
            for orders in self._of_size(tenant, size_bytes)
            if (leaf := self._victim(orders))
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
        assert all(chunk.mask for chunk in self._young), "V1"
        assert {chunk for _, chunk in self._ages} >= self._young.keys(), "V1"
        for space in spaces:
            for chunk in space.chunks.values():
                assert chunk.told == bool(chunk.mask), "V1"
                assert not _is_spare_leaf(chunk) or self._of(space).spare.has(chunk), "V3"
