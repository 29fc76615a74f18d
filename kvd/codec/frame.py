"""The header of a frame: what is in an object's cold form, and the checks before it is believed.

    offset  bytes  field
         0      4  magic `kvdc`
         4      1  version
         5      1  form: 0 raw, 1 fp8, 2 lossless
         6      1  dtype, see `DTYPE_CODES`
         7      1  bit i: plane i is one zstd frame
         8      8  raw_bytes: the object's size
        16      4  scales: count; 0 but in fp8
        20      4  heads: of the scales' (planes, heads); 0 but in fp8
        24      4  blocks: times the heads come round in a plane; 0 but in fp8
        28      4  count of byte planes
        32     32  bytes stored of byte planes 0 to 3; 0 for those that are not there
        64         scales, int16 each: the power of two; then the byte planes, nothing after

All numbers are little-endian and unsigned but the scales. A *byte plane* is what is compressed as
a whole: the object (raw), its codes (fp8), or the bytes of one significance (lossless, the least
significant first). There is no checksum: the record around a frame has one.

Invariants:

F1. Nothing is allocated or read by a number of the header before it equals what the object's shape
    demands: the header cannot ask for memory.
F2. The sizes add up to the frame's length.

Pure; any thread.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.codec.shape import FORMS, FP8_DTYPES, ITEM_BYTES
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from kvd.codec.shape import Form, ObjectShape

MAGIC: Final = b"kvdc"
VERSION: Final = 1
BYTE_PLANES_MAX: Final = 4
SCALE_BYTES: Final = 2
ZSTD_FRAME_BYTES_MIN: Final = 9  # magic 4, descriptor 1, size 1, block header 3
DTYPE_CODES: Final[dict[str, int]] = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "float8_e4m3fn": 4,
    "float8_e5m2": 5,
    "int8": 6,
    "uint8": 7,
}

_HEADER: Final = struct.Struct("<4sBBBBQIIII4Q")
HEADER_BYTES: Final = _HEADER.size
assert HEADER_BYTES == 64  # noqa: PLR2004 - as drawn above


class CorruptFrame(KvdError):
    """A frame that is not what its shape demands, or does not decode; what was written is void."""


class CodecMissing(KvdError):
    """A library this form needs is not installed; the text says which."""


class Header(NamedTuple):
    """A frame's header, checked against the object's shape.

    Attributes:
        form: Of the object.
        zstd: Bit i: byte plane i is compressed.
        stored: Bytes of each byte plane in the frame.
    """

    form: Form
    zstd: int
    stored: tuple[int, ...]


def byte_planes(form: Form, shape: ObjectShape) -> tuple[int, ...]:
    """Give the bytes of each byte plane before compression."""
    if form == "fp8":
        values = shape.planes * shape.blocks * shape.heads * shape.run
        assert values * ITEM_BYTES[shape.dtype] == shape.raw_bytes > 0  # kernels trust the axes
        return (values,)
    if form == "lossless":
        return (shape.raw_bytes // shape.item_bytes,) * shape.item_bytes
    return (shape.raw_bytes,)


def scale_count(form: Form, shape: ObjectShape) -> int:
    """Count the scales of a frame."""
    return shape.scales if form == "fp8" else 0


def frame_bytes_max(form: Form, shape: ObjectShape) -> int:
    """Give the bytes that a frame of this form can take at most.

    Raises:
        ValueError: FP8 is refused for this shape.
    """
    if form == "fp8" and not (shape.scaled and shape.dtype in FP8_DTYPES):
        raise ValueError("fp8 needs a shape whose axes are known (shape_of)")
    size = sum(byte_planes(form, shape))
    return HEADER_BYTES + SCALE_BYTES * scale_count(form, shape) + size


def pack(header: Header, shape: ObjectShape, out: memoryview) -> None:
    """Write the header at the beginning of `out`."""
    scaled = header.form == "fp8"
    _HEADER.pack_into(
        out,
        0,
        MAGIC,
        VERSION,
        FORMS.index(header.form),
        DTYPE_CODES[shape.dtype],
        header.zstd,
        shape.raw_bytes,
        scale_count(header.form, shape),
        shape.heads if scaled else 0,
        shape.blocks if scaled else 0,
        len(header.stored),
        *header.stored,
        *(0,) * (BYTE_PLANES_MAX - len(header.stored)),
    )


def parse(frame: memoryview, shape: ObjectShape) -> Header:
    """Read the header and check it against the shape and the frame's length (F1, F2).

    Args:
        frame: The whole frame, exactly: bytes.
        shape: Of the object it should be.

    Raises:
        CorruptFrame: It is not such a frame.
    """
    form = frame_form(frame)
    fields = _HEADER.unpack_from(frame)
    dtype, zstd, raw_bytes, scales, heads, blocks, count = fields[3:10]
    _check(dtype == DTYPE_CODES[shape.dtype], "another dtype")
    _check(raw_bytes == shape.raw_bytes, "another raw size")
    if form == "fp8":
        _check(shape.scaled and shape.dtype in FP8_DTYPES, "fp8 for an object that has no scales")
        axes = (scales, heads, blocks) == (shape.scales, shape.heads, shape.blocks)
    else:
        axes = (scales, heads, blocks) == (0, 0, 0)
    _check(axes, "other axes")
    sizes = byte_planes(form, shape)
    _check(count == len(sizes), "another number of byte planes")
    _check(zstd >> count == 0, "a flag for a byte plane that is not there")
    stored: tuple[int, ...] = fields[10 : 10 + count]
    _check(not any(fields[10 + count :]), "a size for a byte plane that is not there")
    for index, (size, full) in enumerate(zip(stored, sizes, strict=True)):
        if zstd >> index & 1:
            _check(ZSTD_FRAME_BYTES_MIN <= size < full, "a compressed size out of bounds")
        else:
            _check(size == full, "a raw size that is not the byte plane's")
    total = HEADER_BYTES + SCALE_BYTES * scales + sum(stored)
    _check(total == len(frame), "sizes that do not add up to the frame's length")
    return Header(form, zstd, stored)


def frame_form(frame: memoryview) -> Form:
    """Read which form a frame has, with nothing else of it checked.

    Raises:
        CorruptFrame: Too short, or not a frame of this version.
    """
    _check(len(frame) >= HEADER_BYTES, "shorter than a header")
    form: int
    magic, version, form = _HEADER.unpack_from(frame)[:3]
    _check(magic == MAGIC, "no magic")
    _check(version == VERSION, "another version")
    _check(form < len(FORMS), "an unknown form")
    return FORMS[form]


def _check(holds: bool, what: str) -> None:  # noqa: FBT001 - an assertion for what comes from outside
    if not holds:
        raise CorruptFrame(f"the frame has {what}")
