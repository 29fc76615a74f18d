"""Where the pages of vLLM's KV cache lie, and where they go in kvd's objects.

All caches of a rank lie in one allocation. The page of layer `l` and block `b` begins at
`start[l] + b * block_stride`; groups overlay each other, since a block belongs to one at a time.
An object is, for each layer of its group, the pages of its chunk one after the other; or, of groups
kept as FP8 (`cuts.py`), a frame of these.

Invariants:

A1. No address is made for a block outside the allocation, nor for the null block 0.
A2. A page is moved whole; what is inside is the attention back end's business, but for FP8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvd_client.cuda.forms import Form
from kvd_client.errors import Unsupported
from kvd_client.vllm import frames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kvd_client._copiers import Copier
    from kvd_client.cuda.device import Device
    from kvd_client.cuda.kernels import Axes
    from kvd_client.vllm.cuts import Cut, Cuts
    from kvd_client.vllm.gpu_pages import GpuPages

    Addresses = npt.NDArray[np.int64]


class GroupPages(NamedTuple):
    """One group's pages.

    Attributes:
        starts: (planes, 1) int64: address of block 0, in the object's order. A plane is a layer, or
            the part of one that `cuts.py` makes of it.
        block_stride: Bytes from a block to the next.
        page_bytes: Bytes of a plane's page.
        pages: Pages a chunk.
        axes: How a plane's page is cut for FP8; None to keep it as it is.
    """

    starts: Addresses
    block_stride: int
    page_bytes: int
    pages: int
    axes: Axes | None = None

    @property
    def form(self) -> Form:
        """How an object lies in its slot."""
        return Form(len(self.starts), self.pages, self.page_bytes, self.axes)

    @property
    def object_bytes(self) -> int:
        """Bytes of one object."""
        return self.form.object_bytes

    def bytes_of(self, pages: int) -> int:
        """Bytes that so many pages of a chunk, all planes of each, have in an object."""
        return len(self.starts) * pages * (self.axes.page_values if self.axes else self.page_bytes)


class Piece(NamedTuple):
    """Some pages of one object in the engine, and the object's bytes in a slot.

    Attributes:
        group: Of the engine.
        blocks: (pages a chunk,) block ids; 0 for pages that stay where they are.
        buffer: The object, in kvd's memory.
    """

    group: int
    blocks: Sequence[int]
    buffer: memoryview


class Pages:
    """The pages of one rank in host memory. Any thread, if nobody else writes the blocks.

    `mark`, `wait`, `epoch` and `close` are for pages that lie elsewhere (`gpu_pages.py`).
    """

    on_gpu: Final = False
    piece_bytes: Final = 16 << 20
    """Reserved, copied and published at a time: some 5 ms."""

    def __init__(self, groups: Sequence[GroupPages], blocks: int, copier: Copier) -> None:
        """Know the groups, in the layout's order; `blocks` is how many there are.

        Raises:
            Unsupported: One is kept as FP8, and that cannot be done here.
        """
        if any(group.axes for group in groups):
            frames.warm_up()
        self.groups: Final = tuple(groups)
        self.blocks: Final = blocks
        self._copier: Final = copier

    def mark(self) -> int:
        """Mark what the engine has asked for so far: on a CPU it is done."""
        return 0

    def wait(self, mark: int) -> None:
        """Wait until what came before a mark is done."""

    def close(self) -> None:
        """Let go."""

    def load(self, pieces: Sequence[Piece], epoch: int) -> int:  # noqa: ARG002
        """Copy pages out of kvd's objects; return the bytes.

        Raises:
            KvdError: An object is not FP8 of this engine; nothing is under way.
        """
        return self._copy(pieces, to_engine=True)

    def save(self, pieces: Sequence[Piece], epoch: int) -> int:  # noqa: ARG002
        """Copy pages into kvd's objects; return the bytes."""
        return self._copy(pieces, to_engine=False)

    def _copy(self, pieces: Sequence[Piece], *, to_engine: bool) -> int:
        """Copy, one call a group, of FP8 one an object."""
        size = 0
        for number, group in enumerate(self.groups):
            own = [piece for piece in pieces if piece.group == number]
            if not own:
                continue
            if group.axes:
                self._copy_fp8(group, own, to_engine=to_engine)
            else:
                bases = [np.frombuffer(piece.buffer, np.uint8) for piece in own]
                places = [self._addresses(group, *both) for both in zip(own, bases, strict=True)]
                here, there = (np.concatenate(each) for each in zip(*places, strict=True))
                target, source = (here, there) if to_engine else (there, here)
                self._copier.copy(target, source, group.page_bytes)
            size += sum(group.bytes_of(sum(map(bool, piece.blocks))) for piece in own)
        return size

    def _copy_fp8(self, group: GroupPages, pieces: Sequence[Piece], *, to_engine: bool) -> None:
        """Copy between the engine's pages and frames, by way of an object in memory of our own."""
        form = group.form
        values = np.empty(form.useful_bytes, np.uint8)
        for piece in pieces:
            here, there = self._addresses(group, piece, values)
            if to_engine:
                frames.read(form, piece.buffer, values)
                self._copier.copy(here, there, group.page_bytes)
            else:
                self._copier.copy(there, here, group.page_bytes)
                frames.write(form, values, piece.buffer)

    def _addresses(
        self, group: GroupPages, piece: Piece, room: npt.NDArray[np.uint8]
    ) -> tuple[Addresses, Addresses]:
        """Give the addresses of a piece's pages in the engine, and in an object's `room`."""
        ids = np.asarray(piece.blocks, dtype=np.int64)
        assert len(ids) == group.pages
        assert piece.buffer.nbytes == group.object_bytes
        wanted = np.flatnonzero(ids)
        assert not len(ids) or (ids.min() >= 0 and ids.max() < self.blocks)  # A1
        engine = group.starts + ids[wanted] * group.block_stride
        base = room.ctypes.data
        rows = np.arange(len(group.starts), dtype=np.int64)[:, None] * group.pages
        return engine.ravel(), (base + (rows + wanted) * group.page_bytes).ravel()


