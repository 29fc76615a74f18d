"""Identity and the usable prefix: what makes two KV caches the same, and how far one may be read.

The fold is checked against a model that knows tokens only: which of them the next token must see
in each group and rank, and which of them some stored object holds.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.identity import legal_lengths, presence, rules_of, usable_prefix
from kvd_client import identity
from kvd_client.identity import (
    COLUMNS_MAX,
    DTYPES,
    GROUPS_MAX,
    Group,
    Layout,
    Namespace,
    chunk_hashes,
    token_bytes,
)

# ---------------------------------------------------------------- the fold

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
    ("window", "reach"), [(2, 1), (16, 1), (17, 1), (18, 2), (32, 2), (33, 2), (34, 3), (1 << 31, 1 << 27)]
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


# ---------------------------------------------------------------- namespaces and layouts

NAMESPACE: Final = Namespace(
    "model", "r1", "bfloat16", "adapter", "rope", b"0123456789abcdef", "extra"
)
OTHER_FIELDS: Final[dict[str, Any]] = {
    "model": "model2",
    "revision": "r2",
    "dtype": "float16",
    "adapter": "",
    "rope": "",
    "salt": b"0123456789abcdeg",
    "extra": "",
}
LAYOUT: Final = Layout(
    32, 16, "bfloat16", (Group("full", 4, 2, 64, 4096), Group("sliding", 4, 2, 64, 4096, 64)), 2, 2
)
GROUP_CHANGES: Final[dict[str, Any]] = {
    "kind": "mla",
    "layers": 5,
    "kv_heads": 3,
    "head_size": 65,
    "object_bytes": 4097,
}
LAYOUT_CHANGES: Final[dict[str, Any]] = {
    "chunk_tokens": 64,
    "page_tokens": 32,
    "dtype": "float16",
    "groups": LAYOUT.groups[:1],
    "tp": 1,
    "pp": 1,
    "order": "other/1",
}


def test_each_field_of_a_namespace_makes_another_id() -> None:
    """Another model, revision, dtype, adapter, rope, salt or extra: another id, all different."""
    assert set(OTHER_FIELDS) == set(Namespace._fields)
    ids = [NAMESPACE.id, *(NAMESPACE._replace(**{k: v}).id for k, v in OTHER_FIELDS.items())]
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {32}


def test_no_salt_is_not_any_salt() -> None:
    """A namespace without salt, and with salts that begin alike, have different ids."""
    salts = [b"", b"\0" * 16, b"\0" * 17, b"\0" * 64]
    assert len({NAMESPACE._replace(salt=salt).id for salt in salts}) == len(salts)


@given(st.lists(st.sampled_from(["", "a", "b", "ab", "ba", "aab"]), min_size=3, max_size=3))
def test_moving_bytes_between_fields_makes_another_id(words: list[str]) -> None:
    """Fields that read the same when joined still make different ids."""
    seen: dict[bytes, tuple[str, ...]] = {}
    names = ("adapter", "rope", "extra")
    joined = "".join(words)
    for a, b in combinations(range(len(joined) + 1), 2):
        parts = (joined[:a], joined[a:b], joined[b:])
        found = seen.setdefault(
            NAMESPACE._replace(**dict(zip(names, parts, strict=True))).id, parts
        )
        assert found == parts


def test_text_and_bytes_of_one_content_differ() -> None:
    """A salt is no text: the same bytes as salt and as extra make different ids."""
    bare = NAMESPACE._replace(salt=b"", extra="")
    assert bare._replace(salt=b"a" * 16).id != bare._replace(extra="a" * 16).id


@pytest.mark.parametrize("name", Namespace._fields)
def test_a_bad_namespace_is_refused_by_name(name: str) -> None:
    """A field of another type, too long, unprintable or, where it must be, empty is ValueError."""
    bad: list[Any] = [None, 1, ["x"]]
    if name == "salt":
        bad += ["text", b"\0" * 15, b"\0" * 65, bytearray(16)]
    else:
        bad += [b"bytes", "a" * 257, "é" * 129, "a\n", "\ud800"]
    if name in {"model", "revision", "dtype"}:
        bad.append("")
    for value in bad:
        with pytest.raises(ValueError):  # noqa: PT011 - a surrogate is refused by its codec
            NAMESPACE._replace(**{name: value}).id  # noqa: B018 - the property checks


def test_the_label_shows_no_secret() -> None:
    """People see model and revision, bounded, and nothing of the salt."""
    assert NAMESPACE.label == "model@r1"
    assert len(NAMESPACE._replace(model="m" * 256).label) == 256


def test_each_field_of_a_layout_makes_another_id() -> None:
    """Another chunk, page, dtype, group field, order, tp or pp: another id, all different."""
    assert set(LAYOUT_CHANGES) == set(Layout._fields)
    changed = [LAYOUT, *(LAYOUT._replace(**{k: v}) for k, v in LAYOUT_CHANGES.items())]
    for name, value in GROUP_CHANGES.items():
        groups = (LAYOUT.groups[0]._replace(**{name: value}), LAYOUT.groups[1])
        changed.append(LAYOUT._replace(groups=groups))
    changed.append(
        LAYOUT._replace(groups=(LAYOUT.groups[0], LAYOUT.groups[1]._replace(window=65)))
    )
    changed.append(LAYOUT._replace(groups=LAYOUT.groups[::-1]))
    ids = {layout.check().id for layout in changed}
    assert len(ids) == len(changed)


def test_ids_of_two_kinds_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes hashed as namespace, layout and chunk give three ids (I1)."""
    domains = [identity._NAMESPACE, identity._LAYOUT, identity._CHUNK]
    assert len({identity._digest(domain, b"same") for domain in domains}) == 3
    used = []
    digest = identity._digest
    monkeypatch.setattr(identity, "_digest", lambda d, b: used.append(d) or digest(d, b))
    assert NAMESPACE.id != LAYOUT.id
    assert used == domains[:2]


