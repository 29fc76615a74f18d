"""Replay a trace of requests against eviction and admission policies.

A hit is a block of the leading run of resident blocks: nothing after the first miss counts. A tier
may overshoot while a request runs and is back at its capacity when it ends, where the request's
own blocks may go too. The tiers start empty, and all requests count.

R1. A tier holds no block without its parent, and at most its capacity between requests.
R2. In two tiers, a block of the lower one has its parent in one of the two.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.policies import Admission, Policy, Request
    from kvd.trace import Entry, Trace


# -------------------------------------------------------------------------------------- one tier


class Tier:
    """A forest of blocks of some capacity, which tells its policy what happens."""

    def __init__(self, policy: Policy[int], capacity: int) -> None:
        """Start empty."""
        assert capacity > 0
        self.policy = policy
        self.capacity = capacity
        self.parents: dict[int, int | None] = {}
        self.children: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        """Whether a block is resident."""
        return block in self.parents

    def insert(self, block: int, parent: int | None, now_ns: int) -> None:
        """Take in a block, and let it go again if it is a leaf."""
        self.policy.inserted(block, parent, now_ns)
        self.parents[block] = parent
        if parent is not None:
            count = self.children[parent] = self.children.get(parent, 0) + 1
            if count == 1 and parent in self.parents:
                self.policy.held(parent)
        if not self.children.get(block):
            self.policy.evictable(block)

    def store(self, request: Request[int]) -> None:
        """Take in what is missing of a chain, root side first; by R1 that is its end."""
        parents, children, policy = self.parents, self.children, self.policy
        above: int | None = None
        last: int | None = None
        for block in request.chain:
            if block not in parents:
                policy.inserted(block, above, request.now_ns)
                parents[block] = above
                if above is not None:
                    count = children[above] = children.get(above, 0) + 1
                    if count == 1:
                        policy.held(above)
                last = block
            above = block
        if last is not None:
            policy.evictable(last)

    def shrink(self) -> Iterator[int]:
        """Evict what is too much, block by block: each has just gone when it is named."""
        while len(self.parents) > self.capacity:
            block = self.policy.victim()
            assert block is not None  # a forest has leaves, and nobody holds one between requests
            self.remove(block)
            yield block

    def remove(self, block: int) -> None:
        """Evict a leaf."""
        assert not self.children.get(block)  # R1
        self.children.pop(block, None)
        above = self.parents.pop(block)
        self.policy.removed(block)
        if above is not None:
            self.children[above] -= 1
            if not self.children[above]:
                del self.children[above]
                if above in self.parents:
                    self.policy.evictable(above)

    def check(self) -> None:
        """Recount R1."""
        self.policy.check()
        assert len(self.parents) <= self.capacity, "R1"
        counts: dict[int, int] = {}
        for parent in self.parents.values():
            if parent is not None:
                counts[parent] = counts.get(parent, 0) + 1
        assert counts == self.children, "R1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found.

    Attributes:
        blocks: Asked for.
        hits: Found.
        tokens: Of all prompts.
        tokens_saved: Not to be computed again.
    """

    blocks: int
    hits: int
    tokens: int
    tokens_saved: int

    @property
    def block_hit_ratio(self) -> float:
        """Share of blocks found."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def token_savings(self) -> float:
        """Share of prompt tokens found."""
        return self.tokens_saved / self.tokens if self.tokens else 0.0


class _Count:
    """Adds up an `Outcome`. Blocks left out of chains still count as asked for."""

    def __init__(self, trace: Trace) -> None:
        size = trace.block_tokens
        self._size = size
        self._blocks = sum(-(-entry.input_tokens // size) for entry in trace.entries)
        self._tokens = sum(entry.input_tokens for entry in trace.entries)
        self._hits = self._saved = 0

    def add(self, entry: Entry, hits: int) -> None:
        self._hits += hits
        self._saved += min(hits * self._size, entry.input_tokens)

    def outcome(self) -> Outcome:
        return Outcome(self._blocks, self._hits, self._tokens, self._saved)


def replay(trace: Trace, policy: Policy[int], capacity: int) -> Outcome:
    """Replay a trace over one tier of `capacity` blocks."""
    tier, count = Tier(policy, capacity), _Count(trace)
    for entry in trace.entries:
        request = entry.request
        hits = 0
        for block in request.chain:
            if block not in tier.parents:
                break
            hits += 1
        count.add(entry, hits)
        policy.touched(request)
        tier.store(request)
        for _ in tier.shrink():
            pass
    return count.outcome()


def replay_optimum(trace: Trace, capacity: int) -> Outcome:
    """Replay a trace with the best decisions that knowing all of it allows (Belady's MIN).

    The block whose next use is farthest off goes, and one that is never used again is not kept.
    On chains that is the optimum for leading runs too: an ancestor's next use is never later than
    its descendant's, and between equals the descendant goes.
    """
    assert capacity > 0
    never = len(trace.entries)
    nexts: list[list[int]] = []
    following: dict[int, int] = {}
    for index in range(len(trace.entries) - 1, -1, -1):
        chain = trace.entries[index].request.chain
        nexts.append([following.get(block, never) for block in chain])
        following.update(dict.fromkeys(chain, index))
    nexts.reverse()
    kept: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    count = _Count(trace)
    for entry, uses in zip(trace.entries, nexts, strict=True):
        hits = 0
        for block in entry.request.chain:
            if block not in kept:
                break
            hits += 1
        count.add(entry, hits)
        for depth, (block, use) in enumerate(zip(entry.request.chain, uses, strict=True)):
            kept.pop(block, None)
            if use < never:
                kept[block] = use
                heapq.heappush(heap, (-use, -depth, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(heap)
            if kept.get(block) == -use:
                del kept[block]
    return count.outcome()


# -------------------------------------------------------------------------------------- two tiers


@dataclass(frozen=True, slots=True)
class TiersOutcome:
    """What a replay over two tiers found.

    Attributes:
        total: Both tiers together.
        lower_hits: Blocks read from the lower tier.
        written: Blocks written to it.
    """

    total: Outcome
    lower_hits: int
    written: int

    @property
    def write_amplification(self) -> float:
        """Blocks written for each that was read."""
        return self.written / max(1, self.lower_hits)


class Tiers:
    """An upper tier, and a lower one which takes what leaves the upper and is found worth it.

    A block is written once: a copy in the lower tier stays when the block is used in the upper
    one, and is good again when it leaves that. Both policies are told every request.
    """

    def __init__(self, upper: Tier, lower: Tier, admission: Admission[int]) -> None:
        """Start over two empty tiers."""
        self.upper = upper
        self.lower = lower
        self.admission = admission
        self.lower_hits = 0
        self.written = 0

    def use(self, request: Request[int]) -> int:
        """Run one request; returns how many blocks were found in either tier."""
        upper, lower = self.upper, self.lower
        hits = 0
        for block in request.chain:
            if block not in upper.parents:
                if block not in lower.parents:
                    break
                self.lower_hits += 1
            hits += 1
        self.admission.touched(request)
        upper.policy.touched(request)
        lower.policy.touched(request)
        upper.store(request)
        parents = upper.parents
        while len(parents) > upper.capacity:
            leaving = upper.policy.victim()
            assert leaving is not None
            above = parents[leaving]
            upper.remove(leaving)
            if leaving not in lower and self._wanted(leaving):
                lower.insert(leaving, above, request.now_ns)
                self.written += 1
                for _ in lower.shrink():
                    pass
        return hits

    def _wanted(self, block: int) -> bool:
        """Whether to write a block that leaves the upper tier."""
        lower = self.lower
        if lower.children.get(block):
            return True  # R2: what was written of its children would be lost with it
        if not self.admission.admits(block):
            return False
        if len(lower.parents) < lower.capacity:
            return True
        first = lower.policy.victim()
        worth = lower.policy.worth(block)
        least = None if first is None else lower.policy.worth(first)
        return worth is None or least is None or worth >= least

    def check(self) -> None:
        """Recount R1 and R2."""
        self.upper.check()
        self.lower.check()
        for parent in self.lower.parents.values():
            assert parent is None or parent in self.lower or parent in self.upper, "R2"


def replay_tiers(trace: Trace, tiers: Tiers) -> TiersOutcome:
    """Replay a trace over two tiers."""
    count = _Count(trace)
    for entry in trace.entries:
        count.add(entry, tiers.use(entry.request))
    return TiersOutcome(count.outcome(), tiers.lower_hits, tiers.written)
