"""Start-up of the NVMe store: what is there, what of it may be believed, and what next.

Invariants:

R1. A row of the index is handed on only if its check fits, its region is there and in the same use,
    and its place lies within the region. Whether the record is whole is seen when it is read.
R2. Rows that are not handed on are deleted from the index before the first write.
R3. A new life begins, durably, before the first generation of it is used (D2).
R4. Recovery can be cut short at any point and begun again.
R5. A rebuilt index names the youngest whole record of each key; it may bring back what had been
    deleted, never what is damaged beside an older whole one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.errors import StartError
from kvd.tiers.disk import aligned_memory
from kvd.tiers.extents import Extents, Region, RegionState
from kvd.tiers.index import Change, Changes, IndexBroken, IndexFailed, IndexFull
from kvd.tiers.region import BLOCK, FORMAT_VERSION, BadRecord, decode_region, decode_space
from kvd.tiers.rows import (
    ENTRY,
    ENTRY_PARTS,
    KEY_BYTES,
    ROW,
    ROW_BYTES,
    Row,
    checks,
    words_of,
)
from kvd.tiers.storefiles import (
    identify,
    lay_ballast,
    read_clean,
    region_path,
    take,
    takes_direct,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvd.tiers.disk import Disk
    from kvd.tiers.index import Index, IndexPlace
    from kvd.tiers.nvme_types import Entry
    from kvd.tiers.region import Space
    from kvd.tiers.storefiles import Identity

LIFE_SHIFT: Final = 32


@dataclass(slots=True)
class Report:
    """What a start found.

    Attributes:
        how: `fresh`, `clean`, `copied` (not stopped cleanly; index copied), `rebuilt` (by scan).
        entries: Rows handed on.
        dropped: Rows that could not be right.
        regions: Region files.
        regions_bad: Of them, with an unreadable header or of another length.
        direct: Whether reads and writes pass the page cache by.
        seconds: Until the index was read and checked.
        notes: Lines for the operator.
    """

    how: str = "clean"
    entries: int = 0
    dropped: int = 0
    regions: int = 0
    regions_bad: int = 0
    direct: bool = True
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Recovered:
    """A store ready for its first write. The handles belong to whoever has this."""

    identity: Identity
    lock: int
    life: int
    index: Index
    extents: Extents
    spaces: dict[bytes, Space]
    batches: list[bytes]
    report: Report


# -------------------------------------------------------------------------------- regions


def open_regions(
    disk: Disk,
    directory: Path,
    extents: Extents,
    uuid: bytes,
    report: Report,
    *,
    remove: bool = True,
) -> None:
    """Open every region file. Sealed until their rows are counted; a bad header is None.

    One of another length holds nothing that counts, since its length is durable before its first
    record is; it goes, with `remove`.
    """
    for name in disk.names(directory / "regions"):
        if not (len(name) == 8 and name.isdecimal()):  # noqa: PLR2004 - as region_path writes it
            report.notes.append("there is a file in regions/ that is none")
            continue
        number = int(name)
        handle = disk.open(region_path(directory, number), direct=report.direct)
        if disk.size(handle) != extents.region_bytes:
            disk.close(handle)
            if remove:
                disk.unlink(region_path(directory, number))
            report.regions_bad += 1
            continue
        report.regions += 1
        region = Region(number, handle, RegionState.SEALED, None)
        block = aligned_memory(BLOCK)
        try:
            disk.preadv(handle, [block], 0)
            header = decode_region(block)
            expected = (uuid, number, extents.region_bytes)
            if (header.store, header.region, header.region_bytes) == expected:
                region.incarnation = header.incarnation
        except (BadRecord, OSError):
            pass
        report.regions_bad += region.incarnation is None
        extents.regions[number] = region


# -------------------------------------------------------------------------------- rows


class _Table:
    """What the rows are checked against, by region number."""

    def __init__(self, extents: Extents, life: int) -> None:
        count = 1 + max(extents.regions, default=0)
        self.usable = np.zeros(count, np.bool_)
        self.incarnation = np.zeros(count, np.uint64)
        self.region_bytes = np.uint64(extents.region_bytes)
        self.life = np.uint64(life)
        for number, region in extents.regions.items():
            self.usable[number] = region.handle >= 0
            self.incarnation[number] = region.incarnation or 0

    def good(self, words: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell which rows may be right (R1)."""
        number = words[:, 14] & np.uint64(0xFFFFFFFF)
        offset, length, generation, stored = (words[:, column] for column in range(15, 19))
        good: NDArray[np.bool_] = (checks(words) == words[:, -1]) & (number < self.usable.size)
        number = np.where(good, number, 0).astype(np.int64)
        block = np.uint64(BLOCK)
        good &= self.usable[number] & (generation > self.incarnation[number])
        good &= (generation >> np.uint64(LIFE_SHIFT)) <= self.life
        good &= (offset >= block) & (offset % block == 0)
        good &= (length >= 2 * block) & (length % block == 0) & (length <= self.region_bytes)
        good &= (offset <= self.region_bytes - np.where(good, length, 0)) & (stored <= length)
        return good


