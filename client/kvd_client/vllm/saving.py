"""What of a step's requests is to be saved, and which blocks the step takes anew. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.vllm.messages import Save

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd_client.vllm.messages import Identity

    Table = tuple[Sequence[int], ...]
    """Block ids of one request, for each of the engine's groups."""
    Cut = tuple[tuple[int, ...], ...]
    """Block ids of some chunks, for each group."""
    Offer = tuple[int, int, int]
    States = dict[int, int]
    """Blocks by group."""


def whole_chunks(computed: int, hashed: int, chunk_tokens: int) -> int:
    """Count chunks whose KV is there after a step, and whose hash is known.

    Args:
        computed: Tokens the engine has computed then; may run ahead of what it knows.
        hashed: Tokens that the request's block hashes cover: their values are known.
        chunk_tokens: Tokens a chunk.
    """
    return max(0, min(computed, hashed)) // chunk_tokens


def chunk_blocks(
    table: Table,
    identity: Identity,
    start: int,
    stop: int,
    *,
    skip_tokens: int = 0,
) -> Cut:
    """Cut the blocks of chunks `start` to `stop` - 1 out of a request's block table.

    Args:
        table: Of the engine's groups.
        identity: The engine's.
        start: First chunk.
        stop: One past the last chunk.
        skip_tokens: Pages that lie wholly before this token become 0.

    Returns:
        For each group (stop - start) * pages ids; 0 where the table is too short.
    """
    cut = []
    counts = zip(table, identity.blocks, identity.pages, identity.page_tokens, strict=True)
    for ids, count, pages, tokens in counts:
        part = [
            ids[index] if skip_tokens // tokens <= index < len(ids) else 0
            for chunk in range(start, stop)
            for index in range((chunk + 1) * count - pages, (chunk + 1) * count)
        ]
        cut.append(tuple(part))
    return tuple(cut)


def whole_states(offers: Iterable[Offer], identity: Identity, chunks: int) -> dict[int, States]:
    """Sort the states that the engine has at ends of a request's first `chunks` chunks, by chunk.

    Args:
        offers: The engine's: group, block, and tokens that the state has seen.
        identity: The engine's.
        chunks: Whose hash is known.
    """
    found: dict[int, States] = {}
    for group, block, tokens in offers:
        chunk, rest = divmod(tokens, identity.layout.chunk_tokens)
        if not rest and 0 < chunk <= chunks:
            found.setdefault(chunk - 1, {})[group] = block
    return found


def with_states(blocks: Cut, identity: Identity, start: int, states: dict[int, States]) -> Cut:
    """Put states into the blocks of chunks from `start` on: those alone are known to be whole."""
    cut = []
    for group, (ids, kind) in enumerate(zip(blocks, identity.layout.groups, strict=True)):
        if kind.kind == "recurrent":
            cut.append(tuple(states.get(start + at, {}).get(group, 0) for at in range(len(ids))))
        else:
            cut.append(ids)
    return tuple(cut)


def plan_save(
    request: str, chain: Sequence[bytes], start: int, stop: int, blocks: tuple[tuple[int, ...], ...]
) -> Save:
    """Make the message to save chunks `start` to `stop` - 1 of a chain."""
    assert 0 <= start < stop <= len(chain)
    parent = chain[start - 1] if start else b""
    return Save(request, parent, tuple(chain[start:stop]), blocks)


def new_blocks(table: Table, block_tokens: Sequence[int], computed: int) -> Iterator[int]:
    """Yield the blocks of a table that hold no computed token yet: those are written from now on.

    Args:
        table: Of all groups.
        block_tokens: Tokens a block, for each group.
        computed: Tokens that were there before the step.
    """
    for ids, tokens in zip(table, block_tokens, strict=True):
        yield from (block for block in ids[computed // tokens :] if block)
