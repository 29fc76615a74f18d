"""Which chunks of a vLLM step are saved, from which blocks, and which blocks it takes anew."""

from __future__ import annotations

import pytest

from kvd_client.identity import Group, Layout, Namespace
from kvd_client.vllm import saving
from kvd_client.vllm.messages import Identity
from kvd_client.vllm.options import BadOption, read_options


def identity(*page_tokens: int, kinds: tuple[str, ...] = ()) -> Identity:
    """Describe an engine with chunks of 64 tokens, and groups with blocks of so many."""
    groups = tuple(Group(kind, 2, 2, 64, 1 << 16) for kind in kinds or ("full",) * len(page_tokens))
    layout = Layout(64, min(page_tokens), "float32", groups)
    return Identity(Namespace("m", "1", "float32"), layout, page_tokens, 16)


@pytest.mark.parametrize(
    ("computed", "hashed", "chunks"),
    [(0, 0, 0), (63, 640, 0), (64, 640, 1), (640, 100, 1), (129, 128, 2), (-5, 100, 0)],
)
def test_only_whole_chunks_of_known_tokens_are_saved(
    computed: int, hashed: int, chunks: int
) -> None:
    """A chunk is there when all its tokens are computed, and their values known."""
    assert saving.whole_chunks(computed, hashed, 64) == chunks


def test_pages_that_the_engine_has_are_skipped() -> None:
    """A load that begins inside a chunk leaves the pages before it alone, in every group."""
    table = (list(range(1, 13)), list(range(101, 107)))
    blocks = saving.chunk_blocks(table, identity(16, 32), 1, 3, skip_tokens=96)
    assert blocks == ((0, 0, 7, 8, 9, 10, 11, 12), (0, 104, 105, 106))


def test_of_a_state_only_the_block_at_a_chunks_end_counts() -> None:
    """A load fills it there; the others are the engine's null blocks."""
    table = (list(range(1, 9)), [0, 0, 0, 0, 0, 0, 0, 77])
    states = identity(16, 16, kinds=("full", "recurrent"))
    assert states.pages == (4, 1)
    blocks = saving.chunk_blocks(table, states, 0, 2)
    assert blocks == (tuple(range(1, 9)), (0, 77))


def test_states_are_saved_where_the_engine_offers_them_whole() -> None:
    """At ends of chunks with a known hash; whatever else lies in the table is under way."""
    made = identity(16, 16, kinds=("full", "recurrent"))
    offers = [(1, 70, 64), (1, 71, 80), (1, 72, 128), (1, 73, 192), (1, 74, 0)]
    states = saving.whole_states(offers, made, 2)
    assert states == {0: {1: 70}, 1: {1: 72}}
    blocks = saving.chunk_blocks((list(range(1, 9)), [9] * 8), made, 1, 2)
    assert blocks == ((5, 6, 7, 8), (9,))
    assert saving.with_states(blocks, made, 1, states) == ((5, 6, 7, 8), (72,))
    assert saving.with_states(blocks, made, 1, {}) == ((5, 6, 7, 8), (0,))


def test_a_table_that_is_too_short_gives_nothing() -> None:
    """Pages without a block are 0, like those outside a window."""
    blocks = saving.chunk_blocks(([1, 0, 3],), identity(32), 0, 2)
    assert blocks == ((1, 0, 3, 0),)


def test_a_save_names_its_parent() -> None:
    """The chunk before the first is named, or nothing before the prompt's first."""
    chain = [b"a", b"b", b"c"]
    assert saving.plan_save("r", chain, 0, 2, ()).parent == b""
    assert saving.plan_save("r", chain, 1, 3, ())[1:3] == (b"a", (b"b", b"c"))


def test_blocks_that_were_hit_are_not_taken_anew() -> None:
    """Of a new request's table, only blocks beyond what is computed are written."""
    assert list(saving.new_blocks(([5, 6, 7], [0, 8]), (32, 64), 64)) == [7, 8]


@pytest.mark.parametrize(
    "extra",
    [
        {"sockets": "x"},
        {"chunk_tokens": 0},
        {"chunk_tokens": True},
        {"adapters": {"a": ""}},
        {"load": "later"},
        {"save": None},
        {"media": 1},
        {"wait_s": 0},
        {"socket": ""},
    ],
)
def test_a_wrong_option_is_named(extra: dict[str, object]) -> None:
    """An unknown option, or a value it cannot have, is refused by name."""
    with pytest.raises(BadOption, match=next(iter(extra))):
        read_options(extra)


def test_options_are_taken() -> None:
    """What is given is kept, the rest is as documented."""
    options = read_options({"socket": "/run/x", "adapters": {"a": "1f"}, "load": "sync"})
    assert (options.socket, options.adapters, options.load) == ("/run/x", {"a": "1f"}, "sync")
    assert (options.chunk_tokens, options.save, options.media) == (256, "all", False)
