"""An engine's paged KV on a GPU, as the kernels see it; the sibling of `kvd_client.paged`.

Objects are those of `paged.py`: for each plane, the pages in order. So engines on a CPU and on a
GPU with the same order inside a page share them.

Importing this imports neither torch nor NumPy; building a `DevicePages` imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd_client.paged import _page_bytes, _page_shape, _split_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvd_client.paged import Form, Layer


class DevicePages:
    """Where each plane's blocks lie. Holds the tensors; their storage must not move.

    Attributes:
        planes: How many.
        blocks: Blocks of every plane.
        page_bytes: Bytes of one block of one plane.
        starts: Address of each plane's block 0.
        strides: Bytes from a block of a plane to the next.
    """

    def __init__(
        self,
        starts: Sequence[int],
        strides: Sequence[int],
        *,
        blocks: int,
        page_bytes: int,
        keep: object = None,
    ) -> None:
        """Take addresses as they are; `from_layers` reads them from tensors.

        Raises:
            ValueError: Blocks that overlap, or none.
        """
        if not starts or len(starts) != len(strides) or blocks < 1 or page_bytes < 1:
            raise ValueError("paged KV needs planes, blocks and bytes")
        if blocks > 1 and min(strides) < page_bytes:
            raise ValueError(f"blocks overlap: a stride of {min(strides)}, {page_bytes} bytes each")
        self.starts: Final = tuple(starts)
        self.strides: Final = tuple(strides)
        self.blocks: Final = blocks
        self.page_bytes: Final = page_bytes
        self._keep: Final = keep

    @property
    def planes(self) -> int:
        """How many planes there are."""
        return len(self.starts)

    @classmethod
    def from_layers(cls, layers: Sequence[Layer], form: Form) -> DevicePages:
        """Build from an engine's tensors, one entry a layer; see `PagedKV.from_layers`.

        Raises:
            ValueError: Layers that do not have the form, or cannot be copied as pages.
        """
        planes: list[torch.Tensor] = []
        for index, layer in enumerate(layers):
            planes.extend(_split_layer(layer, form, index))
        if not planes:
            raise ValueError("paged KV needs at least one layer")
        first, shape = planes[0], _page_shape(planes[0], 0)
        for index, plane in enumerate(planes):
            if plane.dtype != first.dtype or _page_shape(plane, index) != shape:
                raise ValueError(f"plane {index}: pages of another type or shape than plane 0's")
            if plane.device != first.device or plane.shape[0] != first.shape[0]:
                raise ValueError(f"plane {index}: another device or number of blocks than plane 0")
        return cls(
            [plane.data_ptr() for plane in planes],
            [plane.stride(0) * plane.element_size() for plane in planes],
            blocks=int(first.shape[0]),
            page_bytes=_page_bytes(first),
            keep=planes,
        )

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError if a block id is not one of the engine's."""
        if ids and not (min(ids) >= 0 and max(ids) < self.blocks):
            raise ValueError(
                f"block ids {min(ids)}..{max(ids)} are not within 0..{self.blocks - 1}"
            )
