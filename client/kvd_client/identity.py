"""What makes two KV caches the same: namespace, layout and the chain of chunk hashes.

Invariants:

I1. Every id is BLAKE2b-256 with a domain of its own, over canonical msgpack or length-prefixed
    bytes: no two different inputs of one kind have one encoding, and no two kinds share a domain.
I2. A chunk hash covers the namespace (salt included) and every token up to the chunk's end.
I3. The salt enters the namespace's digest and leaves this process in no other form.

Pure and light: hashlib, array and msgpack only. Any thread.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HASH_BYTES = 32
SALT_BYTES_MIN = 16
SALT_BYTES_MAX = 64
TEXT_BYTES_MAX = 256
GROUPS_MAX = 16
RANKS_MAX = 64
COLUMNS_MAX = 256
GROUP_KINDS = ("full", "sliding", "recurrent", "mla")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")

_NAMESPACE = b"kvd.namespace.1"
_LAYOUT = b"kvd.layout.1"
_CHUNK = b"kvd.chunk.1"


def _text(name: str, value: object, *, empty: bool = True) -> str:
    """Return `value` if it is printable text of bounded length; raise ValueError otherwise."""
    if not isinstance(value, str):
        msg = f"{name} must be text, not {type(value).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - one error type for a bad field
    if len(value.encode()) > TEXT_BYTES_MAX or not value.isprintable():
        msg = f"{name} must be printable text of at most {TEXT_BYTES_MAX} bytes"
        raise ValueError(msg)
    if not empty and not value:
        msg = f"{name} is empty: kvd must know it to tell one model's KV from another's"
        raise ValueError(msg)
    return value


def _count(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        msg = f"{name} must be a whole number from {low} to {high}"
        raise ValueError(msg)
    return value


class Namespace(NamedTuple):
    """Who may share KV: everything but the tokens that changes what the bytes mean.

    Attributes:
        model: What was run, best a digest of its weights; never an alias that may move.
        revision: The weights' revision, checkpoint or epoch.
        dtype: The compute dtype.
        adapter: Digest of the adapter's content, empty for none.
        rope: The rotary embedding's parameters, as text.
        salt: 16 to 64 secret bytes shared by those who may share prefixes, or empty.
        extra: What else changes KV (quantisation, attention back end, image tower, ...).
        lossy: Objects may go through a lossy cold form (FP8); exact copies only, otherwise.
    """

    model: str
    revision: str
    dtype: str
    adapter: str = ""
    rope: str = ""
    salt: bytes = b""
    extra: str = ""
    lossy: bool = False

    def check(self) -> Namespace:
        """Return self, or raise ValueError naming the first bad field."""
        _text("namespace.model", self.model, empty=False)
        _text("namespace.revision", self.revision, empty=False)
        _text("namespace.dtype", self.dtype, empty=False)
        _text("namespace.adapter", self.adapter)
        _text("namespace.rope", self.rope)
        _text("namespace.extra", self.extra)
        salt: object = self.salt
        if not isinstance(salt, bytes):
            msg = "namespace.salt must be bytes"
            raise ValueError(msg)  # noqa: TRY004 - one error type for a bad field
        lossy: object = self.lossy
        if not isinstance(lossy, bool):
            msg = "namespace.lossy must be True or False"
            raise ValueError(msg)  # noqa: TRY004 - one error type for a bad field
        if self.salt and not SALT_BYTES_MIN <= len(self.salt) <= SALT_BYTES_MAX:
            msg = f"namespace.salt must be empty or {SALT_BYTES_MIN} to {SALT_BYTES_MAX} bytes"
            raise ValueError(msg)
        return self

    @property
    def id(self) -> bytes:
        """The 32-byte id under which the daemon keeps this namespace."""
        return _digest(_NAMESPACE, msgpack.packb(list(self.check()), use_bin_type=True))

    @property
    def label(self) -> str:
        """What `kvd ls` shows of it: model and revision, no secrets."""
        return f"{self.model}@{self.revision}"[:TEXT_BYTES_MAX]


class Group(NamedTuple):
    """Layers that share one rule of reuse; one object a chunk and shard.

    Attributes:
        kind: `full`, `sliding`, `recurrent` (state after exactly this chunk) or `mla`.
        layers: Layers of the group held by one rank.
        kv_heads: KV heads of one rank (1 for `mla`, 0 for `recurrent`).
        head_size: Values a head and token (latent width for `mla`).
        object_bytes: Bytes of one object: one chunk, this group, one rank.
        window: Tokens a layer sees, itself included; `sliding` only.
    """

    kind: str
    layers: int
    kv_heads: int
    head_size: int
    object_bytes: int
    window: int = 0

    def check(self, index: int) -> None:
        """Raise ValueError naming the first bad field."""
        name = f"layout.groups[{index}]"
        if self.kind not in GROUP_KINDS:
            msg = f"{name}.kind must be one of {', '.join(GROUP_KINDS)}"
            raise ValueError(msg)
        _count(f"{name}.layers", self.layers, 1, 4096)
        _count(f"{name}.kv_heads", self.kv_heads, 0, 4096)
        _count(f"{name}.head_size", self.head_size, 0, 1 << 20)
        _count(f"{name}.object_bytes", self.object_bytes, 1, 1 << 36)
        low, high = (2, 1 << 31) if self.kind == "sliding" else (0, 0)
        _count(f"{name}.window", self.window, low, high)


class Layout(NamedTuple):
    """How an object's bytes are read.

    Attributes:
        chunk_tokens: Tokens a chunk: the unit of identity and of hits.
        page_tokens: Tokens a page of the engine; divides `chunk_tokens`.
        dtype: Of the KV values.
        groups: The model's layer groups, in an order the engine keeps.
        tp: Tensor-parallel ranks.
        pp: Pipeline-parallel ranks; rank = pp_rank * tp + tp_rank.
        order: The axis order inside an object and its version, as the client names it.
    """

    chunk_tokens: int
    page_tokens: int
    dtype: str
    groups: tuple[Group, ...]
    tp: int = 1
    pp: int = 1
    order: str = "layer,kv,page,token,head,dim/1"

    def check(self) -> Layout:
        """Return self, or raise ValueError naming the first bad field."""
        _count("layout.chunk_tokens", self.chunk_tokens, 1, 1 << 20)
        _count("layout.page_tokens", self.page_tokens, 1, 1 << 20)
        if self.chunk_tokens % self.page_tokens:
            msg = (
                f"layout.chunk_tokens ({self.chunk_tokens}) must be a multiple of "
                f"layout.page_tokens ({self.page_tokens})"
            )
            raise ValueError(msg)
        if self.dtype not in DTYPES:
            msg = f"layout.dtype must be one of {', '.join(DTYPES)}"
            raise ValueError(msg)
        _count("layout.tp", self.tp, 1, RANKS_MAX)
        _count("layout.pp", self.pp, 1, RANKS_MAX)
        _count("layout.tp * layout.pp", self.tp * self.pp, 1, RANKS_MAX)
        _text("layout.order", self.order, empty=False)
        _count("the number of layout.groups", len(self.groups), 1, GROUPS_MAX)
        for index, group in enumerate(self.groups):
            group.check(index)
        _count("objects a chunk (groups x ranks)", self.columns, 1, COLUMNS_MAX)
        return self

    @property
    def ranks(self) -> int:
        """Worker processes that share one model."""
        return self.tp * self.pp

    def shards(self, group: int) -> int:
        """Objects of `group` a chunk has: one a rank, or one a pipeline stage for MLA."""
        return self.pp if self.groups[group].kind == "mla" else self.ranks

    def column(self, group: int, rank: int) -> int:
        """Place of (group, rank) among the objects of a chunk."""
        before = sum(self.shards(earlier) for earlier in range(group))
        return before + (rank // self.tp if self.groups[group].kind == "mla" else rank)

    def group_of(self, column: int) -> int:
        """Return the group whose objects a column is among."""
        for group in range(len(self.groups)):
            column -= self.shards(group)
            if column < 0:
                return group
        msg = "no such column"
        raise ValueError(msg)

    @property
    def columns(self) -> int:
        """Objects a chunk has over all groups and ranks."""
        return sum(self.shards(group) for group in range(len(self.groups)))

    def fields(self) -> list[object]:
        """The layout as plain lists, for the wire and for its id."""
        return [*self[:3], [list(group) for group in self.groups], *self[4:]]

    @property
    def id(self) -> bytes:
        """The 32-byte id of this layout."""
        return _digest(_LAYOUT, msgpack.packb(self.fields(), use_bin_type=True))

    @staticmethod
    def from_fields(fields: Sequence[object]) -> Layout:
        """Rebuild a layout from `fields()`; ValueError when it is not one."""
        if len(fields) != len(Layout._fields) or not isinstance(fields[3], list):
            msg = f"layout must have the {len(Layout._fields)} fields {', '.join(Layout._fields)}"
            raise ValueError(msg)
        groups = []
        for index, group in enumerate(fields[3][: GROUPS_MAX + 1]):
            if not isinstance(group, list) or len(group) != len(Group._fields):
                msg = f"layout.groups[{index}] must have the fields {', '.join(Group._fields)}"
                raise ValueError(msg)
            groups.append(Group(*group))
        return Layout._make([*fields[:3], tuple(groups), *fields[4:]]).check()


def _digest(domain: bytes, body: bytes) -> bytes:
    return blake2b(body, digest_size=HASH_BYTES, person=domain).digest()


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Encode token ids as little-endian 32-bit unsigned integers.

    Args:
        tokens: Ints from 0 to 2**32 - 1; a list, a 1-D numpy array or a 1-D torch tensor.

    Raises:
        ValueError: A token is negative, too large or not a whole number.
    """
    to_list = getattr(tokens, "tolist", None)
    try:
        if to_list is not None:
            tokens = to_list()
        # iter: array would take raw bytes for its own encoding, four of them a token
        encoded = array("I", tokens if isinstance(tokens, list) else iter(tokens))
    except (OverflowError, TypeError) as error:
        msg = f"tokens must be a flat sequence of whole numbers from 0 to 2**32 - 1: {error}"
        raise ValueError(msg) from error
    assert encoded.itemsize == 4  # noqa: PLR2004 - C int on every platform CPython runs CUDA on
    return encoded.tobytes()


def chunk_hashes(
    root: bytes,
    tokens: Iterable[int],
    chunk_tokens: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Hash every whole chunk of `tokens`; each hash covers all chunks before it (I2).

    Args:
        root: `Namespace.id`, 32 bytes.
        tokens: Token ids; a last part shorter than a chunk is left out.
        chunk_tokens: Tokens a chunk.
        extras: Chunk index to bytes for what else changes KV there (an image's digest, ...).

    Returns:
        One 32-byte hash a chunk.

    Raises:
        ValueError: Bad tokens.
    """
    encoded = token_bytes(tokens)
    step = 4 * chunk_tokens
    previous = root
    hashes = []
    for index in range(len(encoded) // step):
        extra = extras.get(index, b"") if extras else b""
        digest = blake2b(previous, digest_size=HASH_BYTES, person=_CHUNK)
        digest.update(len(extra).to_bytes(4, "little") + extra)
        digest.update(encoded[index * step : (index + 1) * step])
        previous = digest.digest()
        hashes.append(previous)
    return hashes