def _unknown_spaces(words: NDArray[np.uint64], known: set[bytes], seen: set[bytes]) -> list[slice]:
    """Return the runs of rows whose space is not described; note the others as seen."""
    if not len(words):
        return []
    edges = np.flatnonzero(np.any(words[1:, :2] != words[:-1, :2], axis=1)) + 1
    starts = [0, *edges.tolist()]
    runs = []
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        key = words[start, :2].tobytes()
        seen.add(key)
        if key not in known:
            runs.append(slice(start, end))
    return runs


def _count(batches: list[bytes], extents: Extents) -> None:
    """Account for the rows that are handed on, region by region."""
    if not batches:
        return
    words = [words_of(batch) for batch in batches]
    number = np.concatenate([part[:, 14] & np.uint64(0xFFFFFFFF) for part in words])
    order = np.argsort(number, kind="stable")
    number = number[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1])
    lengths = np.concatenate([part[:, 16] for part in words])[order]
    ends = np.concatenate([part[:, 15] for part in words])[order] + lengths
    keys = np.concatenate(
        [np.frombuffer(b, np.uint8).reshape(-1, ROW_BYTES)[:, :KEY_BYTES] for b in batches]
    )[order]
    live, tails = np.add.reduceat(lengths, starts), np.maximum.reduceat(ends, starts)
    for group, (start, end) in enumerate(pairwise([*starts.tolist(), len(number)])):
        region = extents.regions[int(number[start])]
        region.live_count += end - start
        region.live_bytes += int(live[group])
        region.tail_bytes = max(region.tail_bytes, int(tails[group]))
        region.keys += keys[start:end].tobytes()


