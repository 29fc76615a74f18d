"""Where the pages of vLLM's KV cache lie, and where they go in kvd's objects.

All caches of a rank lie in one allocation. The page of layer `l` and block `b` begins at
`start[l] + b * block_stride`; groups overlay each other, since a block belongs to one at a time.
An object is, for each layer of its group, the pages of its chunk one after the other.

Invariants:

A1. No address is made for a block outside the allocation, nor for the null block 0.
A2. A page is moved whole; what is inside is the attention back end's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvd_client.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kvd_client._copiers import Copier
    from kvd_client.cuda.device import Device
    from kvd_client.vllm.gpu_pages import GpuPages

    Addresses = npt.NDArray[np.int64]


class GroupPages(NamedTuple):
    """One group's pages.

    Attributes:
        starts: (layers, 1) int64: address of block 0, in the object's order.
        block_stride: Bytes from a block to the next.
        page_bytes: Bytes of a page.
        pages: Pages a chunk.
    """

    starts: Addresses
    block_stride: int
    page_bytes: int
    pages: int

    @property
    def object_bytes(self) -> int:
        """Bytes of one object."""
        return len(self.starts) * self.pages * self.page_bytes


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
        """Know the groups, in the layout's order; `blocks` is how many there are."""
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
        """Copy pages out of kvd's objects; return the bytes."""
        return self._copy(pieces, to_engine=True)

    def save(self, pieces: Sequence[Piece], epoch: int) -> int:  # noqa: ARG002
        """Copy pages into kvd's objects; return the bytes."""
        return self._copy(pieces, to_engine=False)

    def _copy(self, pieces: Sequence[Piece], *, to_engine: bool) -> int:
        """Copy, one call a group."""
        size = 0
        for number, group in enumerate(self.groups):
            engine: list[Addresses] = []
            kept: list[Addresses] = []
            for piece in pieces:
                if piece.group == number:
                    here, there = self._addresses(group, piece)
                    engine.append(here)
                    kept.append(there)
            if engine:
                here, there = np.concatenate(engine), np.concatenate(kept)
                target, source = (here, there) if to_engine else (there, here)
                self._copier.copy(target, source, group.page_bytes)
                size += len(here) * group.page_bytes
        return size

    def _addresses(self, group: GroupPages, piece: Piece) -> tuple[Addresses, Addresses]:
        """Give the addresses of a piece's pages in the engine and in the object."""
        ids = np.asarray(piece.blocks, dtype=np.int64)
        assert len(ids) == group.pages
        assert piece.buffer.nbytes == group.object_bytes
        wanted = np.flatnonzero(ids)
        assert not len(ids) or (ids.min() >= 0 and ids.max() < self.blocks)  # A1
        engine = group.starts + ids[wanted] * group.block_stride
        base = np.frombuffer(piece.buffer, np.uint8).ctypes.data
        rows = np.arange(len(group.starts), dtype=np.int64)[:, None] * group.pages
        return engine.ravel(), (base + (rows + wanted) * group.page_bytes).ravel()


def find_pages(
    caches: Any,  # noqa: ANN401 - vLLM's KVCacheConfig
    tensors: Mapping[str, Any],
    chunk_pages: Sequence[int],
    copier: Copier,
) -> Pages | GpuPages:
    """Find every layer's pages in what vLLM registers.

    Args:
        caches: How vLLM placed them.
        tensors: The view of each layer, or of each part of its state, by its name.
        chunk_pages: Pages a chunk, for each group.
        copier: Moves bytes.

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
    for group, count in zip(caches.kv_cache_groups, chunk_pages, strict=True):
        missing = [name for name in group.layer_names if name not in tensors]
        if missing:
            raise Unsupported(f"vLLM registered no cache for {missing[0]}")
        strides = {places[name][1] for name in group.layer_names}
        if len(strides) != 1:
            raise Unsupported("layers of one group have blocks of different strides")
        starts = np.array([[base + places[name][0]] for name in group.layer_names], dtype=np.int64)
        page_bytes = int(group.kv_cache_spec.page_size_bytes)
        groups.append(GroupPages(starts, strides.pop(), page_bytes, count))
    device = open_device(devices.pop())
    if device is None:
        return Pages(groups, int(caches.num_blocks), copier)
    from kvd_client.vllm.gpu_pages import GpuPages

    return GpuPages(groups, int(caches.num_blocks), device)


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
