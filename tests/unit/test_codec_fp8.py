"""FP8 against torch's own conversion, for every value and every scale."""

from __future__ import annotations

import math
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")
pytest.importorskip("numba")
torch = pytest.importorskip("torch")

from kvd.codec import ObjectShape, fp8  # noqa: E402 - after the checks for what it needs

pytestmark = pytest.mark.timeout(180)  # the first use on a machine compiles

ITEM: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
INFINITE: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
EVERY: Final = 1 << 16


def shape_for(dtype: str, planes: int, blocks: int, heads: int, run: int) -> ObjectShape:
    """Make a shape of these axes."""
    size = planes * blocks * heads * run * ITEM[dtype]
    return ObjectShape(size, dtype, planes, blocks, heads, run)


def encoded(shape: ObjectShape, bits: Any) -> tuple[Any, Any, int]:
    """Quantise; returns codes, exponents and the count of wild heads."""
    codes = np.full(bits.size, 0xEE, dtype=np.uint8)
    exponents = np.full(shape.scales, 77, dtype=np.int16)
    wild = fp8.encode(shape, bits.ravel(), codes, exponents)
    return codes, exponents, wild


def decoded(shape: ObjectShape, codes: Any, exponents: Any) -> Any:
    """Give the bits of values."""
    bits = np.full(codes.size, 0xEEEE, dtype=np.uint32 if ITEM[shape.dtype] == 4 else np.uint16)
    fp8.decode(shape, codes, np.asarray(exponents, dtype=np.int16), bits)
    return bits


def as_double(bits: Any, dtype: str) -> Any:
    """Give the values of bits as torch float64."""
    signed = torch.from_numpy(bits.view(np.int32 if ITEM[dtype] == 4 else np.int16))
    return signed.view(getattr(torch, dtype)).double()


def torch_codes(values: Any, exponent: int) -> Any:
    """Give torch's codes of values under a scale; exact up to its one rounding."""
    scaled = (values * 2.0**-exponent).float()
    # Older releases of torch turn infinity and what is too large into NaN.
    clamped = torch.where(scaled.isnan(), scaled, scaled.clamp(-448, 448))
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def powers(exponents: list[int]) -> Any:
    """Give powers of two as torch float64."""
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float64)


def fitting(dtype: str, exponent: int, bits: Any) -> Any:
    """Replace by zero what would saturate under a scale, so that the scale is the right one."""
    kept = bits.copy()
    low, high = fp8.EXPONENTS[dtype]
    values = as_double(bits, dtype).abs().numpy()
    if exponent < high:
        kept[np.isfinite(values) & (values > 1.8125 * 2.0 ** (exponent + 8))] = 0
    if exponent > low:  # and nothing that would do with less is the largest
        finite = np.isfinite(values) & (kept != 0)
        assert values[finite].max() > 1.8125 * 2.0 ** (exponent + 7)
    return kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads_apart", [False, True])
def test_every_16_bit_value_under_every_scale(dtype: str, heads_apart: bool) -> None:  # noqa: FBT001
    """Scale and codes of all 65,536 values, for all scales, are what torch says."""
    low, high = fp8.EXPONENTS[dtype]
    every = np.arange(EVERY, dtype=np.uint16)
    objects = np.stack([fitting(dtype, e, every) for e in range(low, high + 1)])
    if heads_apart:  # heads side by side in each of 1024 blocks
        shape = shape_for(dtype, 1, 1024, len(objects), 64)
        source = objects.reshape(-1, 1024, 64).transpose(1, 0, 2)
    else:
        shape = shape_for(dtype, len(objects), 1, 1, EVERY)
        source = objects
    codes, exponents, wild = encoded(shape, np.ascontiguousarray(source))
    assert exponents.tolist() == list(range(low, high + 1))
    assert wild == len(objects)  # each has the infinities and NaN
    if heads_apart:
        codes = codes.reshape(1024, -1, 64).transpose(1, 0, 2)
    codes = codes.reshape(-1, EVERY)
    for own, bits, exponent in zip(codes, objects, exponents.tolist(), strict=True):
        expected = torch_codes(as_double(bits, dtype), exponent)
        assert np.array_equal(own, expected), exponent


