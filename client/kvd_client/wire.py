"""THE wire format: every message, field and limit between a client and the daemon.

Two channels carry these messages (docs/protocol.md):

- the *socket* (SOCK_SEQPACKET), for greeting, file descriptors and the end: one message a packet;
- the *rings* (shared memory), for everything frequent: one message a frame (`ring.py`).

A message is a msgpack array ``[opcode, field, ...]`` of fixed length. Decoding sets every msgpack
limit, allows no extension types and no maps, then checks each field against the rule named beside
it. What breaks a rule raises `WireError` and nothing else.

Pure; any thread.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from kvd_client.errors import WireError
from kvd_client.identity import HASH_BYTES, TEXT_BYTES_MAX
from kvd_client.wire_admin import (
    AdminDenied,
    AdminHello,
    AdminPage,
    AdminWelcome,
    Drain,
    Evict,
    ListChunks,
    ListPins,
    ListSpaces,
    Pin,
    Record,
    Unpin,
    Warm,
)
from kvd_client.wire_gpu import HANDLE_BYTES_MAX, UUID_BYTES, GpuSlab, GpuSlabReply, UseGpu
from kvd_client.wire_rules import Rule, binary, exactly, integer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [  # beside what is defined here
    "AdminDenied",
    "AdminHello",
    "AdminPage",
    "AdminWelcome",
    "Drain",
    "Evict",
    "ListChunks",
    "ListPins",
    "ListSpaces",
    "Pin",
    "Record",
    "Unpin",
    "Warm",
]

PROTOCOL = 1
BELL = b"\0"
"""The daemon's doorbell, a packet on the socket that is no message: replies are on the ring."""
PACKET_BYTES_MAX = 16 << 10
"""Longest message on the socket."""
MESSAGE_BYTES_MAX = 192 << 10
"""Longest message on a ring."""
RING_BYTES = 512 << 10
"""Data bytes of one ring; holds at least two of the longest messages."""
HASHES_MAX = 4096
"""Most chunk hashes, and most objects, one message may name."""
TOKEN_BYTES = 16
"""A lease token: unguessable, valid for the tenant until the lease ends."""
ROWS_MAX = 64
"""Most rows of one AdminPage, and most parts of any list in a message."""


class Status(IntEnum):
    """Outcome of one object or request. Only OK means that something is there."""

    OK = 0
    EXISTS = 1
    """The key is already published; the first writer won."""
    NO_SPACE = 2
    """No slot, and nothing that may be evicted."""
    BUSY = 3
    """Another session is filling the same key."""
    EXPIRED = 4
    """The deadline passed: not published; what was written there is gone."""
    STALE = 5
    """Not a handle of this session, epoch or generation."""
    OVER_QUOTA = 6
    """The tenant holds as much as it may."""
    DRAINING = 7
    """The daemon is going down and takes nothing in."""
    ORPHAN = 8
    """The parent chunk is not here, so that this one could never be used."""
    MISS = 9
    """Nothing usable to hold."""


class Refusal(IntEnum):
    """Why a session is refused or ended."""

    PROTOCOL = 1
    FORBIDDEN = 2
    BAD_LAYOUT = 3
    TOO_MANY = 4
    MALFORMED = 5
    DRAINING = 6
    LATE = 7

    @property
    def passing(self) -> bool:
        """Whether it may be otherwise in a moment, without a change of configuration."""
        return self in {Refusal.TOO_MANY, Refusal.DRAINING, Refusal.LATE}


class Hello(NamedTuple):
    """Socket, client's first: who I am and how I read KV."""

    protocol: int
    client: str
    namespace: bytes
    label: str
    layout: list[object]
    rank: int
    lossy: int


class Welcome(NamedTuple):
    """Socket, with 2 fds: ring memory, doorbell to the daemon (an eventfd)."""

    protocol: int
    epoch: int
    session: int
    ring_bytes: int
    slab_bytes: int


class Refused(NamedTuple):
    """Socket: the session does not start, or ends here, and why."""

    code: int
    text: str


class SlabRequest(NamedTuple):
    """Socket: send me this slab of my tenant."""

    slab: int


class SlabReply(NamedTuple):
    """Socket: the slab; with 1 fd, or none and 0 bytes when it is not the tenant's."""

    slab: int
    slab_bytes: int


class Bye(NamedTuple):
    """Socket: I am done, and no copy of mine from or to a slot is under way."""


class Ping(NamedTuple):
    """Ring: are you there."""

    request: int


class Lookup(NamedTuple):
    """Ring: how long is the usable prefix of this chain of hashes."""

    request: int
    hashes: bytes


