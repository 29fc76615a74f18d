"""Single cases of the catalog; tests/state/test_catalog_machine.py has the rest."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import pytest

from kvd.catalog import Catalog
from kvd.filling import Fillings
from kvd.metrics import Counters
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout
from kvd_client.wire import Status

if TYPE_CHECKING:
    from kvd.entry import Space

TENANT: Final = Tenant("a")
ME: Final = OwnerId(1)
ROOT: Final = b"n" * 32
PAGE: Final = 4096


def chain(name: str, length: int) -> list[bytes]:
    """Make the hashes of a chain."""
    return [blake2b(f"{name}/{at}".encode(), digest_size=32).digest() for at in range(length)]


def layout_of(*sizes: int, kind: str = "full") -> Layout:
    """Make a layout of groups with these object sizes."""
    window = 8 if kind == "sliding" else 0
    groups = tuple(Group(kind, 1, 1, 8, size, window) for size in sizes)
    return Layout(8, 8, "float16", groups).check()


class Host:
    """A catalog of one tenant."""

    def __init__(self, slabs: int, places: int = 4, pinned: int = 1 << 40) -> None:
        """Make slabs of so many pages."""
        pool = SlabPool(places * PAGE, {TENANT: slabs})
        for slab in range(slabs):
            pool.add_blank(SlabId(slab))
        limits = dict.fromkeys(Resource, 1 << 40) | {Resource.PINNED_BYTES: pinned}
        self.catalog = Catalog(pool, Quota({TENANT: limits}), Counters())

    def enter(self, layout: Layout) -> Space:
        """Begin a session."""
        return self.catalog.enter(TENANT, ROOT, "label", layout)

    def reserve(
        self, space: Space, hashes: list[bytes], groups: int = 1, first: int = 0
    ) -> list[Status]:
        """Reserve chunks from `first` on; return what was said."""
        parent = hashes[first - 1] if first else ROOT
        records = self.catalog.reserve(
            space, ME, 0, parent=parent, hashes=hashes[first:], groups=groups, deadline_ns=10
        )
        self.catalog.check()
        self.granted = [Generation(record[6]) for record in records if record[6]]
        return [Status(record[2]) for record in records]

    def store(self, space: Space, hashes: list[bytes], groups: int = 1, first: int = 0) -> None:
        """Reserve and publish."""
        assert set(self.reserve(space, hashes, groups, first)) == {Status.OK}
        for generation in self.granted:
            assert self.catalog.publish(ME, generation, 0) == Status.OK


@pytest.mark.parametrize("groups", [0, 0b10, 1 << 31])
def test_reserving_no_group_leaves_nothing(groups: int) -> None:
    """A mask without any group of the layout is an empty answer and no node in the tree."""
    host = Host(1)
    space = host.enter(layout_of(PAGE))
    assert host.reserve(space, chain("a", 3), groups) == []
    assert not space.chunks


def test_objects_of_one_stride_make_room_for_each_other() -> None:
    """Another size in places of the same length is no reason to refuse a new model for ever."""
    host = Host(1)
    old, new = host.enter(layout_of(5000)), host.enter(layout_of(8000))
    host.store(old, chain("old", 2))
    host.store(new, chain("new", 2))
    assert host.catalog.usable(new, chain("new", 2)) == 2
    assert host.catalog.usable(old, chain("old", 2)) == 0


def test_a_slab_is_as_warm_as_what_would_go_with_it() -> None:
    """A slab with an old root of a chain that just grew is warmer than an older leaf elsewhere."""
    host = Host(3)
    small, large = host.enter(layout_of(PAGE)), host.enter(layout_of(2 * PAGE))
    host.store(large, chain("grows", 2))  # fills a slab
    host.store(small, chain("old", 4))  # fills a slab, later
    host.store(large, chain("grows", 4), first=2)  # fills the last, last
    host.store(small, chain("new", 1))
    assert host.catalog.usable(large, chain("grows", 4)) == 4
    assert host.catalog.usable(small, chain("old", 4)) == 3


def test_a_cold_slab_of_another_size_goes_before_warm_leaves() -> None:
    """When the other size was used longer ago, its slab is emptied and cut anew."""
    host = Host(2)
    small, large = host.enter(layout_of(PAGE)), host.enter(layout_of(2 * PAGE))
    host.store(large, chain("cold", 2))
    host.store(small, chain("warm", 4))
    host.store(small, chain("new", 4))
    assert host.catalog.usable(small, chain("warm", 4)) == 4
    assert host.catalog.usable(small, chain("new", 4)) == 4
    assert host.catalog.usable(large, chain("cold", 2)) == 0


def test_what_was_built_upon_lately_is_warm() -> None:
    """When a leaf goes, its parent is as warm as the leaf was, however long ago it was stored."""
    host = Host(1, places=3)
    space = host.enter(layout_of(PAGE))
    host.store(space, chain("a", 1))
    host.store(space, chain("b", 1))
    host.store(space, chain("a", 2), first=1)
    host.catalog.evict(space.chunks[chain("a", 2)[1]], "operator")
    host.store(space, chain("c", 1))
    host.store(space, chain("d", 1))
    assert host.catalog.usable(space, chain("a", 1)) == 1
    assert host.catalog.usable(space, chain("b", 1)) == 0


def test_what_can_never_fit_costs_nobody_anything() -> None:
    """An object larger than a slab is refused without evicting for it."""
    host = Host(1)
    small, huge = host.enter(layout_of(PAGE)), host.enter(layout_of(5 * PAGE, PAGE))
    host.store(small, chain("small", 4))
    assert host.reserve(huge, chain("huge", 1)) == [Status.NO_SPACE]
    assert host.catalog.usable(small, chain("small", 4)) == 4


@pytest.mark.parametrize("pinned_pages", [1, 2, 3, 99])
def test_hashes_that_are_no_chain_hold_nothing_in_the_wrong_place(pinned_pages: int) -> None:
    """A hash nobody stored before a window is never answered with its neighbour's bytes."""
    host = Host(2, pinned=pinned_pages * PAGE)
    space = host.enter(layout_of(PAGE, kind="sliding"))
    stored = chain("real", 3)
    host.store(space, stored)
    asked = [*chain("nobody's", 1), *stored]
    held = host.catalog.hold(space, asked, 0)
    assert [chunk.hash for chunk in held] == asked[: len(held)]


