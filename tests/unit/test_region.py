"""Records, regions and rows: what is written is read, and nothing else is taken for it."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvd.tiers import region as fmt
from kvd.tiers import rows as rowfmt
from kvd.tiers.region import BLOCK, BadRecord, Bundle, Origin, Part, Space

SPACE = Space("alice", b"n" * 32, b"l" * 32, "model@1", b"\x93\x01\x02\x03")
ORIGIN = Origin(b"u" * 16, 3, 1 << 32 | 1, 1 << 32 | 7)


def bundle(sizes: list[int], form: int = 0, hint: int = 5) -> Bundle:
    """Return a bundle with objects of these sizes, every second column left out."""
    parts = [Part(2 * n, form, size, bytes([n]) * size) for n, size in enumerate(sizes)]
    return Bundle(SPACE, b"c" * 32, b"p" * 32, parts, hint)


def header_of(item: Bundle, origin: Origin = ORIGIN) -> bytes:
    """Return the header of a bundle with right checksums."""
    plan = fmt.plan_record(item)
    sums = [xxhash.xxh3_64_intdigest(part.stored) for part in item.parts]
    return fmt.encode_record(item, plan, origin, sums)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=128))
def test_header_round_trip(sizes: list[int]) -> None:
    """A header says again what went into it, and each object has whole blocks of its own."""
    item = bundle(sizes)
    plan = fmt.plan_record(item)
    header = header_of(item)
    assert len(header) == plan.header_bytes
    assert fmt.header_bytes_of(header[:BLOCK]) == len(header)
    record = fmt.decode_record(header)
    assert record.origin == ORIGIN
    assert record.length_bytes == plan.length_bytes
    assert record.hint == 5
    assert [row.stored_bytes for row in record.objects] == sizes
    assert [row.column for row in record.objects] == [2 * n for n in range(len(sizes))]
    end = record.header_bytes
    for row in record.objects:
        assert row.offset_bytes == end
        end += fmt.aligned(row.stored_bytes)
    assert end == record.length_bytes
    fmt.check_identity(record, SPACE, b"c" * 32, b"p" * 32)
    fmt.check_place(record, ORIGIN, plan.length_bytes)
    assert fmt.decode_space(record.space_blob) == SPACE
    named = rowfmt.row_of(record, 4 * BLOCK)
    assert named == rowfmt.planned_row(item, plan, ORIGIN, 4 * BLOCK)
    assert rowfmt.decode_row(rowfmt.encode_row(named)) == named


def test_a_header_may_span_blocks() -> None:
    """All 256 columns fit; their header takes three blocks."""
    parts = [Part(n, 0, 1, b"x") for n in range(256)]
    item = Bundle(SPACE, b"c" * 32, b"p" * 32, parts)
    assert len(header_of(item)) == 3 * BLOCK
    assert len(fmt.decode_record(header_of(item)).objects) == 256


@pytest.mark.parametrize(
    "item",
    [
        bundle([]),
        Bundle(SPACE, b"c" * 31, b"p" * 32, [Part(0, 0, 1, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p", [Part(0, 0, 1, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p" * 32, [Part(1, 0, 1, b"x"), Part(0, 0, 1, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p" * 32, [Part(1, 0, 1, b"x"), Part(1, 0, 1, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p" * 32, [Part(256, 0, 1, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p" * 32, [Part(0, 0, 2, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p" * 32, [Part(0, 255, 2, b"x")]),
        Bundle(SPACE, b"c" * 32, b"p" * 32, [Part(0, 1, 1, b"")]),
        Bundle(SPACE._replace(label="x" * 9000), b"c" * 32, b"p" * 32, [Part(0, 0, 1, b"x")]),
        Bundle(SPACE._replace(namespace=b"n"), b"c" * 32, b"p" * 32, [Part(0, 0, 1, b"x")]),
    ],
)
def test_a_bad_bundle_is_refused(item: Bundle) -> None:
    """What breaks a rule of the format is refused before anything is written."""
    with pytest.raises(ValueError, match=r"\w"):
        fmt.plan_record(item)


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    """No single changed bit goes unnoticed, padding included."""
    header = header_of(bundle([100, 5000]))
    for bit in range(len(header) * 8):
        broken = bytearray(header)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadRecord):
            fmt.decode_record(broken)


def resealed(header: bytes, offset: int, value: bytes) -> bytes:
    """Change a field and make the checksum right again: a lie that is well told."""
    broken = bytearray(header)
    broken[offset : offset + len(value)] = value
    end = fmt._RECORD.size
    broken[end - 8 : end] = bytes(8)
    broken[end - 8 : end] = xxhash.xxh3_64_intdigest(broken).to_bytes(8, "little")
    return bytes(broken)


def test_lies_behind_a_right_checksum_are_refused() -> None:
    """Random words in a header with a right checksum never give a record that breaks D3."""
    chance = random.Random(1)
    header = header_of(bundle([100, 5000, 4096]))
    end = fmt._RECORD.size + 3 * fmt._OBJECT.size
    for _ in range(20_000):
        size = chance.choice([1, 2, 4, 8])
        offset = chance.randrange(0, end - size)
        value = chance.choice(
            [chance.randbytes(size), b"\xff" * size, bytes(size), (1).to_bytes(size, "little")]
        )
        try:
            record = fmt.decode_record(resealed(header, offset, value))
        except BadRecord:
            continue
        last = record.header_bytes
        for row in record.objects:
            assert last <= row.offset_bytes
            last = row.offset_bytes + row.stored_bytes
        assert last <= record.length_bytes <= 1 << 40


def test_identity_is_compared_whole() -> None:
    """A record of another tenant, namespace, layout, chunk, parent or use is refused."""
    record = fmt.decode_record(header_of(bundle([10])))
    for space in (
        SPACE._replace(tenant="bob"),
        SPACE._replace(namespace=b"N" * 32),
        SPACE._replace(layout_id=b"L" * 32),
    ):
        with pytest.raises(BadRecord):
            fmt.check_identity(record, space, b"c" * 32, b"p" * 32)
    with pytest.raises(BadRecord, match="chunk"):
        fmt.check_identity(record, SPACE, b"d" * 32, b"p" * 32)
    with pytest.raises(BadRecord, match="parent"):
        fmt.check_identity(record, SPACE, b"c" * 32, b"q" * 32)
    for origin in (
        ORIGIN._replace(store=b"v" * 16),
        ORIGIN._replace(region=4),
        ORIGIN._replace(incarnation=2),
        ORIGIN._replace(generation=8),
    ):
        with pytest.raises(BadRecord):
            fmt.check_place(record, origin, record.length_bytes)
    with pytest.raises(BadRecord):
        fmt.check_place(record, ORIGIN, record.length_bytes + BLOCK)
    assert SPACE.key != SPACE._replace(tenant="bob").key
    assert SPACE.key == SPACE._replace(label="other").key


def test_region_header() -> None:
    """A region's header round-trips, and no flipped bit of it goes unnoticed."""
    header = fmt.RegionHeader(b"u" * 16, 7, 1 << 28, 9 << 32)
    block = fmt.encode_region(header)
    assert len(block) == BLOCK
    assert fmt.decode_region(block) == header
    for bit in range(fmt._REGION.size * 8):
        broken = bytearray(block)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadRecord):
            fmt.decode_region(broken)
    with pytest.raises(BadRecord):
        fmt.decode_region(b"")


