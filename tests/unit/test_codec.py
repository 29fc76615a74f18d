"""Frames: every form and dtype comes back, and only where it belongs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("numba")
zstandard = pytest.importorskip("zstandard")

from kvd import codec  # noqa: E402 - after the checks for what it needs
from kvd.codec import CorruptFrame, ObjectShape  # noqa: E402
from kvd.codec.shape import FP8_DTYPES, ITEM_BYTES  # noqa: E402

pytestmark = pytest.mark.timeout(180)  # the first use on a machine compiles

PLANES, BLOCKS, HEADS, RUN = 4, 64, 3, 32
VALUES: Final = PLANES * BLOCKS * HEADS * RUN


def kv_shape(dtype: str = "bfloat16") -> ObjectShape:
    """Make a shape with axes, or a flat one for dtypes that are not quantised."""
    size = VALUES * ITEM_BYTES[dtype]
    if dtype not in FP8_DTYPES:
        return ObjectShape(size, dtype)
    return ObjectShape(size, dtype, PLANES, BLOCKS, HEADS, RUN)


def kv_bytes(dtype: str = "bfloat16", seed: int = 0) -> bytes:
    """Make KV as models have it: normal, with channels that stand out."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(PLANES, BLOCKS, HEADS, RUN)).astype(np.float32)
    values[..., ::16] *= 12
    if dtype == "float32":
        made: Any = values
    elif dtype == "float16":
        made = values.astype(np.float16)
    elif dtype == "bfloat16":
        made = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        made = (values.view(np.uint32) >> 24).astype(np.uint8)
    data: bytes = made.tobytes()
    return data


def encoded(
    form: codec.Form, shape: ObjectShape, source: bytes, planes: int = codec.ALL_PLANES
) -> tuple[bytes, codec.Encoded]:
    """Encode into memory of exactly the size promised."""
    out = bytearray(codec.frame_bytes_max(form, shape))
    result = codec.encode(form, shape, source, out, planes=planes)
    assert result.size_bytes <= len(out)
    return bytes(out[: result.size_bytes]), result


def decoded(frame: bytes, shape: ObjectShape) -> bytes:
    """Decode into memory of the object's size."""
    out = bytearray(shape.raw_bytes)
    codec.decode(frame, shape, out)
    return bytes(out)


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
@pytest.mark.parametrize("form", ["raw", "lossless"])
@pytest.mark.parametrize("planes", [0, 1, 2, 5, 8, 15])
def test_exact_forms_come_back(form: codec.Form, dtype: str, planes: int) -> None:
    """Every byte is what it was, whichever planes are compressed, and the frame says exact."""
    shape, source = kv_shape(dtype), kv_bytes(dtype)
    frame, result = encoded(form, shape, source, planes)
    out = bytearray(shape.raw_bytes)
    read = codec.decode(frame, shape, out)
    assert out == source
    assert (read.form, read.exact, result.form) == (form, True, form)
    packed = [plane for plane in result.planes if plane.stored_bytes < plane.raw_bytes]
    assert read.unzstd_bytes == sum(plane.raw_bytes for plane in packed)
    assert all(plane.tried for plane in packed)
    for index, plane in enumerate(result.planes):
        assert plane.tried == bool(planes >> index & 1)
    assert codec.frame_form(memoryview(frame)) == form


@pytest.mark.parametrize("dtype", sorted(FP8_DTYPES))
@pytest.mark.parametrize("planes", [0, 1])
def test_fp8_comes_back_as_it_was_rounded(dtype: str, planes: int) -> None:
    """The frame is half or a quarter of the object, says lossy, and is a fixed point."""
    shape, source = kv_shape(dtype), kv_bytes(dtype)
    frame, result = encoded("fp8", shape, source, planes)
    assert result.size_bytes <= 64 + 2 * shape.scales + VALUES
    if planes:
        assert result.planes[0].stored_bytes < result.planes[0].raw_bytes
    out = bytearray(shape.raw_bytes)
    read = codec.decode(frame, shape, out)
    assert (read.form, read.exact) == ("fp8", False)
    assert out != source
    again, _ = encoded("fp8", shape, bytes(out), planes)
    assert again == frame
    plain, _ = encoded("fp8", shape, source, 0)
    assert decoded(plain, shape) == out


