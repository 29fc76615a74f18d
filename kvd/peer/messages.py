"""What two daemons say to each other: every message, its limits, its bytes. Pure.

A connection has one direction: who opened it asks, who accepted it holds. A message is a msgpack
list, its kind first, behind four bytes of length. What comes from the other side is checked here
once, field by field; who gets a message from `decode` need not check its form again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
FRAME_BYTES_MAX = 1 << 20
"""Of one message, read before anything is allocated for it."""
CHUNKS_MAX = 256
"""Chunks of one ask."""
COLUMNS_MAX = 256
HASH_BYTES = 32
SEAL_BYTES = 16
DIGEST_BYTES = 16
TEXT_BYTES_MAX = 256
METADATA_BYTES_MAX = 512 * 1024
_NUMBER_MAX = (1 << 64) - 1


class PeerError(KvdError):
    """What another host sent breaks the protocol."""


class Piece(NamedTuple):
    """One object on offer.

    Attributes:
        column: Which of its chunk's objects.
        address: Where it lies, in the holder's source process.
        size_bytes: How long it is.
        generation: Of the holder's slot.
        lossy: Whether it went through a lossy form.
        seal: See `seal`.
    """

    column: int
    address: int
    size_bytes: int
    generation: int
    lossy: int
    seal: bytes


class Hello(NamedTuple):
    """First from the asker."""

    version: int
    cluster: str
    host: str
    epoch: int
    transport: str


class Welcome(NamedTuple):
    """The holder's answer to it."""

    version: int
    cluster: str
    host: str
    epoch: int
    transport: str


class Ask(NamedTuple):
    """Ask for chunks, in prefix order.

    Attributes:
        ask: The asker's number of it, never used again on this connection.
        epoch: The holder's, as the asker knows it.
        tag: Whose: `tag_of` a tenant.
        namespace: Its id.
        layout: Its id.
        lease_ms: For how long the holder keeps what it offers, counted from the request.
        wants: Hash and mask of columns of each chunk.
    """

    ask: int
    epoch: int
    tag: bytes
    namespace: bytes
    layout: bytes
    lease_ms: int
    wants: tuple[tuple[bytes, int], ...]


class Agent(NamedTuple):
    """How to reach the holder's source: valid for offers that name the same version."""

    version: int
    metadata: bytes


class Offer(NamedTuple):
    """The chunk `at` of an ask, held in place until it is handed back or the lease ends."""

    ask: int
    epoch: int
    at: int
    agent: int
    pieces: tuple[Piece, ...]


class Stop(NamedTuple):
    """Nothing of an ask is offered from chunk `at` on, and why."""

    ask: int
    epoch: int
    at: int
    why: str
    retry_ms: int


class Have(NamedTuple):
    """The asker is done with a chunk: it has it, or does not want it any more."""

    ask: int
    at: int


class Release(NamedTuple):
    """The asker is done with an ask."""

    ask: int


class Ping(NamedTuple):
    """Are you there?"""

    nonce: int


class Pong(NamedTuple):
    """Yes."""

    nonce: int
    epoch: int


Message = Hello | Welcome | Ask | Agent | Offer | Stop | Have | Release | Ping | Pong
KINDS: tuple[type[Any], ...] = (
    Hello,
    Welcome,
    Ask,
    Agent,
    Offer,
    Stop,
    Have,
    Release,
    Ping,
    Pong,
)

WHYS = ("end", "miss", "busy", "forbidden", "epoch", "draining", "not now")
"""Why a `Stop`: all offered; not here; come again later; not yours; of another life; ..."""
TRANSPORTS = ("tcp", "rdma")


def tag_of(cluster: str, tenant: str) -> bytes:
    """Name a tenant between hosts: its name stays at home."""
    return blake2b(
        tenant.encode(), digest_size=16, person=b"kvd.peer.tenant", key=cluster.encode()[:64]
    ).digest()


