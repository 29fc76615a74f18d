"""The cold form of an object: what the NVMe tier writes instead of the bytes it was given.

    encode(form, shape, source, out)   ->  Encoded   out[:size_bytes] is the frame
    decode(frame, shape, out)          ->  Decoded   out holds the object

Forms: `raw` (as it is), `lossless` (bytes apart by significance), `fp8` (lossy); each with zstd on
the byte planes asked for, where it saves enough. A frame says which form it is (`frame`); how the
object's bytes are read is not in it but comes from the layout (`shape`), and must agree.

Functions over buffers without state but a thread's scratch memory; for executor threads. Loops
over bytes run without the GIL. Importing this imports nothing heavy: numba, numpy and zstandard
come with the first call that needs them, or with `warm_up()`, before there is a hot path.

Invariants:

C1. `decode` writes nothing outside `out` and raises nothing but `CorruptFrame`, whatever the frame.
C2. `decode` holds at most the object's size in memory beside the frame and `out`, and zstd's window
    of at most 8 MiB.
C3. For `raw` and `lossless`, decoding gives the bytes that were encoded. For `fp8`, encoding what
    was decoded gives the same scales and codes: an object loses nothing by a second demotion.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd.codec import fp8, split, zplane
from kvd.codec.chooser import ALL_PLANES, Chooser, Rates
from kvd.codec.frame import (
    HEADER_BYTES,
    SCALE_BYTES,
    CodecMissing,
    CorruptFrame,
    Header,
    byte_planes,
    frame_bytes_max,
    frame_form,
    pack,
    parse,
    scale_count,
)
from kvd.codec.shape import FORMS, Form, ObjectShape, flat_shape, shape_of, usable_form

if TYPE_CHECKING:
    from mmap import mmap

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Buffer = bytes | bytearray | memoryview | mmap | npt.NDArray[Any]

__all__ = [
    "ALL_PLANES",
    "FORMS",
    "Chooser",
    "CodecMissing",
    "CorruptFrame",
    "Decoded",
    "Encoded",
    "Form",
    "ObjectShape",
    "PlaneSize",
    "Rates",
    "available_forms",
    "decode",
    "encode",
    "flat_shape",
    "frame_bytes_max",
    "frame_form",
    "is_exact",
    "shape_of",
    "usable_form",
    "warm_up",
]


class PlaneSize(NamedTuple):
    """What became of one byte plane.

    Attributes:
        raw_bytes: Before compression.
        stored_bytes: In the frame; equal where compression was not tried or does not pay.
        tried: Whether compression was tried.
        zstd_ns: What that took.
    """

    raw_bytes: int
    stored_bytes: int
    tried: bool
    zstd_ns: int


class Encoded(NamedTuple):
    """A frame that was written.

    Attributes:
        form: Of the frame.
        size_bytes: Of the frame, from the beginning of `out`.
        planes: Its byte planes, for `Chooser.record`.
        wild_heads: In fp8, the (plane, head) with infinities or NaN: KV of a broken model.
    """

    form: Form
    size_bytes: int
    planes: tuple[PlaneSize, ...]
    wild_heads: int = 0


class Decoded(NamedTuple):
    """A frame that was read.

    Attributes:
        form: Of the frame.
        exact: Whether the bytes are those that were stored.
        unzstd_bytes: Bytes of byte planes that were decompressed, for `Rates`.
        unzstd_ns: What that took.
    """

    form: Form
    exact: bool
    unzstd_bytes: int
    unzstd_ns: int


def is_exact(form: Form) -> bool:
    """Whether an object that went through this form has the bytes it had."""
    return form != "fp8"


def available_forms() -> tuple[Form, ...]:
    """Give the forms that can be written and read here; imports nothing.

    `raw` needs numpy alone while no plane is compressed; the others need numba and zstandard.
    """
    if find_spec("numba") is None or find_spec("zstandard") is None:
        return ("raw",)
    return FORMS


def warm_up() -> None:
    """Import and compile everything: some seconds the first time on a host, then 0.5 s.

    Call at start, in a thread; without it the first object pays.

    Raises:
        CodecMissing: numba or zstandard is not installed; `raw` works all the same.
    """
    zplane.zstandard_module()
    _need_kernels()
    from kvd.codec import _kernels  # noqa: F401 - compiles, as does kvd_client._fp8_loops


def encode(
    form: Form,
    shape: ObjectShape,
    source: Buffer,
    out: Buffer,
    *,
    planes: int = ALL_PLANES,
) -> Encoded:
    """Write an object's frame.

    Args:
        form: To write; `usable_form` says which a shape allows.
        shape: Of the object.
        source: The object, exactly: `shape.raw_bytes` bytes, contiguous, aligned to its values. It
            is only read; should somebody write to it meanwhile, the frame holds a mixture but reads
            well.
        out: At least `frame_bytes_max(form, shape)` bytes, writable, contiguous, the caller's
            alone; no part of `source`. All of it may be overwritten.
        planes: Bit i: try zstd on byte plane i (`Chooser.next_planes`).

    Raises:
        ValueError: Buffers that do not fit, or fp8 for a shape that has no scales; nothing written.
        CodecMissing: A library is not installed.
    """
    target = _bytes(out)
    if frame_bytes_max(form, shape) > len(target) or not target.flags.writeable:
        raise ValueError("out is smaller than frame_bytes_max, or read-only")
    if form != "raw":
        _need_kernels()
    sizes = byte_planes(form, shape)
    tried = [bool(planes >> index & 1) for index in range(len(sizes))]
    scales_end = HEADER_BYTES + SCALE_BYTES * scale_count(form, shape)
    # Planes to compress are made in scratch memory, the others where they belong, if that is known.
    room = zplane.scratch(sum(size for index, size in enumerate(sizes) if any(tried[: index + 1])))
    made: list[Bytes] = []
    at, free = scales_end, 0
    for index, size in enumerate(sizes):
        if any(tried[: index + 1]):
            made.append(room[free : free + size])
            free += size
        else:
            made.append(target[at : at + size])
            at += size
    wild = _make(form, shape, _values(source, shape, form), made, target[HEADER_BYTES:scales_end])
    done = _store(made, tried, target[scales_end:])
    zstd = sum(
        1 << index for index, plane in enumerate(done) if plane.stored_bytes < plane.raw_bytes
    )
    stored = tuple(plane.stored_bytes for plane in done)
    pack(Header(form, zstd, stored), shape, target.data)
    return Encoded(form, scales_end + sum(stored), done, wild)


def decode(frame: Buffer, shape: ObjectShape, out: Buffer) -> Decoded:
    """Read an object from its frame (C1, C2).

    Args:
        frame: The frame, exactly, contiguous; not trusted.
        shape: Of the object, from its layout.
        out: `shape.raw_bytes` bytes, writable, contiguous, aligned to the values; no part of
            `frame`. Void after an error: it must not be published.

    Raises:
        CorruptFrame: It is not a frame of such an object.
        ValueError: `out` does not fit; nothing written.
        CodecMissing: A library is not installed.
    """
    view = _bytes(frame).data
    header = parse(view, shape)
    if header.form != "raw":
        _need_kernels()
    target = _values(out, shape, header.form)
    if not target.flags.writeable:
        raise ValueError("out is read-only")
    sizes = byte_planes(header.form, shape)
    packed = [bool(header.zstd >> index & 1) for index in range(len(sizes))]
    direct = header.form == "raw"  # its plane is the object, so it needs no scratch
    room = zplane.scratch(0 if direct else sum(s for s, z in zip(sizes, packed, strict=True) if z))
    scales_end = at = HEADER_BYTES + SCALE_BYTES * scale_count(header.form, shape)
    planes: list[Bytes] = []
    free = spent = unpacked = 0
    for size, stored, is_packed in zip(sizes, header.stored, packed, strict=True):
        if is_packed:
            plane = target if direct else room[free : free + size]
            free += 0 if direct else size
            spent += zplane.decompress(view[at : at + stored], plane)
            unpacked += size
        else:
            plane = _bytes(view[at : at + stored])
        planes.append(plane)
        at += stored
    if header.form == "fp8":
        fp8.decode(shape, planes[0], _exponents(view[HEADER_BYTES:scales_end]), target)
    elif header.form == "lossless":
        split.merge(planes, target)
    elif not unpacked:
        target[:] = planes[0]
    return Decoded(header.form, is_exact(header.form), unpacked, spent)


def _make(
    form: Form,
    shape: ObjectShape,
    values: Any,  # noqa: ANN401 - arrays of three widths
    planes: list[Bytes],
    scales: Bytes,
) -> int:
    """Make the byte planes and scales; returns `Encoded.wild_heads`."""
    if form == "fp8":
        exponents = _exponents(scales)  # a copy: out need not be aligned
        wild = fp8.encode(shape, values, planes[0], exponents)
        scales[:] = _bytes(exponents)
        return wild
    if form == "lossless":
        split.split(values, planes)
    else:
        planes[0][:] = values
    return 0


def _store(made: list[Bytes], tried: list[bool], out: Bytes) -> tuple[PlaneSize, ...]:
    """Put the byte planes one after another into `out`, compressed where asked for and paying."""
    done: list[PlaneSize] = []
    at = 0
    for plane, is_tried in zip(made, tried, strict=True):
        size, spent = zplane.compress(plane, out[at:]) if is_tried else (0, 0)
        if not size:
            size = len(plane)
            if is_tried or any(tried[: len(done)]):  # else it was made in its place
                out[at : at + size] = plane
        done.append(PlaneSize(len(plane), size, is_tried, spent))
        at += size
    return tuple(done)


_DTYPES: Final = {1: "u1", 2: "<u2", 4: "<u4"}


def _values(buffer: Buffer, shape: ObjectShape, form: Form) -> Any:  # noqa: ANN401
    """View an object's bytes as bits of values, (values,) unsigned, as wide as the form needs.

    Raises:
        ValueError: Not the object's size, not contiguous, or not aligned to its values.
    """
    flat = _bytes(buffer)
    if len(flat) != shape.raw_bytes:
        raise ValueError(f"a buffer of {len(flat)} bytes for an object of {shape.raw_bytes}")
    values = flat.view(_DTYPES[1 if form == "raw" else shape.item_bytes])
    if not values.flags.aligned:
        raise ValueError("a buffer that is not aligned to the object's values")
    return values


def _bytes(buffer: Buffer) -> Bytes:
    """View a contiguous buffer as (n,) uint8."""
    import numpy as np

    return np.frombuffer(buffer, dtype=np.uint8)


def _exponents(scales: Buffer) -> npt.NDArray[np.int16]:
    """Copy the scales out of a frame: (scales,) int16."""
    import numpy as np

    return np.frombuffer(scales, dtype="<i2").copy()


@cache
def _need_kernels() -> None:
    """Raise CodecMissing unless numba is installed."""
    if find_spec("numba") is None:
        raise CodecMissing("this form needs the package numba, not installed here: kvd[cpu]")
