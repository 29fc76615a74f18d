"""The life table and what it learns, against counting block by block."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.policies import LifeTable, Request
from kvd.policies.hazard import BINS, EDGES_NS, SECOND_NS, WIDTHS_S, reuse_within, worth_of
from kvd.policies.lifetable import OUTPUTS, PARTIAL, kind_of
from tests.policy_model import STEPS, Naive, Step, compare

if TYPE_CHECKING:
    from collections.abc import Sequence

# --------------------------------------------------------------------------------- hazard

RATES: Final = st.lists(
    st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1)), min_size=BINS, max_size=BINS
)


def naive_worth(rates: Sequence[float], first: int) -> float:
    """Try every bin to stop after."""
    alive, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
    for rate, width_s in list(zip(rates, WIDTHS_S, strict=True))[first:]:
        hits += alive * rate
        seconds += alive * (1 - rate / 2) * width_s
        alive *= 1 - rate
        best = max(best, hits / seconds)
    return best


@given(RATES)
def test_worth_is_the_best_rate_over_all_stops(rates: list[float]) -> None:
    """The hull finds what trying every stop finds."""
    expected = [naive_worth(rates, first) for first in range(BINS)]
    assert worth_of(rates) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_bins_double_from_a_quarter_second_and_adjoin() -> None:
    """The edges are those of the facts (H1)."""
    assert BINS == 20
    assert EDGES_NS[:4] == (0, 250_000_000, 500_000_000, 1_000_000_000)
    assert EDGES_NS[-1] == 65_536 * SECOND_NS
    assert [sum(WIDTHS_S[:index]) for index in range(BINS)] == [e / SECOND_NS for e in EDGES_NS]


@given(RATES, st.integers(0, BINS - 1), st.floats(0, 1e15), st.floats(0, 1e15))
def test_reuse_is_a_chance_that_grows_with_time(
    rates: list[float], first: int, span_ns: float, longer_ns: float
) -> None:
    """It is between 0 and 1, 0 for no time, and no smaller for a longer time."""
    near, far = sorted((span_ns, longer_ns))
    assert reuse_within(rates, first, 0) == 0
    assert -1e-12 <= reuse_within(rates, first, near) <= reuse_within(rates, first, far) + 1e-12
    assert reuse_within(rates, first, far) <= 1


def test_reuse_takes_a_part_of_the_last_bin() -> None:
    """Whole bins count whole, the one where time is up by its part."""
    rates = [0.0] * BINS
    rates[3], rates[4] = 0.5, 0.4  # 1 to 2 s, 2 to 4 s
    assert reuse_within(rates, 3, SECOND_NS) == pytest.approx(0.5)
    assert reuse_within(rates, 3, 2 * SECOND_NS) == pytest.approx(1 - 0.5 * 0.8)
    assert reuse_within(rates, 5, 1e15) == 0


# ------------------------------------------------------------------------------ life table


@pytest.mark.parametrize(
    ("hits", "new", "output", "kind"),
    [
        (0, 0, 0, 0),
        (0, 3, 63, 0),
        (0, 3, 64, 1),
        (0, 3, 255, 1),
        (0, 3, 256, 2),
        (0, 3, None, 3),
        (0, 4, 0, 4),
        (0, 15, None, 7),
        (0, 16, 0, 8),
        (0, 63, 0, 8),
        (0, 64, 0, 12),
        (1, 15, 0, 16),
        (1, 16, 0, 20),
        (2, 0, 0, 24),
        (3, 0, 0, 32),
        (9, 99, None, 39),
    ],
)
def test_kinds_are_cut_at_powers_of_four(
    hits: int, new: int, output: int | None, kind: int
) -> None:
    """History by four parts of newness or three of hits, output by three and unknown."""
    assert kind_of(hits, new, output) == kind
    assert kind < PARTIAL == 10 * OUTPUTS


class NaiveLifeTable(Naive):
    """Each block by itself, each age from its birth, each worth by trying all stops."""

    def __init__(self, rebuild_every: int, weight: float) -> None:
        """Start empty."""
        self.every = rebuild_every
        self.weight = weight
        self.requests = 0
        self.now_ns = 0
        self.born: dict[int, int] = {}
        self.hits: dict[int, int] = {}
        self.kind: dict[int, int] = {}
        self.bin: dict[int, int] = {}
        self.events: Counter[tuple[int, int]] = Counter()
        self.risk: Counter[tuple[int, int]] = Counter()
        self.rates: dict[int, list[float]] = {}
        self.pool = [0.1] * BINS

    def touched(self, request: Request[int]) -> None:
        """Age every known block, then count the chain's."""
        self.age(request.now_ns)
        self.requests += 1
        if self.requests % self.every == 0:
            self.rebuild()
        new = sum(block not in self.born for block in request.chain)
        for block in request.chain:
            hits = 0
            if block in self.born:
                self.events[self.kind[block], self.bin[block]] += 1
                hits = self.hits[block] + 1
            kind = kind_of(hits, new, request.output_tokens)
            if request.partial and block == request.chain[-1]:
                kind = PARTIAL
            self.begin(block, hits, kind)

    def served(self, block: int) -> None:
        """Count a use of it, and leave it where it is."""
        self.events[self.kind[block], self.bin[block]] += 1

    def begin(self, block: int, hits: int, kind: int) -> None:
        """Put a block at age 0."""
        self.born[block], self.hits[block], self.kind[block] = self.now_ns, hits, kind
        self.bin[block] = 0
        self.risk[kind, 0] += 1

    def age(self, now_ns: int) -> None:
        """Count each bin that a block reaches."""
        self.now_ns = now_ns
        for block, born in self.born.items():
            while (at := self.bin[block] + 1) < BINS and born + EDGES_NS[at] <= now_ns:
                self.bin[block] = at
                self.risk[self.kind[block], at] += 1

    def rebuild(self) -> None:
        """Apply the formulas of the facts, and let all counts fade."""
        kinds, weight = {kind for kind, _ in self.risk}, self.weight
        for age in range(BINS):
            seen = sum(self.events[kind, age] for kind in kinds)
            reached = sum(self.risk[kind, age] for kind in kinds)
            self.pool[age] = min(1.0, (seen + weight * 0.1) / (reached + weight))
        for kind in kinds:
            self.rates[kind] = [
                min(1.0, (self.events[kind, a] + weight * pool) / (self.risk[kind, a] + weight))
                for a, pool in enumerate(self.pool)
            ]
        for counts in (self.events, self.risk):
            for key in counts:
                counts[key] *= 0.98  # type: ignore[assignment]

    def worth(self, block: int) -> float:
        """Return what a block is worth."""
        rates = self.rates.get(self.kind[block], None) or self.pool
        return naive_worth(rates, self.bin[block])

    def expect(self, evictable: set[int]) -> set[int]:
        """Return the blocks worth least, of those the oldest by bins."""
        if not evictable:
            return set()
        worth = {block: self.worth(block) for block in evictable}
        least = min(worth.values()) * (1 + 1e-9)
        return {block for block in evictable if worth[block] <= least}


