"""Every policy's promises, LRU and S3-FIFO against naive ones, and admission."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.policies import (
    ADMISSIONS,
    POLICIES,
    LeafLru,
    LeafS3Fifo,
    LifeTable,
    Predicted,
    Request,
    SecondTouch,
    make,
    make_admission,
)
from kvd.policies.hazard import SECOND_NS
from tests.policy_model import STEPS, Naive, Step, compare, parent_of

if TYPE_CHECKING:
    from kvd.policies import Policy

# ------------------------------------------------------------------------------ all policies


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_tier_has_no_victim(name: str) -> None:
    """Nothing there, nothing to evict, nothing known."""
    policy: Policy[int] = make(name)
    assert policy.victim() is None
    assert policy.worth(1) is None
    policy.touched(Request(0, ()))
    policy.held(1)
    policy.check()


@pytest.mark.parametrize("name", POLICIES)
def test_what_breaks_a_tiers_promise_is_seen(name: str) -> None:
    """A second insertion and a removal of what is not there are bugs (B2)."""
    policy: Policy[int] = make(name)
    policy.inserted(1, None, 0)
    with pytest.raises(AssertionError):
        policy.inserted(1, None, 0)
    for wrong in (policy.removed, policy.evictable):
        with pytest.raises((KeyError, AssertionError)):
            wrong(2)


@pytest.mark.parametrize("name", POLICIES)
def test_being_told_twice_changes_nothing(name: str) -> None:
    """`evictable` and `held` may be repeated."""
    policy: Policy[int] = make(name)
    policy.inserted(1, None, 0)
    policy.evictable(1)
    policy.evictable(1)
    assert policy.victim() == 1
    policy.held(1)
    policy.held(1)
    assert policy.victim() is None
    policy.check()


@pytest.mark.parametrize("name", ["lru", "s3fifo"])
def test_a_block_used_again_and_again_leaves_no_trail(name: str) -> None:
    """Stale entries are bounded, and cleaning up keeps every live one."""
    policy = LeafLru[int]() if name == "lru" else LeafS3Fifo[int]()
    policy.inserted(1, None, 0)
    policy.inserted(2, None, 0)
    policy.evictable(1)
    for now in range(5 * policy.SLACK):
        policy.held(2)
        policy.touched(Request(now, (2,)))
        policy.evictable(2)
        policy.check()
    assert policy.victim() == 1
    policy.held(1)
    assert policy.victim() == 2


# ------------------------------------------------------------------------------------- LRU


class NaiveLru(Naive):
    """Blocks in the order of their last use."""

    def __init__(self) -> None:
        """Start empty."""
        self.order: list[int] = []

    def touched(self, request: Request[int]) -> None:
        """Move resident blocks to the end, the tail first."""
        for block in reversed(request.chain):
            if block in self.order:
                self.order.remove(block)
                self.order.append(block)

    def inserted(self, block: int) -> None:
        """Append."""
        self.order.append(block)

    def removed(self, block: int) -> None:
        """Let the parent have the block's place, if that is later than its own."""
        place = self.order.index(block)
        above = parent_of(block)
        if above in self.order[:place]:
            self.order[place] = above
            self.order.remove(above)
        else:
            del self.order[place]

    def expect(self, evictable: set[int]) -> set[int]:
        """Return the first."""
        return set([block for block in self.order if block in evictable][:1])


@given(STEPS, st.sampled_from([0, 3, LeafLru.SLACK]))
def test_lru_is_a_naive_lru(steps: list[Step], slack: int) -> None:
    """The leaf used longest ago goes; a parent inherits its child's last use."""
    lru = LeafLru[int]()
    lru.SLACK = lru._bound = slack
    compare(lru, NaiveLru(), steps)


def test_a_parent_inherits_the_last_use_of_its_child() -> None:
    """A chain is as recent as its latest use, however its ancestors came by it."""
    lru = LeafLru[str]()
    lru.inserted("root", None, 1)
    lru.inserted("other", None, 2)
    lru.inserted("leaf", "root", 3)
    lru.evictable("other")
    lru.evictable("leaf")
    lru.removed("leaf")
    lru.evictable("root")
    assert lru.victim() == "other"
    assert lru.worth("root") == 3
    assert lru.worth("other") == 2


def test_of_one_request_the_tail_goes_first() -> None:
    """Where a block between is missing, both its sides may go: the far one is worth less."""
    lru = LeafLru[int]()
    for block, parent in ((1, None), (3, 2)):
        lru.inserted(block, parent, 0)
        lru.evictable(block)
    lru.touched(Request(1, (1, 2, 3)))
    assert lru.victim() == 3


# --------------------------------------------------------------------------------- S3-FIFO


