"""What lies on NVMe: region headers, records, index rows. Pure: bytes in, values out.

A region file, every border a multiple of 4096 bytes:

    | region header | record | record | ... | unused |

A record:

    | header: fixed part, one row an object, zeros | object 0 | object 1 | ... |

Each object begins at a 4096-byte border and is padded with zeros, so a raw one can be read by
O_DIRECT straight into a slot. All numbers are little-endian.

Invariants:

D1. A record is believed only if magic, format version, store, region, incarnation, generation, key
    (tenant digest, namespace, layout, chunk), parent and the header's checksum are all as expected;
    an object only if its own checksum is right too.
D2. Generations and incarnations come from one counter that never repeats in the life of a store
    (`life << 32 | sequence`, the life being durable before it is used): a record of an earlier use
    of a region is older than that region's incarnation.
D3. Nothing read from disk is used as a length or an offset before it was checked against the
    record's own limits.

The store's uuid is secret (owner-only files, never sent): a client cannot put bytes into an object
that a scan would take for a record.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import ReadableBuffer

BLOCK: Final = 4096
FORMAT_VERSION: Final = 1
COLUMNS_MAX: Final = 256
HASH_BYTES: Final = 32
UUID_BYTES: Final = 16
SPACE_KEY_BYTES: Final = 16
KEY_BYTES: Final = SPACE_KEY_BYTES + HASH_BYTES
REGION_BYTES_MIN: Final = 64 << 10
REGION_BYTES_MAX: Final = 1 << 40
FORM_RAW: Final = 0
"""Stored as it is. Every other form is the codec's business."""
FORM_MIXED: Final = 255
"""In an index row: the objects of this bundle have several forms."""


def aligned(size_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-size_bytes // BLOCK) * BLOCK


class Space(NamedTuple):
    """What bundles may be compared with each other.

    Attributes:
        tenant: The tenant's name.
        namespace: 32-byte id.
        layout_id: 32-byte id.
        label: For people.
        layout: The layout's fields as the caller encodes them; opaque here, kept in the index.
    """

    tenant: str
    namespace: bytes
    layout_id: bytes
    label: str = ""
    layout: bytes = b""

    @property
    def key(self) -> bytes:
        """The 16 bytes that stand for it in the index; the record repeats the whole identity."""
        return self.digest[:SPACE_KEY_BYTES]

    @property
    def digest(self) -> bytes:
        """32 bytes over tenant, namespace and layout."""
        body = self.namespace + self.layout_id + self.tenant.encode()
        return blake2b(body, digest_size=HASH_BYTES, person=b"kvd.space.1").digest()


class Part(NamedTuple):
    """One object to write; `stored` belongs to the store until the write has ended."""

    column: int
    form: int
    raw_bytes: int
    stored: ReadableBuffer


class Bundle(NamedTuple):
    """One chunk with its objects, written and committed as one.

    Attributes:
        space: Whose.
        chunk: Chunk hash, 32 bytes.
        parent: Hash of the chunk before it, or the namespace id.
        parts: Objects by rising column, at least one.
        hint: A number of the caller's that comes back from the index at start.
    """

    space: Space
    chunk: bytes
    parent: bytes
    parts: Sequence[Part]
    hint: int = 0


class Ref(NamedTuple):
    """Where a bundle lies; of no use once the generation there is another."""

    region: int
    offset_bytes: int
    length_bytes: int
    generation: int


class ObjectRow(NamedTuple):
    """A record's line about one object; `offset_bytes` counts from the record's start."""

    column: int
    form: int
    raw_bytes: int
    stored_bytes: int
    offset_bytes: int
    checksum: int


class BadRecord(ValueError):
    """Bytes that are not the record, region or row they should be; the text says why."""
