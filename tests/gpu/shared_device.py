"""A fake GPU that several processes share: its memory is memfds, its handles name them.

A handle holds pid and descriptor of the exporter, as a CUDA IPC handle names an allocation of its
process; memory lives while somebody maps it, as on a GPU. Its streams move by themselves.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

import numpy as np

from kvd_client.cuda.device import DeviceError
from tests.gpu.fake_device import FakeDevice

HANDLE = struct.Struct("<4sIIQ44x")


class SharedDevice(FakeDevice):
    """See the module. `pause` stops its streams, `over` ends its thread."""

    def __init__(self, seed: int = 0, memory_bytes: int = 1 << 30) -> None:
        super().__init__(seed, memory_bytes)
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}
        self.opened: dict[int, mmap.mmap] = {}
        self.pause = threading.Event()
        self.over = threading.Event()
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while not self.over.is_set():
            if self.pause.is_set() or not self.advance():
                time.sleep(0.0005)

    def alloc(self, size_bytes: int) -> int:
        self._ask()
        if size_bytes > self.left_bytes:
            raise DeviceError("out of memory")
        self.left_bytes -= size_bytes
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, size_bytes)
        memory = mmap.mmap(fd, size_bytes)
        memory[:] = b"\xee" * size_bytes  # what another process left there
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._maps[address] = (memory, fd)
        return address

    def free(self, address: int) -> None:
        memory, fd = self._maps.pop(address)
        self.left_bytes += len(memory)
        os.close(fd)

    def export(self, address: int) -> bytes:
        memory, fd = self._maps[address]
        return HANDLE.pack(b"fake", os.getpid(), fd, len(memory))

    def open(self, handle: bytes) -> int:
        magic, pid, fd, size = HANDLE.unpack(handle)
        assert magic == b"fake"
        if pid == os.getpid():
            raise DeviceError("a handle of this process's own memory: invalid context")
        try:
            here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"no such handle: {error}") from error
        memory = mmap.mmap(here, size)
        os.close(here)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self.opened[address] = memory
        return address

    def close(self, address: int) -> None:
        del self.opened[address]
