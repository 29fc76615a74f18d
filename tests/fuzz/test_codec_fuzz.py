"""Frames from a broken disk or a hostile hand: refused or decoded, in bounded memory.

A frame has no checksum of its own (the record has), so a changed payload may decode to other bytes;
what must hold is C1 and C2 of `kvd.codec`: one error type, nothing written outside `out`, bounded
memory.
"""

from __future__ import annotations

import struct
import tracemalloc
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("numba")
zstandard = pytest.importorskip("zstandard")

from kvd import codec  # noqa: E402 - after the checks for what it needs
from kvd.codec import CorruptFrame, ObjectShape  # noqa: E402
from kvd.codec.shape import ITEM_BYTES  # noqa: E402

if TYPE_CHECKING:
    from kvd.codec import Form

pytestmark = pytest.mark.timeout(300)  # the first use on a machine compiles

HEADER: Final = struct.Struct("<4sBBBBQIIII4Q")
GUARD_BYTES: Final = 64
ROOM_BYTES: Final = 16 << 20
DTYPES: Final = ("bfloat16", "float16", "float32")


def shape_for(dtype: str) -> ObjectShape:
    """Make a small shape with every axis."""
    return ObjectShape(4 * 8 * 3 * 40 * ITEM_BYTES[dtype], dtype, 4, 8, 3, 40)


@cache
def corpus(form: Form, dtype: str, planes: int) -> bytes:
    """Make a good frame."""
    shape = shape_for(dtype)
    rng = np.random.default_rng(planes)
    wide = rng.normal(size=shape.raw_bytes // ITEM_BYTES[dtype]).astype(np.float32)
    upper: Any = (wide.view(np.uint32) >> 16).astype(np.uint16)
    values = {"bfloat16": upper, "float16": wide.astype(np.float16), "float32": wide}[dtype]
    out = bytearray(codec.frame_bytes_max(form, shape))
    result = codec.encode(form, shape, values, out, planes=planes)
    return bytes(out[: result.size_bytes])


frames = st.tuples(st.sampled_from(codec.FORMS), st.sampled_from(DTYPES), st.integers(0, 15))


def survives(frame: bytes, shape: ObjectShape) -> bool:
    """Decode between guards with memory watched; whether it was taken for a frame."""
    room = np.full(shape.raw_bytes + 2 * GUARD_BYTES, 0xA5, dtype=np.uint8)
    out = room[GUARD_BYTES:-GUARD_BYTES]
    tracemalloc.start()
    try:
        codec.decode(frame, shape, out)
        taken = True
    except CorruptFrame:
        taken = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= shape.raw_bytes + ROOM_BYTES
    assert (room[:GUARD_BYTES] == 0xA5).all()
    assert (room[-GUARD_BYTES:] == 0xA5).all()
    return taken


@given(which=frames, edits=st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=6))
def test_changed_bytes(which: tuple[Form, str, int], edits: list[tuple[int, int]]) -> None:
    """Bytes changed anywhere."""
    frame = bytearray(corpus(*which))
    for at, value in edits:
        frame[at % len(frame)] = value
    survives(bytes(frame), shape_for(which[1]))


@given(which=frames, at=st.integers(0), cut=st.integers(0, 200), more=st.binary(max_size=80))
def test_cut_and_spliced(which: tuple[Form, str, int], at: int, cut: int, more: bytes) -> None:
    """Bytes taken out and others put in: never a frame, unless nothing was changed in length."""
    good = corpus(*which)
    start = at % len(good)
    frame = good[:start] + more + good[start + cut :]
    taken = survives(frame, shape_for(which[1]))
    assert not taken or len(frame) == len(good)


numbers = st.one_of(st.integers(0, 8), st.sampled_from([2**31, 2**32 - 1]), st.integers(0, 5000))
large = st.one_of(numbers, st.sampled_from([2**40, 2**63, 2**64 - 1]))


@given(
    which=frames,
    small=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    counts=st.lists(numbers, min_size=4, max_size=4),
    sizes=st.lists(large, min_size=5, max_size=5),
    kept=st.integers(0, (1 << 13) - 1),
)
def test_invented_headers(
    which: tuple[Form, str, int],
    small: list[int],
    counts: list[int],
    sizes: list[int],
    kept: int,
) -> None:
    """A header with some fields invented, before a good payload."""
    good = corpus(*which)
    fields = list(HEADER.unpack_from(good))
    invented = [*small, fields[4] ^ 1, sizes[0], *counts, *sizes[1:]]
    for index, value in enumerate(invented):
        if not kept >> index & 1:
            fields[index + 1] = value
    survives(HEADER.pack(*fields) + good[64:], shape_for(which[1]))


@given(data=st.binary(max_size=300), whole=st.booleans())
def test_noise(data: bytes, whole: bool) -> None:  # noqa: FBT001
    """Noise, with or without a good beginning."""
    taken = survives((b"kvdc\1" if whole else b"") + data, shape_for("bfloat16"))
    assert not taken


@given(
    which=frames,
    payload=st.one_of(st.binary(max_size=200), st.integers(0, 1 << 22).map(bytes)),
    window_log=st.integers(10, 27),
    declare=st.booleans(),
    twice=st.booleans(),
)
def test_foreign_zstd_frames(
    which: tuple[Form, str, int],
    payload: bytes,
    window_log: int,
    declare: bool,  # noqa: FBT001
    twice: bool,  # noqa: FBT001
) -> None:
    """Planes that are good zstd frames of something else, of any size and window."""
    form, dtype, _ = which
    shape = shape_for(dtype)
    head = list(HEADER.unpack_from(corpus(form, dtype, 0)))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=window_log, write_content_size=declare
    )
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(payload)
    packed *= 1 + twice
    count = head[9]
    head[4] = (1 << count) - 1
    head[10 : 10 + count] = [len(packed)] * count
    scales = bytes(2 * head[6])
    taken = survives(HEADER.pack(*head) + scales + packed * count, shape)
    assert not taken or len(payload) == shape.raw_bytes // count