def test_lossless_takes_two_thirds() -> None:
    """The exponents compress to a third, the rest is not tried in vain for long."""
    frame, result = encoded("lossless", kv_shape(), kv_bytes())
    assert len(frame) < 0.75 * kv_shape().raw_bytes
    low, high = result.planes
    assert high.stored_bytes < 0.5 * high.raw_bytes
    assert low.stored_bytes == low.raw_bytes


def test_float32_that_was_bfloat16_is_small() -> None:
    """The lower half of such values is zero, and takes no room."""
    wide = (np.frombuffer(kv_bytes(), np.uint16).astype(np.uint32) << 16).tobytes()
    frame, _ = encoded("lossless", kv_shape("float32"), wide)
    assert len(frame) < 0.4 * len(wide)


def test_what_does_not_compress_stays_as_it_is() -> None:
    """Noise costs a header, no more."""
    noise = np.random.default_rng(3).bytes(kv_shape().raw_bytes)
    for form in ("raw", "lossless"):
        frame, result = encoded(form, kv_shape(), noise)
        assert len(frame) == 64 + len(noise)
        assert all(plane.stored_bytes == plane.raw_bytes for plane in result.planes)
        assert decoded(frame, kv_shape()) == noise


@given(data=st.binary(min_size=1, max_size=70), dtype=st.sampled_from(list(ITEM_BYTES)))
def test_objects_of_any_size_come_back(data: bytes, dtype: str) -> None:
    """Odd sizes, that no dtype divides, have exact forms too."""
    shape = ObjectShape(len(data), dtype)
    for form in ("raw", "lossless"):
        frame, _ = encoded(form, shape, data)
        assert decoded(frame, shape) == data


def test_golden_header() -> None:
    """The header's bytes are those drawn in `kvd.codec.frame`: other bytes need a new version."""
    shape = ObjectShape(24, "bfloat16", 2, 3, 1, 2)
    frame, _ = encoded("fp8", shape, np.full(12, 0x3F80, np.uint16).tobytes(), 0)
    head = struct.pack("<4sBBBBQIIII4Q", b"kvdc", 1, 1, 3, 0, 24, 2, 1, 3, 1, 12, 0, 0, 0)
    assert frame == head + struct.pack("<2h", -8, -8) + b"\x78" * 12
    frame, _ = encoded("lossless", shape, struct.pack("<12H", *[0xC012] * 12), 0)
    head = struct.pack("<4sBBBBQIIII4Q", b"kvdc", 1, 2, 3, 0, 24, 0, 0, 0, 2, 12, 12, 0, 0)
    assert frame == head + b"\x92" * 12 + b"\x80" * 12


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"planes": 2, "heads": 2 * HEADS},
        {"blocks": 2 * BLOCKS, "run": RUN // 2},
        {"planes": 0, "blocks": 0, "heads": 0, "run": 0},
        {"planes": PLANES // 2, "raw_bytes": VALUES},
    ],
)
def test_frame_of_another_shape_is_refused(other: dict[str, Any]) -> None:
    """FP8 is read with exactly the axes it was written with."""
    frame, _ = encoded("fp8", kv_shape(), kv_bytes())
    shape = kv_shape()._replace(**other)
    with pytest.raises(CorruptFrame):
        codec.decode(frame, shape, bytearray(shape.raw_bytes))


HEADER: Final = struct.Struct("<4sBBBBQIIII4Q")


@pytest.mark.parametrize("form", codec.FORMS)
def test_every_field_of_the_header_counts(form: codec.Form) -> None:
    """No field can be another number without the frame being refused, but a flag on its data."""
    shape = kv_shape()
    frame, _ = encoded(form, shape, kv_bytes())
    fields = HEADER.unpack_from(frame)
    for index, field in enumerate(fields):
        values = [b"kvdC"] if index == 0 else [field ^ 1, field ^ 2, field + 1 & 255, 255]
        for value in values:
            if value == field:
                continue
            changed = HEADER.pack(*fields[:index], value, *fields[index + 1 :]) + frame[64:]
            with pytest.raises(CorruptFrame):
                codec.decode(changed, shape, bytearray(shape.raw_bytes))


