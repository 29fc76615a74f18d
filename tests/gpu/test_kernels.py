"""`kernels.cu` on the CPU, the NumPy reference, `paged.py` and the codec all give the same bytes.

What runs here is the kernels' own source, compiled as C++ with a shim (`cuda_cpu.h` says what that
cannot show). The same cases run on a GPU in `test_device.py`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.codec import fp8 as fp8_codec
from kvd.codec.shape import ObjectShape
from kvd_client.cuda import kernels, nvrtc, reference
from kvd_client.cuda.kernels import Axes, Call
from tests.gpu import cpu_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

needs_compiler = pytest.mark.skipif(cpu_kernels.COMPILER is None, reason=cpu_kernels.MISSING)

pytestmark = needs_compiler

CANARY = 0xA5
Form = Literal["kv_blocks", "blocks_kv", "pairs", "latent"]


class Ram:
    """One piece of memory with canaries around every part of it."""

    def __init__(self) -> None:
        self.parts: list[tuple[Bytes, int, int]] = []

    def take(self, size: int, *, offset: int = 0) -> Bytes:
        """Give `size` bytes at an address that is `offset` above a multiple of 64."""
        whole = np.full(size + 256, CANARY, np.uint8)
        start = (-whole.ctypes.data) % 64 + 64 + offset
        self.parts.append((whole, start, size))
        return whole[start : start + size]

    def put(self, values: NDArray[Any]) -> int:
        """Keep a table; give its address."""
        part = self.take(values.nbytes)
        part[:] = values.view(np.uint8).ravel()
        return int(part.ctypes.data)

    def check(self) -> None:
        """Nothing was written beside the parts."""
        for whole, start, size in self.parts:
            assert (whole[:start] == CANARY).all()
            assert (whole[start + size :] == CANARY).all()


def at(address: int, size: int) -> Bytes:
    """Look at memory of this process."""
    kind: Any = ctypes.c_uint8 * size
    return np.frombuffer(kind.from_address(address), np.uint8)


def on_cpu(call: Call) -> None:
    """Run the kernel's source."""
    cpu_kernels.run(call, threads=32, seed=7)


def by_reference(call: Call) -> None:
    """Run the NumPy reference."""
    reference.run(call, at)


RUNNERS: list[Callable[[Call], None]] = [on_cpu, by_reference]


