"""Which tier a lease's tokens and bytes count for: where they lay when it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvd.config import Limits
from kvd.ipc.caller import Caller
from kvd.ipc.dispatch import Dispatcher
from kvd.lease import LeaseBook
from kvd.measures import TIERS, Usage
from kvd.types import Generation, OwnerId
from kvd_client import wire
from kvd_client.wire import Status
from kvd_client.wire_gpu import GPU_SLABS
from tests.cold_kit import NAMES, PAGE, PLAIN, ROOT, TENANT
from tests.unit.test_waiting import Desk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.entry import Chunk, Space
    from kvd.places import PlaceRecord

TOKENS = PLAIN.chunk_tokens
OTHER = OwnerId(2)
PEER = OwnerId(-1)


class Reach:
    """Other hosts that have a chain; what they give comes when the test says so."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.done: Callable[[], None] | None = None
        self.first = 0

    def elsewhere(self, *_: object) -> bool:
        """Know of nothing ahead of time."""
        return False

    def fetch(self, space: Space, hashes: Sequence[bytes], found: int, **options: Any) -> bool:
        """Begin."""
        del space, hashes
        self.first, self.done = found, options["done"]
        return True

    def rates(self) -> tuple[float, float, float]:
        """Know nothing."""
        return 0.0, 0.0, 0.0

    def give(self, hashes: Sequence[bytes], owner: OwnerId = PEER) -> None:
        """Put chunks of the chain into host slots, as a mover or an engine does, and say so."""
        catalog = self.desk.world.catalog
        for key in hashes:
            at = NAMES.index(key)
            (record,) = catalog.reserve(
                self.desk.space,
                owner,
                0,
                parent=NAMES[at - 1] if at else ROOT,
                hashes=[key],
                groups=1,
                deadline_ns=1 << 62,
            )
            assert catalog.publish(owner, Generation(record[6]), 1) is Status.OK
        assert self.done is not None
        self.done()


class Gpu:
    """A GPU tier that has some chunks."""

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks = chunks

    def whole(self, chunk: Chunk) -> bool:
        """Tell."""
        return chunk in self.chunks

    def places(
        self, chunks: Sequence[Chunk], first: int, rank: int, places: list[PlaceRecord]
    ) -> list[PlaceRecord]:
        """Tell of places on the GPU where there are."""
        del rank
        return [
            (*p[:3], GPU_SLABS, *p[4:]) if chunks[p[0] - first] in self.chunks else p
            for p in places
        ]


def usages(desk: Desk) -> tuple[Usage, Usage]:
    """Return the tenant's and the namespace's."""
    return desk.world.catalog.counters.measures.usage(TENANT), desk.space.usage


