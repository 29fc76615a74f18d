"""The life of an object's slot: a pure state machine, and the records it moves.

    reserve          publish             evict
 FREE ----> RESERVED ------> PUBLISHED ---------> FREE
               | deadline
               v           confirm | holder dead
          QUARANTINED ---------------------------> FREE
               (a slot also goes RESERVED -> FREE by abort, or its holder's death, and
                PUBLISHED -> QUARANTINED for good when its bytes are found to differ)

Invariants:

E1. Bytes are findable only in PUBLISHED.
E2. A slot leaves RESERVED or QUARANTINED for reuse only when its writer said that it is done, or
    is dead: a deadline alone never frees a slot, a DMA may still be writing.
E3. An object is written once: PUBLISHED has no way back to RESERVED.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import TYPE_CHECKING

from kvd.cost import Gate
from kvd.errors import InvariantError
from kvd.measures import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.identity import GroupRule
    from kvd.types import Generation, OwnerId, SlabId, Tenant
    from kvd_client.identity import Layout

    Place = tuple[int, int, int, int]
    """Region, offset, length and generation of a cold copy."""


ALIGN_BYTES = 4096
"""Places begin and end at pages, so that O_DIRECT and DMA can use them."""
PLACE = struct.Struct("<IQQ")
"""Region, offset and generation of a cold copy, packed: a million tuples of numbers would take
twice as much."""
SIZES_MAX = 64
"""Masks whose bytes a space remembers."""


def stride_of(size_bytes: int) -> int:
    """Return the distance of two places for objects of a size."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def columns_of(mask: int) -> list[int]:
    """Return the columns of a mask."""
    return [column for column in range(mask.bit_length()) if mask >> column & 1]


class SlotState(Enum):
    """Where a slot is in its life."""

    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"
    QUARANTINED = "quarantined"


class SlotEvent(Enum):
    """What may happen to a slot."""

    RESERVE = "reserve"
    PUBLISH = "publish"
    ABORT = "abort"
    DEADLINE = "deadline"
    CONFIRM = "confirm"
    HOLDER_DEAD = "holder dead"
    EVICT = "evict"
    DAMAGE = "damage"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, SlotEvent.PUBLISH): SlotState.PUBLISHED,
    (SlotState.RESERVED, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.RESERVED, SlotEvent.HOLDER_DEAD): SlotState.FREE,
    (SlotState.RESERVED, SlotEvent.DEADLINE): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.CONFIRM): SlotState.FREE,
    (SlotState.QUARANTINED, SlotEvent.HOLDER_DEAD): SlotState.FREE,
    (SlotState.PUBLISHED, SlotEvent.EVICT): SlotState.FREE,
    (SlotState.PUBLISHED, SlotEvent.DAMAGE): SlotState.QUARANTINED,
}


