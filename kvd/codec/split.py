"""Lossless: the bytes of values apart, by significance.

A float's exponent says much the same for all values of a head (2.9 bits of 8 on real KV), its
mantissa and sign say nothing that could be foretold. Side by side they hide this from a compressor;
apart, one byte plane compresses to a third and the others are kept as they are.

    bfloat16   plane 1: exponent                            plane 0: sign, mantissa
    float16    plane 1: exponent, top 3 bits of mantissa    plane 0: sign, rest
    float32    plane 3: exponent   plane 2: sign, top 7 bits of mantissa   planes 1, 0: rest
    one byte   plane 0

Any thread, no GIL while values are looped over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]


def split(source: Any, planes: Sequence[Bytes]) -> None:  # noqa: ANN401 - arrays of three widths
    """Take values apart.

    Args:
        source: (n,) uint8, uint16 or uint32: the bits.
        planes: As many as a value has bytes, least significant first; (n,) uint8 each, overwritten.
    """
    from kvd.codec import _kernels

    if len(planes) == 1:
        planes[0][:] = source
    elif len(planes) == 2:  # noqa: PLR2004 - bytes of a value
        _kernels.split2(source, *planes)
    else:
        _kernels.split4(source, *planes)


def merge(planes: Sequence[Bytes], target: Any) -> None:  # noqa: ANN401 - arrays of three widths
    """Undo `split`: every value of byte planes is a value, so nothing can be wrong with them."""
    from kvd.codec import _kernels

    if len(planes) == 1:
        target[:] = planes[0]
    elif len(planes) == 2:  # noqa: PLR2004 - bytes of a value
        _kernels.merge2(*planes, target)
    else:
        _kernels.merge4(*planes, target)
