"""FP8: e4m3fn codes with one power-of-two scale a plane (layer, K or V) and head.

    value = code * 2**e,  e the least with which the head's largest finite value does not saturate

A power of two costs no accuracy: FP8's relative error does not depend on the scale while nothing
saturates and little falls below its normal range, which spans 2**-6 to 448 under the largest value.

What becomes of a value:

- Finite: rounded to the nearest code, half to even; torch's `(x * 2**-e).to(float8_e4m3fn)`.
- Zero keeps its sign, and so does what rounds to zero (below 2**(e - 10)).
- Infinity becomes the largest code, 448 * 2**e, with its sign. e4m3fn has no infinity, and this is
  what torch 2.13 does. Infinities and NaN do not count towards the scale.
- NaN becomes the quiet NaN with its sign.

The exponent is bounded so that decoding never overflows, and in bfloat16 and float32 never leaves
the normal range. Values beyond are KV of a broken model: at the upper bound a head saturates above
1.8125 times the dtype's largest power of two; at the lower, steps are 2**-125 (bfloat16, float32)
or 2**-24, float16's own smallest.

Values are bits, (planes, blocks, heads, run) in C order. Needs numba, imported by the first call.
Any thread, no GIL while values are looped over.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Exponents = npt.NDArray[np.int16]
    Shape = tuple[int, int, int, int]

EXPONENTS: Final[dict[str, tuple[int, int]]] = {
    "bfloat16": (-116, 119),
    "float32": (-116, 119),
    "float16": (-15, 7),
}
"""Least and greatest exponent of a scale. 448 * 2**119 and 448 * 2**7 are finite; a bfloat16 below
its normal range is less than half of 2**(-116 - 9); 2**(-15 - 9) is float16's smallest."""


class BadScale(KvdError):
    """A scale that encoding never gives."""


def encode(
    dtype: str,
    shape: Shape,
    source: Any,  # noqa: ANN401
    codes: Bytes,
    exponents: Exponents,
) -> int:
    """Quantise values.

    Args:
        dtype: A key of `EXPONENTS`.
        shape: (planes, blocks, heads, run).
        source: (values,) uint16 or uint32: the bits; nothing is kept of it.
        codes: (values,) uint8, overwritten.
        exponents: (planes * heads,) int16, overwritten.

    Returns:
        How many (plane, head) have values that are not finite.
    """
    from kvd_client import _fp8_loops

    axes = _axes(shape)
    bounds = EXPONENTS[dtype]
    if dtype == "bfloat16":
        return int(_fp8_loops.encode_bf16(source, codes, exponents, *axes, *bounds))
    if dtype == "float32":
        return int(_fp8_loops.encode_f32(source, codes, exponents, *axes, *bounds))
    return _encode_half(source, codes, exponents, axes)


def decode(
    dtype: str,
    shape: Shape,
    codes: Bytes,
    exponents: Exponents,
    target: Any,  # noqa: ANN401
) -> None:
    """Give the values of codes.

    Args:
        dtype: As in `encode`.
        shape: As in `encode`.
        codes: (values,) uint8.
        exponents: (planes * heads,) int16.
        target: (values,) uint16 or uint32, overwritten with the bits.

    Raises:
        BadScale: An exponent that `encode` never gives; `target` is as it was.
    """
    from kvd_client import _fp8_loops

    low, high = EXPONENTS[dtype]
    if int(exponents.min()) < low or int(exponents.max()) > high:
        raise BadScale("the frame has a scale out of bounds")
    axes = _axes(shape)
    if dtype == "bfloat16":
        _fp8_loops.decode_bf16(codes, target, exponents, *axes)
    elif dtype == "float32":
        _fp8_loops.decode_f32(codes, target, exponents, *axes)
    else:
        _fp8_loops.decode_half(_half_values(), codes, target, exponents, *axes, low)


def _axes(shape: Shape) -> Shape:
    """With one block each head is a plane: less at a time."""
    planes, blocks, heads, run = shape
    return (planes * heads, 1, 1, run) if blocks == 1 else shape


def _encode_half(
    source: Any,  # noqa: ANN401
    codes: Bytes,
    exponents: Exponents,
    axes: Shape,
) -> int:
    """Quantise float16 plane by plane, by way of float32, which holds each of them."""
    import numpy as np

    from kvd_client import _fp8_loops

    planes, blocks, heads, run = axes
    size = blocks * heads * run
    wide = np.empty(size, dtype=np.uint32)
    wild = 0
    for plane in range(planes):
        part = slice(plane * size, (plane + 1) * size)
        _fp8_loops.widen(_half_bits(), source[part], wide)
        own = exponents[plane * heads : (plane + 1) * heads]
        wild += _fp8_loops.encode_f32(
            wide, codes[part], own, 1, blocks, heads, run, *EXPONENTS["float16"]
        )
    return wild


@cache
def _half_bits() -> Any:  # noqa: ANN401
    """Give the float32 bits of each float16: (65536,) uint32."""
    import numpy as np

    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)


@cache
def _half_values() -> Any:  # noqa: ANN401
    """Give the float16 bits of each code under each exponent: (exponents * 256,) uint16."""
    import numpy as np

    from kvd_client import _fp8_loops

    low, high = EXPONENTS["float16"]
    count = high - low + 1
    codes = np.tile(np.arange(256, dtype=np.uint8), count)
    wide = np.empty(codes.size, dtype=np.uint32)
    exponents = np.arange(low, high + 1, dtype=np.int16)
    _fp8_loops.decode_f32(codes, wide, exponents, count, 1, 1, 256)
    return wide.view(np.float32).astype(np.float16).view(np.uint16)
