"""What goes first: clean before dirty, oldest first, and what must not go while it can be saved."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvd.catalog import Catalog
from kvd.eviction import GRACE_S
from kvd.metrics import Counters
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout
from kvd_client.wire import Status
from tests.cold_kit import ROOT, chain

if TYPE_CHECKING:
    from kvd.entry import Chunk, Space

A, B = Tenant("a"), Tenant("b")
ME = OwnerId(1)
PAGE = 4096
SMALL = Layout(8, 8, "float16", (Group("full", 1, 1, 8, PAGE),))
LARGE = Layout(8, 8, "float16", (Group("full", 1, 1, 8, 2 * PAGE),))


class Host:
    """A catalog of two tenants with slabs of four pages."""

    def __init__(self, slabs: int = 1, policy: str = "lru") -> None:
        pool = SlabPool(4 * PAGE, {A: slabs, B: slabs})
        for slab in range(2 * slabs):
            pool.add_blank(SlabId(slab))
        limits = dict.fromkeys(Resource, 1 << 40)
        self.catalog = Catalog(pool, Quota({A: limits, B: limits}), Counters(), policy)
        self.eviction = self.catalog.eviction
        self.eviction.demoting = True
        self.place = 0

    def enter(self, tenant: Tenant = A, layout: Layout = SMALL) -> Space:
        """Begin a session."""
        return self.catalog.enter(tenant, ROOT, "label", layout)

    def put(self, space: Space, name: str, length: int = 1, first: int = 0) -> list[Chunk]:
        """Store a chain from `first` on, as far as there is room; return its chunks."""
        hashes = chain(name, length)
        records = self.catalog.reserve(
            space,
            ME,
            0,
            parent=hashes[first - 1] if first else ROOT,
            hashes=hashes[first:],
            groups=1,
            deadline_ns=1,
        )
        for record in reversed(records):
            if record[2] == Status.OK:
                assert self.catalog.publish(ME, Generation(record[6]), 0) is Status.OK
        self.catalog.check()
        return [space.chunks[key] for key in hashes if key in space.chunks]

    def save(self, *chunks: Chunk) -> None:
        """Write chunks down."""
        for chunk in chunks:
            self.place += 1
            self.catalog.begin_demotion(chunk)
            self.catalog.end_demotion(chunk, ((0, self.place, 1, self.place), chunk.mask, False))

    def here(self, chunks: list[Chunk]) -> list[bool]:
        """Tell which chunks have host slots."""
        return [bool(chunk.mask) for chunk in chunks]


def test_only_what_is_clean_goes_while_the_rest_can_be_saved() -> None:
    """An older dirty chunk stays and a younger clean one goes; nothing clean: no room."""
    host = Host()
    space = host.enter()
    chunks = [host.put(space, name)[0] for name in "pqrs"]
    host.save(chunks[2])
    host.put(space, "new")
    assert host.here(chunks) == [True, True, False, True]
    assert not host.put(space, "newer")
    assert host.eviction.pressed == {A}
    assert host.catalog.counters.evictions == {"clean": 1}


def test_without_a_tier_below_the_oldest_goes() -> None:
    """Clean or not: the host tier never stands still because of a disk."""
    host = Host()
    host.eviction.demoting = False
    space = host.enter()
    chunks = [host.put(space, name)[0] for name in "pqrs"]
    host.save(chunks[2])
    host.put(space, "new", 2)
    assert host.here(chunks) == [False, False, True, True]
    assert host.catalog.counters.evictions == {"capacity": 2}


def test_what_is_not_wanted_below_goes_like_a_clean_one() -> None:
    """It costs no write, and is not counted as dirty."""
    host = Host()
    space = host.enter()
    chunks = [host.put(space, name)[0] for name in "pqrs"]
    assert host.eviction.dirty_bytes == {A: 4 * PAGE, B: 0}
    host.catalog.reject(chunks[3])
    assert host.eviction.dirty_bytes == {A: 3 * PAGE, B: 0}
    assert host.eviction.demotable(A) is chunks[0]
    host.put(space, "new")
    assert host.here(chunks) == [True, True, True, False]
    assert host.catalog.counters.evictions == {"unwanted": 1}


def test_pressure_is_the_tenants_own() -> None:
    """A tenant that finds no room evicts nobody else's, and is the only one that is pressed."""
    host = Host()
    mine, theirs = host.enter(A), host.enter(B)
    host.put(mine, "p", 4)
    saved = host.put(theirs, "q", 4)
    host.save(*saved)
    assert not host.put(mine, "new")
    assert host.here(saved) == [True] * 4
    assert host.eviction.pressed == {A}
    assert host.eviction.demotable(B) is None
    assert host.eviction.demotable(A) is not None


def test_what_is_to_be_written_comes_oldest_first_over_all_sizes() -> None:
    """One order a tenant, whatever its objects' size; what is moved or filled is left out."""
    host = Host(slabs=3)
    small, large = host.enter(), host.enter(layout=LARGE)
    chunks = [
        host.put(small, "p")[0],
        host.put(large, "q")[0],
        host.put(small, "r")[0],
        host.put(large, "s")[0],
    ]
    for chunk in chunks:
        assert host.eviction.demotable(A) is chunk
        host.catalog.begin_demotion(chunk)
    assert host.eviction.demotable(A) is None
    host.catalog.end_demotion(chunks[2], None)
    host.catalog.end_demotion(chunks[1], None)
    assert host.eviction.demotable(A) is chunks[1]