def seal(
    namespace: bytes, layout: bytes, key: bytes, piece: tuple[int, int, int, int], digest: bytes
) -> bytes:
    """Bind an object's bytes to what they are.

    Args:
        namespace: Its id.
        layout: Its id.
        key: The chunk's hash.
        piece: Column, size, generation of the holder's slot, lossy.
        digest: xxh3-128 of the bytes.
    """
    state = blake2b(digest_size=SEAL_BYTES, person=b"kvd.peer.seal.1")
    for part in (namespace, layout, key, digest):
        assert len(part) in {HASH_BYTES, DIGEST_BYTES}  # fixed widths: one input, one encoding
        state.update(part)
    for number in piece:
        state.update(number.to_bytes(8, "little"))
    return state.digest()


# -------------------------------------------------------------------- fields


def _number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _NUMBER_MAX


def _bytes(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is bytes and least <= len(value) <= most


def _text(value: object) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value.encode("utf-8", "replace")) <= TEXT_BYTES_MAX
        and value.isprintable()
    )


def _mask(value: object) -> bool:
    return _bytes(1, COLUMNS_MAX // 8)(value)


_ID = _bytes(HASH_BYTES, HASH_BYTES)


def _wants(value: object) -> bool:
    return (
        type(value) is list
        and 0 < len(value) <= CHUNKS_MAX
        and all(type(w) is list and len(w) == 2 and _ID(w[0]) and _mask(w[1]) for w in value)  # noqa: PLR2004
    )


def _pieces(value: object) -> bool:
    return type(value) is list and 0 < len(value) <= COLUMNS_MAX and all(map(_piece, value))


def _piece(value: object) -> bool:
    return (
        type(value) is list
        and len(value) == len(Piece._fields)
        and all(map(_number, value[:5]))
        and value[0] < COLUMNS_MAX
        and 0 < value[2] <= _NUMBER_MAX - value[1]
        and value[4] in {0, 1}
        and _bytes(SEAL_BYTES, SEAL_BYTES)(value[5])
    )


def _one_of(names: tuple[str, ...]) -> Callable[[object], bool]:
    return lambda value: value in names


_RULES: dict[str, Callable[[object], bool]] = {
    "cluster": _text,
    "host": _text,
    "transport": _one_of(TRANSPORTS),
    "tag": _bytes(16, 16),
    "namespace": _ID,
    "layout": _ID,
    "wants": _wants,
    "metadata": _bytes(1, METADATA_BYTES_MAX),
    "pieces": _pieces,
    "why": _one_of(WHYS),
}
"""Fields that are no plain number."""


def encode(message: Message) -> bytes:
    """Return a message with its length before it."""
    fields: list[Any] = list(message)
    if isinstance(message, Ask):
        fields[-1] = [[key, _pack_mask(mask)] for key, mask in message.wants]
    body: bytes = msgpack.packb([KINDS.index(type(message)), *fields], use_bin_type=True)
    assert len(body) <= FRAME_BYTES_MAX
    return len(body).to_bytes(4, "little") + body


def _pack_mask(mask: int) -> bytes:
    return mask.to_bytes(max(1, -(-mask.bit_length() // 8)), "little")


def decode(body: bytes) -> Message:
    """Return the message of a frame's body.

    Raises:
        PeerError: It breaks a rule; the text names the field.
    """
    try:
        fields = msgpack.unpackb(body, raw=False, max_map_len=0, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        msg = f"no message: {error}"
        raise PeerError(msg) from error
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        raise PeerError("no message: not a list with a kind")
    if not 0 <= fields[0] < len(KINDS):
        raise PeerError("unknown kind of message")
    kind = KINDS[fields[0]]
    if len(fields) != 1 + len(kind._fields):
        msg = f"{kind.__name__} has {len(kind._fields)} fields"
        raise PeerError(msg)
    for name, value in zip(kind._fields, fields[1:], strict=True):
        if not _RULES.get(name, _number)(value):
            msg = f"{kind.__name__}.{name} breaks its rule"
            raise PeerError(msg)
    message: Message = kind(*fields[1:])
    if isinstance(message, Ask):
        wants = tuple((key, int.from_bytes(mask, "little")) for key, mask in fields[-1])
        return message._replace(wants=wants)
    if isinstance(message, Offer):
        return message._replace(pieces=tuple(Piece(*piece) for piece in fields[-1]))
    return message
