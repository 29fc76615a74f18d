"""Slots that are reserved or quarantined: by generation, by owner, by deadline. Pure.

G1. A slot is here from its reservation until it is published or free.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.entry import Slot
    from kvd.types import Generation, OwnerId


class Fillings:
    """All slots that somebody may be writing."""

    SLACK = 1024
    """Deadlines of ended reservations kept beyond as many as there are live ones."""

    def __init__(self) -> None:
        """Start empty."""
        self._slots: dict[Generation, Slot] = {}
        self._by_owner: dict[OwnerId, dict[Generation, Slot]] = {}
        self._deadlines: list[tuple[int, Generation]] = []

    def add(self, slot: Slot) -> None:
        """Take in a slot just reserved (G1)."""
        self._slots[slot.generation] = slot
        self._by_owner.setdefault(slot.owner, {})[slot.generation] = slot
        heapq.heappush(self._deadlines, (slot.deadline_ns, slot.generation))
        if len(self._deadlines) > 2 * len(self._slots) + self.SLACK:
            self._deadlines = [(s.deadline_ns, s.generation) for s in self._slots.values()]
            heapq.heapify(self._deadlines)

    def forget(self, slot: Slot) -> None:
        """Let a slot go that is published or free now."""
        del self._slots[slot.generation]
        owned = self._by_owner[slot.owner]
        del owned[slot.generation]
        if not owned:
            del self._by_owner[slot.owner]

    def adopt(self, slot: Slot, owner: OwnerId, deadline_ns: int) -> None:
        """Give a slot another owner and deadline."""
        self.forget(slot)
        slot.owner, slot.deadline_ns = owner, deadline_ns
        self.add(slot)

    def get(self, owner: OwnerId, generation: Generation) -> Slot | None:
        """Return the slot of this generation if it is the owner's."""
        return self._by_owner.get(owner, {}).get(generation)

    def of(self, owner: OwnerId) -> list[Slot]:
        """Return an owner's slots."""
        return list(self._by_owner.get(owner, {}).values())

    def count(self, owner: OwnerId) -> int:
        """Count an owner's slots."""
        return len(self._by_owner.get(owner, {}))

    def all(self) -> list[Slot]:
        """Return every slot."""
        return list(self._slots.values())

    def due(self, now_ns: int) -> Iterator[Slot]:
        """Yield the slots whose deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] < now_ns:
            _, generation = heapq.heappop(self._deadlines)
            slot = self._slots.get(generation)
            if slot is not None and slot.deadline_ns < now_ns:  # it may have got another
                yield slot

    def check(self) -> None:
        """Recount; raises AssertionError."""
        owned = {slot for slots in self._by_owner.values() for slot in slots.values()}
        assert owned == set(self._slots.values()), "G1"