class Slot:
    """One use of one slot, from reserve to free.

    Attributes:
        generation: Names this use; no other ever has it.
        tenant: Owner of the slab.
        slab: Which slab.
        index: Which place in it.
        offset_bytes: Where the place begins.
        size_bytes: Bytes of the object; the place may be longer.
        state: See the module.
        owner: Who fills it; kept for the life of the slot.
        chunk: Whose object it is; None once quarantined.
        column: Which of the chunk's objects.
        deadline_ns: Until when it may be published.
        lossy: Whether what comes into it went through a lossy form, or was computed from what did.
        twin: Its place in GPU memory, see `kvd.twins`; None without.
        digest: The xxh3-128 of its bytes as they were published, empty while nobody knows it.
        watched: Whether its bytes are verified, see `kvd.verifying`.
    """

    __slots__ = (
        "chunk",
        "column",
        "deadline_ns",
        "digest",
        "generation",
        "index",
        "lossy",
        "offset_bytes",
        "owner",
        "size_bytes",
        "slab",
        "state",
        "tenant",
        "twin",
        "watched",
    )

    def __init__(
        self,
        *,
        generation: Generation,
        tenant: Tenant,
        slab: SlabId,
        index: int,
        offset_bytes: int,
        size_bytes: int,
        owner: OwnerId,
    ) -> None:
        """Start free, about to be reserved."""
        self.generation = generation
        self.tenant = tenant
        self.slab = slab
        self.index = index
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes
        self.owner = owner
        self.state = SlotState.FREE
        self.chunk: Chunk | None = None
        self.column = 0
        self.deadline_ns = 0
        self.lossy = False
        self.twin: Slot | None = None
        self.digest = b""
        self.watched = False

    def step(self, event: SlotEvent) -> None:
        """Move on.

        Raises:
            InvariantError: The event is not legal in this state; nothing has changed.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            msg = f"slot generation {self.generation}: {event.value} in state {self.state.value}"
            raise InvariantError(msg)
        self.state = target


class Space:
    """The chunks of one (tenant, namespace, layout): the world one session sees.

    Attributes:
        tenant: Whose.
        namespace: 32-byte id; the parent of every first chunk.
        label: For people.
        layout: How objects are read.
        rules: The fold's rules.
        full_mask: The mask of a chunk that has all its objects.
        strides: Sizes of the slots that its objects need.
        lossy: Whether its objects may go through a lossy form.
        gate: Load or recompute.
        prefix_only: No group but `full` and `mla`: the usable prefix ends at the first hole.
        chunks: By hash.
        sessions: Live sessions; a space without sessions and chunks is forgotten.
        usage: What was asked for and given in it.
    """

    __slots__ = (
        "_sizes",
        "chunks",
        "full_mask",
        "gate",
        "label",
        "layout",
        "lossy",
        "namespace",
        "prefix_only",
        "rules",
        "sessions",
        "strides",
        "tenant",
        "usage",
    )

    def __init__(
        self,
        tenant: Tenant,
        namespace: bytes,
        label: str,
        layout: Layout,
        rules: tuple[GroupRule, ...],
    ) -> None:
        """Start empty."""
        self.strides = frozenset(stride_of(group.object_bytes) for group in layout.groups)
        self.tenant = tenant
        self.namespace = namespace
        self.label = label
        self.layout = layout
        self.rules = rules
        self.full_mask = (1 << layout.columns) - 1
        self.prefix_only = all(rule.kind in {"full", "mla"} for rule in rules)
        self.chunks: dict[bytes, Chunk] = {}
        self.sessions = 0
        self.lossy = False
        self.gate = Gate()
        self.usage = Usage()
        self._sizes: dict[int, int] = {}

    def bytes_of(self, mask: int) -> int:
        """Return the bytes of a chunk's objects of some columns; asked for thousands at a time."""
        size_bytes = self._sizes.get(mask)
        if size_bytes is None:
            groups = self.layout.groups
            size_bytes = sum(groups[self.layout.group_of(c)].object_bytes for c in columns_of(mask))
            if len(self._sizes) < SIZES_MAX:
                self._sizes[mask] = size_bytes
        return size_bytes


