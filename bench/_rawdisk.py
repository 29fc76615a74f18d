"""The disk without kvd: the same records by plain O_DIRECT calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.tiers.region import BLOCK, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    Object = npt.NDArray[np.uint8]

THREADS: Final = 4  # the daemon's default
REGION_BYTES: Final = 256 << 20


class RawDisk:
    """Records in files like kvd's regions, written and read by plain O_DIRECT calls."""

    def __init__(self, directory: Path, objects: Sequence[Object]) -> None:
        """Put objects into memory that direct writes can use."""
        self._directory = directory
        self._record_bytes = BLOCK + aligned(objects[0].nbytes)
        self.object_bytes = objects[0].nbytes
        self._memory = []
        for item in objects:
            memory = mmap.mmap(-1, self._record_bytes)
            np.frombuffer(memory, np.uint8)[BLOCK : BLOCK + item.nbytes] = item
            self._memory.append(memory)
        self._into = [mmap.mmap(-1, self._record_bytes) for _ in range(THREADS)]
        for memory in self._into:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, len(memory))
        self._files: list[int] = []
        self._each = (REGION_BYTES - BLOCK) // self._record_bytes
        self._pool = ThreadPoolExecutor(THREADS)

    def write(self, count: int) -> float:
        """Make files, then write so many records until they are synced; return those seconds."""
        for number in range(-(-count // self._each)):
            path = self._directory / f"{number:08d}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, REGION_BYTES)
            self._files.append(fd)
        started = time.perf_counter()
        list(self._pool.map(self._write_one, range(count)))
        list(self._pool.map(os.fdatasync, self._files))
        return time.perf_counter() - started

    def _write_one(self, index: int) -> None:
        memory = self._memory[index % len(self._memory)]
        fd, offset = self._place(index)
        if os.pwritev(fd, [memory], offset) != self._record_bytes:
            raise OSError("a short write")

    def read(self, count: int) -> float:
        """Read them back; return seconds."""
        started = time.perf_counter()
        turns = [range(first, count, THREADS) for first in range(THREADS)]
        list(self._pool.map(self._read_some, turns, self._into))
        return time.perf_counter() - started

    def _read_some(self, indices: range, memory: mmap.mmap) -> None:
        for index in indices:
            fd, offset = self._place(index)
            if os.preadv(fd, [memory], offset) != self._record_bytes:
                raise OSError("a short read")

    def _place(self, index: int) -> tuple[int, int]:
        number, place = divmod(index, self._each)
        return self._files[number], BLOCK + place * self._record_bytes

    def remove(self) -> None:
        """Remove the files."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        for path in self._directory.iterdir():
            path.unlink()
