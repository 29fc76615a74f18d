"""How an object's bytes lie in a slot: as the engine's pages have them, or as FP8.

The FP8 form is the frame of `kvd/codec/frame.py`, uncompressed: 64 bytes of header, the scales, the
codes. So the daemon, and any engine without a GPU, reads it with `kvd.codec.decode`. It is a layout
of its own (`fp8_layout`): objects of the two forms have different keys and are never mistaken for
each other.

Pure; any thread.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd_client.cuda.kernels import ITEM_BYTES, Axes
from kvd_client.fp8 import EXPONENTS

if TYPE_CHECKING:
    from kvd_client.identity import Group, Layout

HEADER: Final = struct.Struct("<4sBBBBQIIII4Q")
_DTYPES: Final = {"float32": 1, "float16": 2, "bfloat16": 3}
_FP8_FORM: Final = 1
_TOKENS_FIRST: Final = ("page", "token", "head", "dim")
_HEADS_FIRST: Final = ("page", "head", "token", "dim")
FP8_ORDER: Final = "kvdc-fp8"


class Form(NamedTuple):
    """The bytes of one object of `pages` pages in `planes` planes.

    Attributes:
        planes: K and V of each layer, or its latent.
        pages: Of an object.
        page_bytes: Of one page of one plane, in the engine's memory.
        axes: How a page is cut for FP8; None for objects as they are.
    """

    planes: int
    pages: int
    page_bytes: int
    axes: Axes | None = None

    @property
    def plane_bytes(self) -> int:
        """Bytes of a plane of an object in its slot; of its codes in FP8."""
        return self.pages * (self.axes.page_values if self.axes else self.page_bytes)

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of one plane; 0 but in FP8."""
        return 2 * self.axes.heads if self.axes else 0

    @property
    def scales_at(self) -> int:
        """Where the scales begin in the slot."""
        return HEADER.size if self.axes else 0

    @property
    def codes_at(self) -> int:
        """Where the planes begin in the slot."""
        return self.scales_at + self.planes * self.scales_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of an object in its slot."""
        return self.codes_at + self.planes * self.plane_bytes

    @property
    def useful_bytes(self) -> int:
        """Bytes of an object in the engine's memory."""
        return self.planes * self.pages * self.page_bytes

    def header(self) -> bytes:
        """Give what the slot begins with: the same for every object of the form."""
        if self.axes is None:
            return b""
        scales = self.planes * self.axes.heads
        values = self.planes * self.plane_bytes
        return HEADER.pack(
            b"kvdc", 1, _FP8_FORM, _DTYPES[self.axes.dtype], 0, self.useful_bytes, scales,
            self.axes.heads, self.pages * self.axes.rows, 1, values, 0, 0, 0,
        )  # fmt: skip

    def sound(self, slot: memoryview) -> bool:
        """Tell whether a slot begins as the form demands, its scales within bounds."""
        if self.axes is None:
            return True
        if bytes(slot[: self.scales_at]) != self.header():
            return False
        low, high = EXPONENTS[self.axes.dtype]
        scales = memoryview(bytes(slot[self.scales_at : self.codes_at])).cast("h")
        return low <= min(scales) and max(scales) <= high


def page_axes(layout: Layout, group: Group) -> Axes:
    """Read how a page of a group is cut.

    Raises:
        ValueError: FP8 is refused for such pages; the text says why.
    """
    name, _, version = layout.order.partition("/")
    inner = tuple(name.split(",")[2:])
    if group.kind not in {"full", "sliding"}:
        raise ValueError(f"FP8 is for full and sliding-window attention, not {group.kind!r}")
    if layout.dtype not in ITEM_BYTES:
        raise ValueError(f"FP8 is for {', '.join(ITEM_BYTES)}, not {layout.dtype}")
    if version != "1" or inner not in {_TOKENS_FIRST, _HEADS_FIRST}:
        raise ValueError(f"FP8 cannot read the order {layout.order!r}")
    if inner == _TOKENS_FIRST:
        return Axes(layout.dtype, layout.page_tokens, group.kv_heads, group.head_size)
    return Axes(layout.dtype, 1, group.kv_heads, layout.page_tokens * group.head_size)


def form_of(layout: Layout, group_index: int, *, planes: int, fp8: bool = False) -> Form:
    """Give the form of a group's objects under the layout that the engine's pages have.

    Raises:
        ValueError: FP8 is asked for and refused, or the layout does not add up.
    """
    group = layout.groups[group_index]
    pages = layout.chunk_tokens // layout.page_tokens
    page_bytes, rest = divmod(group.object_bytes, planes * pages)
    if rest or not page_bytes:
        raise ValueError(f"{group.object_bytes} bytes are not {planes} planes of {pages} pages")
    form = Form(planes, pages, page_bytes)
    if not fp8:
        return form
    axes = page_axes(layout, group)
    if axes.page_values * ITEM_BYTES[axes.dtype] != page_bytes:
        raise ValueError(f"a page of {page_bytes} bytes is not {axes.page_values} {axes.dtype}")
    return form._replace(axes=axes)


def fp8_layout(layout: Layout) -> Layout:
    """Give the layout under which objects of these pages are kept as FP8; their space is lossy.

    Raises:
        ValueError: FP8 is refused for one of the groups.
    """
    groups = []
    for index, group in enumerate(layout.groups):
        form = form_of(layout, index, planes=2 * group.layers, fp8=True)
        groups.append(group._replace(object_bytes=form.object_bytes))
    order = f"{FP8_ORDER}:{layout.dtype}:{layout.order}"
    return layout._replace(dtype="uint8", groups=tuple(groups), order=order).check()
