"""What of a step's requests is to be saved, and which blocks the step takes anew. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.vllm.messages import Save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Table = tuple[Sequence[int], ...]
    """Block ids of one request, for each of the engine's groups."""


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
    pages: Sequence[int],
    start: int,
    stop: int,
    *,
    skip_tokens: int,
    chunk_tokens: int,
) -> tuple[tuple[int, ...], ...]:
    """Cut the blocks of chunks `start` to `stop` - 1 out of a request's block table.

    Args:
        table: Of the groups that are kept.
        pages: Pages a chunk, for each group.
        start: First chunk.
        stop: One past the last chunk.
        skip_tokens: Pages that lie wholly before this token become 0.
        chunk_tokens: Tokens a chunk.

    Returns:
        For each group (stop - start) * pages ids; 0 where the table is too short.
    """
    cut = []
    for ids, count in zip(table, pages, strict=True):
        skipped = skip_tokens * count // chunk_tokens
        part = [
            ids[index] if skipped <= index < len(ids) else 0
            for index in range(start * count, stop * count)
        ]
        cut.append(tuple(part))
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
