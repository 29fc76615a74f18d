"""The loops that split bytes by significance and merge them: numba, without the GIL.

Imports numba and compiles (or loads from its cache) all loops at once, so only `split` imports it,
in functions. Those of FP8 are the client's (`kvd_client._fp8_loops`), as engines need them as well;
that module also says how loops are compiled, and why every operation is cast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from kvd_client._fp8_loops import compiled, read_only

if TYPE_CHECKING:
    import numpy.typing as npt

    U8 = npt.NDArray[np.uint8]
    U16 = npt.NDArray[np.uint16]
    U32 = npt.NDArray[np.uint32]

_U8: Any = np.uint8
_U16: Any = np.uint16
_U32: Any = np.uint32


def _split2(source: U16, least: U8, most: U8) -> None:
    """Split 16-bit floats: `most` gets bits 14..7 (bfloat16's exponent), `least` the rest."""
    for i in range(len(source)):
        bits = source[i]
        most[i] = _U8(_U16(bits >> _U16(7)))
        least[i] = _U8(_U16(_U16(bits & _U16(0x7F)) | _U16(_U16(bits >> _U16(8)) & _U16(0x80))))


def _merge2(least: U8, most: U8, target: U16) -> None:
    """Undo `_split2`."""
    for i in range(len(target)):
        low = _U16(least[i])
        bits = _U16(_U16(_U16(low & _U16(0x80)) << _U16(8)) | _U16(low & _U16(0x7F)))
        target[i] = _U16(bits | _U16(_U16(most[i]) << _U16(7)))


def _split4(source: U32, plane0: U8, plane1: U8, plane2: U8, plane3: U8) -> None:
    """Split float32: the upper half as `_split2` into planes 3 and 2, the lower as it is."""
    for i in range(len(source)):
        bits = source[i]
        plane3[i] = _U8(_U32(bits >> _U32(23)))
        sign = _U32(_U32(bits >> _U32(24)) & _U32(0x80))
        plane2[i] = _U8(_U32(sign | _U32(_U32(bits >> _U32(16)) & _U32(0x7F))))
        plane1[i] = _U8(_U32(bits >> _U32(8)))
        plane0[i] = _U8(bits)


def _merge4(plane0: U8, plane1: U8, plane2: U8, plane3: U8, target: U32) -> None:
    """Undo `_split4`."""
    for i in range(len(target)):
        mid = _U32(plane2[i])
        bits = _U32(_U32(_U32(mid & _U32(0x80)) << _U32(24)) | _U32(_U32(plane3[i]) << _U32(23)))
        bits = _U32(bits | _U32(_U32(mid & _U32(0x7F)) << _U32(16)))
        target[i] = _U32(bits | _U32(_U32(_U32(plane1[i]) << _U32(8)) | _U32(plane0[i])))


_R8, _R16, _R32 = read_only(types.uint8), read_only(types.uint16), read_only(types.uint32)
_W8, _W16, _W32 = types.uint8[::1], types.uint16[::1], types.uint32[::1]

split2 = compiled(types.void(_R16, _W8, _W8), _split2)
merge2 = compiled(types.void(_R8, _R8, _W16), _merge2)
split4 = compiled(types.void(_R32, _W8, _W8, _W8, _W8), _split4)
merge4 = compiled(types.void(_R8, _R8, _R8, _R8, _W32), _merge4)
