"""Gather and scatter between an engine's paged KV memory (torch, on the CPU) and kvd's slots.

A `PagedKV` is an ordered list of *planes*: tensors whose first dimension is the block (the
engine's page) and whose bytes within one block are contiguous. Blocks may lie at any stride. The
object of n pages is

    for plane in planes: for block in block_ids: the block's page_bytes bytes

in the bytes' physical order, so it does not depend on whether K and V are stacked, interleaved or
apart. It does depend on the order inside a page (NHD or HND): `page_shape` gives it, and engines
with another order need another `kvd_client.Layout`.

Invariants:
    G1  block ids, buffer sizes and writability are checked for the whole batch before a byte moves
    G2  payload is copied without the GIL, in calls of at most 64 MiB
    G3  when a call returns or raises, none of its threads touches the buffers any more

Importing this module imports neither torch nor numpy; building a `PagedKV` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from kvd_client import _copiers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from mmap import mmap

    import numpy as np
    import numpy.typing as npt
    import torch

    Addresses = npt.NDArray[np.int64]
    Buffer = bytes | bytearray | memoryview | mmap
    BlockIds = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor
    Layer = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

Form = Literal["kv_blocks", "blocks_kv", "pairs", "latent"]
THREADS_MAX_DEFAULT: Final = 4  # memory bandwidth is used up by then; the rest is the engine's
_PLANE_DIMENSIONS_MIN: Final = 2  # (blocks, page, ...)
_KV: Final = 2  # K and V


class PagedKV:
    """An engine's paged KV memory, as kvd copies it.

    Holds references to the tensors: their storage must not be resized while this lives. Any
    thread may gather and scatter, several at once, if the blocks are not being written by others.
    Scatter writes under torch's back: no autograd version is bumped, no stream is involved.
    """

    def __init__(
        self,
        planes: Sequence[torch.Tensor],
        page_tokens: int = 16,
        *,
        threads: int | None = None,
        kernel: _copiers.KernelName | None = None,
    ) -> None:
        """Check the planes and choose a way to copy.

        Args:
            planes: each (blocks, ...) on the CPU; equal dtype, blocks and page shape, with the
                dimension of the page's tokens among the rest. Order is the object's order.
            page_tokens: tokens of a page.
            threads: most threads of one copy, the caller's included; default torch's, at most 4.
            kernel: which copier to use; default the best that works (`_copiers`).

        Raises:
            ValueError: a plane that cannot be copied as pages; the text says which and why.

        """
        import numpy as np
        import torch

        if threads is None:
            threads = min(torch.get_num_threads(), THREADS_MAX_DEFAULT)
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        if not planes:
            raise ValueError("a PagedKV needs at least one plane")
        self._planes: Final = tuple(planes)
        for index, plane in enumerate(self._planes):
            _check_plane(plane, index, self._planes[0])
        self.page_shape: Final = _page_shape(self._planes[0], 0)
        if page_tokens not in self._planes[0].shape[1:]:
            raise ValueError(f"no dimension of the page {self.page_shape} is {page_tokens} tokens")
        self.page_tokens: Final = page_tokens
        self.blocks: Final = int(self._planes[0].shape[0])
        self.page_bytes: Final = _page_bytes(self._planes[0])
        self._starts: Addresses = np.array([[p.data_ptr()] for p in planes], dtype=np.int64)
        self._strides: Addresses = np.array(
            [[p.stride(0) * p.element_size()] for p in planes], dtype=np.int64
        )
        self._copier: Final = (
            _copiers.build_copier(kernel, threads) if kernel else _copiers.best_copier(threads)
        )

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[Layer],
        form: Form,
        page_tokens: int = 16,
        *,
        threads: int | None = None,
        kernel: _copiers.KernelName | None = None,
    ) -> PagedKV:
        """Build from an engine's tensors, one entry a layer; planes are K, V of each in turn.

        The page's inner order is free: (page, heads, dim), (heads, page, dim) or a permuted view.

        Args:
            layers: by `form`:
                `kv_blocks`: (2, blocks, page, heads, dim), K and V stacked first;
                `blocks_kv`: (blocks, 2, page, heads, dim), K and V side by side in a block;
                `pairs`: a tuple (K, V), each (blocks, page, heads, dim);
                `latent`: (blocks, page, dim), one plane a layer (MLA).
            form: which of these.
            page_tokens: tokens of a page.
            threads: see `PagedKV`.
            kernel: see `PagedKV`.

        Raises:
            ValueError: layers that do not have the form, or what `PagedKV` refuses.

        """
        planes: list[torch.Tensor] = []
        for index, layer in enumerate(layers):
            planes.extend(_split_layer(layer, form, index))
        return cls(planes, page_tokens, threads=threads, kernel=kernel)

    @property
    def kernel(self) -> _copiers.KernelName:
        """Name of the copier in use."""
        return self._copier.name

    def object_bytes(self, pages: int) -> int:
        """Give the size in bytes of an object of so many pages."""
        return len(self._planes) * pages * self.page_bytes

    def gather(self, block_ids: BlockIds, out: Buffer) -> None:
        """Copy the blocks into `out`, one object; see `gather_many`."""
        self.gather_many([(block_ids, out)])

    def scatter(self, block_ids: BlockIds, source: Buffer) -> None:
        """Copy one object from `source` into the blocks; see `scatter_many`."""
        self.scatter_many([(block_ids, source)])

    def gather_many(self, items: Iterable[tuple[BlockIds, Buffer]]) -> None:
        """Copy blocks into several objects, one object for each (block ids, writable buffer).

        Buffers must be C-contiguous, of exactly `object_bytes(len(block_ids))`, and distinct.
        Readable by other threads and processes when this returns.

        Raises:
            ValueError: a block id, a size or a buffer is wrong; nothing was written.
            OSError: the operating system refused a copy; the buffers' content is undefined.

        """
        pages, places, keep = self._addresses(items, writable=True)
        if pages is not None and places is not None:
            self._copier.copy(places, pages, self.page_bytes)
        del keep  # exports of the buffers: whoever unmaps earlier gets a BufferError, not a crash

    def scatter_many(self, items: Iterable[tuple[BlockIds, Buffer]]) -> None:
        """Copy several objects into blocks, one object for each (block ids, buffer).

        Buffers as for `gather_many`, but may be read-only. If a block id occurs twice (an engine's
        null block), the content of that block is one of the two, possibly mixed.

        Raises:
            ValueError: a block id, a size or a buffer is wrong; nothing was written.
            OSError: the operating system refused a copy; the blocks' content is undefined.

        """
        pages, places, keep = self._addresses(items, writable=False)
        if pages is not None and places is not None:
            self._copier.copy(pages, places, self.page_bytes)
        del keep

    def _addresses(
        self,
        items: Iterable[tuple[BlockIds, Buffer]],
        *,
        writable: bool,
    ) -> tuple[Addresses | None, Addresses | None, list[npt.NDArray[np.uint8]]]:
        """Check a batch (G1); give the addresses of all its pages and of their places in objects.

        Returns:
            Page addresses, place addresses, each (pages of all objects and planes,), or None for
            an empty batch; and arrays that keep the buffers exported.

        """
        import numpy as np

        pages: list[Addresses] = []
        places: list[Addresses] = []
        keep: list[npt.NDArray[np.uint8]] = []
        for index, (block_ids, buffer) in enumerate(items):
            ids = _block_ids(block_ids, self.blocks, index)
            content = _content(buffer, index, writable=writable)
            expected = self.object_bytes(len(ids))
            if content.nbytes != expected:
                raise ValueError(
                    f"object {index}: buffer has {content.nbytes} bytes,"
                    f" {len(ids)} pages need {expected}"
                )
            keep.append(content)
            pages.append((self._starts + ids * self._strides).ravel())
            count = len(self._planes) * len(ids)
            places.append(content.ctypes.data + np.arange(count, dtype=np.int64) * self.page_bytes)
        if not keep:
            return None, None, keep
        return np.concatenate(pages), np.concatenate(places), keep


def _page_bytes(plane: torch.Tensor) -> int:
    """Give the bytes of one block of a plane."""
    return plane.element_size() * plane[0].numel()


def _page_shape(plane: torch.Tensor, index: int) -> tuple[int, ...]:
    """Give a page's dimensions above 1 in physical order, or raise ValueError if it has gaps."""
    if plane.dim() < _PLANE_DIMENSIONS_MIN or plane.numel() == 0:
        raise ValueError(f"plane {index}: shape {tuple(plane.shape)} is not (blocks, page, ...)")
    inner = [
        (stride, size)
        for stride, size in zip(plane.stride()[1:], plane.shape[1:], strict=True)
        if size > 1
    ]
    inner.sort(key=lambda dimension: -dimension[0])
    expected = 1
    for stride, size in reversed(inner):
        if stride != expected:
            raise ValueError(
                f"plane {index}: a page is not contiguous"
                f" (shape {tuple(plane.shape)}, strides {plane.stride()})"
            )
        expected *= size
    return tuple(size for _, size in inner) or (1,)


