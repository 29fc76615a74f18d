"""How an object's bytes are read: what the codec needs to know of a layout, and no more.

    plane 0                                   plane 1
    +------------------+------------------+-- +---------
    | block 0          | block 1          |   | ...
    | head 0 | head 1  | head 0 | head 1  |   |
    +------------------+------------------+-- +---------
    a plane is K or V of one layer; a head's part of a block is `run` values in a row

Every order kvd knows is such a picture: with tokens before heads a block is a token and a run one
head's vector; with heads before tokens inside a page a block is a page; with heads before all
tokens there is one block.

Pure; any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from kvd_client.identity import Layout

Form = Literal["raw", "fp8", "lossless"]
FORMS: Final[tuple[Form, ...]] = ("raw", "fp8", "lossless")

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
FP8_DTYPES: Final = frozenset({"bfloat16", "float16", "float32"})
FP8_KINDS: Final = frozenset({"full", "sliding"})

_OUTER: Final = (("layer", "kv"), ("kv", "layer"))
_TOKENS_FIRST: Final = (("page", "token", "head", "dim"), ("token", "head", "dim"))
_HEADS_IN_PAGE: Final = ("page", "head", "token", "dim")
_HEADS_FIRST: Final = ("head", "token", "dim")
_ORDER_VERSION: Final = "1"


class ObjectShape(NamedTuple):
    """The bytes of one object: (planes, blocks, heads, run) values of `dtype`, C order.

    Attributes:
        raw_bytes: Bytes of the object.
        dtype: Of its values, a key of `ITEM_BYTES`.
        planes: K and V of each layer; 0 in a shape that only counts bytes.
        blocks: Times the heads come round in a plane.
        heads: KV heads.
        run: Values of one head in one block.
    """

    raw_bytes: int
    dtype: str
    planes: int = 0
    blocks: int = 0
    heads: int = 0
    run: int = 0

    @property
    def scaled(self) -> bool:
        """Whether the axes are known, so that each head can have its scale."""
        return self.planes > 0

    @property
    def scales(self) -> int:
        """FP8 scales of the object: one a plane and head, in this order."""
        return self.planes * self.heads

    @property
    def item_bytes(self) -> int:
        """Bytes that are split by significance; 1 where the object is no whole number of items."""
        size = ITEM_BYTES[self.dtype]
        return 1 if self.raw_bytes % size else size


def shape_of(layout: Layout, group_index: int) -> ObjectShape | None:
    """Read the axes of a group's objects, or None where FP8 is refused.

    Refused are groups other than full and sliding-window attention, values other than bfloat16,
    float16 and float32, orders not known here, and objects whose size is not what their axes
    multiply up to (K and V of different widths, for one). Such objects stay `lossless` or `raw`,
    with `flat_shape`.

    Args:
        layout: Checked (`Layout.check`).
        group_index: Which of its groups.
    """
    group = layout.groups[group_index]
    if group.kind not in FP8_KINDS or layout.dtype not in FP8_DTYPES:
        return None
    name, _, version = layout.order.partition("/")
    axes = tuple(name.split(","))
    if version != _ORDER_VERSION or axes[:2] not in _OUTER:
        return None
    tokens, heads, run = layout.chunk_tokens, group.kv_heads, group.head_size
    if axes[2:] in _TOKENS_FIRST:
        blocks = tokens
    elif axes[2:] == _HEADS_IN_PAGE:
        blocks, run = tokens // layout.page_tokens, layout.page_tokens * run
    elif axes[2:] == _HEADS_FIRST:
        blocks, run = 1, tokens * run
    else:
        return None
    planes = 2 * group.layers
    size = planes * blocks * heads * run * ITEM_BYTES[layout.dtype]
    if size == 0 or size != group.object_bytes:
        return None
    return ObjectShape(size, layout.dtype, planes, blocks, heads, run)


def flat_shape(layout: Layout, group_index: int) -> ObjectShape:
    """Give the shape of a group's objects as plain bytes: enough for `raw` and `lossless`."""
    return ObjectShape(layout.groups[group_index].object_bytes, layout.dtype)


def usable_form(wanted: Form, shape: ObjectShape) -> Form:
    """Give the form such objects take where `wanted` is asked for: FP8 may be refused."""
    return "lossless" if wanted == "fp8" and not shape.scaled else wanted
