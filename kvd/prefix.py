"""How much of a chain is usable, read off a space's chunks. Pure; the rules are `identity.py`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.cost import Load
from kvd.identity import presence, usable_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.entry import Chunk, Space


def usable_chunks(space: Space, hashes: Sequence[bytes], *, cold: bool) -> int:
    """Return the chunks of the usable prefix of a chain.

    Args:
        space: Where.
        hashes: The chain.
        cold: Whether copies in the tier below count.
    """
    chunks = space.chunks
    full = space.full_mask
    complete = 0
    above: Chunk | None = None
    for key in hashes:
        # The next of a chain hangs on the last, and most chunks have one child: to follow the tree
        # spares the table, whose every probe misses the cache once it has a million entries.
        chunk = above.first_child if above is not None else None
        if chunk is None or chunk.hash != key:
            chunk = chunks.get(key)
        if chunk is None or (
            chunk.mask != full and not (cold and chunk.mask | chunk.cold_mask == full)
        ):
            break
        above = chunk
        complete += 1
    if complete == len(hashes) or space.prefix_only:
        return complete  # all of it, or cut at the first hole: no rule says otherwise
    masks = [
        0 if chunk is None else chunk.mask | chunk.cold_mask if cold else chunk.mask
        for chunk in map(chunks.get, hashes)
    ]
    return usable_prefix(presence(masks, space.layout.columns), space.rules)


def warm_length(space: Space, chunks: Sequence[Chunk], first: int) -> int:
    """Return how many of pinned chunks, from the first on, are a legal prefix in host slots.

    Args:
        space: Where.
        chunks: Chunks `first` and later of a chain, as `Catalog.hold` returned them.
        first: Chunks before them, which the engine has.
    """
    if space.prefix_only:
        full = space.full_mask
        return next((i for i, chunk in enumerate(chunks) if chunk.mask != full), len(chunks))
    masks = [space.full_mask] * first + [chunk.mask for chunk in chunks]
    return max(0, usable_prefix(presence(masks, space.layout.columns), space.rules) - first)


def present(space: Space, hashes: Sequence[bytes]) -> tuple[list[Chunk], int]:
    """Return the chunks of a usable prefix, and how many of them, from the first on, are warm."""
    chunks = [chunk for key in hashes if (chunk := space.chunks.get(key))]
    return chunks, next((i for i, chunk in enumerate(chunks) if not chunk.ready), len(chunks))


def load_of(space: Space, chunks: Sequence[Chunk], count: int) -> Load:
    """Return what it takes to load a prefix of `count` chunks of which `chunks` are here."""
    cold = sum([chunk.cold_bytes for chunk in chunks if not chunk.ready])
    host = sum([chunk.size_bytes for chunk in chunks])
    peer = max(0, count - len(chunks)) * space.bytes_of(space.full_mask)
    return Load(count * space.layout.chunk_tokens, host, cold, peer)


def pinnable(chunks: Sequence[Chunk], left: int) -> int:
    """Return how many chunks from the first on can be pinned with so many bytes."""
    for count, chunk in enumerate(chunks):
        if not chunk.pins:
            left -= chunk.weight_bytes
            if left < 0:
                return count
    return len(chunks)
