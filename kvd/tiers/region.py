"""What lies on NVMe: region headers and records. Pure: bytes in, values out.

A region file, every border a multiple of 4096 bytes:

    | region header | record | record | ... | unused |

A record:

    | header: fixed part, one row an object, zeros | object 0 | object 1 | ... |

Each object begins at a 4096-byte border and is padded with zeros, so a raw one can be read by
O_DIRECT straight into a slot. All numbers are little-endian.

Invariants:

D1. A record is believed only if magic, format version, store, region, incarnation, generation, key
    (tenant digest, namespace, layout, chunk), parent and the header's checksum are all as expected;
    an object only if its own checksum is right too.
D2. Generations and incarnations come from one counter that never repeats in the life of a store
    (`life << 32 | sequence`, the life being durable before it is used): a record of an earlier use
    of a region is older than that region's incarnation.
D3. Nothing read from disk is used as a length or an offset before it was checked against the
    record's own limits.

The store's uuid is secret (owner-only files, never sent): a client cannot put bytes into an object
that a scan would take for a record.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import msgpack
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer

BLOCK: Final = 4096
FORMAT_VERSION: Final = 1
COLUMNS_MAX: Final = 256
HASH_BYTES: Final = 32
UUID_BYTES: Final = 16
SPACE_KEY_BYTES: Final = 16
REGION_BYTES_MIN: Final = 64 << 10
REGION_BYTES_MAX: Final = 1 << 40
FORM_RAW: Final = 0
"""Stored as it is. Every other form is the codec's business."""
FORM_MIXED: Final = 255
"""In an index row: the objects of this bundle have several forms. No object's own."""