def _check_plane(plane: torch.Tensor, index: int, first: torch.Tensor) -> None:
    """Raise ValueError if a plane cannot be copied, or not together with the first."""
    if plane.device.type != "cpu":
        raise ValueError(f"plane {index}: is on {plane.device}, not on the CPU")
    if str(plane.layout) != "torch.strided":
        raise ValueError(f"plane {index}: layout {plane.layout} is not strided")
    shape, first_shape = _page_shape(plane, index), _page_shape(first, 0)
    if plane.dtype != first.dtype or shape != first_shape:
        raise ValueError(
            f"plane {index}: pages of {plane.dtype} {shape} among {first.dtype} {first_shape}"
        )
    if plane.shape[0] != first.shape[0]:
        raise ValueError(f"plane {index}: {plane.shape[0]} blocks, the first {first.shape[0]}")
    stride_bytes = plane.stride(0) * plane.element_size()
    if plane.shape[0] > 1 and stride_bytes < _page_bytes(plane):
        raise ValueError(f"plane {index}: blocks overlap (stride of {stride_bytes} bytes)")


def _split_layer(layer: Layer, form: Form, index: int) -> tuple[torch.Tensor, ...]:
    """Give the planes of one layer, or raise ValueError if it does not have the form."""
    if form == "pairs":
        if not isinstance(layer, tuple) or len(layer) != _KV:
            raise ValueError(f"layer {index}: form 'pairs' needs a tuple (K, V)")
        return layer
    if isinstance(layer, tuple):
        text = f"layer {index}: form {form!r} needs one tensor, not a tuple"
        raise ValueError(text)  # noqa: TRY004 - one error for whatever cannot be copied
    if form == "latent":
        return (layer,)
    if form not in {"kv_blocks", "blocks_kv"}:
        raise ValueError(f"unknown form {form!r}")
    dimension = 0 if form == "kv_blocks" else 1
    if layer.dim() <= _PLANE_DIMENSIONS_MIN or layer.shape[dimension] != _KV:
        raise ValueError(
            f"layer {index}: form {form!r} needs 2 (K and V) as dimension {dimension},"
            f" shape is {tuple(layer.shape)}"
        )
    return layer.select(dimension, 0), layer.select(dimension, 1)


def _block_ids(block_ids: BlockIds, blocks: int, index: int) -> Addresses:
    """Give block ids as (pages,) int64, or raise ValueError."""
    import numpy as np

    ids = np.asarray(block_ids)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"object {index}: block ids must be one or more integers in one row")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= blocks:
        raise ValueError(f"object {index}: block ids {low}..{high} are not within 0..{blocks - 1}")
    return ids.astype(np.int64, copy=False)


def _content(buffer: Buffer, index: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    """Give a buffer's bytes without copying them, or raise ValueError."""
    import numpy as np

    try:
        content: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    except (BufferError, ValueError, TypeError) as reason:
        raise ValueError(f"object {index}: not a contiguous buffer of bytes: {reason}") from reason
    if writable and not content.flags.writeable:
        raise ValueError(f"object {index}: buffer is read-only")
    return content
