"""What the store below calls what is in the catalog, and back. Loop only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

from kvd.tiers.region import Space as StoredSpace

if TYPE_CHECKING:
    from kvd.catalog import Catalog
    from kvd.entry import Chunk, Space
    from kvd.types import Tenant


class StoredNames:
    """Spaces as the store knows them; each is named once."""

    def __init__(self, catalog: Catalog) -> None:
        """Know none yet."""
        self._catalog = catalog
        self._stored: dict[Space, StoredSpace] = {}
        self._identities: dict[bytes, tuple[Tenant, bytes, bytes]] = {}

    def space(self, space: Space) -> StoredSpace:
        """Return a space as the store knows it."""
        stored = self._stored.get(space)
        if stored is None:
            layout = msgpack.packb(space.layout.fields(), use_bin_type=True)
            stored = StoredSpace(
                space.tenant, space.namespace, space.layout.id, space.label, layout
            )
            self._stored[space] = stored
            self._identities[stored.key] = (space.tenant, space.namespace, space.layout.id)
        return stored

    def find(self, space_key: bytes, key: bytes) -> Chunk | None:
        """Return the chunk of a row, None if it is here no more."""
        identity = self._identities.get(space_key)
        space = self._catalog.spaces.get(identity) if identity else None
        return space.chunks.get(key) if space else None


def above(chunk: Chunk) -> bytes:
    """Return what names the chunk before it, as records do."""
    return chunk.parent.hash if chunk.parent else chunk.space.namespace