def counts(desk: Desk, what: str = "hit_tokens") -> dict[str, int]:
    """Return what was counted, in chunks; the same for tenant and namespace."""
    tenant, space = (getattr(usage, what) for usage in usages(desk))
    assert tenant == space
    assert set(tenant) == set(TIERS)
    unit = TOKENS if what == "hit_tokens" else PAGE
    assert all(count % unit == 0 for count in tenant.values())
    return {tier: count // unit for tier, count in tenant.items() if count}


def with_reach(desk: Desk) -> Reach:
    """Let a desk ask other hosts."""
    reach = Reach(desk)
    desk.desk = Dispatcher(
        desk.world.catalog, desk.book, Limits(), desk.clock, desk.riser, reach=reach
    )
    return reach


@pytest.fixture
def desk() -> Desk:
    """Make a desk whose chain lies in the tier below."""
    return Desk()


def test_what_came_up_counts_as_nvme_once(desk: Desk) -> None:
    """The chunks that were up already count for host memory; the next time, all do."""
    desk.acquire(1, NAMES[:2])
    for chunk in desk.chunks()[:2]:
        desk.riser.end(chunk)
    assert counts(desk) == counts(desk, "hit_bytes") == {"nvme": 2}
    desk.acquire(2)
    for chunk in desk.chunks()[2:]:
        desk.riser.end(chunk)
    assert counts(desk) == counts(desk, "hit_bytes") == {"host": 2, "nvme": 4}
    assert desk.acquire(3) is not None
    assert counts(desk) == counts(desk, "hit_bytes") == {"host": 6, "nvme": 4}


def test_who_attaches_reads_from_the_tier_of_the_lease(desk: Desk) -> None:
    """A lease that only holds gives tokens; the bytes count for those who read under it."""
    assert desk.ask(wire.Acquire(1, b"".join(NAMES), 0, 30_000, 0)) is None
    for chunk in desk.chunks():
        desk.riser.end(chunk)
    (reply,) = desk.late
    assert (counts(desk), counts(desk, "hit_bytes")) == ({"nvme": 4}, {})
    worker = Caller(OTHER, TENANT, desk.space, 0)
    desk.desk.answer(worker, wire.encode(wire.Attach(2, reply.token)), desk.hear)
    assert (counts(desk), counts(desk, "hit_bytes")) == ({"nvme": 4}, {"nvme": 4})


def test_another_rank_reads_bytes_and_no_tokens(desk: Desk) -> None:
    """A token counts once, however many ranks there are."""
    desk.acquire(1)
    for chunk in desk.chunks():
        desk.riser.end(chunk)
    before = counts(desk)
    rank = Caller(OTHER, TENANT, desk.space, 1)
    desk.desk.answer(rank, wire.encode(wire.Acquire(2, b"".join(NAMES), 0, 9, 1)), desk.hear)
    assert counts(desk) == before


def test_what_a_peer_gave_counts_as_peer_once(desk: Desk) -> None:
    """Fetched for this lease: peer; had before: host; stored meanwhile by an engine: host."""
    desk.world.catalog.cold_readable = False
    reach = with_reach(desk)
    desk.acquire(1)
    reach.give(NAMES[:2])
    assert counts(desk) == counts(desk, "hit_bytes") == {"peer": 2}
    desk.acquire(2)
    assert reach.first == 2
    reach.give([NAMES[2]], OTHER)
    assert counts(desk) == counts(desk, "hit_bytes") == {"peer": 2, "host": 3}


def test_peers_and_nvme_in_one_lease(desk: Desk) -> None:
    """What no peer gave comes up from below, and counts for that."""
    reach = with_reach(desk)
    longer = [*NAMES, b"x" * 32]
    desk.acquire(1, longer)
    assert reach.first == len(NAMES), "the rest lies below"
    assert reach.done is not None
    reach.done()
    for chunk in desk.chunks():
        desk.riser.end(chunk)
    assert counts(desk) == {"nvme": 4}


def test_gpu_memory_counts_where_it_may_be_read(desk: Desk) -> None:
    """By who copies on that GPU, or holds for others; to who does not, it is host memory."""
    desk.acquire(1)
    for chunk in desk.chunks():
        desk.riser.end(chunk)
    gpu: Any = Gpu(*desk.chunks()[:3])
    desk.desk = Dispatcher(
        desk.world.catalog, LeaseBook(), Limits(), desk.clock, desk.riser, gpu=gpu
    )
    desk.acquire(2)
    assert counts(desk) == counts(desk, "hit_bytes") == {"nvme": 4, "host": 4}
    desk.caller.on_gpu = True
    desk.acquire(3)
    assert counts(desk) == counts(desk, "hit_bytes") == {"nvme": 4, "host": 5, "gpu": 3}
    desk.caller.on_gpu = False
    desk.ask(wire.Acquire(4, b"".join(NAMES), 0, 30_000, 0))
    assert counts(desk) == {"nvme": 4, "host": 6, "gpu": 6}
    assert counts(desk, "hit_bytes") == {"nvme": 4, "host": 5, "gpu": 3}
