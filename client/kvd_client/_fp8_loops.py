# ruff: noqa: PLR0917 - a kernel takes its arguments by position
"""FP8's loops over values: numba, integers only, without the GIL.

Imports numba and compiles (or loads from its cache) all loops at once, so only `fp8` imports it, in
functions. Signatures are explicit: nothing is ever compiled by a first call.

An e4m3 code is sign, 4 bits of exponent with bias 7, 3 of mantissa; exponent 0 counts in steps of
2**-9, 0x7e is 448, the largest, 0x7f is NaN, and there is no infinity. With a scale of 2**e, moving
a value between bfloat16 and e4m3 is an addition to the exponent and a rounding of the mantissa.
All of it is done in 16-bit lanes: numba widens every operation to 64 bits, so each is cast back at
once, and LLVM then narrows it (without the casts the loops are four times slower).

Shapes as in `fp8`: values (planes, blocks, heads, run), exponents (planes, heads), all flat and
C-contiguous. A source may change while it is read: codes are then of a mixture, but no access
leaves the arrays.

Invariants:

K1. exponent_min <= e <= exponent_max (of `fp8`) makes every biased exponent below positive, and
    every product of a code and 2**e finite.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
from numba import njit, types

if TYPE_CHECKING:
    import numpy.typing as npt

    U8 = npt.NDArray[np.uint8]
    U16 = npt.NDArray[np.uint16]
    U32 = npt.NDArray[np.uint32]
    I16 = npt.NDArray[np.int16]

assert sys.byteorder == "little"  # frames are, and kernels write their numbers as they are

# bfloat16 has 1, 8 and 7 bits, float32 1, 8 and 23, both with bias 127; e4m3 has bias 7: a code
# with exponent field f is a bfloat16 with field f + e + 120.
_ROUNDS_TO_448: Final = 0x680000  # largest mantissa that rounds down to 1.75: 0.8125 * 2**23

_U8: Any = np.uint8
_U16: Any = np.uint16
_U32: Any = np.uint32


def _amax16(values: U16, exponents: I16, blocks: int, heads: int, run: int, infinite: int) -> int:
    """Put the largest magnitude's bits of each head of a plane into `exponents`.

    Args:
        values: One plane.
        exponents: (heads,), overwritten.
        blocks: See the module.
        heads: See the module.
        run: See the module.
        infinite: Smallest bits of a magnitude that is not finite.

    Returns:
        Heads with values that are not finite, which do not count towards the largest.
    """
    wild = 0
    for head in range(heads):
        largest = _U16(0)
        for block in range(blocks):
            at = (block * heads + head) * run
            part = values[at : at + run]
            for i in range(run):
                largest = max(largest, _U16(part[i] & _U16(0x7FFF)))
        if largest >= infinite:
            wild += 1
            largest = _U16(0)
            for block in range(blocks):
                at = (block * heads + head) * run
                part = values[at : at + run]
                for i in range(run):
                    magnitude = _U16(part[i] & _U16(0x7FFF))
                    if magnitude < infinite:
                        largest = max(largest, magnitude)
        exponents[head] = largest
    return wild


def _exponent(bits: int, low: int, high: int) -> int:
    """Choose the scale's exponent for a head whose largest finite magnitude has these f32 bits.

    The smallest with which the largest value does not saturate: up to 1.8125 * 2**k it rounds to
    1.75 * 2**k, which is 448 for k = 8; above, it needs the next power of two.
    """
    exponent = (bits >> 23) - 127 - 8
    if (bits & 0x7FFFFF) > _ROUNDS_TO_448:
        exponent += 1
    return min(max(exponent, low), high)


def _encode_bf16(
    source: U16,
    codes: U8,
    exponents: I16,
    planes: int,
    blocks: int,
    heads: int,
    run: int,
    low: int,
    high: int,
) -> int:
    """Scale and round bfloat16; returns how many (plane, head) have values that are not finite."""
    size = blocks * heads * run
    wild = 0
    for plane in range(planes):
        own = exponents[plane * heads : (plane + 1) * heads]
        values = source[plane * size : (plane + 1) * size]
        wild += _amax16_njit(values, own, blocks, heads, run, 0x7F80)
        for head in range(heads):
            own[head] = _exponent_njit(own[head] << 16, low, high)
        at = plane * size
        for _block in range(blocks):
            for head in range(heads):
                one = _U16(own[head] + 121)  # the exponent field of the smallest normal code
                part = source[at : at + run]
                out = codes[at : at + run]
                for i in range(run):
                    bits = part[i]
                    magnitude = _U16(bits & _U16(0x7FFF))
                    field = _U16(magnitude >> _U16(7))
                    # Field 0 counts as if it had the leading one: below half a step (K1) anyway.
                    digits = _U16(_U16(0x80) | _U16(magnitude & _U16(0x7F)))
                    above = _U16(max(field, one) - one)
                    below = _U16(one - min(field, one))
                    # Round half to even; from 5 below on all is under half a step.
                    shift = _U16(_U16(4) + min(below, _U16(5))) & _U16(15)
                    odd = _U16(_U16(digits >> shift) & _U16(1))
                    half = _U16(_U16(_U16(1) << _U16(shift - _U16(1))) - _U16(1))
                    code = _U16(_U16(_U16(digits + half) + odd) >> shift)
                    code = _U16(code + _U16(min(above, _U16(30)) << _U16(3)))
                    code = min(code, _U16(0x7E))
                    if magnitude > _U16(0x7F80):
                        code = _U16(0x7F)
                    out[i] = _U8(_U16(code | _U16(_U16(bits >> _U16(8)) & _U16(0x80))))
                at += run
    return wild


def _decode_bf16(
    codes: U8,
    target: U16,
    exponents: I16,
    planes: int,
    blocks: int,
    heads: int,
    run: int,
) -> None:
    """Give the bfloat16 of each code: exact, as it has more of everything (K1)."""
    at = 0
    for plane in range(planes):
        for _block in range(blocks):
            for head in range(heads):
                field = exponents[plane * heads + head] + 120
                normal = _U16(field << 7)
                # A code below 8 is code * 2**-9: its leading one moves to bit 7.
                from4 = _U16((field - 1) << 7)
                from2 = _U16((field - 2) << 7)
                from1 = _U16((field - 3) << 7)
                part = codes[at : at + run]
                out = target[at : at + run]
                for i in range(run):
                    code = _U16(part[i])
                    size = _U16(code & _U16(0x7F))
                    bits = _U16(_U16(size << _U16(4)) + normal)
                    bits = bits if size >= _U16(8) else _U16(_U16(size << _U16(5)) + from4)
                    bits = bits if size >= _U16(4) else _U16(_U16(size << _U16(6)) + from2)
                    bits = bits if size >= _U16(2) else _U16(_U16(size << _U16(7)) + from1)
                    bits = bits if size >= _U16(1) else _U16(0)
                    bits = bits if size != _U16(0x7F) else _U16(0x7FC0)
                    out[i] = _U16(bits | _U16(_U16(code & _U16(0x80)) << _U16(8)))
                at += run


def _encode_f32(
    source: U32,
    codes: U8,
    exponents: I16,
    planes: int,
    blocks: int,
    heads: int,
    run: int,
    low: int,
    high: int,
) -> int:
    """Scale and round float32; as `_encode_bf16`, with 23 bits of mantissa."""
    size = blocks * heads * run
    wild = 0
    for plane in range(planes):
        values = source[plane * size : (plane + 1) * size]
        for head in range(heads):
            largest = _U32(0)
            tame = True
            for block in range(blocks):
                at = (block * heads + head) * run
                for i in range(at, at + run):
                    magnitude = _U32(values[i] & _U32(0x7FFFFFFF))
                    if magnitude < _U32(0x7F800000):
                        largest = max(largest, magnitude)
                    else:
                        tame = False
            wild += not tame
            exponents[plane * heads + head] = _exponent_njit(largest, low, high)
        at = plane * size
        for _block in range(blocks):
            for head in range(heads):
                one = _U32(exponents[plane * heads + head] + 121)
                part = source[at : at + run]
                out = codes[at : at + run]
                for i in range(run):
                    out[i] = _code32_njit(part[i], one)
                at += run
    return wild


def _code32(bits: int, one: int) -> int:
    """Round one float32 to a code; the steps are explained in `_encode_bf16`."""
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    field = _U32(magnitude >> _U32(23))
    digits = _U32(_U32(0x800000) | _U32(magnitude & _U32(0x7FFFFF)))
    above = _U32(max(field, one) - one)
    below = _U32(one - min(field, one))
    shift = _U32(_U32(20) + min(below, _U32(5))) & _U32(31)
    odd = _U32(_U32(digits >> shift) & _U32(1))
    half = _U32(_U32(_U32(1) << _U32(shift - _U32(1))) - _U32(1))
    code = _U32(_U32(_U32(digits + half) + odd) >> shift)
    code = _U32(code + _U32(min(above, _U32(30)) << _U32(3)))
    code = min(code, _U32(0x7E))
    if magnitude > _U32(0x7F800000):
        code = _U32(0x7F)
    rounded: int = _U8(_U32(code | _U32(_U32(bits >> _U32(24)) & _U32(0x80))))
    return rounded


def _widen(table: U32, source: U16, wide: U32) -> None:
    """Look up every 16-bit value: float16 to the bits of the same float32."""
    for i in range(len(source)):
        wide[i] = table[source[i]]


def _decode_f32(
    codes: U8,
    target: U32,
    exponents: I16,
    planes: int,
    blocks: int,
    heads: int,
    run: int,
) -> None:
    """Give the float32 of each code; as `_decode_bf16`, 16 bits higher."""
    at = 0
    for plane in range(planes):
        for _block in range(blocks):
            for head in range(heads):
                field = exponents[plane * heads + head] + 120
                for i in range(at, at + run):
                    code = _U32(codes[i])
                    size = _U32(code & _U32(0x7F))
                    bits = _U32(_U32(size << _U32(20)) + _U32(field << 23))
                    if size < _U32(8):
                        bits = _U32(_U32(size << _U32(21)) + _U32((field - 1) << 23))
                    if size < _U32(4):
                        bits = _U32(_U32(size << _U32(22)) + _U32((field - 2) << 23))
                    if size < _U32(2):
                        bits = _U32(_U32(size << _U32(23)) + _U32((field - 3) << 23))
                    if size == _U32(0):
                        bits = _U32(0)
                    if size == _U32(0x7F):
                        bits = _U32(0x7FC00000)
                    target[i] = _U32(bits | _U32(_U32(code & _U32(0x80)) << _U32(24)))
                at += run


def _decode_half(
    table: U16,
    codes: U8,
    target: U16,
    exponents: I16,
    planes: int,
    blocks: int,
    heads: int,
    run: int,
    low: int,
) -> None:
    """Look up the float16 of each code in the row of its exponent; `table`: (exponents, 256)."""
    at = 0
    for plane in range(planes):
        for _block in range(blocks):
            for head in range(heads):
                row = (exponents[plane * heads + head] - low) * 256
                for i in range(at, at + run):
                    target[i] = table[row + codes[i]]
                at += run


def cache_folder() -> None:
    """Say where compiled code is kept, if the user has not.

    numba keeps it beside this file, or in the user's cache folder where that cannot be written. A
    service may have neither, but systemd gives it a folder of its own (`CacheDirectory=`). Never a
    folder that others may write: what is loaded from there is run.
    """
    service = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    settings: Any = numba.config
    if service and not settings.CACHE_DIR:
        settings.CACHE_DIR = os.path.join(service, "numba")  # noqa: PTH118 - a setting, text


def compiled(signature: Any, loop: Any) -> Any:  # noqa: ANN401 - numba has no types
    """Compile for this CPU, from numba's cache where there is a folder for it."""
    try:
        return njit(signature, nogil=True, cache=True)(loop)
    except RuntimeError:  # numba: "no locator available", nowhere to keep the cache
        return njit(signature, nogil=True)(loop)


