"""The usable prefix against a model that knows tokens only.

The model asks which tokens the next one must see in each group and rank, and which of them some
stored object holds. test_client_identity.py has the ids and hashes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.identity import legal_lengths, presence, rules_of, usable_prefix
from kvd_client.identity import COLUMNS_MAX, Group, Layout

Key = tuple[int, int, int]
"""(group, rank or pipeline stage, chunk): one object."""


def layout_of(chunk_tokens: int, groups: list[tuple[str, int]], tp: int = 1, pp: int = 1) -> Layout:
    """Make a layout from kinds and windows; sizes do not matter here."""
    made = tuple(Group(kind, 1, 1, 8, 64, window) for kind, window in groups)
    return Layout(chunk_tokens, chunk_tokens, "float16", made, tp, pp).check()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw layouts of all kinds, windows around multiples of the chunk, several ranks."""
    chunk = draw(st.integers(1, 8))
    windows = st.one_of(
        st.integers(2, 5 * chunk + 2),
        st.integers(1, 4).flatmap(lambda n: st.sampled_from([n * chunk, n * chunk + 1])),
        st.just(1 << 31),
    ).map(lambda window: max(2, window))
    kinds = st.sampled_from(["full", "sliding", "sliding", "recurrent", "mla"])
    groups = [
        (kind, draw(windows) if kind == "sliding" else 0)
        for kind in draw(st.lists(kinds, min_size=1, max_size=4))
    ]
    return layout_of(chunk, groups, draw(st.integers(1, 3)), draw(st.integers(1, 3)))