@pytest.mark.parametrize("form", codec.FORMS)
def test_length_must_be_exact(form: codec.Form) -> None:
    """A frame cut short or longer is no frame."""
    shape = kv_shape()
    frame, _ = encoded(form, shape, kv_bytes())
    for wrong in (b"", frame[:1], frame[:63], frame[:64], frame[:-1], frame + b"\0"):
        with pytest.raises(CorruptFrame):
            codec.decode(wrong, shape, bytearray(shape.raw_bytes))


@pytest.mark.parametrize("exponent", [-117, 120, -32768, 32767])
def test_scale_out_of_bounds_is_refused(exponent: int) -> None:
    """An exponent that would make the kernels' arithmetic wrap never reaches them."""
    shape = kv_shape()
    frame = bytearray(encoded("fp8", shape, kv_bytes())[0])
    struct.pack_into("<h", frame, 64 + 2 * (shape.scales - 1), exponent)
    out = bytearray(shape.raw_bytes)
    with pytest.raises(CorruptFrame):
        codec.decode(frame, shape, out)
    assert not any(out)


def raw_frame(shape: ObjectShape, packed: bytes) -> bytes:
    """Make a raw frame around what may be a zstd frame."""
    size = len(packed)
    head = HEADER.pack(b"kvdc", 1, 0, 3, 1, shape.raw_bytes, 0, 0, 0, 1, size, 0, 0, 0)
    return head + packed


def parameters(**more: Any) -> Any:
    """Make zstd parameters with a fixed window."""
    return zstandard.ZstdCompressionParameters.from_level(1, **more)


def hostile_frames(size: int) -> dict[str, bytes]:
    """Make zstd frames that are well-formed but not the plane they are said to be."""
    plain, window = parameters(window_log=17), parameters(window_log=24)
    without_size = parameters(window_log=17, write_content_size=False)
    trained = zstandard.ZstdCompressionDict(os.urandom(2048), zstandard.DICT_TYPE_RAWCONTENT)
    one = zstandard.ZstdCompressor(compression_params=plain).compress
    whole = one(bytes(size))
    return {
        "shorter": one(bytes(size - 1)),
        "longer": one(bytes(size + 1)),
        "a bomb": one(bytes(1 << 28)),
        "no size": zstandard.ZstdCompressor(compression_params=without_size).compress(bytes(size)),
        "large window": zstandard.ZstdCompressor(compression_params=window).compress(bytes(size)),
        "cut": whole[:-3],
        "skippable": b"\x50\x2a\x4d\x18" + struct.pack("<I", size) + bytes(64),
        "not zstd": bytes(64),
        "with a dictionary": zstandard.ZstdCompressor(dict_data=trained).compress(bytes(size))[:9],
    }


def test_hostile_zstd_frames_are_refused() -> None:
    """A plane's frame must declare, and have, exactly the plane's size in a small window."""
    size = 17 << 20
    shape = ObjectShape(size, "bfloat16")
    out = bytearray(size)
    good = zstandard.ZstdCompressor(compression_params=parameters(window_log=17))
    codec.decode(raw_frame(shape, good.compress(bytes(size))), shape, out)
    for packed in hostile_frames(size).values():
        with pytest.raises(CorruptFrame):
            codec.decode(raw_frame(shape, packed), shape, out)
    codec.decode(raw_frame(shape, good.compress(bytes(size))), shape, out)  # the thread lives on


