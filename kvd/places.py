"""Where objects are, as clients are told: the fields of `wire.Place`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.wire import NOWHERE, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.entry import Chunk, Slot
    from kvd_client.identity import Layout

PlaceRecord = tuple[int, int, int, int, int, int, int]
"""The fields of `wire.Place`."""


def place_record(
    index: int,
    group: int,
    slot: Slot | None,
    status: Status = Status.OK,
    *,
    at: Slot | None = None,
) -> PlaceRecord:
    """Describe a slot, or say by `status` why there is none; `at` is its twin, told instead."""
    if slot is None:
        return (index, group, status, *NOWHERE)
    where = at or slot
    place = (where.slab, where.offset_bytes, slot.size_bytes)
    return (index, group, status, *place, slot.generation)


def places_of(layout: Layout, chunks: Iterable[Chunk], first: int, rank: int) -> list[PlaceRecord]:
    """Say where a rank's published objects of pinned chunks are; `first` is the first's index."""
    columns = [(group, layout.column(group, rank)) for group in range(len(layout.groups))]
    return [
        place_record(index, group, chunk.slots[column])
        for index, chunk in enumerate(chunks, first)
        for group, column in columns
        if chunk.mask >> column & 1
    ]


def slots_of(chunk: Chunk, rank: int) -> list[Slot]:
    """Return the slots of a rank's published objects of a chunk."""
    layout = chunk.space.layout
    columns = [layout.column(group, rank) for group in range(len(layout.groups))]
    return [chunk.slots[column] for column in columns if chunk.mask >> column & 1]