@given(layouts())
def test_a_layout_survives_its_fields(layout: Layout) -> None:
    """What `fields` says is read back as the same layout with the same id."""
    again = Layout.from_fields(layout.fields())
    assert again == layout
    assert again.id == layout.id


GARBAGE: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(["full", "sliding", "mla", "recurrent", "float16", 1, 2, 16, 64]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@given(st.lists(GARBAGE, min_size=7, max_size=7) | st.lists(GARBAGE, max_size=9))
def test_garbage_is_no_layout(fields: list[Any]) -> None:
    """Any nested lists are a layout that says the same of itself, or a ValueError."""
    try:
        layout = Layout.from_fields(fields)
    except ValueError:
        return
    assert layout.fields() == fields


@given(st.data())
def test_a_layout_with_garbage_in_it_is_refused(data: st.DataObject) -> None:
    """A good layout with one value replaced is refused with ValueError, or is what it says."""
    fields: list[Any] = LAYOUT.fields()
    if data.draw(st.booleans()):
        fields[data.draw(st.integers(0, 6))] = data.draw(GARBAGE)
    else:
        group = data.draw(st.sampled_from(fields[3]))
        group[data.draw(st.integers(0, 5))] = data.draw(GARBAGE)
    try:
        layout = Layout.from_fields(fields)
    except ValueError:
        return
    assert layout.fields() == fields
    assert [type(value) for value in layout.fields()] == [type(value) for value in fields]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_tokens": 24}, "multiple"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": True}, "page_tokens"),
        ({"dtype": "float64"}, "dtype"),
        ({"tp": 65}, "tp"),
        ({"tp": 16, "pp": 8}, r"tp \* layout.pp"),
        ({"groups": ()}, "number"),
        ({"groups": LAYOUT.groups[:1] * (GROUPS_MAX + 1)}, "number"),
        ({"groups": LAYOUT.groups[:1] * 16, "tp": 32, "pp": 1}, "objects a chunk"),
        ({"order": ""}, "order"),
        ({"groups": (Group("sliding", 1, 1, 1, 1, 1),)}, "window"),
        ({"groups": (Group("full", 1, 1, 1, 1, 8),)}, "window"),
        ({"groups": (Group("full", 0, 1, 1, 1),)}, "layers"),
        ({"groups": (Group("full", 1, 1, 1, 0),)}, "object_bytes"),
        ({"groups": (Group("other", 1, 1, 1, 1),)}, "kind"),
    ],
)
def test_a_bad_layout_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    """Each limit of a layout is checked, and the error names the field."""
    with pytest.raises(ValueError, match=words):
        Layout.from_fields(LAYOUT._replace(**change).fields())


def test_every_dtype_is_a_layout_of_its_own() -> None:
    """The same shape in another dtype has another id."""
    assert len({LAYOUT._replace(dtype=dtype).check().id for dtype in DTYPES}) == len(DTYPES)


# ---------------------------------------------------------------- chunk hashes

tokens_lists = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


