"""A trace through the daemon's own catalog, stored by the ranks of an engine one after the other.

What `kvd.replay` leaves out: slots, pins, room made before storing, parts of a chunk that come at
different times, and that a chunk counts only when all its ranks' parts are there.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvd.catalog import Catalog
from kvd.metrics import Counters
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.entry import Space
    from kvd.trace import Trace

PAGE: Final = 4096
TENANT: Final = Tenant("bench")
NAMESPACE: Final = b"n" * 32
SECOND_NS: Final = 10**9


class Engine:
    """An engine of some ranks before a host tier without a tier below."""

    def __init__(self, chunks: int, policy: str, ranks: int) -> None:
        """Have room for so many whole chunks."""
        pool = SlabPool(PAGE, {TENANT: chunks * ranks})
        for slab in range(chunks * ranks):
            pool.add_blank(SlabId(slab))
        limits = dict.fromkeys(Resource, 1 << 62)
        self._catalog = Catalog(pool, Quota({TENANT: limits}), Counters(), policy)
        layout = Layout(8, 8, "float16", (Group("full", 1, ranks, 8, PAGE),), tp=ranks)
        self._space: Space = self._catalog.enter(TENANT, NAMESPACE, "bench", layout)
        self.asked = self.hits = 0

    def ask(self, chain: Sequence[bytes], now_ns: int) -> int:
        """Look a prompt up and read what is there; return how many chunks that is."""
        self._catalog.eviction.now_ns = max(self._catalog.eviction.now_ns, now_ns)
        held = self._catalog.hold(self._space, chain, 0)
        self._catalog.unpin(held)
        self.asked += len(chain)
        self.hits += len(held)
        return len(held)

    def store(self, chain: Sequence[bytes], first: int, rank: int, now_ns: int) -> None:
        """Store a rank's part of chunks `first` and later, as far as there is room."""
        self._catalog.eviction.now_ns = max(self._catalog.eviction.now_ns, now_ns)
        owner = OwnerId(1 + rank)
        records = self._catalog.reserve(
            self._space,
            owner,
            rank,
            parent=chain[first - 1] if first else NAMESPACE,
            hashes=chain[first:],
            groups=1,
            deadline_ns=1 << 62,
        )
        taken = [Generation(record[6]) for record in records if record[2] == Status.OK]
        self._catalog.publish_all(owner, taken, now_ns)


def replay_ranks(trace: Trace, chunks: int, policy: str, ranks: int, lag_s: float) -> float:
    """Return the share of blocks found, in per cent.

    Args:
        trace: Whole blocks of its prompts count; nobody says how long answers are.
        chunks: Room, in whole chunks.
        policy: One of `kvd.policies.POLICIES`.
        ranks: That store a part each of every chunk.
        lag_s: A rank stores so long after the one before it, whatever comes between.
    """
    engine = Engine(chunks, policy, ranks)
    later: deque[tuple[int, Sequence[bytes], int, int]] = deque()
    lags = [rank * int(lag_s * SECOND_NS) for rank in range(ranks)]
    for entry in trace.whole_blocks().entries:
        now_ns = entry.request.now_ns + 1
        while later and later[0][0] <= now_ns:
            at_ns, chain, first, rank = later.popleft()
            engine.store(chain, first, rank, at_ns)
        chain = [block.to_bytes(32, "little") for block in entry.request.chain]
        first = engine.ask(chain, now_ns)
        if first < len(chain):
            engine.store(chain, first, 0, now_ns)
            later.extend((now_ns + lags[rank], chain, first, rank) for rank in range(1, ranks))
    return 100 * engine.hits / engine.asked