def find_pages(
    caches: Any,  # noqa: ANN401 - vLLM's KVCacheConfig
    tensors: Mapping[str, Any],
    chunk_pages: Sequence[int],
    copier: Copier,
    cuts: Cuts = (),
) -> Pages | GpuPages:
    """Find every layer's pages in what vLLM registers.

    Args:
        caches: How vLLM placed them.
        tensors: The view of each layer, or of each part of its state, by its name.
        chunk_pages: Pages a chunk, for each group.
        copier: Moves bytes.
        cuts: How each group is cut for FP8; empty to keep all as it is.

    Raises:
        Unsupported: The views do not lie as the configuration says, or on an unusable GPU.
    """
    places: dict[str, tuple[int, int]] = {}
    for tensor in caches.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            offset = tensor.offset + index * tensor.layer_stride
            places[name] = (offset, tensor.block_stride)
    bases = set()
    devices = set()
    for name, view in tensors.items():
        first = view[0] if isinstance(view, list | tuple) else view  # the parts of a state
        if name not in places:
            raise Unsupported(f"vLLM does not say where the cache of {name} lies")
        bases.add(first.data_ptr() - places[name][0])
        devices.add(first.device)
    if len(bases) != 1 or len(devices) != 1:
        raise Unsupported("the caches of this engine do not lie in one allocation")
    base = bases.pop()
    groups = []
    for group, count, cut in zip(
        caches.kv_cache_groups, chunk_pages, cuts or [None] * len(chunk_pages), strict=True
    ):
        missing = [name for name in group.layer_names if name not in tensors]
        if missing:
            raise Unsupported(f"vLLM registered no cache for {missing[0]}")
        strides = {places[name][1] for name in group.layer_names}
        if len(strides) != 1:
            raise Unsupported("layers of one group have blocks of different strides")
        starts = np.array([[base + places[name][0]] for name in group.layer_names], dtype=np.int64)
        page_bytes = int(group.kv_cache_spec.page_size_bytes)
        whole = GroupPages(starts, strides.pop(), page_bytes, count)
        groups.append(cut_pages(whole, cut) if cut else whole)
    device = open_device(devices.pop())
    if device is None:
        return Pages(groups, int(caches.num_blocks), copier)
    from kvd_client.vllm.gpu_pages import GpuPages

    return GpuPages(groups, int(caches.num_blocks), device)


def cut_pages(group: GroupPages, cut: Cut) -> GroupPages:
    """Cut the pages of a group's layers into planes, which are kept as FP8."""
    assert cut.planes * cut.plane_bytes == group.page_bytes
    starts = group.starts + np.arange(cut.planes, dtype=np.int64) * cut.plane_bytes
    return GroupPages(
        starts.reshape(-1, 1), group.block_stride, cut.plane_bytes, group.pages, cut.axes
    )


def open_device(where: Any) -> Device | None:  # noqa: ANN401 - a torch.device
    """Open the GPU that an engine's KV lies on; None for host memory.

    Raises:
        Unsupported: It cannot be used; the text says what to install.
    """
    if where.type == "cpu":
        return None
    if where.type != "cuda":
        raise Unsupported(f"KV on {where}: kvd moves KV in host memory and on NVIDIA GPUs")
    from kvd_client.cuda.cupy_device import CupyDevice
    from kvd_client.cuda.device import DeviceError

    try:
        return CupyDevice(where.index or 0)
    except DeviceError as error:
        raise Unsupported(f"KV on {where}: {error}") from error
