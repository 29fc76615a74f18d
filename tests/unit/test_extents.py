"""Regions: places never overlap, live bytes add up, nothing in use is opened anew."""

from __future__ import annotations

import random

from kvd.tiers.extents import Extents, Region, RegionState
from kvd.tiers.region import BLOCK
from kvd.tiers.rows import Row

REGION_BYTES = 16 * BLOCK


def row(key: int, region: Region, offset: int, length: int, generation: int) -> Row:
    """Return the row of a record."""
    chunk = key.to_bytes(4, "big") * 8
    return Row(b"s" * 16, chunk, chunk, chunk, region.id, 0, offset, length, generation, length, 0)


class Model:
    """A dict of rows beside the regions."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.extents = Extents(4, REGION_BYTES, 1)
        self.rows: dict[int, Row] = {}
        self.readers: list[Region] = []
        self.generation = 0

    def write(self) -> None:
        """Write a row, or open the region that this takes."""
        self.generation += 1
        length = BLOCK * self.chance.randrange(2, 5)
        rewrite = self.chance.random() < 0.2
        place = self.extents.place(length, rewrite=rewrite)
        if place is None:
            self.open(rewrite=rewrite)
            return
        region, offset = place
        key = self.chance.randrange(20)
        for other in self.rows.values():
            apart = other.offset_bytes + other.length_bytes <= offset
            assert other.region != region.id or apart
        if self.chance.random() < 0.9:  # else it failed
            self.extents.remove(self.rows.pop(key, None))
            self.rows[key] = row(key, region, offset, length, self.generation)
            self.extents.add(self.rows[key])
        self.extents.leave(region, writer=True)

    def open(self, *, rewrite: bool) -> None:
        """Open a region, or fail to."""
        region = self.extents.take_free(rewrite=rewrite, grow=True)
        if region is None:
            return
        region.handle = 5
        if self.chance.random() < 0.1:
            self.extents.put_back(region)
            return
        assert not region.users
        assert not any(item.region == region.id for item in self.rows.values())
        self.extents.open(region, self.generation, rewrite=rewrite)

    def delete(self) -> None:
        """Delete a row."""
        for key in self.chance.sample(sorted(self.rows), min(1, len(self.rows))):
            self.extents.remove(self.rows.pop(key))

    def begin_read(self) -> None:
        """Use a region."""
        held = list(self.extents.held())
        for region in self.chance.sample(held, min(1, len(held))):
            region.users += 1
            self.readers.append(region)

    def end_read(self) -> None:
        """Use it no more."""
        if self.readers:
            self.extents.leave(self.readers.pop(0))

    def reclaim(self) -> None:
        """Give up the region with the least in it."""
        held = sorted(self.extents.held(), key=lambda region: region.live_bytes)
        for region in held[:1]:
            self.extents.seal(region)
            keys = self.extents.keys_of(region)
            for key in [k for k, item in self.rows.items() if item.region == region.id]:
                assert self.rows[key].key in keys
                self.extents.remove(self.rows.pop(key))
            self.extents.drain(region)

    def check(self) -> None:
        """Compare."""
        self.extents.check()
        for region in self.extents.held():
            mine = [item for item in self.rows.values() if item.region == region.id]
            assert region.live_count == len(mine)
            assert region.live_bytes == sum(item.length_bytes for item in mine)


def test_by_chance() -> None:
    """A naive model (a dict of rows) agrees after each of many steps."""
    model = Model(1)
    steps = [model.write] * 4 + [
        model.delete, model.begin_read, model.end_read, model.reclaim
    ]  # fmt: skip
    for _ in range(5_000):
        model.chance.choice(steps)()
        model.check()
    assert model.generation > 1000


def test_a_smaller_capacity_uses_less() -> None:
    """A region beyond the count is emptied but never opened anew."""
    extents = Extents(2, REGION_BYTES, 0)
    extra = Region(7, 5, RegionState.SEALED, 1)
    extents.adopt(extra)
    extents.drain(extra)
    extents.check()
    assert extents.free_count(grow=True) == 2
