"""Which tier what a lease gives lay in when it was asked for. Pure.

    gpu    in GPU memory, and the reader may be told of it there
    host   in host memory
    nvme   it came up from the tier below for this lease
    peer   another host gave it for this lease

A chunk counts for the tier of its object that came the longest way, in this order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.measures import TIERS, by_tier
from kvd.places import slots_of
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvd.entry import Chunk, Slot
    from kvd.places import PlaceRecord

    Had = Mapping[Chunk, int]


def had_of(chunks: Iterable[Chunk]) -> Had:
    """Return which columns of chunks are in host slots, to judge by once an acquire has waited."""
    return {chunk: chunk.mask for chunk in chunks}


def tokens_by_tier(
    chunks: Sequence[Chunk],
    had: Had | None,
    *,
    tokens: int,
    on_gpu: Callable[[Chunk], bool] | None,
) -> dict[str, int]:
    """Return the tokens of a lease of rank 0 by tier.

    Args:
        chunks: What it pins.
        had: What was in host slots when it was asked for; None: all of it.
        tokens: Of a chunk.
        on_gpu: Tells whether all that rank 0 reads of a chunk may be read from GPU memory.
    """
    counts = by_tier()
    if had is None and on_gpu is None:
        counts["host"] = tokens * len(chunks)
        return counts
    for chunk in chunks:
        tier = "host"
        if had is not None:
            tiers = [_origin(slot, had) for slot in slots_of(chunk, 0)]
            tier = max(tiers, key=TIERS.index, default="host")
        if tier == "host" and on_gpu is not None and on_gpu(chunk):
            tier = "gpu"
        counts[tier] += tokens
    return counts


def bytes_by_tier(
    places: Sequence[PlaceRecord],
    chunks: Sequence[Chunk],
    rank: int,
    had: Had | None,
    *,
    first: int,
) -> dict[str, int]:
    """Return the bytes that a lease tells its reader, by tier; `first` is the first's index."""
    counts = by_tier()
    if had is None:
        counts["gpu"] = sum([place[5] for place in places if place[3] >= GPU_SLABS])
        counts["host"] = sum([place[5] for place in places]) - counts["gpu"]
        return counts
    for index, group, _, slab, _, size_bytes, _ in places:
        chunk = chunks[index - first]
        slot = chunk.slots[chunk.space.layout.column(group, rank)]
        counts["gpu" if slab >= GPU_SLABS else _origin(slot, had)] += size_bytes
    return counts


def _origin(slot: Slot, had: Had) -> str:
    """Tell where an object came from."""
    chunk = slot.chunk
    assert chunk is not None  # it is pinned
    if had.get(chunk, 0) >> slot.column & 1 or slot.owner > 0:
        return "host"  # or an engine stored it meanwhile
    return "peer" if slot.owner < 0 else "nvme"
