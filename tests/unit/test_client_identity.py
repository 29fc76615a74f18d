"""Client identity: what makes two KV caches the same, and nothing else does."""

from __future__ import annotations

from array import array
from itertools import combinations
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import identity
from kvd_client.identity import (
    DTYPES,
    GROUPS_MAX,
    Group,
    Layout,
    Namespace,
    chunk_hashes,
    token_bytes,
)

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
    "lossy": True,
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
        changes: dict[str, Any] = dict(zip(names, parts, strict=True))
        found = seen.setdefault(NAMESPACE._replace(**changes).id, parts)
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
    changed.append(LAYOUT._replace(groups=(LAYOUT.groups[0], LAYOUT.groups[1]._replace(window=65))))
    changed.append(LAYOUT._replace(groups=LAYOUT.groups[::-1]))
    ids = {layout.check().id for layout in changed}
    assert len(ids) == len(changed)


def test_ids_of_two_kinds_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes hashed as namespace, layout and chunk give three ids (I1)."""
    domains = [identity._NAMESPACE, identity._LAYOUT, identity._CHUNK]
    assert len({identity._digest(domain, b"same") for domain in domains}) == 3
    monkeypatch.setattr(identity, "_digest", lambda domain, _: domain)
    assert [NAMESPACE.id, LAYOUT.id] == domains[:2]


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


GOLDEN: Final = ["51fe2398cf5396f0", "cae20a1b67d4caff", "ad6a5add1fbe265c", "238045a04aaa0396"]


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