def aligned(size_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-size_bytes // BLOCK) * BLOCK


class Space(NamedTuple):
    """What bundles may be compared with each other.

    Attributes:
        tenant: The tenant's name.
        namespace: 32-byte id.
        layout_id: 32-byte id.
        label: For people.
        layout: The layout's fields as the caller encodes them; opaque here, kept in the index.
    """

    tenant: str
    namespace: bytes
    layout_id: bytes
    label: str = ""
    layout: bytes = b""

    @property
    def key(self) -> bytes:
        """The 16 bytes that stand for it in the index; the record repeats the whole identity."""
        return self.digest[:SPACE_KEY_BYTES]

    @property
    def digest(self) -> bytes:
        """32 bytes over tenant, namespace and layout."""
        body = self.namespace + self.layout_id + self.tenant.encode()
        return blake2b(body, digest_size=HASH_BYTES, person=b"kvd.space.1").digest()


class Part(NamedTuple):
    """One object to write; `stored` belongs to the store until the write has ended.

    Attributes:
        column: Which of its chunk's.
        form: A number of the caller's.
        raw_bytes: What it was before it came into this form.
        stored: The bytes.
        checksum: Their xxh3-64, where the caller knows what they should be; None: as they are.
    """

    column: int
    form: int
    raw_bytes: int
    stored: ReadableBuffer
    checksum: int | None = None


class Bundle(NamedTuple):
    """One chunk with its objects, written and committed as one.

    Attributes:
        space: Whose.
        chunk: Chunk hash, 32 bytes.
        parent: Hash of the chunk before it, or the namespace id.
        parts: Objects by rising column, at least one.
        hint: A number of the caller's that comes back from the index at start.
    """

    space: Space
    chunk: bytes
    parent: bytes
    parts: Sequence[Part]
    hint: int = 0


class Ref(NamedTuple):
    """Where a bundle lies; of no use once the generation there is another."""

    region: int
    offset_bytes: int
    length_bytes: int
    generation: int


class ObjectRow(NamedTuple):
    """A record's line about one object; `offset_bytes` counts from the record's start."""

    column: int
    form: int
    raw_bytes: int
    stored_bytes: int
    offset_bytes: int
    checksum: int


class BadRecord(ValueError):
    """Bytes that are not the record, region or row they should be; the text says why."""


# -------------------------------------------------------------------------------- spaces

SPACE_BLOB_BYTES_MAX: Final = 8 << 10


def encode_space(space: Space) -> bytes:
    """Encode a space for the index and for every record header.

    Raises:
        ValueError: A field has the wrong length, or all together are too long.
    """
    if len(space.namespace) != HASH_BYTES or len(space.layout_id) != HASH_BYTES:
        msg = f"a space's ids have {HASH_BYTES} bytes"
        raise ValueError(msg)
    blob: bytes = msgpack.packb(list(space), use_bin_type=True)
    if len(blob) > SPACE_BLOB_BYTES_MAX:
        msg = f"a space's description has at most {SPACE_BLOB_BYTES_MAX} bytes"
        raise ValueError(msg)
    return blob


def decode_space(blob: bytes) -> Space:
    """Decode what `encode_space` made; BadRecord otherwise."""
    limit = SPACE_BLOB_BYTES_MAX
    try:
        fields = msgpack.unpackb(
            blob,
            raw=False,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=8,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise BadRecord("space: not msgpack") from error
    types = [str, bytes, bytes, str, bytes]
    if not isinstance(fields, list) or [type(field) for field in fields] != types:
        raise BadRecord("space: fields")
    space = Space._make(fields)
    if len(space.namespace) != HASH_BYTES or len(space.layout_id) != HASH_BYTES:
        raise BadRecord("space: length of an id")
    return space


# -------------------------------------------------------------------------------- regions

_REGION: Final = struct.Struct("<8sII16sIIQQQ")
_REGION_MAGIC: Final = b"KVDREGN\0"


class RegionHeader(NamedTuple):
    """The first block of a region file, checked."""

    store: bytes
    region: int
    region_bytes: int
    incarnation: int


def encode_region(header: RegionHeader) -> bytes:
    """Return the block that begins a region file."""
    fields = (header.store, header.region, 0, header.region_bytes, header.incarnation)
    body = _REGION.pack(_REGION_MAGIC, FORMAT_VERSION, BLOCK, *fields, 0)[:-8]
    check = xxhash.xxh3_64_intdigest(body)
    return (body + check.to_bytes(8, "little")).ljust(BLOCK, b"\0")


def decode_region(block: ReadableBuffer) -> RegionHeader:
    """Decode a region's first block; BadRecord if it is not one of this format."""
    raw = bytes(memoryview(block)[: _REGION.size])
    if len(raw) < _REGION.size:
        raise BadRecord("region: short")
    magic, version, header_bytes, store, region, zero, size, incarnation, check = _REGION.unpack(
        raw
    )
    if magic != _REGION_MAGIC:
        raise BadRecord("region: magic")
    if (version, header_bytes, zero) != (FORMAT_VERSION, BLOCK, 0):
        raise BadRecord("region: format version")
    if check != xxhash.xxh3_64_intdigest(raw[:-8]):
        raise BadRecord("region: checksum")
    return RegionHeader(store, region, size, incarnation)


# -------------------------------------------------------------------------------- records

_RECORD: Final = struct.Struct("<8sII16sIIIIQQQQ32s32s32s32s32s32sQ")
_RECORD_MAGIC: Final = b"KVDRECD\0"
_OBJECT: Final = struct.Struct("<HBBIQQQQ")
HEADER_BYTES_MAX: Final = aligned(_RECORD.size + COLUMNS_MAX * _OBJECT.size + SPACE_BLOB_BYTES_MAX)
OBJECT_BYTES_MAX: Final = 1 << 36


class Origin(NamedTuple):
    """Where a record is written: what it repeats of its place."""

    store: bytes
    region: int
    incarnation: int
    generation: int


class Record(NamedTuple):
    """A record's header, checked against itself (not yet against what was expected)."""

    origin: Origin
    header_bytes: int
    length_bytes: int
    hint: int
    space_digest: bytes
    space_blob: bytes
    namespace: bytes
    layout_id: bytes
    chunk: bytes
    parent: bytes
    mask: bytes
    objects: tuple[ObjectRow, ...]


class Plan(NamedTuple):
    """Where a bundle's parts come to lie, before checksums are known."""

    header_bytes: int
    length_bytes: int
    offsets: tuple[int, ...]
    mask: bytes
    space_blob: bytes


def plan_record(bundle: Bundle) -> Plan:
    """Lay out a record.

    Raises:
        ValueError: The bundle breaks a rule: no parts, columns not rising, a length of zero, an id
            of another length.
    """
    parts = bundle.parts
    columns = [part.column for part in parts]
    if not parts or columns != sorted(set(columns)) or not 0 <= columns[0] <= columns[-1] < 256:  # noqa: PLR2004 - COLUMNS_MAX
        msg = f"a bundle has parts by rising column from 0 to {COLUMNS_MAX - 1}"
        raise ValueError(msg)
    if len(bundle.chunk) != HASH_BYTES or len(bundle.parent) != HASH_BYTES:
        msg = f"a chunk's and its parent's hash have {HASH_BYTES} bytes"
        raise ValueError(msg)
    blob = encode_space(bundle.space)
    end = header_bytes = aligned(_RECORD.size + len(parts) * _OBJECT.size + len(blob))
    offsets = []
    for part in parts:
        size = memoryview(part.stored).nbytes
        if not (0 < size <= OBJECT_BYTES_MAX and 0 < part.raw_bytes <= OBJECT_BYTES_MAX):
            raise ValueError("an object has at least one byte and at most 64 GiB")
        if not 0 <= part.form < FORM_MIXED or (part.form == FORM_RAW and part.raw_bytes != size):
            raise ValueError("an object's form is from 0 to 254, and raw means as long as it is")
        offsets.append(end)
        end += aligned(size)
    mask = sum(1 << column for column in columns).to_bytes(HASH_BYTES, "little")
    return Plan(header_bytes, end, tuple(offsets), mask, blob)


def encode_record(bundle: Bundle, plan: Plan, origin: Origin, checksums: Sequence[int]) -> bytes:
    """Return a record's header, whole blocks."""
    space = bundle.space
    rows = b"".join(
        _OBJECT.pack(
            part.column,
            part.form,
            0,
            0,
            part.raw_bytes,
            memoryview(part.stored).nbytes,
            offset,
            checksum,
        )
        for part, offset, checksum in zip(bundle.parts, plan.offsets, checksums, strict=True)
    )
    fixed = _RECORD.pack(
        _RECORD_MAGIC,
        FORMAT_VERSION,
        plan.header_bytes,
        origin.store,
        origin.region,
        len(bundle.parts),
        len(plan.space_blob),
        0,
        origin.incarnation,
        origin.generation,
        plan.length_bytes,
        bundle.hint,
        space.digest,
        space.namespace,
        space.layout_id,
        bundle.chunk,
        bundle.parent,
        plan.mask,
        0,
    )
    header = bytearray((fixed + rows + plan.space_blob).ljust(plan.header_bytes, b"\0"))
    check = xxhash.xxh3_64_intdigest(header)
    header[_RECORD.size - 8 : _RECORD.size] = check.to_bytes(8, "little")
    return bytes(header)


def header_bytes_of(block: ReadableBuffer) -> int:
    """Return the length of the header that a block begins, at most HEADER_BYTES_MAX.

    Raises:
        BadRecord: No record of this format begins here.
    """
    head = bytes(memoryview(block)[:16])
    if head[:8] != _RECORD_MAGIC:
        raise BadRecord("record: magic")
    version, size = struct.unpack("<II", head[8:])
    if version != FORMAT_VERSION:
        raise BadRecord("record: format version")
    if not BLOCK <= size <= HEADER_BYTES_MAX or size % BLOCK:
        raise BadRecord("record: length of the header")
    return int(size)


def decode_record(header: ReadableBuffer) -> Record:
    """Decode a header of exactly `header_bytes_of` bytes, checked against itself (D3).

    Raises:
        BadRecord: The text says which rule is broken.
    """
    raw = bytearray(header)
    size = header_bytes_of(raw)
    if len(raw) != size:
        raise BadRecord("record: short")
    fields = _RECORD.unpack_from(raw)
    store, region, count, blob_bytes, zero, incarnation, generation, length, hint = fields[3:12]
    digest, namespace, layout_id, chunk, parent, mask, check = fields[12:]
    raw[_RECORD.size - 8 : _RECORD.size] = bytes(8)
    if check != xxhash.xxh3_64_intdigest(raw):
        raise BadRecord("record: checksum of the header")
    rows_end = _RECORD.size + count * _OBJECT.size
    if not 1 <= count <= COLUMNS_MAX or zero or blob_bytes > SPACE_BLOB_BYTES_MAX:
        raise BadRecord("record: counts")
    if aligned(rows_end + blob_bytes) != size:
        raise BadRecord("record: length of the header")
    objects = _objects(raw[_RECORD.size : rows_end], size, length, mask)
    return Record(
        Origin(store, region, incarnation, generation),
        size,
        length,
        hint,
        digest,
        bytes(raw[rows_end : rows_end + blob_bytes]),
        namespace,
        layout_id,
        chunk,
        parent,
        mask,
        objects,
    )


def _objects(rows: bytearray, start: int, length: int, mask: bytes) -> tuple[ObjectRow, ...]:
    found = []
    end, bits, last = start, 0, -1
    for column, form, zero, none, raw, stored, offset, checksum in _OBJECT.iter_unpack(rows):
        if column <= last or column >= COLUMNS_MAX or zero or none or form == FORM_MIXED:
            raise BadRecord("record: columns")
        if not (0 < raw <= OBJECT_BYTES_MAX and 0 < stored <= OBJECT_BYTES_MAX):
            raise BadRecord("record: length of an object")
        if offset != end or (form == FORM_RAW and raw != stored):
            raise BadRecord("record: place of an object")
        end += aligned(stored)
        bits |= 1 << column
        last = column
        found.append(ObjectRow(column, form, raw, stored, offset, checksum))
    if end != length or bits.to_bytes(HASH_BYTES, "little") != mask:
        raise BadRecord("record: length")
    return tuple(found)


def check_identity(record: Record, space: Space, chunk: bytes, parent: bytes) -> None:
    """Raise BadRecord unless this record is of that bundle (D1)."""
    if record.space_digest != space.digest:
        raise BadRecord("record: another tenant, namespace or layout")
    if (record.namespace, record.layout_id) != (space.namespace, space.layout_id):
        raise BadRecord("record: another namespace or layout")
    if record.chunk != chunk:
        raise BadRecord("record: another chunk")
    if record.parent != parent:
        raise BadRecord("record: another parent")


def check_place(record: Record, origin: Origin, length_bytes: int) -> None:
    """Raise BadRecord unless this record was written there, and is that one (D1, D2)."""
    if record.origin != origin:
        raise BadRecord("record: another store, region, incarnation or generation")
    if record.length_bytes != length_bytes:
        raise BadRecord("record: another length")