def _sifted(
    index: Index, extents: Extents, life: int, spaces: dict[bytes, Space], seen: set[bytes]
) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield the rows that may be right, packed, and the keys of those that cannot be (R1)."""
    table = _Table(extents, life)
    for batch in index.batches():
        if len(batch) % ROW_BYTES:
            raise IndexBroken("index: a row of another length")
        words = words_of(batch)
        good = table.good(words)
        for run in _unknown_spaces(words, set(spaces), seen):
            good[run] = False
        raw = np.frombuffer(batch, np.uint8).reshape(-1, ROW_BYTES)
        bad = [row[:KEY_BYTES].tobytes() for row in raw[~good]]
        yield (batch if good.all() else raw[good].tobytes()), bad


def sift_rows(
    index: Index, extents: Extents, life: int
) -> tuple[dict[bytes, Space], Iterator[tuple[list[Row], list[bytes]]]]:
    """Return the spaces, and row by row what `sift` would hand on and what not. For checks."""
    spaces, _ = _known_spaces(index)

    def rows() -> Iterator[tuple[list[Row], list[bytes]]]:
        for packed, bad in _sifted(index, extents, life, spaces, set()):
            yield [Row._make(fields[:-1]) for fields in ROW.iter_unpack(packed)], bad

    return spaces, rows()


def sift(
    index: Index, extents: Extents, life: int, report: Report
) -> tuple[list[bytes], dict[bytes, Space], list[Changes]]:
    """Read the whole index; return what is good, and how to delete what is not (R1, R2).

    Also counts the good rows into `extents`, and forgets spaces without rows.
    """
    spaces, cleaning = _known_spaces(index)
    seen: set[bytes] = set()
    batches, newest = [], (0, -1)
    for packed, bad in _sifted(index, extents, life, spaces, seen):
        if packed:
            words = words_of(packed)
            row = words[int(np.argmax(words[:, 17]))]
            newest = max(newest, (int(row[17]), int(row[14]) & 0xFFFFFFFF))
            batches.append(packed)
        if bad:
            cleaning.append(Changes([Change(key, None) for key in bad]))
        report.entries += len(packed) // ROW_BYTES
        report.dropped += len(bad)
    cleaning.append(Changes(spaces=dict.fromkeys(spaces.keys() - seen)))
    _count(batches, extents)
    _settle(extents, newest[1])
    return batches, {key: spaces[key] for key in spaces.keys() & seen}, cleaning


def _known_spaces(index: Index) -> tuple[dict[bytes, Space], list[Changes]]:
    known: dict[bytes, Space] = {}
    cleaning = Changes()
    for key, blob in index.spaces().items():
        try:
            space = decode_space(blob)
            if space.key == key:
                known[key] = space
                continue
        except BadRecord:
            pass
        cleaning.spaces[key] = None
    return known, [cleaning]


def _settle(extents: Extents, newest: int) -> None:
    """Free what nothing names; go on appending where the youngest row is."""
    for region in list(extents.regions.values()):
        if region.state is not RegionState.SEALED:
            continue
        if not region.live_count:
            region.state = RegionState.FREE
            region.tail_bytes = BLOCK
            extents.adopt(region)
        elif region.id == newest and region.incarnation is not None and region.id < extents.count:
            region.state = RegionState.OPEN
            extents.current[False] = region


# -------------------------------------------------------------------------------- the whole


def begin_meta(uuid: bytes, life: int) -> dict[bytes, bytes]:
    """Return meta of an index of this store."""
    version = FORMAT_VERSION.to_bytes(4, "little")
    return {b"uuid": uuid, b"version": version, b"life": life.to_bytes(8, "little")}


def life_of(index: Index, uuid: bytes) -> int:
    """Return the last life an index knows of.

    Raises:
        IndexBroken: It is the index of another store or format.
    """
    meta = index.meta()
    life = int.from_bytes(meta.get(b"life", b""), "little")
    if meta != begin_meta(uuid, life) or not 0 <= life < 1 << 31:
        raise IndexBroken("index: of another store or format")
    return life


def open_index(
    disk: Disk, place: IndexPlace, mark: bytes, identity: Identity, found: tuple[Extents, Report]
) -> tuple[Index, int]:
    """Open the index, or rebuild it; return it with the last life."""
    from kvd.tiers.rebuild import rebuild

    extents, report = found
    try:
        index = place.open(mark)
        if index is not None:
            try:
                last = life_of(index, identity.uuid)
            except IndexBroken:
                index.close()
                raise
            if place.copied and mark:
                report.notes.append("the index was changed after the clean stop")
            report.how = "copied" if place.copied else "clean"
            return index, last
        if not report.regions:
            report.how = "fresh"
            return place.build([Changes(meta=begin_meta(identity.uuid, 0))]), 0
        report.notes.append("there was no index")
    except IndexBroken as error:
        report.notes.append(str(error))
    report.how = "rebuilt"
    return rebuild(disk, place, identity.uuid, extents, 0)


def begin_life(index: Index, uuid: bytes, life: int, cleaning: list[Changes]) -> None:
    """Commit a new life, and what has to be cleaned up (R2, R3)."""
    for changes in [Changes(meta=begin_meta(uuid, life)), *cleaning]:
        if changes.rows or changes.spaces or changes.meta:
            index.commit(changes)


def recover(
    disk: Disk,
    place: IndexPlace,
    directory: Path,
    *,
    regions: int,
    region_bytes: int,
    spare: int,
    direct: bool,
) -> Recovered:
    """Bring a store to where it may be written to; blocks.

    Raises:
        StartError: It cannot be used; the text says what to change. Nothing is held.
    """
    began = time.monotonic()
    handles: list[int] = []
    try:
        handles.append(take(disk, directory))
        identity = identify(disk, directory, region_bytes)
        mark = read_clean(disk, directory, identity.uuid)
        report = Report()
        disk.unlink(directory / "clean")
        report.direct = direct and takes_direct(disk, directory)
        if direct and not report.direct:
            report.notes.append("the file system has no O_DIRECT: through the page cache")
        extents = Extents(regions, region_bytes, spare)
        open_regions(disk, directory, extents, identity.uuid, report)
        handles += [region.handle for region in extents.regions.values() if region.handle >= 0]
        index, last = open_index(disk, place, mark, identity, (extents, report))
        try:
            batches, spaces, cleaning = sift(index, extents, last, report)
            begin_life(index, identity.uuid, last + 1, cleaning)
        except BaseException:
            index.close()
            raise
        lay_ballast(disk, directory)
    except BaseException as error:
        for handle in handles:
            disk.close(handle)
        if isinstance(error, OSError | IndexFull | IndexFailed | IndexBroken):
            text = error.strerror if isinstance(error, OSError) else str(error)
            raise StartError(
                f"the NVMe store in {directory}: {text}; mend that, or set another [nvme] directory"
            ) from error
        raise
    _forget_excess(disk, directory, extents)
    report.seconds = time.monotonic() - began
    return Recovered(identity, handles[0], last + 1, index, extents, spaces, batches, report)


def _forget_excess(disk: Disk, directory: Path, extents: Extents) -> None:
    """Remove empty regions beyond the capacity."""
    for region in [r for r in extents.regions.values() if r.id >= extents.count]:
        if region.state is RegionState.FREE:
            disk.close(region.handle)
            disk.unlink(region_path(directory, region.id))
            del extents.regions[region.id]


def entries_of(batches: list[bytes]) -> Iterator[tuple[bytes, Iterator[Entry]]]:
    """Yield each space's key and rows, the oldest row first; the batches are used up.

    The index has them in the order of their hashes. In the order of writing a chunk is near the
    others of its prefix: the tree is put up with few look-ups, and lies in memory as it is read.

    Args:
        batches: Packed rows in the index's order, so that a space's are together.
    """
    words = [words_of(batch) for batch in batches]
    count = sum(len(part) for part in words)
    if not count:
        return
    generations = np.concatenate([part[:, 17] for part in words])
    keys = np.concatenate([part[:, :2] for part in words])
    edges = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
    starts = [0, *edges.tolist(), count]
    named = [keys[start].tobytes() for start in starts[:-1]]
    turn = np.empty(count, np.int64)
    for start, end in pairwise(starts):
        turn[start + np.argsort(generations[start:end], kind="stable")] = np.arange(start, end)
    del words, keys, generations
    packed = np.empty((count, ENTRY.size), np.uint8)
    end = count
    while batches:  # each is let go of once it is copied
        rows = np.frombuffer(batches.pop(), np.uint8).reshape(-1, ROW_BYTES)
        packed[turn[end - len(rows) : end]] = np.concatenate(
            [rows[:, at : at + size] for at, size in ENTRY_PARTS], axis=1
        )
        end -= len(rows)
    del turn
    for key, start, end in zip(named, starts, starts[1:], strict=False):
        yield key, ENTRY.iter_unpack(packed[start:end].data.cast("B"))