cache_folder()
_I64: Final = types.int64
_AXES: Final = (_I64,) * 4  # planes, blocks, heads, run


def read_only(item: Any) -> Any:  # noqa: ANN401
    """Type of an array that is only read, so that memory mapped read-only will do."""
    return types.Array(item, 1, "C", readonly=True)


_R8, _R16, _R32 = read_only(types.uint8), read_only(types.uint16), read_only(types.uint32)
_W8, _W16, _W32 = types.uint8[::1], types.uint16[::1], types.uint32[::1]
_SCALES: Final = types.int16[::1]

_amax16_njit = compiled(_I64(_R16, _SCALES, *_AXES[1:], types.uint16), _amax16)
_exponent_njit = compiled(_I64(_I64, _I64, _I64), _exponent)
_code32_njit = compiled(types.uint8(types.uint32, types.uint32), _code32)

encode_bf16 = compiled(_I64(_R16, _W8, _SCALES, *_AXES, _I64, _I64), _encode_bf16)
decode_bf16 = compiled(types.void(_R8, _W16, _SCALES, *_AXES), _decode_bf16)
encode_f32 = compiled(_I64(_R32, _W8, _SCALES, *_AXES, _I64, _I64), _encode_f32)
decode_f32 = compiled(types.void(_R8, _W32, _SCALES, *_AXES), _decode_f32)
widen = compiled(types.void(_R32, _R16, _W32), _widen)
decode_half = compiled(types.void(_R16, _R8, _W16, _SCALES, *_AXES, _I64), _decode_half)
