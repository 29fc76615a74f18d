"""Copies on NVMe that an operator gives up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.tiers.disk import TierError
from kvd.tiers.region import Space as StoredSpace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvd.catalog import Catalog
    from kvd.entry import Chunk
    from kvd.tiers.nvme import NvmeStore

REASON = "operator"


def forgetting(catalog: Catalog, store: NvmeStore) -> Callable[[Sequence[Chunk]], Awaitable[int]]:
    """Return what gives up the copies of chunks; nobody moves them.

    They are found no more at once, and deleted from the index when it returns. It returns how many
    could not be deleted: a later start may find these again.
    """

    async def forget(chunks: Sequence[Chunk]) -> int:
        keys = []
        for chunk in chunks:
            place = chunk.cold
            if place is None or chunk.moves:
                continue  # taken up by somebody meanwhile
            space = chunk.space
            stored = StoredSpace(space.tenant, space.namespace, space.layout.id)
            keys.append((stored.key, chunk.hash, place[3]))
            catalog.counters.count_cold_drop(place[2])
            catalog.drop_cold(chunk, REASON)
        try:
            await store.delete(keys)
        except TierError:
            return len(keys)
        return 0

    return forget