class Chunk:
    """A node of the prefix tree: one chunk with the objects of its groups and ranks.

    It has up to two residences: objects in host slots (`mask`), and a cold copy of them all in the
    tier below (`cold`). A million nodes may be cold only, so that what such a node does not need
    costs it nothing: children are a linked list, slots an empty dictionary shared by all.

    Attributes:
        hash: Its key within the space.
        space: Where it lives.
        parent: The chunk before it; None for a first chunk.
        first_child: Head of the list of chunks after it that are here.
        next_sibling: See `first_child`.
        previous_sibling: See `first_child`.
        warm_children: Children that are warm.
        mask: Columns that are published in host slots.
        slots: Column to slot, reserved or published.
        filling: Reserved slots among them.
        pins: Leases that name it; it stays while there is one.
        pinned_bytes: What the first pin charged.
        moves: Moves under way between the tiers; it stays while there is one.
        size_bytes: Bytes of its objects in host slots.
        lossy_mask: Columns in host slots that went through a lossy form (`Slot.lossy`).
        cold_place: Place of the cold copy, packed; None without one.
        cold_bytes: Its length there; 0 without one.
        cold_mask: Columns of the cold copy.
        cold_lossy: Whether the cold copy is lossy.
        cold_used: Whether it was asked for since the cold copy was written.
        unwanted: Not to be written to the tier below.
        spare: Uses here until it is kept like what was stored here, see `eviction.py`; 0: it is.
        told: Whether the eviction policy knows it as resident.
        dirty_bytes: What the eviction counts of it as the only copy.
        tick: When it was last used; larger is later.
    """

    __slots__ = (
        "cold_bytes",
        "cold_lossy",
        "cold_mask",
        "cold_place",
        "cold_used",
        "dirty_bytes",
        "filling",
        "first_child",
        "hash",
        "lossy_mask",
        "mask",
        "moves",
        "next_sibling",
        "parent",
        "pinned_bytes",
        "pins",
        "previous_sibling",
        "size_bytes",
        "slots",
        "space",
        "spare",
        "tick",
        "told",
        "unwanted",
        "warm_children",
    )

    def __init__(self, key: bytes, space: Space, parent: Chunk | None) -> None:
        """Start as a node without objects, among its parent's children."""
        self.hash = key
        self.space = space
        self.parent = parent
        self.first_child: Chunk | None = None
        self.next_sibling: Chunk | None = None
        self.previous_sibling: Chunk | None = None
        self.warm_children = 0
        self.mask = 0
        self.slots: dict[int, Slot] = _NO_SLOTS
        self.filling = 0
        self.pins = 0
        self.pinned_bytes = 0
        self.moves = 0
        self.size_bytes = 0
        self.lossy_mask = 0
        self.cold_place: bytes | None = None
        self.cold_bytes = 0
        self.cold_mask = 0
        self.cold_lossy = False
        self.cold_used = False
        self.unwanted = False
        self.spare = 0
        self.told = False
        self.dirty_bytes = 0
        self.tick = 0
        if parent is not None:
            self.join(parent)

    @property
    def cold(self) -> Place | None:
        """Where the cold copy lies; made anew each time, so ask once."""
        if self.cold_place is None:
            return None
        region, offset_bytes, generation = PLACE.unpack(self.cold_place)
        return region, offset_bytes, self.cold_bytes, generation

    @cold.setter
    def cold(self, place: Place | None) -> None:
        if place is None:
            self.cold_place, self.cold_bytes = None, 0
        else:
            region, offset_bytes, self.cold_bytes, generation = place
            self.cold_place = PLACE.pack(region, offset_bytes, generation)

    def join(self, parent: Chunk) -> None:
        """Become a child; for a node that has no parent yet and is not warm."""
        self.parent = parent
        self.next_sibling = parent.first_child
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self
        parent.first_child = self

    def leave(self) -> None:
        """Leave its parent's children, at its end."""
        assert self.first_child is None
        if self.next_sibling is not None:
            self.next_sibling.previous_sibling = self.previous_sibling
        if self.previous_sibling is not None:
            self.previous_sibling.next_sibling = self.next_sibling
        elif self.parent is not None:
            self.parent.first_child = self.next_sibling

    def children(self) -> Iterator[Chunk]:
        """Iterate over the chunks after it that are here."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling

    def put(self, column: int, slot: Slot) -> None:
        """Give it a slot for a column."""
        if not self.slots:
            self.slots = {}
        self.slots[column] = slot

    def take(self, column: int) -> None:
        """Take the slot of a column off it."""
        del self.slots[column]
        if not self.slots:
            self.slots = _NO_SLOTS

    @property
    def warm(self) -> bool:
        """It, or a chunk after it, has something in host slots."""
        return bool(self.mask or self.filling or self.warm_children)

    @property
    def evictable(self) -> bool:
        """Has objects in host slots, and nobody holds, fills, moves or depends on them there."""
        return bool(self.mask) and not (
            self.warm_children or self.pins or self.filling or self.moves
        )

    @property
    def ready(self) -> bool:
        """Whether its host slots have all that is known of it."""
        return not self.cold_mask & ~self.mask

    @property
    def weight_bytes(self) -> int:
        """Bytes of its objects in host slots once all that is known of it is there."""
        if self.ready:
            return self.size_bytes
        return self.size_bytes + self.space.bytes_of(self.cold_mask & ~self.mask)

    @property
    def clean(self) -> bool:
        """Whether the cold copy has all that its host slots have."""
        return not self.mask & ~self.cold_mask

    @property
    def needed(self) -> bool:
        """Whether there is a reason for the node to be in the tree."""
        return bool(
            self.mask
            or self.filling
            or self.pins
            or self.moves
            or self.cold_place is not None
            or self.first_child is not None
        )

    def check(self) -> None:
        """Recount one node of the tree (the catalog's T1 to T4)."""
        parent = self.parent
        assert self.needed, "T2"
        assert parent is None or parent.space.chunks.get(parent.hash) is parent, "T1"
        assert parent is None or any(child is self for child in parent.children()), "T1"
        assert self.warm_children == sum(child.warm for child in self.children()), "T4"
        assert (self.cold_place is None) == (not self.cold_mask) == (not self.cold_bytes), "T4"
        mask = filling = size_bytes = 0
        for column, slot in self.slots.items():
            assert slot.chunk is self, "T3"
            assert slot.column == column, "T3"
            assert slot.tenant == self.space.tenant, "T3"
            mask |= (slot.state is SlotState.PUBLISHED) << column
            filling += slot.state is SlotState.RESERVED
            size_bytes += slot.size_bytes if slot.state is SlotState.PUBLISHED else 0
        assert not self.lossy_mask & ~mask, "T3"
        assert self.dirty_bytes == (0 if self.clean or self.unwanted else size_bytes), "V2"
        assert self.unwanted or not self.spare, "V3"
        assert size_bytes == self.size_bytes, "T3"
        assert (mask, filling) == (self.mask, self.filling), "T3"


_NO_SLOTS: dict[int, Slot] = {}
"""Stands for no slots; `Chunk.put` replaces it, and nothing is ever put into it."""
