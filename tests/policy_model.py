"""A forest with pins and holes, told to a policy and to a naive twin of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from hypothesis import strategies as st

from kvd.policies import Request
from kvd.policies.hazard import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.policies import Policy

BLOCKS: Final = 10


def parent_of(block: int) -> int | None:
    """Two trees: even and odd numbers, each block with up to two children."""
    return None if block < 2 else (block - block % 2 - 2) // 4 * 2 + block % 2


def chain_to(block: int | None) -> list[int]:
    """Return the blocks from the root to a block."""
    chain: list[int] = []
    while block is not None:
        chain.append(block)
        block = parent_of(block)
    return chain[::-1]


class Forest:
    """What a tier does, the slow way: says what changed after each step."""

    def __init__(self, policy: Policy[int]) -> None:
        """Start empty."""
        self.policy = policy
        self.resident: set[int] = set()
        self.pins: set[int] = set()
        self.now_ns = 0
        self.told: set[int] = set()

    def evictable(self) -> set[int]:
        """Return the resident leaves that nobody holds."""
        parents = {parent_of(block) for block in self.resident}
        return self.resident - parents - self.pins

    def tell(self) -> None:
        """Tell the policy which blocks have become evictable or held."""
        now = self.evictable()
        for block in sorted(self.told - now):
            self.policy.held(block)
        for block in sorted(now - self.told):
            self.policy.evictable(block)
        self.told = now

    def insert(self, block: int) -> None:
        """Make a block resident."""
        self.resident.add(block)
        self.policy.inserted(block, parent_of(block), self.now_ns)
        self.tell()

    def remove(self, block: int) -> None:
        """End a residence, whatever the policy thinks."""
        self.resident.discard(block)
        self.pins.discard(block)
        self.told.discard(block)
        self.policy.removed(block)
        self.tell()


class Step(NamedTuple):
    """One thing that happens to a forest."""

    what: str
    block: int
    delay_ns: int = SECOND_NS
    output: int | None = None
    partial: bool = False


STEP: Final = st.builds(
    Step,
    st.sampled_from(
        ["request", "request", "touch", "serve", "insert", "pin", "unpin", "drop", "evict"]
    ),
    st.integers(0, BLOCKS - 1),
    st.sampled_from([0, SECOND_NS // 8, SECOND_NS, 7 * SECOND_NS, 600 * SECOND_NS]),
    st.sampled_from([None, 0, 63, 64, 255, 256]),
    st.booleans(),
)
STEPS: Final = st.lists(STEP, max_size=20) | st.lists(STEP, min_size=25, max_size=45)


class Naive:
    """A policy done the slow way; `expect` names what the real one may answer."""

    def touched(self, request: Request[int]) -> None:
        """See `Policy`."""

    def served(self, block: int) -> None:
        """See `Policy`."""

    def inserted(self, block: int) -> None:
        """See `Policy`."""

    def removed(self, block: int) -> None:
        """See `Policy`."""

    def expect(self, evictable: set[int]) -> set[int]:
        """Return the blocks that may be the victim; not empty if there are any."""
        return evictable


def use(forest: Forest, naive: Naive, step: Step) -> None:
    """Run a request; what it misses is stored, or not."""
    chain = chain_to(step.block)
    request = Request(forest.now_ns, chain, step.output, step.partial)
    forest.policy.touched(request)
    naive.touched(request)
    for block in chain if step.what == "request" else []:
        if block not in forest.resident:
            forest.insert(block)
            naive.inserted(block)


def serve(forest: Forest, naive: Naive, block: int) -> None:
    """Let another host take a copy."""
    if block in forest.resident:
        forest.policy.served(block)
        naive.served(block)


def act(forest: Forest, naive: Naive, step: Step) -> None:
    """Do one step to a policy and its naive twin."""
    forest.now_ns += step.delay_ns
    block = step.block
    match step.what:
        case "request" | "touch":
            use(forest, naive, step)
        case "serve":
            serve(forest, naive, block)
        case "insert":
            if block not in forest.resident:
                forest.insert(block)  # perhaps without its parent
                naive.inserted(block)
        case "pin":
            forest.pins |= {block} & forest.resident
        case "unpin":
            forest.pins.discard(block)
        case "drop":
            if block in forest.resident:
                forest.remove(block)  # perhaps with children
                naive.removed(block)
        case _:
            victim = forest.policy.victim()
            if victim is not None:
                forest.remove(victim)
                naive.removed(victim)
    forest.tell()


def compare(policy: Policy[int], naive: Naive, steps: Sequence[Step]) -> Forest:
    """Do steps, checking after each that the policy agrees with its twin and with itself."""
    forest = Forest(policy)
    for step in steps:
        act(forest, naive, step)
        policy.check()
        evictable = forest.evictable()
        victim = policy.victim()
        expected = naive.expect(evictable)
        assert (victim in expected) if evictable else (victim is None)
        policy.check()
        assert policy.victim() == victim
        assert all(policy.worth(block) is not None for block in forest.resident)
    return forest