@dataclass
class Stored:
    """A naive cache: the objects that are there, asked about tokens."""

    layout: Layout
    objects: set[Key] = field(default_factory=set)

    def holder(self, group: int, rank: int) -> int:
        """Name whose object a rank reads: its own, or its stage's where ranks share a latent."""
        shared = self.layout.groups[group].kind == "mla"
        return rank // self.layout.tp if shared else rank

    def holders(self, group: int) -> set[int]:
        """Name all holders of a group's objects."""
        return {self.holder(group, rank) for rank in range(self.layout.tp * self.layout.pp)}

    def has_token(self, group: int, rank: int, token: int) -> bool:
        """Tell whether a rank can read this token's KV."""
        return (group, self.holder(group, rank), token // self.layout.chunk_tokens) in self.objects

    def has_state_at(self, group: int, rank: int, token: int) -> bool:
        """Tell whether a rank can read the state just before this token."""
        chunk, inside = divmod(token, self.layout.chunk_tokens)
        return not inside and (group, self.holder(group, rank), chunk - 1) in self.objects

    def legal(self, chunks: int) -> bool:
        """Tell whether the token after so many chunks finds all that it sees."""
        position = chunks * self.layout.chunk_tokens
        for number, group in enumerate(self.layout.groups):
            for rank in range(self.layout.tp * self.layout.pp):
                if group.kind == "recurrent":
                    if position and not self.has_state_at(number, rank, position):
                        return False
                    continue
                first = max(0, position - group.window + 1) if group.kind == "sliding" else 0
                if not all(self.has_token(number, rank, t) for t in range(first, position)):
                    return False
        return True

    def table(self, chunks: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return what the fold takes: a row a column of the layout."""
        table = np.zeros((self.layout.columns, chunks), dtype=np.bool_)
        for group, holder, chunk in self.objects:
            shared = self.layout.groups[group].kind == "mla"
            rank = holder * self.layout.tp if shared else holder
            table[self.layout.column(group, rank), chunk] = True
        return table


@st.composite
def caches(draw: st.DrawFn) -> tuple[Stored, int]:
    """Draw a cache of a chain: nearly all objects there, about half, or nearly none."""
    stored = Stored(draw(layouts()))
    chunks = draw(st.integers(0, 9))
    density = draw(st.sampled_from([0.5, 0.8, 0.95, 0.99, 1.0]))
    chance = random.Random(draw(st.integers(0, 2**32)))
    for group in range(len(stored.layout.groups)):
        for holder in stored.holders(group):
            for chunk in range(chunks):
                if chance.random() < density:
                    stored.objects.add((group, holder, chunk))
    return stored, chunks


@settings(max_examples=4 * settings().max_examples)
@given(caches())
def test_the_fold_is_the_model(cache: tuple[Stored, int]) -> None:
    """A length is legal exactly when every token the next one sees is there, on every rank."""
    stored, chunks = cache
    table, rules = stored.table(chunks), rules_of(stored.layout)
    expected = [stored.legal(length) for length in range(chunks + 1)]
    assert legal_lengths(table, rules).tolist() == expected
    longest = max(length for length in range(chunks + 1) if expected[length])
    assert usable_prefix(table, rules) == longest


@given(caches())
def test_one_more_object_never_shortens_the_prefix(cache: tuple[Stored, int]) -> None:
    """What is usable stays usable when more arrives."""
    stored, chunks = cache
    rules = rules_of(stored.layout)
    table = stored.table(chunks)
    before = legal_lengths(table, rules)
    for place in np.argwhere(~table)[:5]:
        more = table.copy()
        more[tuple(place)] = True
        assert (legal_lengths(more, rules) >= before).all()


@pytest.mark.parametrize(
    ("window", "reach"),
    [(2, 1), (16, 1), (17, 1), (18, 2), (32, 2), (33, 2), (34, 3), (1 << 31, 1 << 27)],
)
def test_reach_of_a_window(window: int, reach: int) -> None:
    """The next token sees window - 1 tokens before it: with 17 just one chunk of 16."""
    (rule,) = rules_of(layout_of(16, [("sliding", window)]))
    assert rule.reach == reach


def test_a_missing_rank_ends_the_prefix() -> None:
    """One rank's object of one group is enough to end it; what others have later is no hit."""
    layout = layout_of(4, [("full", 0), ("mla", 0)], tp=2, pp=2)
    rules = rules_of(layout)
    for column in range(layout.columns):
        table = np.ones((layout.columns, 6), dtype=np.bool_)
        table[column, 3] = False
        assert usable_prefix(table, rules) == 3


def test_longer_may_be_legal_where_shorter_is_not() -> None:
    """Windows and states: the longest legal length counts, holes before it do not."""
    sliding = rules_of(layout_of(4, [("sliding", 5)]))
    recurrent = rules_of(layout_of(4, [("recurrent", 0)]))
    only_last = np.array([[False, False, True]])
    assert legal_lengths(only_last, sliding).tolist() == [True, False, False, True]
    assert legal_lengths(only_last, recurrent).tolist() == [True, False, False, True]
    assert usable_prefix(only_last, sliding) == usable_prefix(only_last, recurrent) == 3


@given(layouts())
def test_columns_are_one_to_one(layout: Layout) -> None:
    """Each holder's object has a column of its own, groups one after another, ranks in order."""
    stored = Stored(layout)
    expected = [(g, h) for g in range(len(layout.groups)) for h in sorted(stored.holders(g))]
    assert layout.columns == len(expected)
    for group in range(len(layout.groups)):
        assert layout.shards(group) == len(stored.holders(group))
        for rank in range(layout.ranks):
            assert expected[layout.column(group, rank)] == (group, stored.holder(group, rank))
    for group, rule in enumerate(rules_of(layout)):
        assert {g for g, _ in expected[rule.start : rule.stop]} == {group}


@given(st.integers(1, COLUMNS_MAX), st.lists(st.integers(0, 2**COLUMNS_MAX - 1), max_size=6))
def test_presence_spreads_the_bits(columns: int, masks: list[int]) -> None:
    """Bit c of mask n is row c, column n of the table; no mask gives an empty table."""
    masks = [mask % (1 << columns) for mask in masks]
    table = presence(masks, columns)
    assert table.shape == (columns, len(masks))
    assert table.dtype == np.bool_
    assert table.tolist() == [[bool(m >> c & 1) for m in masks] for c in range(columns)]


@given(layouts())
def test_a_layout_survives_its_fields(layout: Layout) -> None:
    """What `fields` says is read back as the same layout with the same id."""
    again = Layout.from_fields(layout.fields())
    assert again == layout
    assert again.id == layout.id
