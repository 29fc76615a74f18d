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
from kvd.tiers.region import BLOCK, BadRecord, Record, decode_record, decode_space, header_bytes_of
from kvd.tiers.rows import KEY_BYTES, pack_row, row_of, seal_rows, unpack_row
from kvd.tiers.transfer import read_header, verify_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.tiers.disk import Disk
    from kvd.tiers.extents import Extents, Region
    from kvd.tiers.index import Index, IndexPlace
    from kvd.tiers.rows import Row

PIECE_BYTES: Final = 1 << 20
FAR_BYTES: Final = 128 << 10
"""Records longer than this are visited one by one; shorter ones are read with what follows."""
_MAGIC: Final = np.frombuffer(b"KVDRECD\0", np.uint64)[0]


class _Window:
    """Part of a region in memory, moved along as it is read."""

    def __init__(self, disk: Disk, region: Region, region_bytes: int) -> None:
        self._disk = disk
        self._handle = region.handle
        self._end_bytes = region_bytes
        self._piece = aligned_memory(PIECE_BYTES)
        self._offset = self._length = 0

    def at(self, offset_bytes: int, length_bytes: int, *, ahead: bool) -> memoryview:
        """Return bytes of the region, shorter at its end; with `ahead` reads on beyond them."""
        assert length_bytes <= PIECE_BYTES
        start = offset_bytes - self._offset
        if not 0 <= start <= self._length - length_bytes:
            want = PIECE_BYTES if ahead else length_bytes
            view = self._piece[: min(want, self._end_bytes - offset_bytes)]
            self._length = self._disk.preadv(self._handle, [view], offset_bytes) // BLOCK * BLOCK
            self._offset, start = offset_bytes, 0
        return self._piece[start : min(start + length_bytes, self._length)]

    def next_start(self, offset_bytes: int) -> int:
        """Return the next block that begins like a record, or the region's end."""
        while offset_bytes < self._end_bytes:
            view = self.at(offset_bytes, BLOCK, ahead=True)
            if not view:
                break
            start = offset_bytes - self._offset
            rest = np.frombuffer(self._piece[start : self._length], np.uint64)
            hits = np.flatnonzero(rest[:: BLOCK // 8] == _MAGIC)
            if hits.size:
                return offset_bytes + int(hits[0]) * BLOCK
            offset_bytes += rest.nbytes
        return self._end_bytes

    def record(self, offset_bytes: int, *, ahead: bool) -> Record:
        """Decode the header that begins there; BadRecord if none does."""
        size = header_bytes_of(self.at(offset_bytes, BLOCK, ahead=ahead))
        record = decode_record(self.at(offset_bytes, size, ahead=ahead))
        if record.length_bytes > self._end_bytes - offset_bytes:
            raise BadRecord("record: beyond the region")
        return record


def walk(
    disk: Disk, region: Region, region_bytes: int, uuid: bytes
) -> Iterator[tuple[int, Record]]:
    """Yield offset and header of every record of this use of a region.

    Raises:
        OSError: The disk failed; what was yielded before is good.
    """
    window = _Window(disk, region, region_bytes)
    spaces: dict[bytes, tuple[bytes, bytes, bytes]] = {}
    offset, ahead = BLOCK, False
    while offset < region_bytes:
        try:
            record = window.record(offset, ahead=ahead)
            _check(record, region, uuid, spaces)
        except BadRecord:
            offset = window.next_start(offset + BLOCK)
            continue
        yield offset, record
        offset += record.length_bytes
        ahead = record.length_bytes <= FAR_BYTES


def _check(
    record: Record, region: Region, uuid: bytes, spaces: dict[bytes, tuple[bytes, bytes, bytes]]
) -> None:
    """Raise BadRecord unless a record is of this use of a region, and describes its space."""
    origin = record.origin
    if (origin.store, origin.region, origin.incarnation) != (uuid, region.id, region.incarnation):
        raise BadRecord("record: of another store, region or use of it")
    if origin.generation <= origin.incarnation:
        raise BadRecord("record: older than this use of the region")
    ids = spaces.get(record.space_blob)
    if ids is None:
        space = decode_space(record.space_blob)
        ids = spaces[record.space_blob] = (space.digest, space.namespace, space.layout_id)
    if ids != (record.space_digest, record.namespace, record.layout_id):
        raise BadRecord("record: describes another space")


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
        packed = pack_row(row)
        before = self.newest.get(row.key)
        if before is not None:
            self.older.setdefault(row.key, []).append(before)
        self.newest[row.key] = packed

    def settle(self, disk: Disk, extents: Extents) -> None:
        """Where there are several records of a key, take the youngest that is whole (R5)."""
        for key, others in self.older.items():
            for packed in sorted([*others, self.newest[key]], key=_generation, reverse=True):
                self.newest[key] = packed
                if _is_whole(disk, extents, unpack_row(packed)):
                    break


def _generation(packed: bytes) -> int:
    return unpack_row(packed).generation


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
            rows = seal_rows([found.newest[key] for key in keys[first : first + BATCH_ROWS]])
            yield Changes([Change(row[:KEY_BYTES], row[KEY_BYTES:]) for row in rows])

    return place.build(fill()), found.life