def test_every_flipped_bit_of_a_row_is_seen() -> None:
    """The check word of a row sees any single changed bit, and packed rows are checked at once."""
    row = rowfmt.planned_row(bundle([10]), fmt.plan_record(bundle([10])), ORIGIN, BLOCK)
    packed = rowfmt.encode_row(row)
    broken = []
    for bit in range(len(packed) * 8):
        other = bytearray(packed)
        other[bit // 8] ^= 1 << bit % 8
        broken.append(bytes(other))
    words = rowfmt.words_of(b"".join(broken))
    assert not (rowfmt.checks(words) == words[:, -1]).any()
    with pytest.raises(BadRecord):
        rowfmt.decode_row(broken[0])
    with pytest.raises(BadRecord):
        rowfmt.decode_row(packed[:-1])


@given(st.binary(max_size=200))
def test_a_space_blob_is_decoded_or_refused(blob: bytes) -> None:
    """Whatever the bytes, there is a space or a BadRecord."""
    try:
        space = fmt.decode_space(blob)
    except BadRecord:
        return
    assert len(space.namespace) == 32


def test_golden_bytes() -> None:
    """The format does not change by accident: a change needs a new FORMAT_VERSION."""
    header = header_of(bundle([100, 5000]))
    assert struct.unpack("<8sI", header[:12]) == (b"KVDRECD\0", 1)
    assert xxhash.xxh3_64_hexdigest(header) == GOLDEN_RECORD
    region = fmt.encode_region(fmt.RegionHeader(b"u" * 16, 7, 1 << 28, 9 << 32))
    assert xxhash.xxh3_64_hexdigest(region) == GOLDEN_REGION
    row = rowfmt.planned_row(bundle([10]), fmt.plan_record(bundle([10])), ORIGIN, BLOCK)
    assert xxhash.xxh3_64_hexdigest(rowfmt.encode_row(row)) == GOLDEN_ROW


GOLDEN_RECORD = "0138fd74f081e445"
GOLDEN_REGION = "1607c38066ebaa1c"
GOLDEN_ROW = "ebfca7b55958b640"
