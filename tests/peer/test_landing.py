"""Slots that chunks of other hosts land in, on a real catalog: not found early, not free early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.catalog import Catalog
from kvd.metrics import Counters
from kvd.peer.asking import runs
from kvd.peer.landing import Landings, rank_of
from kvd.peer.messages import Piece
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from kvd.entry import Space

TENANT, ROOT, PAGE = Tenant("a"), b"n" * 32, 4096
KEYS = [bytes([i]) * 32 for i in range(1, 9)]
PLACES = 8


class Host:
    """A catalog with eight places, and a mover's landings in it."""

    def __init__(self, layout: Layout | None = None) -> None:
        """Enter a space of objects of one page."""
        pool = SlabPool(PLACES * PAGE, {TENANT: 1})
        pool.add_blank(SlabId(0))
        limits = dict.fromkeys(Resource, 1 << 40)
        self.catalog = Catalog(pool, Quota({TENANT: limits}), Counters())
        layout = layout or Layout(8, 8, "float16", (Group("full", 1, 1, 8, PAGE),))
        self.space: Space = self.catalog.enter(TENANT, ROOT, "label", layout)
        self.landings = Landings(self.catalog, OwnerId(-1))

    def take(self, read: int, at: int, columns: int = 1, *, lossy: int = 0) -> bool:
        """Reserve for a chunk of the chain."""
        pieces = [Piece(column, 0, PAGE, 1, lossy, b"") for column in range(columns)]
        parent = KEYS[at - 1] if at else ROOT
        slots = self.landings.take(read, self.space, parent, KEYS[at], pieces)
        self.catalog.check()
        return slots is not None

    @property
    def free(self) -> int:
        """Places that can be had."""
        return PLACES - self.catalog.pool.used_bytes(TENANT) // PAGE

    def usable(self) -> int:
        """Chunks of the chain that can be read."""
        self.catalog.check()
        return self.catalog.usable(self.space, KEYS)


def test_what_has_landed_is_found_and_nothing_else() -> None:
    """A chunk is found when it is published, not when its slots are reserved."""
    host = Host()
    assert host.take(1, 0)
    assert host.take(2, 1)
    assert host.usable() == 0
    host.landings.publish(1, 0)
    assert host.usable() == 1
    host.landings.give_back(2)
    assert host.usable() == 1
    assert host.free == PLACES - 1
    assert host.catalog.counters.objects_published == 0, "that counts what engines stored"


def test_quarantine_keeps_a_place_until_it_is_given_back() -> None:
    """A place in quarantine is nobody's, its chunk can be filled anew, and then it comes back."""
    host = Host()
    assert host.take(1, 0)
    host.landings.quarantine(1)
    assert host.catalog.quarantined_bytes == PAGE
    assert host.free == PLACES - 1
    assert host.take(2, 0), "another place for the same chunk"
    host.landings.publish(2, 0)
    assert host.usable() == 1
    host.landings.give_back(1)
    assert host.catalog.quarantined_bytes == 0
    assert host.free == PLACES - 1
    assert host.usable() == 1


def test_a_chunk_comes_whole_or_not_at_all() -> None:
    """Where one of its objects finds no place, those reserved for the others are given back."""
    layout = Layout(8, 8, "float16", (Group("full", 1, 1, 8, PAGE),), tp=5)
    host = Host(layout)
    assert host.take(1, 0, columns=5)
    assert not host.take(2, 1, columns=5)
    assert host.free == PLACES - 5
    host.landings.publish(1, 0)
    assert host.usable() == 1


def test_what_is_being_stored_here_is_left_alone() -> None:
    """A chunk that an engine fills, or has published, is not landed in a second time."""
    host = Host()
    host.catalog.reserve(
        host.space, OwnerId(1), 0, parent=ROOT, hashes=KEYS[:1], groups=1, deadline_ns=10
    )
    assert not host.take(1, 0)
    assert not host.take(2, 2), "its parent is not here"


def test_a_lossy_copy_stays_one() -> None:
    """What went through a lossy form at the holder is known as lossy here."""
    host = Host()
    assert host.take(1, 0, lossy=1)
    host.landings.publish(1, 0)
    assert host.space.chunks[KEYS[0]].lossy_mask == 1
    host.catalog.check()


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 3)])
def test_every_column_has_its_rank(tp: int, pp: int) -> None:
    """For each object of a chunk there is a rank whose object it is, MLA's one a stage too."""
    groups = (Group("mla", 1, 1, 8, PAGE), Group("full", 1, 1, 8, PAGE))
    layout = Layout(8, 8, "float16", groups, tp=tp, pp=pp).check()
    for column in range(layout.columns):
        rank = rank_of(layout, column)
        assert layout.column(layout.group_of(column), rank) == column


@pytest.mark.parametrize(
    ("holders", "cut"),
    [
        ([], []),
        ([("a",), ("a", "b"), ("a",)], [(("a",), 0, 3)]),
        ([("a", "b"), ("b",), ("c",)], [(("b",), 0, 2), (("c",), 2, 3)]),
    ],
)
def test_runs_are_of_hosts_that_hold_all_of_it(
    holders: list[tuple[str, ...]], cut: list[tuple[tuple[str, ...], int, int]]
) -> None:
    """A run goes on while one host has all of it."""
    assert runs(holders) == cut


def test_a_sum_that_the_mover_made_is_the_object_s() -> None:
    """What was compared with the holder's sum is not summed again here: it stays with the slot."""
    host = Host(Layout(8, 8, "float16", (Group("full", 1, 1, 8, PAGE),), tp=2))
    heard = []
    host.catalog.on_publish = lambda slot: heard.append(slot.digest)
    assert host.take(1, 0, columns=2)
    host.landings.summed(1, [b"1" * 16, b"2" * 16])
    host.landings.publish(1, 0)
    assert heard == [b"1" * 16, b"2" * 16]