@given(tokens_lists, st.integers(1, 9), st.data())
def test_a_token_changes_its_chunk_and_all_later(
    tokens: list[int], chunk: int, data: st.DataObject
) -> None:
    """Hashes before a changed token stay; its chunk's and every later one change (I2)."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != tokens[at]))
    before = chunk_hashes(NAMESPACE.id, tokens, chunk)
    after = chunk_hashes(NAMESPACE.id, [*tokens[:at], other, *tokens[at + 1 :]], chunk)
    assert len(before) == len(after) == len(tokens) // chunk
    assert len(set(before)) == len(before)
    same = at // chunk
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after)


@given(tokens_lists, st.integers(1, 9), st.integers(0, 12))
def test_a_prefix_has_the_prefix_of_the_hashes(tokens: list[int], chunk: int, more: int) -> None:
    """What follows a chunk does not change its hash; a part of a chunk has none."""
    whole = chunk_hashes(NAMESPACE.id, tokens + [7] * more, chunk)
    assert whole[: len(tokens) // chunk] == chunk_hashes(NAMESPACE.id, tokens, chunk)


@given(tokens_lists, st.integers(1, 9))
def test_hashes_are_rooted_at_the_namespace(tokens: list[int], chunk: int) -> None:
    """The same tokens under another model, salt and so on share no hash."""
    hashes = [chunk_hashes(NAMESPACE.id, tokens, chunk)]
    hashes += [
        chunk_hashes(NAMESPACE._replace(**{k: v}).id, tokens, chunk)
        for k, v in OTHER_FIELDS.items()
    ]
    joined = [one for chain in hashes for one in chain]
    assert len(set(joined)) == len(joined)


@given(st.integers(1, 8), st.integers(1, 8))
def test_chunks_of_another_length_share_no_hash(one: int, other: int) -> None:
    """Cut differently, the same tokens have other hashes, also where cuts fall together."""
    tokens = list(range(48))
    a, b = (set(chunk_hashes(NAMESPACE.id, tokens, size)) for size in (one, other))
    assert (a == b) if one == other else not a & b


@given(tokens_lists, st.integers(1, 4), st.data())
def test_an_extra_changes_its_chunk_and_all_later(
    tokens: list[int], chunk: int, data: st.DataObject
) -> None:
    """An image's digest at a chunk counts there and after; an empty one is none."""
    chunks = len(tokens) // chunk
    at = data.draw(st.integers(0, chunks))
    extra = data.draw(st.binary(min_size=1, max_size=40))
    plain = chunk_hashes(NAMESPACE.id, tokens, chunk)
    marked = chunk_hashes(NAMESPACE.id, tokens, chunk, {at: extra})
    assert plain[:at] == marked[:at]
    assert not set(plain[at:]) & set(marked)
    assert chunk_hashes(NAMESPACE.id, tokens, chunk, {at: b""}) == plain


def test_an_extra_never_reads_as_tokens() -> None:
    """Bytes moved between the extra and the tokens, or between two extras, change the hash."""
    seen = set()
    for tokens, size, extras in (
        ([1, 2], 2, {}),
        ([2], 1, {0: b"\x01\0\0\0"}),
        ([2], 1, {0: b"\x04\0\0\0\x01\0\0\0"}),
        ([1], 1, {0: b"\x02\0\0\0"}),
        ([4, 1, 2], 3, {}),
        ([0, 1, 2], 3, {}),
    ):
        seen.add(chunk_hashes(NAMESPACE.id, tokens, size, extras)[-1])
    assert len(seen) == 6
    a = chunk_hashes(NAMESPACE.id, [1, 1], 1, {0: b"ab", 1: b"c"})
    b = chunk_hashes(NAMESPACE.id, [1, 1], 1, {0: b"a", 1: b"bc"})
    assert not set(a) & set(b)


def test_a_golden_chain() -> None:
    """Ids and hashes stay what they are: a changed one would orphan every stored object."""
    chain = chunk_hashes(NAMESPACE.id, range(64), 32, {1: b"image"})
    joined = NAMESPACE.id + LAYOUT.id + b"".join(chain)
    assert [joined[at : at + 8].hex() for at in range(0, 128, 32)] == GOLDEN


GOLDEN: Final = ["7288db5bd8527e68", "cae20a1b67d4caff", "5375d099e7718c2f", "c18c804a3b78a2fd"]


def test_tokens_mean_the_same_in_every_container() -> None:
    """Lists, ranges, arrays, numpy arrays, bytes and generators of one content encode alike."""
    tokens = [1, 2, 3, 4, 250, 6, 7, 8]
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    for same in (
        tokens,
        tuple(tokens),
        (token for token in tokens),
        array("I", tokens),
        array("B", tokens),
        np.array(tokens),
        np.array(tokens, dtype=np.uint8),
        bytes(tokens),
        bytearray(tokens),
        memoryview(bytes(tokens)),
    ):
        assert token_bytes(same) == expected, type(same)
    assert token_bytes([]) == b""
    assert token_bytes([2**32 - 1]) == b"\xff" * 4


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [2**32],
        [1.0],
        ["1"],
        "12",
        [[1]],
        [None],
        np.array([1.0]),
        np.array([[1, 2]]),
        np.array(5),
        5,
        None,
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused(bad: Any) -> None:
    """Negative, too large, fractional, nested or no numbers are a ValueError."""
    with pytest.raises(ValueError, match="tokens"):
        token_bytes(bad)
