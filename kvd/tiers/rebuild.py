"""Makes the index anew by scanning the regions. Blocks; any one thread.

A region is walked from record to record by their lengths. Where no record of this use of the region
begins (a write that failed or was cut left a hole), the walk goes on at the next block that does.
A region with an unreadable header is left out: without its incarnation nobody knows which of its
records still count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.tiers.disk import aligned_memory
from kvd.tiers.index import BATCH_ROWS, Change, Changes
from kvd.tiers.recover import LIFE_SHIFT, begin_meta
from kvd.tiers.region import BLOCK, BadRecord, Record, decode_space
from kvd.tiers.rows import KEY_BYTES, decode_row, encode_row, row_of
from kvd.tiers.transfer import read_header, verify_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.tiers.disk import Disk
    from kvd.tiers.extents import Extents, Region
    from kvd.tiers.index import Index, IndexPlace
    from kvd.tiers.rows import Row

PIECE_BYTES: Final = 1 << 20
_MAGIC: Final = np.frombuffer(b"KVDRECD\0", np.uint64)[0]


def _next_start(disk: Disk, region: Region, offset_bytes: int, end_bytes: int) -> int:
    """Return the next block that begins like a record, or the end."""
    piece = aligned_memory(PIECE_BYTES)
    while offset_bytes < end_bytes:
        view = piece[: min(PIECE_BYTES, end_bytes - offset_bytes)]
        got = disk.preadv(region.handle, [view], offset_bytes) // BLOCK * BLOCK
        if got <= 0:
            return end_bytes
        firsts = np.frombuffer(view[:got], np.uint64).reshape(-1, BLOCK // 8)[:, 0]
        hits = np.flatnonzero(firsts == _MAGIC)
        if hits.size:
            return offset_bytes + int(hits[0]) * BLOCK
        offset_bytes += got
    return end_bytes


def walk(
    disk: Disk, region: Region, region_bytes: int, uuid: bytes
) -> Iterator[tuple[int, Record]]:
    """Yield offset and header of every record of this use of a region.

    Raises:
        OSError: The disk failed; what was yielded before is good.
    """
    offset = BLOCK
    while offset < region_bytes:
        try:
            record = read_header(disk, region.handle, offset, region_bytes)
        except BadRecord:
            offset = _next_start(disk, region, offset + BLOCK, region_bytes)
            continue
        origin = record.origin
        mine = (origin.store, origin.region, origin.incarnation)
        if (
            mine == (uuid, region.id, region.incarnation)
            and origin.generation > origin.incarnation
            and _space_fits(record)
        ):
            yield offset, record
            offset += record.length_bytes
        else:
            offset = _next_start(disk, region, offset + BLOCK, region_bytes)


def _space_fits(record: Record) -> bool:
    try:
        space = decode_space(record.space_blob)
    except BadRecord:
        return False
    ids = (record.space_digest, record.namespace, record.layout_id)
    return ids == (space.digest, space.namespace, space.layout_id)


class _Findings:
    """What the scan of all regions found: the youngest record of each key, and its elders."""

    def __init__(self) -> None:
        self.newest: dict[bytes, bytes] = {}
        self.older: dict[bytes, list[bytes]] = {}
        self.spaces: dict[bytes, bytes | None] = {}
        self.life = 0

    def add(self, offset_bytes: int, record: Record) -> None:
        row = row_of(record, offset_bytes)
        self.life = max(self.life, row.generation >> LIFE_SHIFT)
        self.spaces.setdefault(row.space_key, record.space_blob)
        packed = encode_row(row)
        before = self.newest.get(row.key)
        if before is not None:
            self.older.setdefault(row.key, []).append(before)
        self.newest[row.key] = packed

    def settle(self, disk: Disk, extents: Extents) -> None:
        """Where there are several records of a key, take the youngest that is whole (R5)."""
        for key, others in self.older.items():
            for packed in sorted([*others, self.newest[key]], key=_generation, reverse=True):
                self.newest[key] = packed
                if _is_whole(disk, extents, decode_row(packed)):
                    break


def _generation(packed: bytes) -> int:
    return decode_row(packed).generation


def _is_whole(disk: Disk, extents: Extents, row: Row) -> bool:
    handle = extents.regions[row.region].handle
    try:
        end = row.offset_bytes + row.length_bytes
        record = read_header(disk, handle, row.offset_bytes, end)
        verify_record(disk, handle, row.offset_bytes, record)
    except (BadRecord, OSError):
        return False
    return True


def rebuild(
    disk: Disk, place: IndexPlace, uuid: bytes, extents: Extents, life: int
) -> tuple[Index, int]:
    """Scan every region and build the index; return it with the last life seen.

    Args:
        disk: Where the regions are.
        place: Where the index goes.
        uuid: The store's.
        extents: Regions with their handles and incarnations; only read.
        life: A life known to have begun.

    Raises:
        OSError, IndexFull, IndexFailed: It cannot be built; the old one is there still.
    """
    found = _Findings()
    found.life = life
    for region in list(extents.regions.values()):
        if region.handle < 0 or region.incarnation is None:
            continue
        found.life = max(found.life, region.incarnation >> LIFE_SHIFT)
        try:
            for offset, record in walk(disk, region, extents.region_bytes, uuid):
                found.add(offset, record)
        except OSError:
            continue  # what could be read of it was taken
    found.settle(disk, extents)

    def fill() -> Iterator[Changes]:
        yield Changes(meta=begin_meta(uuid, found.life), spaces=found.spaces)
        keys = sorted(found.newest)
        for first in range(0, len(keys), BATCH_ROWS):
            rows = [found.newest[key] for key in keys[first : first + BATCH_ROWS]]
            yield Changes([Change(row[:KEY_BYTES], row[KEY_BYTES:]) for row in rows])

    return place.build(fill()), found.life
