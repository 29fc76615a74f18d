"""What kvd asks of a GPU: few calls, so that a fake one can stand in for tests.

Addresses, streams and events are integers. No call waits for the GPU but `copy_in` and `copy_out`
of memory that is not registered, which the driver stages itself, and `alloc`, `free`, `register`
and `unregister`; the engine's thread makes none of these.

Whatever fails raises `DeviceError`, and nothing else. After one, the device is not asked again, but
where `alloc`, `register` and `open` fail: these leave it as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from kvd_client.cuda.kernels import Call

IPC_BYTES: Final = 64
"""Bytes of a CUDA IPC handle."""
SLAB_MULTIPLE_BYTES: Final = 2 << 20
"""An exported allocation is a whole number of these, so that its handle shows nothing else."""


class DeviceError(KvdError):
    """The GPU or its driver refused a call; the text is the driver's."""


class Device(Protocol):
    """One GPU, as one process sees it. Any thread may call; calls on one stream keep their order.

    Attributes:
        uuid: The GPU's, equal in every process: 16 bytes.
        multiprocessors: Of the GPU.
    """

    uuid: bytes
    multiprocessors: int

    def own_thread(self) -> None:
        """Say that the calling thread is kvd's own, and nobody else's work is done on it."""
        ...

    def prepare(self) -> None:
        """Compile the kernels; else the first launch does, for a second or two."""
        ...

    def current_stream(self) -> int:
        """Return the stream on which the calling thread's engine works now.

        Raises:
            DeviceError: Its work is being recorded into a graph, where no copy can be a part.
        """
        ...

    def make_stream(self) -> int:
        """Make a stream that does not wait for the default one; it lives as long as the device."""
        ...

    def make_event(self) -> int:
        """Make an event without timing."""
        ...

    def destroy_event(self, event: int) -> None:
        """Give an event back; what waits for it goes on waiting."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Let the event happen once all work now on the stream is done."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Keep later work of the stream until the event, as last recorded, has happened."""
        ...

    def happened(self, event: int) -> bool:
        """Tell whether it has; never waits."""
        ...

    def copy_in(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy host memory to the GPU."""
        ...

    def copy_out(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy GPU memory to the host."""
        ...

    def copy_on(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy within the GPU."""
        ...

    def fill(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        """Set every byte."""
        ...

    def launch(self, call: Call, stream: int) -> None:
        """Run a kernel of `kernels.cu`."""
        ...

    def alloc(self, size_bytes: int) -> int:
        """Allocate GPU memory of its own, never a part of a pool."""
        ...

    def free(self, address: int) -> None:
        """Free what `alloc` gave; waits for the GPU."""
        ...

    def alloc_pinned(self, size_bytes: int) -> int:
        """Allocate host memory that copies can use without staging; lives as the device."""
        ...

    def free_bytes(self) -> int:
        """Return how much memory of the GPU is free."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pin host memory that is mapped already, for copies at the full rate.

        Nothing of it may be pinned yet. A copy is of memory that one call has pinned, or of memory
        of which nothing is: others fail.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory is unmapped."""
        ...

    def export(self, address: int) -> bytes:
        """Give the IPC handle of a whole allocation of `alloc`."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; the memory lives until the last `close`."""
        ...

    def close(self, address: int) -> None:
        """Unmap what `open` gave."""
        ...
