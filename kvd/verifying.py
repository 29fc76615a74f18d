"""Which objects of host memory are verified, in what order they are summed, what a sum means. Pure.

An object that is *watched* is summed as soon as it is published, and its sum kept with its slot for
as long as that lives. It is summed again before it is told to a reader or copied elsewhere.

    publish  --> watched? --> summed: the first sum is the object's
    acquire  --> summed again: the same, or it is taken out and its place never used again

It can be found at once, and is told to nobody before its first sum is there. What was written to it
between its publishing and that sum counts as published: nothing tells it from the writer's own
bytes. What comes with a sum already, from another host or an earlier life, has no such gap.

Invariants:

Y1. A watched object is told to a reader only after a sum that ended since it was asked for has been
    the object's.
Y2. One sum an object is under way: everybody else waits for the same one.
Y3. A sum is about the use of a place that it was begun for, and about no other.
Y4. The place of an object that differed is used by nobody again.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Final

from kvd.changes import HOST
from kvd.entry import SlotEvent, SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvd.catalog import Catalog
    from kvd.entry import Slot
    from kvd.types import Tenant

QUEUE_MAX: Final = 1 << 16
"""Most published objects that wait for their first sum; others get it when they are asked for."""


class Sampler:
    """Chooses what is watched: one object of `every`."""

    def __init__(self, every: int) -> None:
        """Begin to count."""
        assert every > 0
        self._every = every
        self._count = 0

    def due(self) -> bool:
        """Count an object; tell whether it is one to watch."""
        self._count += 1
        return self._count % self._every == 0


class Verdict(Enum):
    """What a sum means."""

    GONE = "gone"
    FIRST = "first"
    SAME = "same"
    DIFFERS = "differs"


def judge(slot: Slot, digest: bytes) -> Verdict:
    """Say what a sum of a slot's bytes means; the first becomes the object's."""
    if slot.state is not SlotState.PUBLISHED:
        return Verdict.GONE  # Y3: perhaps others' bytes already
    if not slot.digest:
        slot.digest = digest
        return Verdict.FIRST
    return Verdict.SAME if digest == slot.digest else Verdict.DIFFERS


class Check:
    """Objects that somebody wants to be sure of.

    Attributes:
        left: Those without an answer, in the order in which they are of use.
    """

    def __init__(self, slots: Iterable[Slot], done: Callable[[], None]) -> None:
        """Wait for all of them; `done` is called once, with the last."""
        self.left = dict.fromkeys(slots)
        self._done = done
        self._over = False
        assert self.left

    def hear(self, slot: Slot) -> bool:
        """Hear that an object has been summed, and taken out if it differed; True with the last."""
        del self.left[slot]
        return not self.left

    def end(self) -> None:
        """Tell who waits, unless that has left."""
        if not self._over:
            self._over = True
            self._done()

    def leave(self) -> None:
        """Tell nobody any more."""
        self._over = True


class Turns:
    """Objects in the order in which they came, tenants in turn: none waits for all of another's."""

    def __init__(self) -> None:
        """Start empty."""
        self._of: OrderedDict[Tenant, dict[Slot, None]] = OrderedDict()

    def __len__(self) -> int:
        """Count the objects."""
        return sum(map(len, self._of.values()))

    def __contains__(self, slot: Slot) -> bool:
        """Tell whether an object is here."""
        return slot in self._of.get(slot.tenant, ())

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over all objects."""
        return chain.from_iterable(self._of.values())

    def add(self, slot: Slot) -> None:
        """Put an object behind its tenant's."""
        self._of.setdefault(slot.tenant, {})[slot] = None

    def discard(self, slot: Slot) -> None:
        """Take an object out, if it is here."""
        own = self._of.get(slot.tenant)
        if own is not None:
            own.pop(slot, None)
            if not own:
                del self._of[slot.tenant]

    def first(self) -> Slot | None:
        """Return the first object of the tenant whose turn it is."""
        return next(iter(self), None)

    def turn(self) -> None:
        """Give the next tenant its turn."""
        if self._of:
            self._of.move_to_end(next(iter(self._of)))


class Sums:
    """What is to be summed: what somebody waits for first, then the newly published."""

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._waiters: dict[Slot, list[Check]] = {}
        self._begun: set[Slot] = set()
        self._asked = Turns()
        self._published = Turns()

    def __len__(self) -> int:
        """Count the objects that wait or are being summed."""
        return len(self._waiters)

    def published(self, slot: Slot) -> bool:
        """Take in an object for its first sum; False when there are too many."""
        if len(self._published) >= QUEUE_MAX:
            return False
        self._waiters[slot] = []
        self._published.add(slot)
        return True

    def ask(self, check: Check) -> None:
        """Take in what somebody waits for, who keeps it in place meanwhile."""
        for slot in check.left:
            self._waiters.setdefault(slot, []).append(check)
            if slot not in self._begun:
                self._asked.add(slot)

    def leave(self, check: Check) -> None:
        """Stop waiting; what nobody else waits for is not summed because of it."""
        check.leave()
        for slot in check.left:
            waiters = self._waiters[slot]
            waiters.remove(check)
            if not waiters and slot not in self._begun:
                self._asked.discard(slot)
                if slot not in self._published:
                    del self._waiters[slot]

    def next(self, most_bytes: int) -> list[Slot]:
        """Return what to sum now, about so many bytes of it; none when there is nothing to do."""
        batch: list[Slot] = []
        size_bytes = 0
        while size_bytes < most_bytes:
            slot = self._asked.first() or self._published.first()
            if slot is None:
                break
            self._asked.discard(slot)
            self._published.discard(slot)
            self._begun.add(slot)
            if slot.state is not SlotState.PUBLISHED:
                self.ended(slot)
                continue
            batch.append(slot)
            size_bytes += slot.size_bytes
        self._asked.turn()
        self._published.turn()
        return batch

    def ended(self, slot: Slot) -> None:
        """Tell those who wait for an object that its sum has been judged.

        All have heard before the first goes on: that may ask again, or end others that wait.
        """
        self._begun.remove(slot)
        for check in [check for check in self._waiters.pop(slot) if check.hear(slot)]:
            check.end()

    def check(self) -> None:
        """Recount; raises AssertionError naming the invariant that does not hold."""
        queued = {*self._asked, *self._published}
        assert not self._begun & queued, "Y2"
        assert self._waiters.keys() == self._begun | queued, "Y2"
        for slot, waiters in self._waiters.items():
            assert all(slot in check.left for check in waiters), "Y2"


def take_out(catalog: Catalog, slot: Slot) -> None:
    """Drop a published object that is not what it was; whoever holds its chunk may go on (Y4)."""
    chunk = slot.chunk
    assert chunk is not None
    was_warm, was_whole = chunk.warm, chunk.mask == chunk.space.full_mask
    slot.step(SlotEvent.DAMAGE)
    slot.chunk = None
    chunk.take(slot.column)
    chunk.mask &= ~(1 << slot.column)
    chunk.lossy_mask &= ~(1 << slot.column)
    chunk.size_bytes -= slot.size_bytes
    if not chunk.mask:
        chunk.unwanted, chunk.spare = False, 0  # that was about what is gone
    catalog.damaged.add(slot)
    catalog.on_damage(slot)
    catalog.counters.count_eviction("damaged", 1, slot.size_bytes)
    if was_whole and catalog.changes.heard:
        catalog.changes.removed(chunk, HOST, "damaged")
    catalog.settle(chunk, was_warm)
