"""Replay a trace of requests against eviction and admission policies.

A trace is a file of JSON lines as Mooncake published them, plain or compressed with gzip:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds, lengths are in tokens (`output_length` may be null or missing),
`hash_ids` name the prompt's blocks, each together with all that is before it.

A hit is a block of the leading run of resident blocks: nothing after the first miss counts. A tier
may overshoot while a request runs and is back at its capacity when it ends, where the request's
own blocks may go too. The tiers start empty, and all requests count.

R1. A tier holds no block without its parent, and at most its capacity between requests.
R2. In two tiers, a block of the lower one has its parent in one of the two.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvd.policies import Request
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.policies import Admission, Policy

MS_NS: Final = 10**6
BLOCK_TOKENS: Final = 512
"""Of the published traces."""
_SHOWN: Final = 40
"""Characters of a bad value that an error repeats."""


class TraceError(KvdError):
    """A trace cannot be read; the text says where, and what to change."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a trace, and how many tokens its prompt has."""

    request: Request[int]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time.

    Attributes:
        entries: The requests.
        block_tokens: Tokens of a full block.
    """

    entries: tuple[Entry, ...]
    block_tokens: int

    def whole_blocks(self) -> Trace:
        """Return the trace without partly filled last blocks, as a tier of whole chunks sees it."""
        return self._mapped(lambda r: (r.chain[: len(r.chain) - r.partial], r.output_tokens, False))

    def without_output(self) -> Trace:
        """Return the trace as where nobody says how long answers are."""
        return self._mapped(lambda r: (r.chain, None, r.partial))

    def head(self, count: int) -> Trace:
        """Return the first requests only."""
        return Trace(self.entries[:count], self.block_tokens)

    def _mapped(
        self, facts: Callable[[Request[int]], tuple[Sequence[int], int | None, bool]]
    ) -> Trace:
        return Trace(
            tuple(
                Entry(Request(entry.request.now_ns, *facts(entry.request)), entry.input_tokens)
                for entry in self.entries
            ),
            self.block_tokens,
        )


# -------------------------------------------------------------------------------------- reading


def read_trace(path: str, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: The file, or a line of it, cannot be used.
    """
    entries: list[Entry] = []
    parents: dict[int, int | None] = {}
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the user's path, as it is
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else open(path, "rb") as lines:  # noqa: PTH123
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                if line.strip():
                    entry = _entry(where, line, block_tokens)
                    _check_order(where, entry.request, entries, parents)
                    entries.append(entry)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            f"{path}: broken gzip file ({error}); fetch or compress it anew"
        ) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; name a readable file") from error
    if not entries:
        raise TraceError(f"{path}: no request in it; name a trace with at least one line")
    return Trace(tuple(entries), block_tokens)


def _entry(where: str, line: bytes, block_tokens: int) -> Entry:
    """Read and check one line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: no JSON ({error}); write one object a line") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {_shown(fields)} is no object; write one object a line")
    timestamp_ms = _whole(where, fields, "timestamp")
    input_tokens = _whole(where, fields, "input_length")
    output_tokens = None
    if fields.get("output_length") is not None:
        output_tokens = _whole(where, fields, "output_length")
    chain = fields.get("hash_ids")
    if not isinstance(chain, list) or not all(type(block) is int for block in chain):
        raise TraceError(f'{where}: write "hash_ids" as a list of whole numbers')
    full, rest = divmod(input_tokens, block_tokens)
    if len(chain) not in {full, full + bool(rest)}:
        raise TraceError(
            f"{where}: {input_tokens} input tokens make {full + bool(rest)} blocks of"
            f" {block_tokens}, but hash_ids has {len(chain)}; give the trace's own --block-tokens"
        )
    request = Request(timestamp_ms * MS_NS, tuple(chain), output_tokens, partial=len(chain) > full)
    return Entry(request, input_tokens)


def _whole(where: str, fields: dict[str, object], name: str) -> int:
    """Return a field that must be a whole number, not negative."""
    value = fields.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        found = _shown(value) if name in fields else "missing"
        raise TraceError(f'{where}: "{name}" is {found}; write a whole number from 0 on')
    return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_order(
    where: str, request: Request[int], before: Sequence[Entry], parents: dict[int, int | None]
) -> None:
    """Check that time goes on and that a block's name stands for all before it."""
    if before and request.now_ns < before[-1].request.now_ns:
        raise TraceError(f"{where}: earlier than the line before; sort the trace by timestamp")
    above: int | None = None
    seen: set[int] = set()
    for block in request.chain:
        if block in seen:
            raise TraceError(f"{where}: block {block} twice in hash_ids; name each once")
        seen.add(block)
        if parents.setdefault(block, above) != above:
            raise TraceError(
                f"{where}: block {block} follows {_named(above)} here but"
                f" {_named(parents[block])} before; an id must stand for the whole prefix"
            )
        above = block


def _named(block: int | None) -> str:
    return "nothing" if block is None else f"block {block}"


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
        """Take in what is missing of a chain, root side first."""
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
        if last is not None and not children.get(last):
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