class Acquire(NamedTuple):
    """Ring: hold the usable prefix from chunk `first` on; say where my rank's objects are.

    With `read` 0 the lease is only held, by time, for workers who attach; no places are told.
    """

    request: int
    hashes: bytes
    first: int
    ttl_ms: int
    read: int


class Attach(NamedTuple):
    """Ring: hold, for reading, what the lease of this token holds."""

    request: int
    token: bytes


class Prefill(NamedTuple):
    """Ring: computing so many tokens of my namespace's model took so long."""

    request: int
    tokens: int
    micros: int


class Release(NamedTuple):
    """Ring: this lease ends, and no copy out of its objects is under way."""

    request: int
    lease: int


class Reserve(NamedTuple):
    """Ring: slots for my rank's objects of a chain's next chunks, in the groups of the mask."""

    request: int
    parent: bytes
    hashes: bytes
    groups: int
    deadline_ms: int
    lossy: int


class Publish(NamedTuple):
    """Ring: these slots (by generation) are filled; make them findable."""

    request: int
    generations: bytes


class Abort(NamedTuple):
    """Ring: give these slots back; no copy into them is under way."""

    request: int
    generations: bytes


class Pong(NamedTuple):
    """Ring, reply to Ping."""

    request: int


class LookupReply(NamedTuple):
    """Ring, reply to Lookup: chunks of the usable prefix, and how many are worth loading."""

    request: int
    chunks: int
    worth: int


class AcquireReply(NamedTuple):
    """Ring, reply to Acquire and Attach; `objects` are OBJECT records, empty without `read`."""

    request: int
    status: int
    lease: int
    token: bytes
    first: int
    chunks: int
    lossy: int
    objects: bytes


class StatusReply(NamedTuple):
    """Ring, reply to Release, Prefill and UseGpu."""

    request: int
    status: int


class ReserveReply(NamedTuple):
    """Ring, reply to Reserve: one OBJECT record for each (chunk, group), in that order."""

    request: int
    objects: bytes


class ResultsReply(NamedTuple):
    """Ring, reply to Publish and Abort: one status byte a generation, in the order asked."""

    request: int
    results: bytes


class Place(NamedTuple):
    """Where an object is, or why it is nowhere; one OBJECT record."""

    chunk: int
    group: int
    status: int
    slab: int
    offset_bytes: int
    size_bytes: int
    generation: int


OBJECT = Struct("<IHHIQQQ")
NOWHERE = (0, 0, 0, 0)
GENERATION = Struct("<Q")

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


_TEXT = Rule(
    lambda v: type(v) is str and v.isprintable() and len(v.encode()) <= TEXT_BYTES_MAX,
    f"printable text of at most {TEXT_BYTES_MAX} bytes",
)
_LONG_TEXT = Rule(lambda v: type(v) is str and len(v) <= 2048, "text of at most 2048 characters")  # noqa: PLR2004
_LIST = Rule(lambda v: type(v) is list, "a list")
_FLAG = integer(1)
_ID = integer(_U64)
_SMALL = integer(_U32)
_HASHES = binary(HASH_BYTES, HASHES_MAX)
_HASH = exactly(HASH_BYTES)
_TOKEN = exactly(TOKEN_BYTES)
_GENERATIONS = binary(GENERATION.size, HASHES_MAX)
_OBJECTS = binary(OBJECT.size, HASHES_MAX)

Table = dict[int, tuple[type[Any], tuple[Rule, ...]]]

