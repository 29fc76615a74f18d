"""The life table: what is least likely to be used soon goes first, as learned from the past. Pure.

Blocks that one request used last, and that have one history, form a segment and age together. A
segment is of a kind: how often it was used before, how much was new in the request, how long the
answer was. Each kind has a row in a table of reuse by age (`hazard.py`); evictable segments stand
in a cell for each kind and bin of age, and the cell worth least gives the victim. Blocks that
went, or never came, are remembered for a while: their reuse counts too.

S1. Each known block belongs to one segment, which counts the blocks it has left.
S2. A segment with known blocks stands once in the queue of its bin; queues are in order of age.
S3. A segment with evictable blocks stands in the cell of its kind and bin, and no other does in
    the cells before the cursor.
S4. A segment with remembered blocks stands in the line for forgetting.
S5. Resident blocks are known, evictable ones resident.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, Generic

from kvd.policies.base import B
from kvd.policies.hazard import BINS, EDGES_NS, SECOND_NS, HazardTable, Row, reuse_within

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.policies.base import Request

NEW_EDGES: Final = (4, 16, 64)
"""New blocks of a request, for blocks used for the first time. Powers of four, not fitted."""
NEW_EDGE: Final = 16
"""The same for blocks used before."""
OUTPUT_EDGES: Final = (64, 256)
OUTPUTS: Final = 4
"""Lengths of output: three, and unknown."""
PARTIAL: Final = 10 * OUTPUTS
"""The kind of partly filled last blocks."""


def kind_of(hits: int, new_count: int, output_tokens: int | None) -> int:
    """Number the kind of full blocks, from 0; each fact unknown or known has kinds of its own."""
    if hits == 0:
        history = sum(new_count >= edge for edge in NEW_EDGES)
    else:
        history = 4 + 2 * min(hits - 1, 2) + (new_count >= NEW_EDGE)
    if output_tokens is None:
        return history * OUTPUTS + OUTPUTS - 1
    return history * OUTPUTS + sum(output_tokens >= edge for edge in OUTPUT_EDGES)


class _Kind(Generic[B]):
    """A kind's row, its cells, and where they stand in the order of worth."""

    __slots__ = ("cells", "number", "places", "row")

    def __init__(self, number: int, row: Row) -> None:
        self.number = number
        self.row = row
        self.cells: list[OrderedDict[_Segment[B], None]] = [OrderedDict() for _ in range(BINS)]
        self.places = [0] * BINS


class _Segment(Generic[B]):
    """Consecutive blocks that one request used last.

    Attributes:
        blocks: As they were when it began, root side first; some may have moved on since.
        known: How many have not moved on and are not forgotten.
        born_ns: When they were used.
        hits: How often before.
        kind: See `kind_of`.
        fresh: The kind of what the same request brought new.
        bin: Of its age.
        evictable: Its evictable blocks; one, but for odd trees. The latest is the deepest.
        listed: It stands in a cell.
        in_line: It stands in the line for forgetting.
    """

    __slots__ = (
        "bin",
        "blocks",
        "born_ns",
        "evictable",
        "fresh",
        "hits",
        "in_line",
        "kind",
        "known",
        "listed",
    )

    def __init__(
        self, blocks: list[B], born_ns: int, hits: int, kind: _Kind[B], fresh: _Kind[B]
    ) -> None:
        self.blocks = blocks
        self.known = len(blocks)
        self.born_ns = born_ns
        self.hits = hits
        self.kind = kind
        self.fresh = fresh
        self.bin = 0
        self.evictable: dict[B, None] = {}
        self.listed = False
        self.in_line = False