def test_a_chunk_in_use_is_written_too() -> None:
    """Pinned, used again, or with others that hang on it: it is in the order by its last use."""
    host = Host()
    space = host.enter()
    head, tail = host.put(space, "p", 2)
    other = host.put(space, "q")[0]
    assert host.eviction.demotable(A) is tail
    held = host.catalog.hold(space, chain("p", 2), 0)
    assert host.eviction.demotable(A) is other
    host.catalog.begin_demotion(other)
    assert host.eviction.demotable(A) is tail
    host.catalog.begin_demotion(tail)
    assert host.eviction.demotable(A) is head
    host.catalog.unpin(held)


def test_heads_first_begins_where_the_prefix_does() -> None:
    """With `heads`, no chunk is written before those above it that could be; else tails are."""
    host = Host()
    space = host.enter()
    first, second, third = host.put(space, "p", 3)
    host.put(space, "q")
    assert host.eviction.demotable(A) is third
    order = []
    for _ in range(3):
        chunk = host.eviction.demotable(A, heads=True)
        assert chunk is not None
        order.append(chunk)
        host.save(chunk)
    assert order == [first, second, third]


def test_heads_first_passes_over_what_cannot_go() -> None:
    """A head that moves, or is clean, holds nothing up that hangs on it."""
    host = Host()
    space = host.enter()
    first, second, third = host.put(space, "p", 3)
    host.catalog.begin_demotion(first)
    assert host.eviction.demotable(A, heads=True) is second
    host.save(second)
    assert host.eviction.demotable(A, heads=True) is third


def test_when_the_tier_takes_in_again_what_is_dirty_is_in_order() -> None:
    """What was stored meanwhile is found, and what was clean is not."""
    host = Host()
    host.eviction.demoting = False
    space = host.enter()
    chunks = [host.put(space, name)[0] for name in "pqrs"]
    host.save(chunks[0])
    assert host.eviction.demotable(A) is None
    host.eviction.begin_demoting(list(space.chunks.values()))
    assert host.eviction.demoting
    assert host.eviction.demotable(A) is chunks[1]


def test_a_slab_of_another_size_goes_only_if_all_on_it_may() -> None:
    """One dirty chunk keeps a slab; once it is clean, the slab is cut anew for who needs it."""
    host = Host()
    small, large = host.enter(), host.enter(layout=LARGE)
    chunks = [host.put(small, name)[0] for name in "pqrs"]
    host.save(*chunks[:3])
    assert not host.put(large, "new")
    assert host.here(chunks) == [True] * 4
    host.save(chunks[3])
    assert len(host.put(large, "new")) == 1
    assert host.here(chunks) == [False] * 4


def test_cold_chunks_are_no_reason_to_keep_their_ancestors_up() -> None:
    """Only what is in host slots depends on what is in host slots."""
    host = Host()
    space = host.enter()
    head, tail = host.put(space, "p", 2)
    host.save(head, tail)
    host.put(space, "q", 2)
    host.put(space, "new")
    assert host.here([head, tail]) == [True, False]
    host.put(space, "newer")
    assert host.here([head, tail]) == [False, False]
    assert host.catalog.usable(space, chain("p", 2)) == 0
    host.catalog.cold_readable = True
    assert host.catalog.usable(space, chain("p", 2)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_gets_in_once_all_is_clean(seed: int) -> None:
    """Against chance: stores, uses and writes in any order; a new chunk fits if any is clean."""
    host, chance = Host(slabs=2), random.Random(seed)
    space = host.enter()
    for number in range(150):
        match chance.choice(["put", "put", "save", "use", "reject", "flip"]):
            case "put":
                warm = [chunk for chunk in space.chunks.values() if chunk.mask]
                free = 8 - len(warm)
                may = any(c.clean or c.unwanted for c in warm) or not host.eviction.demoting
                found = host.put(space, f"{number}")
                assert bool(found) == bool(free or may)
            case "save":
                chunk = host.eviction.demotable(A)
                dirty = host.eviction.dirty_bytes[A]
                assert (chunk is not None) == bool(dirty) or not host.eviction.demoting
                if chunk is not None:
                    host.save(chunk)
                    assert host.eviction.dirty_bytes[A] == dirty - PAGE
            case "use":
                key = chance.choice([*space.chunks, b"x" * 32])
                host.catalog.unpin(host.catalog.hold(space, [key], 0))
            case "reject":
                chunk = host.eviction.demotable(A)
                if chunk is not None:
                    host.catalog.reject(chunk)
            case "flip":
                if host.eviction.demoting:
                    host.eviction.demoting = False
                else:
                    host.eviction.begin_demoting(list(space.chunks.values()))
        host.catalog.check()


def test_what_was_just_stored_is_held_back_from_a_policy_that_ranks_it_lowest() -> None:
    """Until its time is over, or nothing else is left; then the one used longest ago goes."""
    host = Host(policy="lifetable")
    space = host.enter()
    old = host.put(space, "p", 2)
    host.eviction.now_ns += int(GRACE_S * 1e9)
    new = host.put(space, "q", 2)
    host.save(*old, *new)
    for _ in range(2):
        host.put(space, f"r{_}")
    assert host.here(new) == [True, True], "the old ones went"
    assert host.here(old) == [False, False]
    host.put(space, "s")
    assert host.here(new) == [True, False], "all are young: of those that may go, the oldest leaf"
    host.catalog.check()


def test_nothing_is_kept_of_the_young_for_longer_than_they_are() -> None:
    """Also where nothing is ever evicted for want of room."""
    host = Host(policy="lifetable")
    space = host.enter()
    for turn in range(20):
        (chunk,) = host.put(space, f"p{turn}")
        host.catalog.evict(chunk, "operator")
        host.eviction.now_ns += int(GRACE_S * 1e9)
    assert len(host.eviction._ages) == 1
    host.catalog.check()
