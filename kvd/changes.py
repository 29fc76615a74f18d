"""What enters and leaves a tier, told to whoever listens: routers, the directory of a fleet. Pure.

A chunk counts for a tier when the tier has all its objects, those of every rank and group. One
whose objects lie partly here, partly there is usable and is told of for neither. Whether a tier
can be read at the moment (`Catalog.cold_readable`) changes nothing of this.

Observers are called on the loop, in the middle of a change: they take note, and neither ask the
catalog for changes nor wait.

H1. What an observer was told stored and not yet removed is what `tiers_of` says, chunk by chunk,
    from when it began to listen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from kvd.entry import Chunk, Space

Tier = Literal["gpu", "host", "nvme"]
HOST: Final = "host"
NVME: Final = "nvme"


class Observer(Protocol):
    """Hears of whole chunks."""

    def stored(self, space: Space, chunk: Chunk, tier: Tier) -> None:
        """A tier has all of a chunk now."""

    def removed(self, space: Space, chunk: Chunk, tier: Tier, reason: str) -> None:
        """A tier no longer has all of it; `reason` as in the counter `evictions`, or "damaged"."""


class Changes:
    """The observers of a catalog.

    Attributes:
        heard: Whether anybody listens; asked before anything is told, so that silence is free.
    """

    __slots__ = ("_observers", "heard")

    def __init__(self) -> None:
        """Start with nobody."""
        self._observers: tuple[Observer, ...] = ()
        self.heard = False

    def watch(self, observer: Observer) -> None:
        """Tell an observer from now on; what is there already it learns from `tiers_of`."""
        self._observers += (observer,)
        self.heard = True

    def stored(self, chunk: Chunk, tier: Tier) -> None:
        """Tell that a tier has all of a chunk now."""
        for observer in self._observers:
            observer.stored(chunk.space, chunk, tier)

    def removed(self, chunk: Chunk, tier: Tier, reason: str) -> None:
        """Tell that a tier no longer has all of it."""
        for observer in self._observers:
            observer.removed(chunk.space, chunk, tier, reason)


def tiers_of(chunk: Chunk) -> tuple[Tier, ...]:
    """Return the tiers that have all of a chunk."""
    full = chunk.space.full_mask
    if chunk.mask == full:
        return (HOST, NVME) if chunk.cold_mask == full else (HOST,)
    return (NVME,) if chunk.cold_mask == full else ()