@pytest.mark.parametrize("blocks", [1, 8])
def test_float32_under_every_scale(blocks: int) -> None:
    """Values around every step and half step of float32 are rounded as torch does."""
    rng = np.random.default_rng(5)
    upper = np.concatenate([np.arange(0, 256, dtype=np.uint32) << 23, [0x7FC00000, 0xFFC00000]])
    mantissas = (np.arange(33, dtype=np.uint32) << 18)[:, None] + np.array([-1, 0, 1])
    near = (upper[:, None].astype(np.int64) + mantissas.ravel()).ravel() & 0x7FFFFFFF
    bits = np.concatenate([near, near | 1 << 31, rng.integers(0, 1 << 32, 4096)])
    bits = np.resize(bits.astype(np.uint32), 53248)
    low, high = fp8.EXPONENTS["float32"]
    scales = [*range(low, high + 1, 13), high]
    objects = np.stack([fitting("float32", e, bits) for e in scales])
    shape = shape_for("float32", len(scales), blocks, 1, bits.size // blocks)
    codes, exponents, _ = encoded(shape, objects)
    assert exponents.tolist() == scales
    for own, values, exponent in zip(codes.reshape(len(scales), -1), objects, scales, strict=True):
        expected = torch_codes(as_double(values, "float32"), exponent)
        assert np.array_equal(own, expected), exponent


@pytest.mark.parametrize("dtype", list(ITEM))
def test_every_code_under_every_scale(dtype: str) -> None:
    """Decoding is exact: code times power of two, zero's and NaN's sign kept."""
    low, high = fp8.EXPONENTS[dtype]
    scales = list(range(low, high + 1))
    codes = np.tile(np.arange(256, dtype=np.uint8), len(scales))
    for axes in ((len(scales), 1, 1, 256), (len(scales), 4, 1, 64)):
        bits = decoded(shape_for(dtype, *axes), codes, scales)
        values = as_double(bits, dtype).reshape(-1, 256)
        unit = torch.from_numpy(codes[:256]).view(torch.float8_e4m3fn).double()
        expected = unit[None, :] * powers(scales)[:, None]
        assert torch.equal(values.nan_to_num(nan=7e77), expected.nan_to_num(nan=7e77))
        assert not values.isinf().any()
        assert torch.equal(values.signbit(), expected.signbit())


def test_scale_is_the_heads_own() -> None:
    """A large head does not cost its neighbours their precision, in either order of axes."""
    sizes = np.array([1e-6, 1.0, 300.0, 4e4], dtype=np.float32)
    rng = np.random.default_rng(1)
    heads_first = rng.normal(size=(4, 32, 16)).astype(np.float32) * sizes[:, None, None]
    for values, axes in (
        (heads_first, (1, 1, 4, 512)),
        (heads_first.transpose(1, 0, 2), (1, 32, 4, 16)),
        (heads_first.reshape(4, 4, 8, 16).transpose(1, 0, 2, 3), (1, 4, 4, 128)),
    ):
        exact = np.ascontiguousarray(values)
        bits = (exact.view(np.uint32) >> 16).astype(np.uint16)
        exact = as_double(bits.ravel(), "bfloat16")
        shape = shape_for("bfloat16", *axes)
        codes, exponents, wild = encoded(shape, bits)
        assert wild == 0
        assert len(set(exponents.tolist())) == 4
        back = as_double(decoded(shape, codes, exponents), "bfloat16")
        # Half a unit of 4 digits, or half the smallest step where that is more.
        scale = powers(exponents.tolist())
        steps = scale.reshape(1, 1, 4, 1).expand(*axes).reshape(-1) * 2.0**-10
        assert ((back - exact).abs() <= torch.maximum(exact.abs() / 16, steps)).all()


def test_infinity_and_nan() -> None:
    """Infinity becomes the largest code, NaN stays NaN, and neither moves the scale."""
    for dtype, infinite in INFINITE.items():
        wide = np.uint32 if ITEM[dtype] == 4 else np.uint16
        sign = 1 << (8 * ITEM[dtype] - 1)
        one = {"bfloat16": 0x3F80, "float16": 0x3C00, "float32": 0x3F800000}[dtype]
        row = [infinite, infinite | sign, infinite + 1, infinite + 1 | sign, one, one | sign, 0]
        bits = np.array([*row, sign, *[one] * 8], dtype=wide)
        shape = shape_for(dtype, 2, 1, 1, 8)
        codes, exponents, wild = encoded(shape, bits)
        assert exponents.tolist() == [-8, -8]
        assert codes.tolist() == [0x7E, 0xFE, 0x7F, 0xFF, 0x78, 0xF8, 0, 0x80, *[0x78] * 8]
        assert wild == 1
        back = as_double(decoded(shape, codes, exponents), dtype).tolist()
        assert back[:2] == [1.75, -1.75]
        assert all(math.isnan(value) for value in back[2:4])


@pytest.mark.parametrize("dtype", list(ITEM))
def test_heads_without_a_finite_value(dtype: str) -> None:
    """All zero, all NaN, all infinite: the least scale, and no harm."""
    wide = np.uint32 if ITEM[dtype] == 4 else np.uint16
    infinite = INFINITE[dtype]
    bits = np.repeat(np.array([0, infinite + 1, infinite], dtype=wide), 40)
    codes, exponents, wild = encoded(shape_for(dtype, 3, 1, 1, 40), bits)
    assert exponents.tolist() == [fp8.EXPONENTS[dtype][0]] * 3
    assert codes.tolist() == [0] * 40 + [0x7F] * 40 + [0x7E] * 40
    assert wild == 2


AXES = st.tuples(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 7, 33, 64])
)


@given(dtype=st.sampled_from(list(ITEM)), axes=AXES, seed=st.integers(0, 1 << 32))
def test_second_demotion_costs_nothing(dtype: str, axes: tuple[int, ...], seed: int) -> None:
    """Encoding what was decoded gives the same codes and scales, whatever the bits."""
    shape = shape_for(dtype, *axes)
    rng = np.random.default_rng(seed)
    wide = np.uint32 if ITEM[dtype] == 4 else np.uint16
    bits = rng.integers(0, np.iinfo(wide).max, math.prod(axes), dtype=wide, endpoint=True)
    if seed % 2:  # and without the wild values that random bits have
        bits &= wide(~(1 << (8 * ITEM[dtype] - 2)) & np.iinfo(wide).max)
    codes, exponents, _ = encoded(shape, bits)
    again = encoded(shape, decoded(shape, codes, exponents))
    assert np.array_equal(again[0], codes)
    assert np.array_equal(again[1], exponents)


@given(axes=AXES, seed=st.integers(0, 1 << 32))
def test_dtypes_agree(axes: tuple[int, ...], seed: int) -> None:
    """The same numbers give the same codes and scales as bfloat16 and as float32."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 16, math.prod(axes), dtype=np.uint16)
    narrow = encoded(shape_for("bfloat16", *axes), bits)
    wide = encoded(shape_for("float32", *axes), bits.astype(np.uint32) << np.uint32(16))
    assert np.array_equal(narrow[0], wide[0])
    assert np.array_equal(narrow[1], wide[1])
    assert narrow[2] == wide[2]