def test_read_only_and_unaligned_buffers() -> None:
    """A source may be read-only; what cannot be written or is not aligned is said so at once."""
    shape, source = kv_shape(), kv_bytes()
    frame, _ = encoded("lossless", shape, source)  # bytes are read-only
    for form in codec.FORMS:
        with pytest.raises(ValueError, match="read-only"):
            codec.encode(form, shape, source, bytes(codec.frame_bytes_max(form, shape)))
        with pytest.raises(ValueError, match="smaller"):
            codec.encode(form, shape, source, bytearray(codec.frame_bytes_max(form, shape) - 1))
        with pytest.raises(ValueError, match="buffer of"):
            codec.encode(form, shape, source[2:], bytearray(codec.frame_bytes_max(form, shape)))
    with pytest.raises(ValueError, match="read-only"):
        codec.decode(frame, shape, bytes(shape.raw_bytes))
    with pytest.raises(ValueError, match="buffer of"):
        codec.decode(frame, shape, bytearray(shape.raw_bytes + 2))
    room = np.zeros(shape.raw_bytes + 8, np.uint8)
    odd = room[1 + room.ctypes.data % 2 :][: shape.raw_bytes]
    with pytest.raises(ValueError, match="aligned"):
        codec.decode(frame, shape, odd)


def test_frames_may_lie_anywhere() -> None:
    """Neither the frame nor the room for it need be aligned."""
    shape, source = kv_shape(), kv_bytes()
    for form in codec.FORMS:
        room = bytearray(codec.frame_bytes_max(form, shape) + 9)
        for start in (1, 3, 8):
            view = memoryview(room)[start:]
            result = codec.encode(form, shape, source, view)
            out = bytearray(shape.raw_bytes)
            codec.decode(view[: result.size_bytes], shape, out)
            assert (out == source) == codec.is_exact(form)


def test_shape_that_contradicts_itself_reaches_no_kernel() -> None:
    """Axes that do not multiply up to the object's size are a bug, found before any byte moves."""
    shape = kv_shape()._replace(run=RUN + 1)
    with pytest.raises(AssertionError):
        codec.encode("fp8", shape, kv_bytes(), bytearray(10 * VALUES))


def test_threads_do_not_share_memory() -> None:
    """Many threads at once give what one gives."""
    shape = kv_shape()
    sources = [kv_bytes(seed=seed) for seed in range(8)]

    def both(index: int) -> bytes:
        frame, _ = encoded(codec.FORMS[index % 3], shape, sources[index % 8])
        return decoded(frame, shape)

    alone = [both(index) for index in range(24)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(both, list(range(24)) * 4)) == alone * 4


def run_python(program: str, **environment: str) -> str:
    """Run a program in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


def test_import_is_light() -> None:
    """Importing the codec loads none of the libraries it works with."""
    loaded = run_python("import kvd.codec, sys; print(*sys.modules)").split()
    assert "kvd.codec" in loaded
    assert not {"numba", "numpy", "zstandard", "torch"} & set(loaded)


def test_without_the_libraries_raw_is_left() -> None:
    """Where numba or zstandard is missing, it says so and raw frames work."""
    program = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:] or MISSING))
from kvd import codec
shape = codec.ObjectShape(64, "bfloat16", 1, 1, 1, 32)
out, back = bytearray(1000), bytearray(64)
assert codec.available_forms() == ("raw",)
size = codec.encode("raw", shape, b"x" * 64, out, planes=0).size_bytes
codec.decode(memoryview(out)[:size], shape, back)
assert back == b"x" * 64
for work in (codec.warm_up, lambda: codec.encode("lossless", shape, b"x" * 64, out)):
    try:
        work()
    except codec.CodecMissing as error:
        print(error)
"""
    for name in ("numba", "zstandard"):
        text = run_python(program.replace("MISSING", repr([name])))
        assert len(text.splitlines()) == 2
        assert text.count(name) == 2


def test_compiled_code_goes_to_the_services_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder systemd gives is used, unless the user has named one."""
    import numba

    from kvd_client import _fp8_loops

    settings: Any = numba.config
    monkeypatch.setattr(settings, "CACHE_DIR", "")
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    _fp8_loops.cache_folder()
    assert not settings.CACHE_DIR
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/kvd:/var/cache/other")
    _fp8_loops.cache_folder()
    assert settings.CACHE_DIR == "/var/cache/kvd/numba"
    monkeypatch.setattr(settings, "CACHE_DIR", "mine")
    _fp8_loops.cache_folder()
    assert settings.CACHE_DIR == "mine"
