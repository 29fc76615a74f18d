"""Operators' pins: chunks that stay in host memory until the pin ends. On the loop.

A pin is of a chain, or of a namespace: then it also takes in what is stored there later. It has an
owner, a budget and an end, and is listed. It does not outlive the daemon, as host memory does not.

B1. A pin holds at most its budget, and all pins of a tenant at most half of what its leases may
    hold: engines always have the other half.
B2. What a pin holds is closed under prefixes: each chunk's parent is held as well.
B3. Each chunk that a pin holds has one pin of the catalog for it, and none after its end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kvd.quota import Resource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.catalog import Catalog
    from kvd.changes import Tier
    from kvd.entry import Chunk, Space
    from kvd.types import Tenant

    SpaceKey = tuple[Tenant, bytes, bytes]

PINS_MAX: Final = 256
"""Pins of all tenants."""
ENDED_A_TICK: Final = 1024
"""Chunks that are let go, or taken in, in one go."""
HEARD_MAX: Final = 1 << 16
"""New chunks that wait to be taken in; those beyond are not."""


def key_of(space: Space) -> SpaceKey:
    """Return what names a space for as long as anybody speaks of it."""
    return (space.tenant, space.namespace, space.layout.id)


class Pin:
    """One pin.

    Attributes:
        id: Its number, never used again in an epoch.
        key: The space.
        label: The namespace's, for people.
        tip: Last chunk of the chain; empty for the whole namespace.
        owner: Who made it, by uid; `operator` if it was one.
        note: Why, in the owner's words.
        budget_bytes: What it may hold.
        expires_ns: When it ends.
        chunks: What it holds.
        held_bytes: Their bytes.
    """

    __slots__ = (
        "budget_bytes",
        "chunks",
        "expires_ns",
        "held_bytes",
        "id",
        "key",
        "label",
        "note",
        "operator",
        "owner",
        "tip",
    )

    def __init__(
        self,
        number: int,
        space: Space,
        *,
        tip: bytes,
        owner: int,
        operator: bool,
        note: str,
        budget_bytes: int,
        expires_ns: int,
    ) -> None:
        """Hold nothing yet."""
        self.id = number
        self.key = key_of(space)
        self.label = space.label
        self.tip = tip
        self.owner = owner
        self.operator = operator
        self.note = note
        self.budget_bytes = budget_bytes
        self.expires_ns = expires_ns
        self.chunks: dict[Chunk, int] = {}
        self.held_bytes = 0

    @property
    def tenant(self) -> Tenant:
        """Whose chunks it holds."""
        return self.key[0]


class PinBook:
    """All pins."""

    def __init__(self, catalog: Catalog) -> None:
        """Start without pins; listens to the catalog from the first one of a namespace on."""
        self._catalog = catalog
        self.pins: dict[int, Pin] = {}
        self._ending: deque[Pin] = deque()
        self._heard: deque[tuple[SpaceKey, bytes]] = deque(maxlen=HEARD_MAX)
        self._followed: set[SpaceKey] = set()
        self._number = 0
        self._listens = False

    def held_bytes(self, tenant: Tenant) -> int:
        """Return what a tenant's pins hold."""
        every = (*self.pins.values(), *self._ending)
        return sum(pin.held_bytes for pin in every if pin.tenant == tenant)

    def make(
        self,
        space: Space,
        *,
        tip: bytes,
        owner: int,
        operator: bool,
        note: str,
        budget_bytes: int,
        expires_ns: int,
    ) -> Pin | None:
        """Make a pin that holds nothing yet; None when there are `PINS_MAX`."""
        if len(self.pins) + len(self._ending) >= PINS_MAX:
            return None
        self._number += 1
        pin = Pin(
            self._number,
            space,
            tip=tip,
            owner=owner,
            operator=operator,
            note=note,
            budget_bytes=budget_bytes,
            expires_ns=expires_ns,
        )
        self.pins[pin.id] = pin
        if not tip:
            self._followed.add(pin.key)
            if not self._listens:
                self._listens = True
                self._catalog.changes.watch(self)
        return pin

    def room_bytes(self, pin: Pin) -> int:
        """Return what a pin may still take in (B1)."""
        quota = self._catalog.quota
        leases = quota.left(pin.tenant, Resource.PINNED_BYTES)
        used = quota.used(pin.tenant, Resource.PINNED_BYTES)
        half = (leases + used) // 2
        left = half - self.held_bytes(pin.tenant)
        return max(0, min(leases, left, pin.budget_bytes - pin.held_bytes))

    def take(self, pin: Pin, chunks: Iterable[Chunk]) -> int:
        """Take chunks in, a head before what follows it; return how many it could."""
        room, taken = self.room_bytes(pin), []
        held = pin.chunks
        for chunk in chunks:
            size = chunk.weight_bytes
            follows = chunk.parent is None or chunk.parent in held  # B2
            if chunk in held or not (chunk.mask and chunk.ready and follows) or size > room:
                continue
            room -= size
            held[chunk] = size
            pin.held_bytes += size
            taken.append(chunk)
        if taken:
            self._catalog.pin(taken)
        return len(taken)

    def end(self, pin: Pin) -> None:
        """End a pin; its chunks are let go in the next ticks (B3)."""
        if self.pins.pop(pin.id, None) is not None:
            self._ending.append(pin)
            if not any(other.key == pin.key and not other.tip for other in self.pins.values()):
                self._followed.discard(pin.key)

    def tick(self, now_ns: int) -> None:
        """Let time pass: ends, what ended pins held, what has come in."""
        for pin in [pin for pin in self.pins.values() if pin.expires_ns <= now_ns]:
            self.end(pin)
        left = ENDED_A_TICK
        while self._ending and left:
            left -= self._let_go(self._ending[0], left)
            if not self._ending[0].chunks:
                self._ending.popleft()
        for _ in range(min(left, len(self._heard))):
            key, chunk_hash = self._heard.popleft()
            space = self._catalog.spaces.get(key)
            chunk = space.chunks.get(chunk_hash) if space is not None else None
            if chunk is not None:
                for pin in self.pins.values():
                    if pin.key == key and not pin.tip:
                        self.take(pin, [chunk])

    def _let_go(self, pin: Pin, most: int) -> int:
        """Unpin some of an ended pin's chunks, the last taken first; return how many."""
        gone = [pin.chunks.popitem() for _ in range(min(most, len(pin.chunks)))]
        pin.held_bytes -= sum(size for _, size in gone)
        if gone:
            self._catalog.unpin([chunk for chunk, _ in gone])
        return len(gone)

    # ---------------------------------------------------------------- kvd.changes.Observer

    def stored(self, space: Space, chunk: Chunk, tier: Tier) -> None:
        """Remember what has come into a namespace that is pinned."""
        if self._followed and tier == "host" and key_of(space) in self._followed:
            self._heard.append((key_of(space), chunk.hash))

    def removed(self, space: Space, chunk: Chunk, tier: Tier, reason: str) -> None:
        """What is held does not go."""

    def check(self) -> None:
        """Recount; raises AssertionError."""
        for pin in (*self.pins.values(), *self._ending):
            assert pin.held_bytes == sum(pin.chunks.values()), "B1"
            for chunk in pin.chunks:
                assert chunk.pins > 0, "B3"
                assert chunk.parent is None or chunk.parent in pin.chunks, "B2"