class LifeTable(Generic[B]):
    """Expected hits a second of residence decide; see the module."""

    REBUILD_EVERY: Final = 100
    """Requests between two rebuilds of the table."""
    GHOSTS_PER_RESIDENT: Final = 4
    GHOSTS_MIN: Final = 60_000
    """Remembered blocks: some twenty minutes of new ones. Fewer hide the reuse to be learned."""
    STAY_FIRST_NS: Final = 600 * SECOND_NS
    STAY_MAX_NS: Final = 3600 * SECOND_NS
    STAY_STEP: Final = 0.001

    def __init__(self, *, ghosts_min: int = GHOSTS_MIN) -> None:
        """Start knowing nothing but the prior.

        Args:
            ghosts_min: Remember at least so many blocks that are not resident.
        """
        self.stay_ns = float(self.STAY_FIRST_NS)
        self._ghosts_min = ghosts_min
        self._table = HazardTable()
        self._kinds: dict[int, _Kind[B]] = {}
        self._segments: dict[B, _Segment[B]] = {}
        self._resident: set[B] = set()
        self._queues: list[deque[_Segment[B]]] = [deque() for _ in range(BINS)]
        self._line: deque[_Segment[B]] = deque()
        self._order: list[OrderedDict[_Segment[B], None]] = []
        self._cursor = 0
        self._now_ns = 0
        self._requests = 0

    # ---------------------------------------------------------------- uses

    def touched(self, request: Request[B]) -> None:
        """Begin segments for a chain's blocks, and learn from the ages of those used again."""
        self._advance(request.now_ns)
        self._requests += 1
        if self._requests % self.REBUILD_EVERY == 0:
            self._table.rebuild()
            self._sort_cells()
        chain = request.chain
        runs = list(self._runs(chain))
        new_count = sum(end - begin for segment, begin, end in runs if segment is None)
        full = len(chain) - request.partial
        for old, begin, end in runs:
            hits = 0
            if old is not None:
                hits = old.hits + 1
                old.kind.row.events[old.bin] += end - begin
                old.known -= end - begin
            fresh = self._kind(kind_of(0, new_count, request.output_tokens))
            if begin < full:
                kind = self._kind(kind_of(hits, new_count, request.output_tokens))
                self._begin(list(chain[begin : min(end, full)]), old, hits, kind, fresh)
            if end > full:
                self._begin(list(chain[full:end]), old, hits, self._kind(PARTIAL), fresh)
            if old is not None and not old.known:
                old.blocks = []  # it may stand in its queue for hours yet

    def _runs(self, chain: Sequence[B]) -> Iterator[tuple[_Segment[B] | None, int, int]]:
        """Cut a chain where the segment changes: (segment or None, begin, end)."""
        segments = self._segments
        begin, current = 0, segments.get(chain[0]) if chain else None
        for index, block in enumerate(chain):
            segment = segments.get(block)
            if segment is not current:
                yield current, begin, index
                begin, current = index, segment
        if chain:
            yield current, begin, len(chain)

    def _begin(
        self,
        blocks: list[B],
        old: _Segment[B] | None,
        hits: int,
        kind: _Kind[B],
        fresh: _Kind[B],
    ) -> _Segment[B]:
        """Make a segment of blocks that are unknown, or come from `old` with what they are."""
        segment = _Segment(blocks, self._now_ns, hits, kind, fresh)
        self._segments.update(dict.fromkeys(blocks, segment))
        kind.row.risk[0] += len(blocks)
        self._queues[0].append(segment)
        if old is not None and old.evictable:
            moved = [block for block in old.evictable if self._segments[block] is segment]
            for block in moved:
                del old.evictable[block]
                segment.evictable[block] = None
            if moved:
                self._list(segment)
        if not self._resident.issuperset(blocks):
            self._remember(segment)
        return segment

    def served(self, block: B) -> None:
        """Learn that blocks of this kind and age are used; this one goes on ageing.

        Who learns from the requests of one host alone takes what others come for as good as dead.
        """
        segment = self._segments.get(block)
        if segment is not None:
            segment.kind.row.events[segment.bin] += 1

    # ---------------------------------------------------------------- residence

    def inserted(self, block: B, parent: B | None, now_ns: int) -> None:
        """Take in a block; one that no request named gets its facts from its parent's."""
        assert block not in self._resident  # B2
        if block not in self._segments:
            self._adopt(block, parent, now_ns)
        self._resident.add(block)

    def _adopt(self, block: B, parent: B | None, now_ns: int) -> None:
        self._now_ns = max(self._now_ns, now_ns)
        above = None if parent is None else self._segments.get(parent)
        if above is None:
            fresh = self._kind(kind_of(0, 1, None))
            self._begin([block], None, 0, fresh, fresh)
        elif above.hits or above.blocks[-1] != parent or above.kind.number == PARTIAL:
            self._begin([block], None, 0, above.fresh, above.fresh)
        else:  # the request goes on, as with the blocks of its answer
            above.blocks.append(block)
            above.known += 1
            self._segments[block] = above
            for reached in range(above.bin + 1):
                above.kind.row.risk[reached] += 1

    def evictable(self, block: B) -> None:
        """Let a block be chosen (S3)."""
        assert block in self._resident  # B2
        segment = self._segments[block]
        segment.evictable[block] = None
        if not segment.listed:
            self._list(segment)

    def held(self, block: B) -> None:
        """Keep a block from being chosen; its segment leaves its cell when it is next seen."""
        segment = self._segments.get(block)
        if segment is not None:
            segment.evictable.pop(block, None)

    def removed(self, block: B) -> None:
        """Remember a block that is gone. Its segment keeps its place: its next block may follow."""
        self._resident.remove(block)
        segment = self._segments[block]
        segment.evictable.pop(block, None)
        self._remember(segment)
        stay_ns = min(self.STAY_MAX_NS, self._now_ns - segment.born_ns)
        self.stay_ns += self.STAY_STEP * (stay_ns - self.stay_ns)

    # ---------------------------------------------------------------- answers

    def victim(self) -> B | None:
        """Return the deepest evictable block of the first segment of the cell worth least."""
        order = self._order
        while self._cursor < len(order):
            cell = order[self._cursor]
            while cell:
                segment = next(iter(cell))
                if segment.evictable:
                    return next(reversed(segment.evictable))
                del cell[segment]
                segment.listed = False
            self._cursor += 1
        return None

    def worth(self, block: B) -> float | None:
        """Return the hits expected a second of keeping a block, resident or remembered."""
        segment = self._segments.get(block)
        return None if segment is None else segment.kind.row.worth[segment.bin]

    def reuse_probability(self, block: B, span_ns: float) -> float:
        """Return the chance that a block is used within a time from now; 0 if it is unknown."""
        segment = self._segments.get(block)
        if segment is None:
            return 0.0
        return reuse_within(segment.kind.row.rates, segment.bin, span_ns)

    # ---------------------------------------------------------------- kinds and cells

    def _kind(self, number: int) -> _Kind[B]:
        kind = self._kinds.get(number)
        if kind is None:
            kind = self._kinds[number] = _Kind(number, self._table.row(number))
            self._sort_cells()
        return kind

    def _sort_cells(self) -> None:
        """Order all cells by worth; of equals the older bin goes first, as in LRU."""
        cells = sorted(
            (kind.row.worth[age], -age, number)
            for number, kind in self._kinds.items()
            for age in range(BINS)
        )
        self._order = [self._kinds[number].cells[-age] for _, age, number in cells]
        for place, (_, age, number) in enumerate(cells):
            self._kinds[number].places[-age] = place
        self._cursor = 0

    def _list(self, segment: _Segment[B]) -> None:
        kind = segment.kind
        kind.cells[segment.bin][segment] = None
        segment.listed = True
        self._cursor = min(self._cursor, kind.places[segment.bin])

    # ---------------------------------------------------------------- time

    def _advance(self, now_ns: int) -> None:
        """Let segments age, and forget the blocks remembered longest beyond the budget."""
        self._now_ns = now = max(self._now_ns, now_ns)
        for age in range(BINS - 1):
            queue, latest = self._queues[age], now - EDGES_NS[age + 1]
            while queue and queue[0].born_ns <= latest:
                self._age(queue.popleft())
        budget = max(self.GHOSTS_PER_RESIDENT * len(self._resident), self._ghosts_min)
        while self._line and len(self._segments) - len(self._resident) > budget:
            self._forget(self._line.popleft())

    def _age(self, segment: _Segment[B]) -> None:
        """Move a segment to the next bin, or let it go if it has no blocks left."""
        if segment.listed:
            del segment.kind.cells[segment.bin][segment]
            segment.listed = False
        if not segment.known:
            return
        segment.bin += 1
        segment.kind.row.risk[segment.bin] += segment.known
        self._queues[segment.bin].append(segment)
        if segment.evictable:
            self._list(segment)

    def _remember(self, segment: _Segment[B]) -> None:
        if not segment.in_line:
            segment.in_line = True
            self._line.append(segment)

    def _forget(self, segment: _Segment[B]) -> None:
        segment.in_line = False
        for block in segment.blocks:
            if block not in self._resident and self._segments.get(block) is segment:
                del self._segments[block]
                segment.known -= 1

    # ---------------------------------------------------------------- accounts

    def check(self) -> None:
        """Recount S1 to S5."""
        self._table.check()
        assert self._resident <= self._segments.keys(), "S5"
        line = set(self._line)
        counts: dict[_Segment[B], int] = {}
        for block, segment in self._segments.items():
            counts[segment] = counts.get(segment, 0) + 1
            assert block in segment.blocks, "S1"
            if block not in self._resident:
                assert segment in line, "S4"
        for age, queue in enumerate(self._queues):
            born = [segment.born_ns for segment in queue]
            assert born == sorted(born), "S2"
            for segment in queue:
                assert segment.bin == age, "S2"
                assert segment.known == counts.pop(segment, 0), "S1"
                self._check_cells(segment)
        assert not counts, "S2"
        assert len(line) == len(self._line), "S4"
        assert all(segment.in_line for segment in line), "S4"

    def _check_cells(self, segment: _Segment[B]) -> None:
        kind = segment.kind
        assert segment.listed == (segment in kind.cells[segment.bin]), "S3"
        assert self._order[kind.places[segment.bin]] is kind.cells[segment.bin], "S3"
        if segment.evictable:
            assert segment.listed, "S3"
            assert kind.places[segment.bin] >= self._cursor, "S3"
        for block in segment.evictable:
            assert self._segments.get(block) is segment, "S5"
            assert block in self._resident, "S5"
