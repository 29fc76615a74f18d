"""The life of an object's slot: a pure state machine, and the records it moves.

    reserve          publish             evict
 FREE ----> RESERVED ------> PUBLISHED ---------> FREE
               | deadline
               v           confirm | holder dead
          QUARANTINED ---------------------------> FREE
               (a slot also goes RESERVED -> FREE by abort, a lost race, or its holder's death)

Invariants:

E1. Bytes are findable only in PUBLISHED.
E2. A slot leaves RESERVED or QUARANTINED for reuse only when its writer said that it is done, or
    is dead: a deadline alone never frees a slot, a DMA may still be writing.
E3. An object is written once: PUBLISHED has no way back to RESERVED.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvd.errors import InvariantError

if TYPE_CHECKING:
    from kvd.identity import GroupRule
    from kvd.types import Generation, OwnerId, SlabId, Tenant
    from kvd_client.identity import Layout


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
    LOSE = "lose the race"
    ABORT = "abort"
    DEADLINE = "deadline"
    CONFIRM = "confirm"
    HOLDER_DEAD = "holder dead"
    EVICT = "evict"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.RESERVE): SlotState.RESERVED,
    (SlotState.RESERVED, SlotEvent.PUBLISH): SlotState.PUBLISHED,
    (SlotState.RESERVED, SlotEvent.LOSE): SlotState.FREE,
    (SlotState.RESERVED, SlotEvent.ABORT): SlotState.FREE,
    (SlotState.RESERVED, SlotEvent.HOLDER_DEAD): SlotState.FREE,
    (SlotState.RESERVED, SlotEvent.DEADLINE): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.CONFIRM): SlotState.FREE,
    (SlotState.QUARANTINED, SlotEvent.HOLDER_DEAD): SlotState.FREE,
    (SlotState.PUBLISHED, SlotEvent.EVICT): SlotState.FREE,
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
    """

    __slots__ = (
        "chunk",
        "column",
        "deadline_ns",
        "generation",
        "index",
        "offset_bytes",
        "owner",
        "size_bytes",
        "slab",
        "state",
        "tenant",
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
        prefix_only: No group but `full` and `mla`: the usable prefix ends at the first hole.
        chunks: By hash.
        sessions: Live sessions; a space without sessions and chunks is forgotten.
    """

    __slots__ = (
        "chunks",
        "full_mask",
        "label",
        "layout",
        "namespace",
        "prefix_only",
        "rules",
        "sessions",
        "tenant",
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
        self.tenant = tenant
        self.namespace = namespace
        self.label = label
        self.layout = layout
        self.rules = rules
        self.full_mask = (1 << layout.columns) - 1
        self.prefix_only = all(rule.kind in {"full", "mla"} for rule in rules)
        self.chunks: dict[bytes, Chunk] = {}
        self.sessions = 0


class Chunk:
    """A node of the prefix tree: one chunk with the objects of its groups and ranks.

    Attributes:
        hash: Its key within the space.
        space: Where it lives.
        parent: The chunk before it; None for a first chunk.
        children: Chunks after it that are here (a node without objects counts).
        mask: Columns that are published.
        slots: Column to slot, reserved or published.
        filling: Reserved slots among them.
        pins: Leases that name it; it stays while there is one.
        pinned_bytes: What the first pin charged.
        size_bytes: Bytes of its published objects.
        tick: When it was last used; larger is later.
    """

    __slots__ = (
        "children",
        "filling",
        "hash",
        "mask",
        "parent",
        "pinned_bytes",
        "pins",
        "size_bytes",
        "slots",
        "space",
        "tick",
    )

    def __init__(self, key: bytes, space: Space, parent: Chunk | None) -> None:
        """Start as a node without objects."""
        self.hash = key
        self.space = space
        self.parent = parent
        self.children: set[Chunk] = set()
        self.mask = 0
        self.slots: dict[int, Slot] = {}
        self.filling = 0
        self.pins = 0
        self.pinned_bytes = 0
        self.size_bytes = 0
        self.tick = 0

    @property
    def evictable(self) -> bool:
        """A leaf with objects that nobody holds or fills."""
        return bool(self.mask) and not (self.children or self.pins or self.filling)

    def check(self) -> None:
        """Recount one node of the tree (the catalog's T1 to T3)."""
        parent = self.parent
        assert self.mask or self.filling or self.pins or self.children, "T2"
        assert parent is None or parent.space.chunks.get(parent.hash) is parent, "T1"
        assert parent is None or self in parent.children, "T1"
        mask = filling = size_bytes = 0
        for column, slot in self.slots.items():
            assert slot.chunk is self, "T3"
            assert slot.column == column, "T3"
            assert slot.tenant == self.space.tenant, "T3"
            mask |= (slot.state is SlotState.PUBLISHED) << column
            filling += slot.state is SlotState.RESERVED
            size_bytes += slot.size_bytes if slot.state is SlotState.PUBLISHED else 0
        assert size_bytes == self.size_bytes, "T3"
        assert (mask, filling) == (self.mask, self.filling), "T3"