class Case:
    """Paged memory, its tables and room for objects."""

    def __init__(
        self,
        *,
        planes: int,
        page_bytes: int,
        counts: tuple[int, int],
        form: Form = "pairs",
        seed: int = 0,
        blocks: int = 24,
        offset: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.ram, (self.count, self.pages) = Ram(), counts
        self.planes, self.page_bytes = planes, page_bytes
        pool = self.ram.take(planes * blocks * page_bytes, offset=offset)
        pool[:] = rng.integers(0, 256, pool.size, np.uint8)
        self.pool = pool
        base = int(pool.ctypes.data)
        if form == "blocks_kv":  # K and V side by side in a block
            assert planes % 2 == 0
            starts = [base + (p // 2 * 2 * blocks + p % 2) * page_bytes for p in range(planes)]
            stride = 2 * page_bytes
        else:  # stacked, apart, or latents: a plane after the other
            starts = [base + p * blocks * page_bytes for p in range(planes)]
            stride = page_bytes
        ids = rng.choice(blocks, self.count * self.pages, replace=False).astype(np.int32)
        self.starts, self.stride, self.ids = starts, stride, ids
        self.tables = {
            "bases": self.ram.put(np.array(starts, np.uint64)),
            "strides": self.ram.put(np.full(planes, stride, np.uint64)),
            "blocks": self.ram.put(ids),
        }

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.planes, self.pages

    @property
    def object_bytes(self) -> int:
        return self.planes * self.pages * self.page_bytes

    def copy(self, direction: kernels.Direction, objects: int, stride: int) -> Call:
        wide = kernels.aligned(16, objects, stride, self.page_bytes, self.stride, *self.starts)
        return kernels.copy_call(
            direction,
            **self.tables,
            objects=objects,
            object_stride=stride,
            shape=self.shape,
            page_bytes=self.page_bytes,
            wide=wide,
            grid_max=5,
        )


def objects_by_paged(case: Case, blocks: int) -> list[Bytes]:
    """Gather with `kvd_client.paged`, the CPU engines' path."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from kvd_client.paged import PagedKV

    planes = []
    for start in case.starts:
        span = at(start, (blocks - 1) * case.stride + case.page_bytes)
        whole = torch.from_numpy(span)
        planes.append(whole.as_strided((blocks, 1, case.page_bytes), (case.stride,) * 2 + (1,)))
    paged = PagedKV(planes, 1, threads=1, kernel="memmove")
    out = [np.zeros(case.object_bytes, np.uint8) for _ in range(case.count)]
    ids = case.ids.reshape(case.count, case.pages)
    paged.gather_many([(ids[o], out[o].data) for o in range(case.count)])
    return out


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("form", ["kv_blocks", "blocks_kv", "pairs", "latent"])
@pytest.mark.parametrize("page_bytes", [16 * 2 * 64, 16 * 576 * 2, 48, 7])
def test_copies_are_those_of_paged(
    runner: Callable[[Call], None], form: Form, page_bytes: int
) -> None:
    """A gather gives the objects that `paged.py` gives, and a scatter puts them back."""
    case = Case(planes=6, page_bytes=page_bytes, counts=(2, 4), form=form, seed=page_bytes)
    gap = case.object_bytes + (16 if page_bytes % 16 == 0 else 3)
    room = case.ram.take(case.count * gap)
    room[:] = 0
    runner(case.copy("gather", int(room.ctypes.data), gap))
    expected = objects_by_paged(case, 24)
    for o, content in enumerate(expected):
        assert np.array_equal(room[o * gap : o * gap + case.object_bytes], content)
    before = case.pool.copy()
    case.pool[:] = 0
    runner(case.copy("scatter", int(room.ctypes.data), gap))
    back = objects_by_paged(case, 24)
    assert all(np.array_equal(a, b) for a, b in zip(back, expected, strict=True))
    named = np.zeros(case.pool.size, bool)  # and no other block was touched
    for start in case.starts:
        for block in case.ids:
            lies = start - int(case.pool.ctypes.data) + int(block) * case.stride
            named[lies : lies + page_bytes] = True
    assert np.array_equal(case.pool[named], before[named])
    assert not case.pool[~named].any()
    case.ram.check()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("page_bytes", [512, 7])
def test_a_page_below_zero_is_left_out(runner: Callable[[Call], None], page_bytes: int) -> None:
    """Pages of an object that an engine has no block for; the others go where they belong."""
    case = Case(planes=3, page_bytes=page_bytes, counts=(2, 4))
    size = case.object_bytes
    room = case.ram.take(case.count * size)
    room[:] = np.arange(room.size) % 251
    before = case.pool.copy()
    kept = case.ids.copy()
    case.ids[[0, 5]] = -1
    case.tables["blocks"] = case.ram.put(case.ids)
    runner(case.copy("scatter", int(room.ctypes.data), size))
    after = case.pool.copy().reshape(3, 24, page_bytes)
    content = room.reshape(case.count, 3, case.pages, page_bytes)
    written = np.zeros(24, bool)
    for place, block in enumerate(kept):
        if place in {0, 5}:
            continue
        written[block] = True
        o, page = divmod(place, case.pages)
        assert np.array_equal(after[:, block], content[o, :, page])
    assert np.array_equal(after[:, ~written], before.reshape(3, 24, page_bytes)[:, ~written])
    case.ram.check()


@given(
    planes=st.integers(1, 5),
    page=st.integers(1, 70),
    unit=st.sampled_from([1, 16, 512]),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    offset=st.sampled_from([0, 1, 8, 16]),
    seed=st.integers(0, 1 << 16),
)
def test_any_copy_is_the_reference(  # noqa: PLR0917 - hypothesis passes by name
    planes: int, page: int, unit: int, counts: tuple[int, int], offset: int, seed: int
) -> None:
    """Whatever the sizes and alignments, kernel and reference write the same bytes."""
    case = Case(planes=planes, page_bytes=page * unit, counts=counts, seed=seed, offset=offset)
    rooms = []
    for runner in RUNNERS:
        room = case.ram.take(case.count * case.object_bytes, offset=offset)
        runner(case.copy("gather", int(room.ctypes.data), case.object_bytes))
        rooms.append(room)
    assert np.array_equal(rooms[0], rooms[1])
    case.ram.check()


# ------------------------------------------------------------------------------------------- FP8


def fp8_case(axes: Axes, planes: int, counts: tuple[int, int], bits: NDArray[Any]) -> Case:
    """Paged memory whose pages hold these values: (objects, planes, pages, page values)."""
    item = kernels.ITEM_BYTES[axes.dtype]
    case = Case(planes=planes, page_bytes=axes.page_values * item, counts=counts)
    content = np.ascontiguousarray(bits).view(np.uint8).reshape(case.count, -1)
    size = case.object_bytes
    room = case.ram.take(case.count * size)
    room[:] = content.ravel()
    reference.run(case.copy("scatter", int(room.ctypes.data), size), at)
    return case


def fp8(
    case: Case,
    axes: Axes,
    direction: kernels.Direction,
    codes: Bytes,
    exponents: Bytes,
    *,
    wild: int = 0,
    narrow: bool = False,
) -> Call:
    """Describe a launch; `narrow` for the kernel that moves value by value."""
    code_stride, exponent_stride = codes.size // case.count, exponents.size // case.count
    wide = kernels.fp8_wide(
        axes, (*case.starts, case.stride), (int(codes.ctypes.data), code_stride)
    )
    return kernels.fp8_call(
        direction,
        axes,
        **case.tables,
        codes=int(codes.ctypes.data),
        code_stride=code_stride,
        exponents=int(exponents.ctypes.data),
        exponent_stride=exponent_stride,
        wild=wild,
        shape=case.shape,
        wide=wide and not narrow,
        grid_max=7,
    )


def values(dtype: str, count: int, seed: int, kind: str) -> NDArray[Any]:
    """Bits of KV-like values, of any bits at all, or of extremes."""
    rng = np.random.default_rng(seed)
    bits: Any = np.uint32 if dtype == "float32" else np.uint16
    if kind == "any":
        return rng.integers(0, 1 << (8 * bits(0).itemsize), count, dtype=bits)
    scale = {"kv": 1.0, "large": 3e4, "small": 1e-6}[kind]
    wide = (rng.standard_normal(count) * scale).astype(np.float32)
    if dtype == "float16":
        return wide.clip(-65504, 65504).astype(np.float16).view(np.uint16)
    return wide.view(np.uint32) if dtype == "float32" else (wide.view(np.uint32) >> 16).astype(bits)


def codec_shape(case: Case, axes: Axes) -> ObjectShape:
    """The object as the daemon's codec reads it."""
    return ObjectShape(
        case.object_bytes, axes.dtype, case.planes, case.pages * axes.rows, axes.heads, axes.run
    )


def check_fp8(axes: Axes, bits: NDArray[Any], *, planes: int, counts: tuple[int, int]) -> None:
    """Kernel, reference and codec agree on codes, exponents and what comes back."""
    case = fp8_case(axes, planes, counts, bits)
    size, scales = planes * case.pages * axes.page_values, planes * axes.heads
    shape = codec_shape(case, axes)
    for runner, narrow in ((on_cpu, False), (on_cpu, True), (by_reference, False)):
        codes, exponents = case.ram.take(case.count * size), case.ram.take(case.count * scales * 2)
        wild = case.ram.take(4)
        wild[:] = 0
        counter = int(wild.ctypes.data)
        runner(fp8(case, axes, "gather", codes, exponents, wild=counter, narrow=narrow))
        counted = 0
        back = []
        for o in range(case.count):
            expected, powers = np.empty(size, np.uint8), np.empty(scales, np.int16)
            counted += fp8_codec.encode(shape, bits[o].ravel(), expected, powers)
            assert np.array_equal(exponents.view("<i2").reshape(case.count, -1)[o], powers)
            assert np.array_equal(codes.reshape(case.count, -1)[o], expected)
            target = np.empty(size, bits.dtype)
            fp8_codec.decode(shape, expected, powers, target)
            back.append(target)
        assert wild.view(np.uint32)[0] == counted
        case.pool[:] = 0
        runner(fp8(case, axes, "scatter", codes, exponents, narrow=narrow))
        room = case.ram.take(case.count * case.object_bytes)
        reference.run(case.copy("gather", int(room.ctypes.data), case.object_bytes), at)
        assert np.array_equal(room.view(bits.dtype), np.concatenate(back))
        case.pool[:] = 0
        restored = np.ascontiguousarray(bits).view(np.uint8)
        room[:] = restored.ravel()
        reference.run(case.copy("scatter", int(room.ctypes.data), case.object_bytes), at)
        case.ram.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["kv", "any", "large", "small"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_fp8_is_the_codecs(dtype: str, kind: str, heads_first: bool) -> None:  # noqa: FBT001
    """Codes, exponents, the count of wild heads and the values are the codec's, bit for bit."""
    tokens, heads, dim = 16, 3, 16
    axes = Axes(dtype, 1, heads, tokens * dim) if heads_first else Axes(dtype, tokens, heads, dim)
    counts, planes = (2, 2), 4
    amount = counts[0] * planes * counts[1] * axes.page_values
    bits = values(dtype, amount, 3, kind).reshape(counts[0], planes, counts[1], -1)
    check_fp8(axes, bits, planes=planes, counts=counts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value_is_coded_as_the_codec_does(dtype: str) -> None:
    """All 65,536 values under each of several scales: nothing is left to chance."""
    step = 1 << 10
    for top in (0x3F80, 0x4780, 0x0080, 0x7F7F) if dtype == "bfloat16" else (0x3C00, 0x7BFF, 1):
        bits = np.arange(1 << 16, dtype=np.uint16).reshape(64, step)
        limit = np.minimum(bits & 0x7FFF, top) | bits & 0x8000  # its largest sets the scale
        limit[:, 0] = top
        axes = Axes(dtype, 1, 64, step)
        check_fp8(axes, limit.reshape(1, 1, 1, -1), planes=1, counts=(1, 1))
    wild = np.arange(1 << 16, dtype=np.uint16)  # NaN, infinities and all, a head each 1,024
    check_fp8(Axes(dtype, 1, 64, step), wild.reshape(1, 1, 1, -1), planes=1, counts=(1, 1))


@given(data=st.data())
def test_any_fp8_is_the_codecs(data: st.DataObject) -> None:
    """Whatever the axes and the bits, the kernels agree with the codec."""
    draw = data.draw
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    axes = Axes(dtype, draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 24)))
    counts = (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    planes = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["kv", "any", "large", "small"]))
    amount = counts[0] * planes * counts[1] * axes.page_values
    bits = values(dtype, amount, draw(st.integers(0, 999)), kind)
    check_fp8(axes, bits.reshape(counts[0], planes, counts[1], -1), planes=planes, counts=counts)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("exponent", [-117, 120, -32768, 32767])
def test_an_exponent_out_of_bounds_decodes_to_nan(
    runner: Callable[[Call], None], exponent: int
) -> None:
    """A scale that no gather gives never becomes a value that looks like KV."""
    axes = Axes("bfloat16", 2, 1, 8)
    case = fp8_case(axes, 1, (1, 1), np.zeros((1, 1, 1, 16), np.uint16))
    codes, exponents = case.ram.take(16), case.ram.take(2)
    codes[:] = np.arange(16) * 17
    exponents[:] = np.array([exponent], "<i2").view(np.uint8)
    runner(fp8(case, axes, "scatter", codes, exponents))
    room = case.ram.take(case.object_bytes)
    reference.run(case.copy("gather", int(room.ctypes.data), room.size), at)
    assert ((room.view(np.uint16) & 0x7FFF) == 0x7FC0).all()


@pytest.mark.parametrize(
    ("runner", "narrow"), [(on_cpu, False), (on_cpu, True), (by_reference, False)]
)
def test_a_page_below_zero_is_left_out_of_fp8(
    runner: Callable[[Call], None],
    narrow: bool,  # noqa: FBT001
) -> None:
    """As of a plain copy: an engine has no block for a page outside its window."""
    axes = Axes("bfloat16", 4, 2, 8)
    bits = values("bfloat16", 2 * 3 * 4 * 64, 5, "kv").reshape(2, 3, 4, -1)
    case = fp8_case(axes, 3, (2, 4), bits)
    codes, exponents = case.ram.take(case.count * 3 * 4 * 64), case.ram.take(case.count * 3 * 2 * 2)
    reference.run(fp8(case, axes, "gather", codes, exponents), at)
    case.pool[:] = CANARY
    reference.run(fp8(case, axes, "scatter", codes, exponents), at)
    whole = case.pool.reshape(3, 24, case.page_bytes).copy()
    left = case.ids[[0, 5]].copy()
    case.ids[[0, 5]] = -1
    case.tables["blocks"] = case.ram.put(case.ids)
    case.pool[:] = CANARY
    runner(fp8(case, axes, "scatter", codes, exponents, narrow=narrow))
    after = case.pool.reshape(3, 24, case.page_bytes)
    assert (after[:, left] == CANARY).all()
    others = np.setdiff1d(np.arange(24), left)
    assert np.array_equal(after[:, others], whole[:, others])
    case.ram.check()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_kernels_compile_for_every_architecture() -> None:
    """NVRTC takes the file and gives every kernel; what is wrong or missing is seen."""
    library = nvrtc.find()
    if library is None:
        pytest.skip(nvrtc.MISSING)
    source = kernels.SOURCE.read_text()
    cubin = nvrtc.compile_source(library, source, "sm_90")
    assert not nvrtc.missing_kernels(cubin)
    with pytest.raises(nvrtc.CompileError, match="undefined"):
        nvrtc.compile_source(library, source + "\n__device__ int f() { return g(); }", "sm_90")
    fewer = nvrtc.compile_source(library, 'extern "C" __global__ void f() {}', "sm_90")
    assert nvrtc.missing_kernels(fewer) == list(kernels.NAMES)