def test_a_hold_is_cut_to_the_quota_and_to_what_is_legal() -> None:
    """What the quota does not reach is not held; the rest is a legal prefix of its own."""
    host = Host(2, pinned=2 * PAGE)
    space = host.enter(layout_of(PAGE))
    hashes = chain("a", 4)
    host.store(space, hashes)
    held = host.catalog.hold(space, hashes, 0)
    assert [chunk.hash for chunk in held] == hashes[:2]
    assert host.catalog.hold(space, hashes, 2) == ()
    again = host.catalog.hold(space, hashes, 1)
    assert [chunk.hash for chunk in again] == hashes[1:2], "held already, so free"
    host.catalog.unpin(held)
    host.catalog.unpin(again)
    host.catalog.check()
    assert host.catalog.quota.used(TENANT, Resource.PINNED_BYTES) == 0


def test_a_chunk_named_twice_is_held_twice() -> None:
    """Hashes may repeat; every pin is ended by its own unpin, and the bytes are charged once."""
    host = Host(2)
    space = host.enter(layout_of(PAGE))
    hashes = chain("a", 1)
    host.store(space, hashes)
    held = host.catalog.hold(space, hashes * 3, 0)
    host.catalog.check()
    assert len(held) == held[0].pins == 3
    assert host.catalog.quota.used(TENANT, Resource.PINNED_BYTES) == PAGE
    host.catalog.unpin(held)
    host.catalog.check()


def test_deadlines_of_ended_reservations_are_forgotten() -> None:
    """Many short reservations leave no trail of deadlines behind."""
    host = Host(1)
    space = host.enter(layout_of(PAGE))
    for _ in range(3 * Fillings.SLACK):
        (record,) = host.catalog.reserve(
            space, ME, 0, parent=ROOT, hashes=chain("a", 1), groups=1, deadline_ns=10**9
        )
        assert host.catalog.abort(ME, Generation(record[6])) == Status.OK
    assert len(host.catalog.fillings._deadlines) <= Fillings.SLACK + 2


def test_eviction_is_counted_with_its_reason() -> None:
    """What goes for room and what an operator drops are counted apart, with their bytes."""
    host = Host(1, places=2)
    space = host.enter(layout_of(PAGE))
    host.store(space, chain("a", 2))
    host.store(space, chain("b", 1))
    assert host.catalog.counters.evictions == {"capacity": 1}
    host.catalog.evict(space.chunks[chain("b", 1)[0]], "operator")
    assert host.catalog.counters.evictions == {"capacity": 1, "operator": 1}
    assert host.catalog.counters.bytes_evicted == 2 * PAGE


def test_a_held_or_filling_chunk_is_not_evicted() -> None:
    """Evicting what is held or filled is a bug that is seen (C2)."""
    host = Host(1)
    space = host.enter(layout_of(PAGE))
    host.store(space, chain("a", 1))
    held = host.catalog.hold(space, chain("a", 1), 0)
    with pytest.raises(AssertionError):
        host.catalog.evict(held[0], "operator")
    host.reserve(space, chain("b", 1))
    with pytest.raises(AssertionError):
        host.catalog.evict(space.chunks[chain("b", 1)[0]], "operator")
