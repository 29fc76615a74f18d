"""Which regions there are, how full they are, and whose bytes are in them. Pure.

The loop is the only caller. A region goes

    blank -> open -> sealed -> draining -> free -> open ...

blank: no file yet; free: a file, nothing in it that counts; open: appended to; draining: reclaimed,
but somebody still reads or writes in it.

Invariants:

E1. A region with users (reads, or writes not yet committed) is never opened anew.
E2. Places handed out in one use of a region do not overlap, and lie behind its header.
E3. `live_bytes` and `live_count` are those of the rows in the index that lie in this use of it.
E4. Ordinary writes leave `spare` regions for rewrites: free, blank, or opened for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvd.tiers.region import BLOCK
from kvd.tiers.rows import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.tiers.rows import Row


class RegionState(Enum):
    """Where a region is in its circle."""

    BLANK = "blank"
    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"
    DRAINING = "draining"


HELD: Final = (RegionState.OPEN, RegionState.SEALED)


@dataclass(slots=True)
class Region:
    """One region.

    Attributes:
        id: Number, also its file's name.
        handle: Of the open file, -1 without one.
        incarnation: Of this use; None when the file's header is unreadable.
        tail_bytes: Where the next record goes.
        live_bytes: Of its records that the index names.
        live_count: How many.
        keys: Every key ever put there in this use, end to end, KEY_BYTES each.
        users: Reads and writes under way.
        writers: Of them, writes that are not committed.
    """

    id: int
    handle: int = -1
    state: RegionState = RegionState.BLANK
    incarnation: int | None = 0
    tail_bytes: int = BLOCK
    live_bytes: int = 0
    live_count: int = 0
    keys: bytearray = field(default_factory=bytearray)
    users: int = 0
    writers: int = 0

    def holds(self, generation: int) -> bool:
        """Whether a record of this generation can be of this use."""
        return self.state in HELD and generation > (self.incarnation or 0)


class Extents:
    """All regions of a store."""

    def __init__(self, count: int, region_bytes: int, spare: int) -> None:
        """Begin with blank regions."""
        self.region_bytes = region_bytes
        self.count = count
        self.spare = min(spare, count - 1)
        self.regions = {number: Region(number) for number in range(count)}
        self.current: dict[bool, Region | None] = {False: None, True: None}
        self._free: deque[Region] = deque()

    def adopt(self, region: Region) -> None:
        """Take in a region found at start."""
        self.regions[region.id] = region
        if region.state is RegionState.FREE:
            self._free.append(region)

    def place(self, length_bytes: int, *, rewrite: bool) -> tuple[Region, int] | None:
        """Take room at the end of the open region; None if it has not enough (E2).

        The region has one writer more, until `leave`.
        """
        region = self.current[rewrite]
        if region is None or not self.fits(length_bytes, rewrite=rewrite):
            return None
        assert region.state is RegionState.OPEN
        offset = region.tail_bytes
        region.tail_bytes += length_bytes
        region.users += 1
        region.writers += 1
        return region, offset

    def fits(self, length_bytes: int, *, rewrite: bool) -> bool:
        """Whether the open region has that much room."""
        region = self.current[rewrite]
        return region is not None and region.tail_bytes + length_bytes <= self.region_bytes

    def free_count(self, *, grow: bool) -> int:
        """Regions that could be opened; with `grow` those without a file too."""
        return len(self._free) + (len(self._blank()) if grow else 0)

    def _blank(self) -> list[Region]:
        return [r for r in self.regions.values() if r.state is RegionState.BLANK]

    def take_free(self, *, rewrite: bool, grow: bool) -> Region | None:
        """Return a region to open, one with a file first; None if there is none (E4)."""
        kept = 0 if rewrite else self.spare - (self.current[True] is not None)
        if self.free_count(grow=grow) <= max(0, kept):
            return None
        if self._free:
            region = self._free.popleft()
            assert region.users == 0, "E1"
            return region
        return self._blank()[0]

    def open(self, region: Region, incarnation: int, *, rewrite: bool) -> None:
        """Begin a new use of a region that `take_free` returned; seals the one before."""
        self.seal(self.current[rewrite])
        region.state = RegionState.OPEN
        region.incarnation = incarnation
        region.tail_bytes = BLOCK
        region.live_bytes = region.live_count = 0
        region.keys = bytearray()
        self.current[rewrite] = region

    def put_back(self, region: Region) -> None:
        """Return what `take_free` gave and could not be opened."""
        if region.handle >= 0:
            region.state = RegionState.FREE
            self._free.append(region)

    def seal(self, region: Region | None) -> None:
        """Append to it no more."""
        if region is None or region.state is not RegionState.OPEN:
            return
        region.state = RegionState.SEALED
        for stream, current in self.current.items():
            if current is region:
                self.current[stream] = None

    def leave(self, region: Region, *, writer: bool = False) -> None:
        """One user less; a drained region becomes free."""
        region.users -= 1
        region.writers -= writer
        assert region.users >= region.writers >= 0, "E1"
        self._settle(region)

    def drain(self, region: Region) -> None:
        """Give up a region whose keys are deleted; free as soon as nobody uses it."""
        assert region.state is RegionState.SEALED
        assert not region.writers, "E1"
        region.state = RegionState.DRAINING
        region.live_bytes = region.live_count = 0
        region.keys = bytearray()
        self._settle(region)

    def _settle(self, region: Region) -> None:
        if region.state is RegionState.DRAINING and not region.users:
            region.state = RegionState.FREE
            if region.id < self.count:  # else: left from a larger capacity, removed at next start
                self._free.append(region)

    def add(self, row: Row) -> None:
        """Account for a row that the index now has."""
        region = self.regions[row.region]
        assert region.holds(row.generation), "E3"
        region.live_bytes += row.length_bytes
        region.live_count += 1
        region.keys += row.key

    def remove(self, row: Row | None) -> None:
        """Account for a row that the index no longer has."""
        region = self.regions.get(row.region) if row is not None else None
        if row is not None and region is not None and region.holds(row.generation):
            region.live_bytes -= row.length_bytes
            region.live_count -= 1
            assert region.live_bytes >= 0, "E3"
            assert region.live_count >= 0, "E3"

    def keys_of(self, region: Region) -> list[bytes]:
        """Return the keys once put into this use of a region, each once."""
        keys = bytes(region.keys)
        return list({keys[i : i + KEY_BYTES]: None for i in range(0, len(keys), KEY_BYTES)})

    def held(self) -> Iterator[Region]:
        """Yield the regions with bytes that count."""
        return (region for region in self.regions.values() if region.state in HELD)

    def check(self) -> None:
        """Recount; AssertionError names the invariant that does not hold."""
        usable = [region for region in self.regions.values() if region.id < self.count]
        free = [region for region in usable if region.state is RegionState.FREE]
        assert sorted(r.id for r in free) == sorted(r.id for r in self._free), "E1"
        for region in self.regions.values():
            assert region.users >= region.writers >= 0, "E1"
            assert BLOCK <= region.tail_bytes <= self.region_bytes, "E2"
            assert region.tail_bytes % BLOCK == 0, "E2"
            assert region.live_bytes <= region.tail_bytes - BLOCK, "E3"
            assert (region.live_count == 0) == (region.live_bytes == 0), "E3"
            assert region.state is not RegionState.FREE or not region.users, "E1"
