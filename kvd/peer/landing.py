"""Slots that other hosts' chunks land in: reserved, published, quarantined, given back. Loop only.

The writer of such a slot is a mover process; its owner in the catalog is a life of one, numbered
below zero. A slot goes back only when the asker says that nothing lands in it any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.catalog import NEVER_NS
from kvd.eviction import AWAITED
from kvd.types import Generation, OwnerId
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.catalog import Catalog
    from kvd.entry import Chunk, Slot, Space
    from kvd.peer.messages import Piece
    from kvd_client.identity import Layout


def rank_of(layout: Layout, column: int) -> int:
    """Return a rank whose object a column is."""
    group = layout.group_of(column)
    shard = column - layout.column(group, 0)
    return shard * layout.tp if layout.groups[group].kind == "mla" else shard


class Landings:
    """The slots of one life of a mover, by read."""

    def __init__(self, catalog: Catalog, owner: OwnerId) -> None:
        """Hold none yet."""
        assert owner < 0
        self.owner = owner
        self._catalog = catalog
        self._slots: dict[int, list[Slot]] = {}
        self._spare: set[int] = set()

    def take(
        self,
        read: int,
        space: Space,
        parent: bytes,
        key: bytes,
        pieces: Sequence[Piece],
        *,
        spare: bool = False,
    ) -> list[Slot] | None:
        """Reserve a slot for each piece, or none; None when one cannot be had.

        Args:
            read: Which.
            space: Where.
            parent: Hash of the chunk before it, or the namespace's id.
            key: Of the chunk.
            pieces: Its objects.
            spare: Enough failure domains hold it without this host.
        """
        slots: list[Slot] = []
        for piece in pieces:
            layout = space.layout
            (record,) = self._catalog.reserve(
                space,
                self.owner,
                rank_of(layout, piece.column),
                parent=parent,
                hashes=[key],
                groups=1 << layout.group_of(piece.column),
                deadline_ns=NEVER_NS,
            )
            slot = None
            if record[2] == Status.OK:
                slot = self._catalog.fillings.get(self.owner, Generation(record[6]))
            if slot is None:
                for taken in slots:
                    self._catalog.abort(self.owner, taken.generation)
                return None
            slot.lossy = bool(piece.lossy)
            slots.append(slot)
        self._slots[read] = slots
        if spare:
            self._spare.add(read)
        return slots

    def summed(self, read: int, digests: Sequence[bytes]) -> None:
        """Hear what a read's bytes sum to; they are believed or given back after this."""
        for slot, digest in zip(self._slots[read], digests, strict=False):
            slot.digest = digest

    def publish(self, read: int, now_ns: int) -> Chunk:
        """Make a read's objects findable, all of them; return their chunk."""
        slots = self._slots.pop(read)
        chunk = slots[0].chunk
        assert chunk is not None
        if read in self._spare and not chunk.mask and chunk.cold is None:
            chunk.spare, chunk.unwanted = AWAITED, True  # nothing of it was stored here
        self._spare.discard(read)
        generations = [slot.generation for slot in slots]
        for slot, status in zip(
            slots, self._catalog.publish_all(self.owner, generations, now_ns), strict=True
        ):
            assert status is Status.OK
            chunk.lossy_mask |= slot.lossy << slot.column
        return chunk

    def quarantine(self, read: int) -> None:
        """Keep a read's slots from everybody."""
        for slot in self._slots[read]:
            self._catalog.quarantine(self.owner, slot.generation)

    def give_back(self, read: int) -> None:
        """Free a read's slots, quarantined or not."""
        self._spare.discard(read)
        for slot in self._slots.pop(read):
            self._catalog.abort(self.owner, slot.generation)
