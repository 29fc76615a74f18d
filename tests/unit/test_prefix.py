"""The usable prefix read off a space's chunks, against the fold over a whole table of presence."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.entry import Chunk, Space
from kvd.identity import presence, rules_of, usable_prefix
from kvd.prefix import usable_chunks, warm_length
from kvd.types import Tenant
from kvd_client.identity import Group, Layout
from tests.cold_kit import chain

FULL: Final = Group("full", 1, 1, 8, 100)
MLA: Final = Group("mla", 1, 1, 8, 100)
SLIDING: Final = Group("sliding", 1, 1, 8, 100, 10)
STATE: Final = Group("recurrent", 1, 0, 0, 100)
LAYOUTS: Final = {
    "full": Layout(4, 4, "float16", (FULL,)),
    "mla": Layout(4, 4, "float16", (MLA,), tp=2),
    "both": Layout(4, 4, "float16", (FULL, MLA), tp=2),
    "sliding": Layout(4, 4, "float16", (SLIDING,)),
    "hybrid": Layout(4, 4, "float16", (FULL, SLIDING), tp=2),
    "state": Layout(4, 4, "float16", (STATE,)),
    "all": Layout(4, 4, "float16", (FULL, SLIDING, STATE)),
}
LENGTH: Final = 9
names = st.sampled_from(sorted(LAYOUTS))


def space_of(name: str) -> Space:
    """Make a space."""
    return Space(Tenant("a"), b"n" * 32, "label", LAYOUTS[name], rules_of(LAYOUTS[name]))


def grow(space: Space, seed: int, hashes: list[bytes]) -> list[tuple[int, int]]:
    """Make a chain's chunks with chance masks, some left out, some with whole siblings.

    Returns:
        (warm, cold) of each.
    """
    chance = random.Random(seed)
    masks = []
    above = None
    density = chance.choice([0.5, 0.9, 0.98])
    for key in hashes:
        warm, cold = (
            sum((chance.random() < density) << column for column in range(space.layout.columns))
            for _ in range(2)
        )
        cold = chance.choice([0, cold, space.full_mask])
        if chance.random() < 0.1:
            warm = cold = 0
        else:
            kin = [key, bytes([255]) + key[1:]] if chance.random() < 0.3 else [key]
            chance.shuffle(kin)
            for name in kin:
                space.chunks[name] = Chunk(name, space, above)
                space.chunks[name].mask = space.full_mask
            above = space.chunks[key]
            above.mask, above.cold_mask = warm, cold
        masks.append((warm, cold))
    return masks


def fold(space: Space, masks: list[int]) -> int:
    """Return the usable prefix of masks, by the rules alone."""
    return usable_prefix(presence(masks, space.layout.columns), space.rules)


@given(names, st.integers(0, 2**32), st.integers(0, LENGTH))
def test_it_is_the_fold(name: str, seed: int, length: int) -> None:
    """With and without the tier below, for every kind of layout, shortcuts or not."""
    space, hashes = space_of(name), chain("a", length)
    masks = grow(space, seed, hashes)
    assert usable_chunks(space, hashes, cold=False) == fold(space, [warm for warm, _ in masks])
    assert usable_chunks(space, hashes, cold=True) == fold(space, [w | c for w, c in masks])


@given(names, st.integers(0, 2**32), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_what_is_up_behind_what_the_engine_has(
    name: str, seed: int, length: int, first: int
) -> None:
    """Of pinned chunks, as many as are legal when the engine has all before them."""
    space, hashes = space_of(name), chain("a", length)
    masks = grow(space, seed, hashes)
    for key in hashes:  # what is pinned is in the tree
        space.chunks.setdefault(key, Chunk(key, space, None))
    chunks = [space.chunks[key] for key in hashes[first:]]
    whole = [space.full_mask] * min(first, length) + [warm for warm, _ in masks[first:]]
    expected = max(0, fold(space, whole) - min(first, length)) if chunks else 0
    assert warm_length(space, chunks, min(first, length)) == expected


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_nothing_is_usable_of_nothing(name: str) -> None:
    """No hashes, unknown hashes: no prefix, unless no rule needs what is missing."""
    space = space_of(name)
    assert usable_chunks(space, [], cold=True) == 0
    assert usable_chunks(space, chain("a", 3), cold=True) == 0
    assert warm_length(space, [], 0) == 0


def test_a_cold_chunk_fills_a_hole_only_where_cold_counts() -> None:
    """Warm and cold halves make one whole; a cold half alone makes none."""
    space, hashes = space_of("hybrid"), chain("a", 3)
    for key in hashes:
        chunk = space.chunks[key] = Chunk(key, space, None)
        chunk.mask = space.full_mask
    middle = space.chunks[hashes[1]]
    middle.mask, middle.cold_mask = 0b0101, 0b1010
    assert usable_chunks(space, hashes, cold=True) == 3
    assert usable_chunks(space, hashes, cold=False) == 1
    middle.cold_mask = 0b1000
    assert usable_chunks(space, hashes, cold=True) == 1
    assert np.array(presence([0b0101], 4)).sum() == 2
