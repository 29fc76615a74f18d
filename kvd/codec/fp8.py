"""FP8 of objects: `kvd_client.fp8`, the engines' own, under the shapes of the codec.

Any thread, no GIL while values are looped over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.codec.frame import CorruptFrame
from kvd_client import fp8
from kvd_client.fp8 import EXPONENTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvd.codec.shape import ObjectShape

    Bytes = npt.NDArray[np.uint8]
    Exponents = npt.NDArray[np.int16]

__all__ = ["EXPONENTS", "decode", "encode"]


def encode(shape: ObjectShape, source: Any, codes: Bytes, exponents: Exponents) -> int:  # noqa: ANN401
    """Quantise an object of a scaled shape; see `kvd_client.fp8.encode`."""
    return fp8.encode(shape.dtype, _axes(shape), source, codes, exponents)


def decode(shape: ObjectShape, codes: Bytes, exponents: Exponents, target: Any) -> None:  # noqa: ANN401
    """Give the values of codes; see `kvd_client.fp8.decode`.

    Raises:
        CorruptFrame: An exponent that `encode` never gives; `target` is as it was.
    """
    try:
        fp8.decode(shape.dtype, _axes(shape), codes, exponents, target)
    except fp8.BadScale as error:
        raise CorruptFrame(str(error)) from error


def _axes(shape: ObjectShape) -> tuple[int, int, int, int]:
    return shape.planes, shape.blocks, shape.heads, shape.run