NO_STRANGERS: Final = STEPS.map(lambda steps: [s for s in steps if s.what != "insert"])


def table_of(*, ghosts_min: int = 99, **constants: float) -> LifeTable[int]:
    """Make a life table with other constants than the usual ones."""
    policy = LifeTable[int](ghosts_min=ghosts_min)
    for name, value in constants.items():
        object.__setattr__(policy._table if name == "WEIGHT" else policy, name, value)
    return policy


@given(NO_STRANGERS, st.integers(1, 5), st.sampled_from([0.1, 2.0, 50.0]))
def test_the_life_table_is_a_naive_one(steps: list[Step], every: int, weight: float) -> None:
    """Counting by segment, queues and cells find what counting block by block finds."""
    policy = table_of(REBUILD_EVERY=every, WEIGHT=weight)
    naive = NaiveLifeTable(every, weight)
    compare(policy, naive, steps)
    for block in naive.born:
        assert policy.worth(block) == pytest.approx(naive.worth(block), rel=1e-9)
    for number, row in policy._table.rows.items():
        assert row.events == pytest.approx([naive.events[number, age] for age in range(BINS)])
        assert row.risk == pytest.approx([naive.risk[number, age] for age in range(BINS)])


@given(STEPS, st.integers(1, 5), st.integers(0, 6))
def test_a_life_table_that_forgets_stays_whole(
    steps: list[Step], every: int, ghosts_min: int
) -> None:
    """Whatever is forgotten or comes unannounced, some leaf goes, and the budget holds."""
    policy = table_of(ghosts_min=ghosts_min, REBUILD_EVERY=every, GHOSTS_PER_RESIDENT=0)
    forest = compare(policy, Naive(), steps)
    policy.touched(Request(forest.now_ns, ()))
    ghosts = len(policy._segments) - len(policy._resident)
    assert ghosts <= ghosts_min


