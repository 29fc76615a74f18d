"""The start of the cold tier: the store's rows become prefix trees again. Loop only; blocks."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import msgpack

from kvd.entry import PLACE
from kvd.trees import plant
from kvd.types import Tenant
from kvd_client.identity import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvd.catalog import Catalog
    from kvd.entry import Space
    from kvd.tiers.nvme_types import Entry, Opened
    from kvd.tiers.region import Space as StoredSpace
    from kvd.trees import Found

    Broken = list[tuple[bytes, bytes, int]]

HINT_LOSSY = 1
"""In the index: the bundle went through a lossy form."""


def restore(
    catalog: Catalog, opened: Opened, entered: Callable[[Space], object]
) -> tuple[int, Broken]:
    """Put what a store holds into the catalog.

    Args:
        catalog: Without chunks.
        opened: The store; its entries are used up.
        entered: Hears of each space.

    Returns:
        How many chunks there are, and the keys and generations of those that nobody can ask for:
        their chain is broken, or their layout or tenant is no longer known.
    """
    count, broken = 0, []
    gc.disable()  # a million nodes, none of them garbage
    try:
        for key, rows in opened.entries:
            stored = opened.spaces.get(key)
            space = _enter(catalog, stored) if stored is not None else None
            if space is not None:
                entered(space)
            if space is None or space.chunks:
                broken += [(key, row[0], PLACE.unpack(row[3])[2]) for row in rows]
                continue
            for chunk in plant(space, _copies(rows), catalog.changes):
                assert chunk.cold is not None
                broken.append((key, chunk.hash, chunk.cold[3]))
            count += len(space.chunks)
            catalog.leave(space)  # nobody is in it: it lives by its chunks
    finally:
        gc.enable()
        gc.freeze()
    return count, broken


def _enter(catalog: Catalog, stored: StoredSpace) -> Space | None:
    """Make the space of stored bundles; None if its layout or tenant is no longer known."""
    try:
        layout = Layout.from_fields(msgpack.unpackb(stored.layout, max_map_len=0))
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if stored.tenant not in catalog.pool.shares or layout.id != stored.layout_id:
        return None
    return catalog.enter(Tenant(stored.tenant), stored.namespace, stored.label, layout)


def _copies(rows: Iterable[Entry]) -> Iterator[Found]:
    """Turn rows of the index into what the catalog takes; equal numbers are one object."""
    shared: dict[object, Any] = {}
    share = shared.setdefault
    for chunk, parent, mask, place, length, hint in rows:
        columns = shared.get(mask)
        if columns is None:
            columns = shared[mask] = int.from_bytes(mask, "little")
        yield chunk, parent, place, share(length, length), columns, bool(hint & HINT_LOSSY)
