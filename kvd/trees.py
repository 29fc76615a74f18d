"""A prefix tree put up again from what the tier below holds. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.entry import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.entry import Space

Cold = tuple[tuple[int, int, int, int], int, bool]
"""A copy in the tier below: its place, its columns, whether it is lossy."""


def plant(space: Space, rows: Iterable[tuple[bytes, bytes, Cold]]) -> list[Chunk]:
    """Put what the tier below holds into an empty space.

    Args:
        space: Where.
        rows: Chunk hash, parent hash and copy, in any order; fastest the oldest first.

    Returns:
        Chunks left out again because the chain above them is broken (the catalog's T1).
    """
    chunks, root = space.chunks, space.namespace
    assert not chunks
    early = []  # before their parent, which is rare where rows come as they were written
    for key, parent, (place, mask, lossy) in rows:
        chunk = chunks[key] = Chunk(key, space, None)
        chunk.cold, chunk.cold_mask, chunk.cold_lossy = place, mask, lossy
        if parent != root:
            above = chunks.get(parent)
            if above is None:
                early.append((chunk, parent))
            else:
                chunk.join(above)
    broken = []
    for chunk, parent in early:
        above = chunks.get(parent)
        if above is None:
            broken.append(chunk)
        else:
            chunk.join(above)
    for chunk in broken:
        broken.extend(chunk.children())
        del chunks[chunk.hash]
    return broken
