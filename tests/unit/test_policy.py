"""Leaf-first LRU against a naive one: a list that is searched each time."""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.entry import Chunk, Space
from kvd.identity import rules_of
from kvd.policy import LeafLru
from kvd.types import Tenant
from kvd_client.identity import Group, Layout

LAYOUT: Final = Layout(4, 4, "float16", (Group("full", 1, 1, 8, 100),))
SPACE: Final = Space(Tenant("a"), b"n" * 32, "label", LAYOUT, rules_of(LAYOUT))


EVICTABLE = attrgetter("evictable")


def chunk_of(tick: int, *, mask: int = 1) -> Chunk:
    """Make a chunk of its own."""
    chunk = Chunk(b"h" * 32, SPACE, None)
    chunk.tick, chunk.mask = tick, mask
    return chunk


def test_an_empty_list_has_no_victim() -> None:
    """Nothing offered, nothing to evict."""
    assert LeafLru(EVICTABLE).victim() is None


def test_a_victim_stays_until_it_is_evicted() -> None:
    """Asking twice names the same chunk: the caller evicts, not the policy."""
    lru = LeafLru(EVICTABLE)
    lru.offer(chunk := chunk_of(1))
    assert lru.victim() is chunk
    assert lru.victim() is chunk


@pytest.mark.parametrize("change", ["pins", "filling", "children", "mask", "tick"])
def test_a_stale_entry_is_skipped(change: str) -> None:
    """A chunk that was used, held, filled, built upon or dropped since is no victim."""
    lru = LeafLru(EVICTABLE)
    old, new = chunk_of(1), chunk_of(2)
    lru.offer(old)
    lru.offer(new)
    match change:
        case "children":
            old.warm_children += 1
        case "mask":
            old.mask = 0
        case "tick":
            old.tick = 3
        case _:
            setattr(old, change, 1)
    assert lru.victim() is new


def test_what_is_not_evictable_is_not_offered() -> None:
    """Offering a chunk that may not go is a bug that is seen (P1)."""
    with pytest.raises(AssertionError):
        LeafLru(EVICTABLE).offer(chunk_of(1, mask=0))


@given(st.integers(0, 2**32), st.sampled_from([2, 8, 40]), st.sampled_from([0, 3, LeafLru.SLACK]))
def test_the_order_is_that_of_a_naive_lru(seed: int, count: int, slack: int) -> None:
    """The victim is the evictable chunk used longest ago, however often entries are cleaned up."""
    chance = random.Random(seed)
    lru = LeafLru(EVICTABLE)
    lru.SLACK = lru._bound = slack
    chunks = [chunk_of(0, mask=0) for _ in range(count)]
    for now in range(1, 6 * count):
        chunk = chance.choice(chunks)
        match chance.choice(["come", "come", "use", "pin", "unpin", "drop", "offered again"]):
            case "come":
                chunk.mask, chunk.tick = 1, now
            case "use":
                chunk.tick = now
            case "pin":
                chunk.pins = 1
            case "unpin":
                chunk.pins = 0
            case "drop":
                chunk.mask = chunk.pins = 0
        if chunk.evictable:
            lru.offer(chunk)
        evictable = [chunk for chunk in chunks if chunk.evictable]
        expected = min(evictable, key=lambda chunk: chunk.tick, default=None)
        assert lru.victim() is expected
        assert len(lru._heap) <= 2 * count + slack + 1


def test_a_chunk_used_again_and_again_leaves_no_trail() -> None:
    """Stale entries are bounded, and cleaning up keeps every live one."""
    lru = LeafLru(EVICTABLE)
    still, busy = chunk_of(0), chunk_of(0)
    lru.offer(still)
    for tick in range(1, 5 * LeafLru.SLACK):
        busy.tick = tick
        lru.offer(busy)
        assert len(lru._heap) <= LeafLru.SLACK + 5
    assert lru.victim() is still
    still.mask = 0
    assert lru.victim() is busy
