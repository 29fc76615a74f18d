"""A prefix tree put up again from what the tier below holds. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.changes import NVME
from kvd.entry import PLACE, Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.changes import Changes
    from kvd.entry import Space

Cold = tuple[tuple[int, int, int, int], int, bool]
"""A copy in the tier below: its place, its columns, whether it is lossy."""
Found = tuple[bytes, bytes, bytes, int, int, bool]
"""A copy found at a start: chunk, parent, place (as `kvd.entry.PLACE`), length, columns, lossy."""


def found_copy(chunk: bytes, parent: bytes, cold: Cold) -> Found:
    """Give a copy as a start finds it."""
    (region, offset_bytes, length_bytes, generation), mask, lossy = cold
    return chunk, parent, PLACE.pack(region, offset_bytes, generation), length_bytes, mask, lossy


def plant(space: Space, rows: Iterable[Found], changes: Changes) -> list[Chunk]:
    """Put what the tier below holds into an empty space.

    Args:
        space: Where.
        rows: In any order; fastest the oldest first, and what is near in time is then near in
            memory, where look-ups find it sooner.
        changes: Who hears of it.

    Returns:
        Chunks left out again because the chain above them is broken (the catalog's T1).
    """
    chunks, root = space.chunks, space.namespace
    assert not chunks
    early = []  # before their parent, which is rare where rows come as they were written
    for key, parent, place, length, mask, lossy in rows:
        chunk = chunks[key] = Chunk(key, space, None)
        chunk.cold_place, chunk.cold_bytes = place, length
        chunk.cold_mask, chunk.cold_lossy = mask, lossy
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
    if changes.heard:
        _tell(space, changes)
    return broken


def _tell(space: Space, changes: Changes) -> None:
    for chunk in space.chunks.values():
        if chunk.cold_mask == space.full_mask:
            changes.stored(chunk, NVME)