class NaiveS3Fifo(Naive):
    """Two lists and a list of ghosts, searched each time."""

    def __init__(self) -> None:
        """Start empty."""
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: Counter[int] = Counter()

    def touched(self, request: Request[int]) -> None:
        """Count up to three uses."""
        for block in request.chain:
            if block in self.small + self.main:
                self.uses[block] = min(3, self.uses[block] + 1)

    def inserted(self, block: int) -> None:
        """Queue; a ghost goes to main."""
        self.small.append(block)
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.promote(block)

    def promote(self, block: int | None) -> None:
        """Move a block and its ancestors to main."""
        while block in self.small:
            self.small.remove(block)
            self.main.append(block)
            self.uses[block] = 0
            block = parent_of(block)

    def removed(self, block: int) -> None:
        """Remember what was in small."""
        if block in self.small:
            self.small.remove(block)
            self.ghosts.append(block)
        else:
            self.main.remove(block)
        del self.uses[block]
        excess = len(self.ghosts) - len(self.small) - len(self.main)
        del self.ghosts[: max(0, excess)]

    def expect(self, evictable: set[int]) -> set[int]:
        """Turn the queues until one has no uses left."""
        while evictable:
            small = [block for block in self.small if block in evictable]
            main = [block for block in self.main if block in evictable]
            crowded = 10 * len(self.small) > len(self.small) + len(self.main)
            block = small[0] if small and (crowded or not main) else main[0]
            if not self.uses[block]:
                return {block}
            if block in self.small:
                self.promote(block)
            else:
                self.main.append(self.main.pop(self.main.index(block)))
                self.uses[block] -= 1
        return set()


@given(STEPS, st.sampled_from([0, 3, LeafS3Fifo.SLACK]))
def test_s3fifo_is_a_naive_one(steps: list[Step], slack: int) -> None:
    """Queues, promotion, second chances and ghosts are as in two plain lists."""
    policy = LeafS3Fifo[int]()
    policy.SLACK = policy._bound = slack
    compare(policy, NaiveS3Fifo(), steps)


def test_a_tenth_is_not_crowded() -> None:
    """The small queue may have one of ten blocks; then main's first goes."""
    policy = LeafS3Fifo[int]()
    for block in range(10):
        policy.inserted(block, None, 0)
        policy.evictable(block)
    policy.touched(Request(1, range(9)))
    assert policy.victim() == 0
    policy.removed(0)
    assert policy.victim() == 9  # one of nine is too many


def test_a_block_of_main_is_spared_three_times() -> None:
    """However often it was used, after three turns it goes before one used four times since."""
    policy = LeafS3Fifo[int]()
    for block in (1, 2):
        policy.inserted(block, None, 0)
        policy.evictable(block)
    policy.touched(Request(1, (1, 2)))
    assert policy.victim() == 1  # both in main
    for _ in range(9):
        policy.touched(Request(2, (1,)))
    for _ in range(3):
        policy.touched(Request(3, (2,)))
    assert policy.victim() == 1


# ------------------------------------------------------------------------------- admission


def test_admissions_have_names() -> None:
    """Each name makes an admission; predicting needs a policy that predicts."""
    for name in ADMISSIONS:
        admission = make_admission(name, LifeTable[int](), remembered=4, threshold=0.5)
        admission.touched(Request(0, (1,)))
        assert admission.admits(1) == (name == "all")
    with pytest.raises(TypeError, match="life table"):
        make_admission("predicted", LeafLru[int](), remembered=4, threshold=0.5)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=30))
def test_second_touch_counts_what_it_remembers(chains: list[list[int]]) -> None:
    """A block is admitted if it was used again while it was among the six used last."""
    admission = SecondTouch[int](6)
    recent: list[int] = []
    again: set[int] = set()
    for now, chain in enumerate(chains):
        admission.touched(Request(now, chain))
        again |= set(chain) & set(recent)
        recent = ([block for block in recent if block not in chain] + chain)[-6:]
        again &= set(recent)
        assert {block for block in range(10) if admission.admits(block)} == again


def test_predicted_reuse_is_compared_with_the_threshold() -> None:
    """The chance is that of the lower tier's table within the time that blocks stay there."""
    table = LifeTable[int]()
    table.touched(Request(0, (1,)))
    chance = table.reuse_probability(1, table.stay_ns)
    assert 0.5 < chance < 1
    assert Predicted(table, chance).admits(1)
    assert not Predicted(table, chance + 0.001).admits(1)
    assert not Predicted(table, 0.001).admits(2)  # nothing is known of it


def test_stay_follows_the_ages_at_which_blocks_go() -> None:
    """It moves by a thousandth of the difference; ages beyond an hour count as one."""
    table = LifeTable[int]()
    table.touched(Request(0, (1,)))
    table.inserted(1, None, 0)
    assert table.stay_ns == 600 * SECOND_NS
    table.touched(Request(10_000 * SECOND_NS, ()))
    table.removed(1)
    assert table.stay_ns == pytest.approx((600 + 3) * SECOND_NS)
