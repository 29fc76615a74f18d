"""The kernels in NumPy: what each must do, byte for byte, with none of their tricks.

Memory is reached through `memory(address, bytes)`, which gives a writable (bytes,) uint8 view, so
the same code serves tests and a fake device. Slow; for checking only. Any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd_client.cuda.kernels import ITEM_BYTES, NAMES, Axes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from kvd_client.cuda.kernels import Call

    Bytes = npt.NDArray[np.uint8]
    Wide = npt.NDArray[np.uint32]
    Memory = Callable[[int, int], Bytes]

_INFINITE = 0x7F800000  # float32: smallest bits of a magnitude that is not finite
_ROUNDS_TO_448 = 0x680000  # largest mantissa that rounds down to 1.75


def run(call: Call, memory: Memory) -> None:
    """Carry out one launch."""
    assert len(call.arguments) == len(NAMES[call.name])
    direction, _, kind = call.name.removeprefix("kvd_").partition("_")
    if kind.startswith("fp8"):
        dtype = kind.removeprefix("fp8_").rpartition("_")[0]
        (_gather_fp8 if direction == "gather" else _scatter_fp8)(call.arguments, dtype, memory)
    else:
        _copy(call.arguments, memory, gather=direction == "gather")


def _copy(arguments: tuple[int, ...], memory: Memory, *, gather: bool) -> None:
    *tables, objects, stride, count, planes, pages, page_bytes = arguments
    for (o, p, j), page in _pages(tuple(tables), (count, planes, pages), page_bytes, memory):
        place = memory(objects + o * stride + (p * pages + j) * page_bytes, page_bytes)
        if gather:
            place[:] = page
        else:
            page[:] = place


def _pages(
    tables: tuple[int, ...], shape: tuple[int, int, int], page_bytes: int, memory: Memory
) -> Iterator[tuple[tuple[int, int, int], Bytes]]:
    """Give ((object, plane, page), the page's bytes) of every page of a launch."""
    import numpy as np

    count, planes, pages = shape
    bases = memory(tables[0], 8 * planes).view(np.uint64).tolist()
    strides = memory(tables[1], 8 * planes).view(np.uint64).tolist()
    blocks = memory(tables[2], 4 * count * pages).view(np.int32).reshape(count, pages).tolist()
    for o in range(count):
        for p in range(planes):
            for j in range(pages):
                if blocks[o][j] >= 0:
                    at = bases[p] + blocks[o][j] * strides[p]
                    yield (o, p, j), memory(at, page_bytes)


def _gather_fp8(arguments: tuple[int, ...], dtype: str, memory: Memory) -> None:
    import numpy as np

    *tables, codes, code_stride, exponents, exponent_stride, wild = arguments[:8]
    count, planes, pages, rows, heads, run_, low, high = arguments[8:]
    axes = Axes(dtype, rows, heads, run_)
    shape = (count, planes, pages)
    values = _values(tuple(tables), shape, axes, memory)  # (o, p, pages, rows, heads, run)
    wide = widen(values, dtype)
    magnitudes = wide & np.uint32(0x7FFFFFFF)
    finite = magnitudes < _INFINITE
    largest = np.where(finite, magnitudes, 0).max(axis=(2, 3, 5))  # (o, p, heads)
    chosen = choose_exponents(largest, low, high)
    coded = encode(wide, chosen[:, :, None, None, :, None])
    size = planes * pages * axes.page_values
    for o in range(count):
        memory(codes + o * code_stride, size)[:] = coded[o].ravel()
        place = memory(exponents + o * exponent_stride, 2 * planes * heads)
        place[:] = chosen[o].astype("<i2").ravel().view(np.uint8)
    if wild:
        memory(wild, 4).view(np.uint32)[0] += int((~finite).any(axis=(2, 3, 5)).sum())


def _scatter_fp8(arguments: tuple[int, ...], dtype: str, memory: Memory) -> None:
    import numpy as np

    *tables, codes, code_stride, exponents, exponent_stride = arguments[:7]
    count, planes, pages, rows, heads, run_, low, high = arguments[7:]
    axes = Axes(dtype, rows, heads, run_)
    size = planes * pages * axes.page_values
    item = ITEM_BYTES[dtype]
    decoded = np.empty((count, planes, pages, axes.page_values * item), dtype=np.uint8)
    for o in range(count):
        own = memory(codes + o * code_stride, size).reshape(planes, pages, rows, heads, run_)
        place = memory(exponents + o * exponent_stride, 2 * planes * heads)
        scale = np.frombuffer(place.tobytes(), dtype="<i2").reshape(planes, 1, 1, heads, 1)
        sound = (scale >= low) & (scale <= high)
        wide = decode(np.where(sound, own, 0x7F).astype(np.uint8), np.where(sound, scale, 0))
        decoded[o] = narrow(wide, dtype).reshape(planes, pages, -1).view(np.uint8)
    page_bytes = axes.page_values * item
    for (o, p, j), page in _pages(tuple(tables), (count, planes, pages), page_bytes, memory):
        page[:] = decoded[o, p, j]


def _values(
    tables: tuple[int, ...], shape: tuple[int, int, int], axes: Axes, memory: Memory
) -> npt.NDArray[Any]:
    """Gather the bits of a launch's values: (objects, planes, pages, rows, heads, run)."""
    import numpy as np

    item = ITEM_BYTES[axes.dtype]
    out = np.empty((*shape, axes.page_values * item), dtype=np.uint8)
    for (o, p, j), page in _pages(tables, shape, out.shape[-1], memory):
        out[o, p, j] = page
    bits = out.view(np.uint32 if item == 4 else np.uint16)  # noqa: PLR2004 - a float32
    return bits.reshape(*shape, axes.rows, axes.heads, axes.run)


def widen(bits: npt.NDArray[Any], dtype: str) -> Wide:
    """Give the float32 bits of values of `dtype`."""
    import numpy as np

    if dtype == "float32":
        return bits.astype(np.uint32)
    if dtype == "bfloat16":
        return bits.astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return bits.view(np.float16).astype(np.float32).view(np.uint32)


def narrow(wide: Wide, dtype: str) -> npt.NDArray[Any]:
    """Give the bits of `dtype` nearest to float32 bits that decoding gave."""
    import numpy as np

    if dtype == "float32":
        return wide
    if dtype == "bfloat16":
        return (wide >> np.uint32(16)).astype(np.uint16)
    return wide.view(np.float32).astype(np.float16).view(np.uint16)


def choose_exponents(largest: Wide, low: int, high: int) -> npt.NDArray[np.int64]:
    """Give the least exponent with which the largest finite magnitude does not saturate."""
    import numpy as np

    exponents = (largest >> 23).astype(np.int64) - 135 + ((largest & 0x7FFFFF) > _ROUNDS_TO_448)
    return np.clip(exponents, low, high)


def encode(wide: Wide, exponents: npt.NDArray[np.int64]) -> Bytes:
    """Round float32 bits to the e4m3fn codes of value / 2**exponent, by way of float64.

    The codes' magnitudes rise with their numbers, so the nearest is found among all 127 by search;
    a tie goes to the even code. Infinities saturate, NaN stays.
    """
    import numpy as np

    table = _code_values()
    with np.errstate(invalid="ignore"):
        values = np.abs(wide.view(np.float32).astype(np.float64))
        scaled = values * np.exp2(-exponents.astype(np.float64))
    scaled = np.minimum(scaled, table[-1])  # NaN stays NaN
    high = np.searchsorted(table, scaled, side="left").clip(1, len(table) - 1)
    low = high - 1
    to_high, to_low = table[high] - scaled, scaled - table[low]
    codes = np.where((to_high < to_low) | ((to_high == to_low) & (high % 2 == 0)), high, low)
    codes = np.where(np.isnan(scaled), 0x7F, codes)
    coded: Bytes = (codes | (wide >> np.uint32(24) & 0x80)).astype(np.uint8)
    return coded


def decode(codes: Bytes, exponents: npt.NDArray[Any]) -> Wide:
    """Give the float32 bits of codes times 2**exponent; NaN is the quiet one with its sign."""
    import numpy as np

    table = np.append(_code_values(), 0.0)
    size = codes & np.uint8(0x7F)
    values = (table[size] * np.exp2(exponents.astype(np.float64))).astype(np.float32)
    bits = np.where(size == 0x7F, np.uint32(0x7FC00000), values.view(np.uint32))  # noqa: PLR2004
    signed: Wide = bits | (codes & np.uint8(0x80)).astype(np.uint32) << np.uint32(24)
    return signed


def _code_values() -> npt.NDArray[np.float64]:
    """Give the value of each positive code that is a number: (127,) float64, rising."""
    import numpy as np

    codes = np.arange(127)
    field, digits = codes >> 3, (codes & 7) / 8
    return np.where(field == 0, digits * 2.0**-6, (1 + digits) * np.exp2(field - 7.0))