def test_ghosts_are_allowed_by_the_size_of_the_tier() -> None:
    """Four for each resident block, of which the oldest are forgotten first."""
    policy = table_of(ghosts_min=0)
    for block in range(2):
        policy.inserted(block, None, 0)
    for block in range(10, 30):
        policy.touched(Request(block, (block,)))
    policy.touched(Request(30, ()))
    assert set(policy._segments) == {0, 1, *range(22, 30)}


def test_what_other_hosts_come_for_is_worth_keeping() -> None:
    """Of two kinds that nobody here uses again, the one that others take copies of is kept."""
    policy = LifeTable[int]()
    for round_ in range(2 * LifeTable.REBUILD_EVERY):
        now_ns = 100 * SECOND_NS * round_
        for kind in (0, 1):  # short answers, long ones
            block = 2 * round_ + kind
            policy.touched(Request(now_ns, (block,), 10 if kind else 1000))
            policy.inserted(block, None, now_ns)
            policy.evictable(block)
            if kind and round_:
                policy.served(block - 2)
    policy.check()
    worth = [policy.worth(block - 2) for block in (block - 1, block)]  # as old as what was served
    assert worth[1] is not None
    assert worth[0] is not None
    assert worth[1] > 10 * worth[0]


def test_equal_worth_means_the_older_first() -> None:
    """Before anything is learned, a chain that waits longer goes first."""
    policy = LifeTable[int]()
    for block, now_s in ((1, 0), (2, 60)):
        policy.touched(Request(now_s * SECOND_NS, (block,), 10))
        policy.inserted(block, None, now_s * SECOND_NS)
        policy.evictable(block)
    assert policy.victim() == 1


def test_a_segment_goes_whole_from_its_tail() -> None:
    """Of two chains alike, the first loses all its blocks before the second loses one."""
    policy = LifeTable[str]()
    for name in "ab":
        chain = [f"{name}{depth}" for depth in range(3)]
        policy.touched(Request(0, chain))
        for depth, block in enumerate(chain):
            policy.inserted(block, chain[depth - 1] if depth else None, 0)
        policy.evictable(chain[-1])
    gone = []
    while (victim := policy.victim()) is not None:
        gone.append(victim)
        policy.removed(victim)
        if victim[1] != "0":
            policy.evictable(f"{victim[0]}{int(victim[1]) - 1}")
        policy.check()
    assert gone == ["a2", "a1", "a0", "b2", "b1", "b0"]


def test_the_deepest_block_of_a_broken_chain_goes_first() -> None:
    """Where a block between is missing, the end is worth nothing: it is let go before."""
    policy = LifeTable[int]()
    policy.touched(Request(0, (1, 2, 3)))
    for block, parent in ((1, None), (3, 2)):
        policy.inserted(block, parent, 0)
        policy.evictable(block)
    assert policy.victim() == 3


def test_blocks_of_the_answer_join_their_request() -> None:
    """What is stored beyond the prompt ages with it, and is as new as it."""
    policy = LifeTable[int]()
    policy.touched(Request(0, range(20), 10))
    for block in range(22):
        policy.inserted(block, block - 1 if block else None, SECOND_NS)
    assert policy._segments[21] is policy._segments[0]
    policy.check()
    policy.inserted(50, 7, SECOND_NS)  # a branch is no answer
    assert policy._segments[50] is not policy._segments[0]
    policy.touched(Request(SECOND_NS, range(100, 103), 10, partial=True))
    policy.inserted(103, 102, SECOND_NS)  # nor is what follows a block that was not full
    assert policy._segments[103].kind.number == kind_of(0, 3, 10)
    policy.inserted(23, 21, SECOND_NS)  # the first one's segment is a second old by now
    assert policy._table.rows[kind_of(0, 20, 10)].risk[:6] == [24, 23, 23, 23, 0, 0]
    policy.touched(Request(2 * SECOND_NS, range(22), 10))
    assert policy._table.rows[kind_of(0, 20, 10)].events[4] == 22
    policy.inserted(22, 21, 3 * SECOND_NS)  # the second request brought nothing new
    assert policy._segments[22].hits == 0
    assert policy._segments[22].kind.number == kind_of(0, 0, 10)
    policy.inserted(99, 98, 3 * SECOND_NS)  # nobody knows anything of its chain
    assert policy._segments[99].kind.number == kind_of(0, 1, None)
    policy.check()


def test_what_moved_on_is_not_kept() -> None:
    """A segment without blocks holds none of them while it waits to age."""
    policy = LifeTable[int]()
    for now in range(50):
        policy.touched(Request(now, range(100)))
    segments = [segment for queue in policy._queues for segment in queue]
    assert sum(len(segment.blocks) for segment in segments) == 100
