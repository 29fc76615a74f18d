"""Rows of the index: which bundle lies where. Pure: bytes in, values out.

A row is 168 bytes: the first KEY_BYTES are its key in the index, the rest its value. The last eight
are a check over all others, so that a damaged row is not believed (R1); what it names is verified
in full when it is read (D1).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.tiers.region import FORM_MIXED, HASH_BYTES, SPACE_KEY_BYTES, BadRecord, Ref

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.tiers.region import Bundle, Origin, Plan, Record

KEY_BYTES: Final = SPACE_KEY_BYTES + HASH_BYTES
ROW: Final = struct.Struct("<16s32s32s32sIIQQQQQQ")
"""space key, chunk | parent, mask, region, form, offset, length, generation, stored, hint, check"""
ROW_BYTES: Final = ROW.size
ENTRY: Final = struct.Struct("<32s32s32s20sQQ")
"""What a start hands on of a row: chunk | parent, mask, place, length, hint; the place is region,
offset and generation as they stand in the row"""
ENTRY_PARTS: Final = ((16, 96), (112, 4), (120, 8), (136, 8), (128, 8), (152, 8))
"""Where in a row that is: offset and length of each part, in the order of ENTRY."""
VALUE_BYTES: Final = ROW_BYTES - KEY_BYTES
_WORDS: Final = ROW_BYTES // 8
_FACTORS: Final[NDArray[np.uint64]] = np.array(
    [(0x9E3779B97F4A7C15 * (2 * n + 1)) % (1 << 64) | 1 for n in range(_WORDS - 1)], np.uint64
)
_REST: Final = np.uint64(0x2545F4914F6CDD1D)
assert ROW_BYTES == 8 * _WORDS


class Row(NamedTuple):
    """An index entry, without its checksum."""

    space_key: bytes
    chunk: bytes
    parent: bytes
    mask: bytes
    region: int
    form: int
    offset_bytes: int
    length_bytes: int
    generation: int
    stored_bytes: int
    hint: int

    @property
    def key(self) -> bytes:
        """The 48 bytes under which it stands in the index."""
        return self.space_key + self.chunk

    @property
    def ref(self) -> Ref:
        """Its place."""
        return Ref(self.region, self.offset_bytes, self.length_bytes, self.generation)


def checks(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the check word of each row, from its other words.

    A sum of the words, each times an odd constant, modulo 2**64: it sees every change within one
    word and all but 2**-64 of the others, and a million rows take some 30 ms.
    """
    total: NDArray[np.uint64] = words[:, : _WORDS - 1] @ _FACTORS + _REST
    return total


def words_of(rows: bytes) -> NDArray[np.uint64]:
    """View packed rows as 64-bit words, one line a row."""
    return np.frombuffer(rows, "<u8").reshape(-1, _WORDS)


def pack_row(row: Row) -> bytes:
    """Pack a row without its check."""
    return ROW.pack(*row, 0)[:-8]


def unpack_row(packed: bytes) -> Row:
    """Unpack what `pack_row` made."""
    return Row._make(ROW.unpack(packed + bytes(8))[:-1])


def seal_rows(packed: list[bytes]) -> list[bytes]:
    """Add the checks to rows from `pack_row`, all at once."""
    sealed = np.frombuffer(bytes(8).join([*packed, b""]), "<u8").reshape(-1, _WORDS).copy()
    sealed[:, -1] = checks(sealed)
    joined = sealed.tobytes()
    return [joined[at : at + ROW_BYTES] for at in range(0, len(joined), ROW_BYTES)]


def encode_row(row: Row) -> bytes:
    """Pack a row, key first: the first KEY_BYTES are the index key, the rest its value."""
    return seal_rows([pack_row(row)])[0]


def decode_row(packed: bytes) -> Row:
    """Unpack one row; BadRecord if its check is wrong."""
    if len(packed) != ROW_BYTES:
        raise BadRecord("index row: length")
    words = words_of(packed)
    if checks(words)[0] != words[0, -1]:
        raise BadRecord("index row: checksum")
    return Row._make(ROW.unpack(packed)[:-1])


def row_of(record: Record, offset_bytes: int) -> Row:
    """Return the index row that names this record."""
    forms = {item.form for item in record.objects}
    return Row(
        record.space_digest[:SPACE_KEY_BYTES],
        record.chunk,
        record.parent,
        record.mask,
        record.origin.region,
        forms.pop() if len(forms) == 1 else FORM_MIXED,
        offset_bytes,
        record.length_bytes,
        record.origin.generation,
        sum(item.stored_bytes for item in record.objects),
        record.hint,
    )


def planned_row(bundle: Bundle, plan: Plan, origin: Origin, offset_bytes: int) -> Row:
    """Return the index row for a record that is about to be written."""
    forms = {part.form for part in bundle.parts}
    return Row(
        bundle.space.key,
        bundle.chunk,
        bundle.parent,
        plan.mask,
        origin.region,
        forms.pop() if len(forms) == 1 else FORM_MIXED,
        offset_bytes,
        plan.length_bytes,
        origin.generation,
        sum(memoryview(part.stored).nbytes for part in bundle.parts),
        bundle.hint,
    )