TO_DAEMON: Table = {
    1: (Hello, (_SMALL, _TEXT, _HASH, _TEXT, _LIST, _SMALL, _FLAG)),
    2: (SlabRequest, (_SMALL,)),
    3: (Bye, ()),
    70: (AdminHello, (_SMALL, _TEXT)),
    71: (ListSpaces, (_ID, _ID)),
    72: (ListChunks, (_ID, _HASH, _SMALL, _ID)),
    73: (Drain, (_ID,)),
    74: (Pin, (_ID, _HASH, _HASH, _ID, _SMALL, _TEXT)),
    75: (Unpin, (_ID, _ID)),
    76: (ListPins, (_ID, _ID)),
    77: (Evict, (_ID, _HASH, _SMALL, _FLAG, _FLAG, _ID)),
    78: (Warm, (_ID, _HASH, _ID, _ID)),
    79: (Record, (_ID, _HASH, _ID)),
}
"""Messages on the socket towards the daemon, by opcode."""
TO_CLIENT: Table = {
    1: (Welcome, (_SMALL, _ID, _ID, _SMALL, _ID)),
    2: (SlabReply, (_SMALL, _ID)),
    3: (Refused, (_SMALL, _LONG_TEXT)),
    70: (AdminWelcome, (_SMALL, _ID, _SMALL, _TEXT)),
    71: (AdminPage, (_ID, _ID, _LIST)),
    72: (AdminDenied, (_ID, _LONG_TEXT)),
}
"""Messages on the socket towards the client, by opcode."""
REQUESTS: Table = {
    1: (Ping, (_ID,)),
    2: (Lookup, (_ID, _HASHES)),
    3: (Acquire, (_ID, _HASHES, _SMALL, _SMALL, _FLAG)),
    4: (Attach, (_ID, _TOKEN)),
    5: (Release, (_ID, _ID)),
    6: (Reserve, (_ID, _HASH, _HASHES, _SMALL, _SMALL, _FLAG)),
    7: (Publish, (_ID, _GENERATIONS)),
    8: (Abort, (_ID, _GENERATIONS)),
    9: (Prefill, (_ID, _SMALL, _SMALL)),
    50: (UseGpu, (_ID, exactly(UUID_BYTES))),
    51: (GpuSlab, (_ID, _SMALL)),
}
"""Messages on the request ring, by opcode."""
REPLIES: Table = {
    1: (Pong, (_ID,)),
    2: (LookupReply, (_ID, _SMALL, _SMALL)),
    3: (AcquireReply, (_ID, _SMALL, _ID, _TOKEN, _SMALL, _SMALL, _FLAG, _OBJECTS)),
    5: (StatusReply, (_ID, _SMALL)),
    6: (ReserveReply, (_ID, _OBJECTS)),
    7: (ResultsReply, (_ID, binary(1, HASHES_MAX))),
    51: (GpuSlabReply, (_ID, _ID, _ID, binary(1, HANDLE_BYTES_MAX))),
}
"""Messages on the completion ring, by opcode."""

_CODES = {
    kind: code
    for table in (TO_DAEMON, TO_CLIENT, REQUESTS, REPLIES)
    for code, (kind, _) in table.items()
}


_PACKER = msgpack.Packer(use_bin_type=True)
"""One for all threads: `pack` of plain values is a single C call under the GIL."""


def encode(message: tuple[Any, ...]) -> bytes:
    """Encode one of the messages above; raises KeyError for anything else."""
    packed: bytes = _PACKER.pack((_CODES[type(message)], *message))
    return packed


def _unpack(payload: bytes) -> list[Any]:
    try:
        body = msgpack.unpackb(
            payload,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=8192,
            max_bin_len=MESSAGE_BYTES_MAX,
            max_array_len=ROWS_MAX,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError("message", "must be one msgpack array within the limits") from error
    if type(body) is not list or not body or type(body[0]) is not int:
        raise WireError("message", "must be an array that begins with an opcode")
    return body


def decode(payload: bytes, table: Table) -> Any:  # noqa: ANN401 - one of the table's messages
    """Decode and check one message of `table`.

    Args:
        payload: A private copy of the bytes; never a view of shared memory.
        table: `TO_DAEMON`, `TO_CLIENT`, `REQUESTS` or `REPLIES`.

    Raises:
        WireError: The bytes break a rule. Nothing else is raised, whatever the bytes.
    """
    body = _unpack(payload)
    known = table.get(body[0])
    if known is None:
        raise WireError("opcode", "must be one of the protocol's")
    kind, rules = known
    if kind in {Hello, AdminHello} and len(body) > 1 and body[1] != PROTOCOL:
        raise WireError("protocol", f"must be {PROTOCOL}")
    if len(body) != len(rules) + 1:
        raise WireError(kind.__name__, f"must have {len(rules)} fields")
    del body[0]
    for index, value in enumerate(body):
        if not rules[index].holds(value):
            name = f"{kind.__name__}.{kind._fields[index]}"
            raise WireError(name, f"must be {rules[index].words}")
    return kind._make(body)


def split_hashes(joined: bytes) -> list[bytes]:
    """Cut joined hashes into single ones."""
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def pack_places(places: Iterable[tuple[int, ...]]) -> bytes:
    """Join OBJECT records."""
    pack = OBJECT.pack
    return b"".join([pack(*place) for place in places])


def unpack_places(joined: bytes) -> Iterator[Place]:
    """Read OBJECT records, whose fields are unsigned by construction."""
    return map(Place._make, OBJECT.iter_unpack(joined))


def slabs_of(joined: bytes) -> set[int]:
    """Return the slabs that OBJECT records name, without reading the rest of them."""
    words = memoryview(joined).cast("I")
    return set(words[2 :: OBJECT.size // 4])


def pack_generations(generations: Iterable[int]) -> bytes:
    """Join generations."""
    return b"".join([GENERATION.pack(generation) for generation in generations])


def unpack_generations(joined: bytes) -> list[int]:
    """Read generations."""
    return [generation for (generation,) in GENERATION.iter_unpack(joined)]
