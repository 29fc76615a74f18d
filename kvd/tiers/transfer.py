"""Moves records between memory and a region file. In the store's I/O threads only.

Everything is read and written by whole blocks at aligned addresses, as O_DIRECT wants it: straight
from and into memory that is page-aligned, by way of memory of our own where it is not, and for the
last part of an object that does not fill a block.

Ownership: the buffers belong to the thread for the whole of one call.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvd.tiers import region as fmt
from kvd.tiers.disk import aligned_memory, copy, is_aligned, read_all, write_all
from kvd.tiers.region import BLOCK, FORM_RAW, BadRecord, ObjectRow, Origin, Record, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _typeshed import WriteableBuffer

    from kvd.tiers.disk import Disk
    from kvd.tiers.region import Bundle, Plan, Ref, Space

    Take = Callable[[int], memoryview]

RUN_BUFFERS: Final = 512
"""Most buffers in one call; the kernel takes 1024."""


class Loaded(NamedTuple):
    """One object read and verified.

    Attributes:
        form: As it was written; FORM_RAW for the object's own bytes.
        raw_bytes: Of the object.
        stored: The caller's buffer, cut to the object's length, or memory of its own.
    """

    form: int
    raw_bytes: int
    stored: memoryview


class Want(NamedTuple):
    """What a read expects to find (D1)."""

    origin: Origin
    known_incarnation: bool
    ref: Ref
    space: Space
    chunk: bytes
    parent: bytes


def _flat(buffer: object) -> memoryview:
    return memoryview(buffer).cast("B")  # type: ignore[arg-type]


def _outgoing(view: memoryview) -> list[memoryview]:
    """Return whole aligned blocks with the bytes of `view`, padded with zeros."""
    whole = view.nbytes // BLOCK * BLOCK
    if whole and is_aligned(view):
        if whole == view.nbytes:
            return [view]
        last = aligned_memory(BLOCK)
        last[: view.nbytes - whole] = view[whole:]
        return [view[:whole], last]
    staged = aligned_memory(view.nbytes)
    copy(staged[: view.nbytes], view)
    return [staged]


def write_record(  # noqa: PLR0917 - run in a thread by name and arguments
    disk: Disk, handle: int, offset_bytes: int, bundle: Bundle, plan: Plan, origin: Origin
) -> None:
    """Checksum a bundle and write it; not durable before the region is synced.

    A client that changes an object meanwhile spoils only that object: its checksum will not fit.

    Raises:
        OSError: The record may lie there in part; nothing names it.
    """
    views = [_flat(part.stored) for part in bundle.parts]
    checksums = [
        xxhash.xxh3_64_intdigest(view) if part.checksum is None else part.checksum
        for part, view in zip(bundle.parts, views, strict=True)
    ]
    header = aligned_memory(plan.header_bytes)
    header[:] = fmt.encode_record(bundle, plan, origin, checksums)
    buffers = [header]
    for view in views:
        buffers += _outgoing(view)
    write_all(disk, handle, buffers, offset_bytes)


def read_header(disk: Disk, handle: int, offset_bytes: int, end_bytes: int) -> Record:
    """Read the record header that begins there, checked against itself.

    Raises:
        BadRecord: No whole record within `end_bytes` begins there.
        OSError: The disk failed.
    """
    if end_bytes - offset_bytes < BLOCK:
        raise BadRecord("record: beyond the region")
    header = aligned_memory(BLOCK)
    _read(disk, handle, [header], offset_bytes)
    size = fmt.header_bytes_of(header)
    if size > BLOCK:
        if size > end_bytes - offset_bytes:
            raise BadRecord("record: beyond the region")
        longer = aligned_memory(size)
        longer[:BLOCK] = header
        _read(disk, handle, [longer[BLOCK:]], offset_bytes + BLOCK)
        header = longer
    record = fmt.decode_record(header)
    if record.length_bytes > end_bytes - offset_bytes:
        raise BadRecord("record: beyond the region")
    return record


def _read(disk: Disk, handle: int, buffers: list[memoryview], offset_bytes: int) -> None:
    try:
        read_all(disk, handle, buffers, offset_bytes)
    except OSError as error:
        if error.errno == errno.ENODATA:
            raise BadRecord("region: shorter than it was") from error
        raise


def read_bundle(
    disk: Disk,
    handle: int,
    want: Want,
    into: Mapping[int, WriteableBuffer | None],
    take: Take,
) -> dict[int, Loaded]:
    """Read and verify objects of a record.

    Args:
        disk: The host's files.
        handle: Of the region.
        want: What lies there.
        into: By column, where a raw object goes; the others go to memory of their own.
        take: Gives that memory, aligned, for a number of bytes.

    Raises:
        BadRecord: It is another record, or damaged, or lacks a column. The buffers hold rubbish.
        OSError: The disk failed; likewise.
        ValueError: A buffer is too short for its object.
    """
    ref = want.ref
    record = read_header(disk, handle, ref.offset_bytes, ref.offset_bytes + ref.length_bytes)
    origin = want.origin
    if not want.known_incarnation:
        origin = origin._replace(incarnation=record.origin.incarnation)
    fmt.check_place(record, origin, ref.length_bytes)
    fmt.check_identity(record, want.space, want.chunk, want.parent)
    rows = {row.column: row for row in record.objects}
    if not into.keys() <= rows.keys():
        raise BadRecord("record: lacks a column")
    arrivals = [_Arrival(rows[column], into[column], take) for column in sorted(into)]
    for run in _runs(arrivals):
        buffers = [buffer for arrival in run for buffer in arrival.buffers]
        _read(disk, handle, buffers, ref.offset_bytes + run[0].row.offset_bytes)
    return {arrival.row.column: arrival.finish() for arrival in arrivals}


def verify_record(disk: Disk, handle: int, offset_bytes: int, record: Record) -> None:
    """Read every object of a record and compare checksums; BadRecord or OSError if one is bad."""
    for row in record.objects:
        arrival = _Arrival(row, None, aligned_memory)
        _read(disk, handle, arrival.buffers, offset_bytes + row.offset_bytes)
        arrival.finish()


class _Arrival:
    """Where one object's blocks go, and what is left to do once they are there."""

    def __init__(self, row: ObjectRow, given: WriteableBuffer | None, take: Take) -> None:
        self.row = row
        size = row.stored_bytes
        self._staged: memoryview | None = None
        if given is None or row.form != FORM_RAW:
            memory = take(size)
            self._view = memory[:size]
            self.buffers = [memory[: aligned(size)]]
            return
        self._view = _flat(given)[:size]
        if self._view.nbytes < size or self._view.readonly:
            msg = f"the buffer for column {row.column} is too short, or read-only"
            raise ValueError(msg)
        self._direct_bytes = size // BLOCK * BLOCK if is_aligned(self._view) else 0
        self.buffers = [self._view[: self._direct_bytes]] if self._direct_bytes else []
        if self._direct_bytes < size:
            self._staged = aligned_memory(size - self._direct_bytes)
            self.buffers.append(self._staged)

    def finish(self) -> Loaded:
        """Complete the object and verify it; BadRecord if its bytes are not those written."""
        row = self.row
        if self._staged is not None:
            rest = self._view[self._direct_bytes :]
            copy(rest, self._staged[: rest.nbytes])
        if xxhash.xxh3_64_intdigest(self._view) != row.checksum:
            raise BadRecord("record: checksum of an object")
        return Loaded(row.form, row.raw_bytes, self._view)


def _runs(arrivals: list[_Arrival]) -> list[list[_Arrival]]:
    """Put neighbours on disk together, to be read by one call."""
    runs: list[list[_Arrival]] = []
    end = count = 0
    for arrival in arrivals:
        row = arrival.row
        if runs and row.offset_bytes == end and count + len(arrival.buffers) <= RUN_BUFFERS:
            runs[-1].append(arrival)
        else:
            runs.append([arrival])
            count = 0
        count += len(arrival.buffers)
        end = row.offset_bytes + aligned(row.stored_bytes)
    return runs
