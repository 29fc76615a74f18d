"""Messages about GPU memory; `wire` has their opcodes and rules. Pure; any thread."""

from __future__ import annotations

from typing import NamedTuple

GPU_SLABS = 1 << 31
"""Slabs with this number or a higher one are memory of a GPU."""
UUID_BYTES = 16
"""Of a GPU, as CUDA tells it."""
NO_GPU = bytes(UUID_BYTES)
"""No GPU's: who could map places in GPU memory no longer can."""
HANDLE_BYTES_MAX = 64
"""Of a CUDA IPC handle."""


class UseGpu(NamedTuple):
    """Ring: I copy on this GPU; from now on you may name places in its memory to me."""

    request: int
    uuid: bytes


class GpuSlab(NamedTuple):
    """Ring: how do I map this slab of a GPU's memory."""

    request: int
    slab: int


class GpuSlabReply(NamedTuple):
    """Ring, reply to GpuSlab: a CUDA IPC handle of this epoch; 0 bytes if not the tenant's."""

    request: int
    epoch: int
    slab_bytes: int
    handle: bytes
