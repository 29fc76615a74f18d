"""The real device: CuPy's bindings of the CUDA runtime, and `kernels.cu` through its RawModule.

CuPy and not torch, because it binds the runtime without owning the memory, and compiles kernels
with no compiler installed. Imports CuPy when a device is made.

No call that may wait holds the GIL. CuPy's own of events do, and these wait where a stream's queue
is full, or another thread pins memory: so they go to the driver past it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.kernels import NAMES, OPTIONS, SOURCE, THREADS
from kvd_client.wire_gpu import UUID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd_client.cuda.kernels import Call

_NON_BLOCKING = 1  # cudaStreamNonBlocking
_DISABLE_TIMING = 2  # cudaEventDisableTiming
_PORTABLE = 1  # cudaHostRegisterPortable, cudaHostAllocPortable
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LAZY_PEER = 1  # cudaIpcMemLazyEnablePeerAccess
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_SUCCESS, _NOT_READY = 0, 600
_TYPES = {
    "pointer": ctypes.c_uint64,
    "u64": ctypes.c_uint64,
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
}


def _load_driver() -> Any:  # noqa: ANN401 - a library, or None where there is none of that name
    """Load the driver's library, whose calls release the GIL."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuEventCreate.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
        library.cuEventRecord.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.cuEventQuery.argtypes = [ctypes.c_void_p]
        library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    except (OSError, AttributeError):
        return None
    return library


class CupyDevice:
    """A GPU by its CUDA index; see `device.Device`.

    Making one creates a context on that GPU and on no other. A thread that calls it finds the GPU
    that was its current one before still current afterwards.
    """

    def __init__(self, index: int = 0) -> None:
        """Take the GPU into use.

        Raises:
            DeviceError: No CuPy, no driver or no such GPU; the text says which.
        """
        try:
            import cupy
        except Exception as error:  # CuPy's loader raises what it likes
            text = f"CuPy is not installed ({error}): pip install 'kvd[cuda13]' or 'kvd[cuda12]'"
            if isinstance(error, OSError) and error.filename:  # made at import, in the home
                text = f"CuPy has no folder for its kernels ({error}): set CUPY_CACHE_DIR"
            raise DeviceError(text) from error
        self._cupy = cupy
        self._driver = _load_driver()
        self._runtime = cupy.cuda.runtime
        self.index = index
        try:
            count = self._runtime.getDeviceCount()
            if not 0 <= index < count:
                raise DeviceError(f"no CUDA device {index}: this process sees {count}")
            properties = self._call(self._runtime.getDeviceProperties, index)
        except DeviceError:
            raise
        except Exception as error:  # CuPy's own types, and what its loader raises
            raise DeviceError(f"CUDA does not work here: {error}") from error
        # CuPy gives a C string: shorter where the id has a zero byte, alike in every process.
        self.uuid = bytes(properties["uuid"])[:UUID_BYTES].ljust(UUID_BYTES, b"\0")
        self.name = bytes(properties["name"]).rstrip(b"\0").decode(errors="replace")
        self.multiprocessors = int(properties["multiProcessorCount"])

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Call the runtime with this GPU as the thread's current one."""
        try:
            driver = self._cupy.cuda.driver
            before = driver.ctxGetCurrent()
            if self._runtime.getDevice() == self.index:
                if not before:  # a new thread, say: the driver's own calls need one
                    self._runtime.setDevice(self.index)
                return call(*arguments)
            self._runtime.setDevice(self.index)
            try:
                return call(*arguments)
            finally:  # not `setDevice`, which would make a context where none was
                driver.ctxSetCurrent(before)
        except DeviceError:
            raise
        except Exception as error:  # CuPy's errors have several types, its loader's yet others
            raise DeviceError(f"{error}" or type(error).__name__) from error

    def own_thread(self) -> None:
        """Make this GPU the thread's current one for good.

        And let its calls not spoil a graph that another thread records meanwhile: CUDA counts
        allocating, pinning and looking at events among what could be meant to be in it.
        """
        try:
            self._runtime.setDevice(self.index)
        except Exception as error:
            raise DeviceError(f"{error}") from error
        if self._driver is not None:
            mode = ctypes.c_int(_CAPTURE_RELAXED)
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    @cached_property
    def _kernels(self) -> dict[str, Any]:
        """Compile `kernels.cu`, or take it from CuPy's cache on disk."""
        source = SOURCE.read_text(encoding="utf-8")
        module = self._cupy.RawModule(code=source, options=OPTIONS, backend="nvrtc")
        return {name: module.get_function(name) for name in NAMES}

    def prepare(self) -> None:
        """Compile the kernels now; otherwise the first launch does."""
        try:
            self._call(lambda: self._kernels)
        except DeviceError as error:
            raise DeviceError(f"kernels.cu does not compile here: {error}") from error

    def current_stream(self) -> int:
        """Return torch's current stream where torch is loaded, CuPy's otherwise."""
        return int(self._call(self._stream))

    def _stream(self) -> int:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            stream = int(torch.cuda.current_stream(self.index).cuda_stream)
        else:
            stream = int(self._cupy.cuda.get_current_stream(self.index).ptr)
        if self._runtime.streamIsCapturing(stream):
            raise DeviceError("the engine's stream is recorded into a graph")
        return stream

    def make_stream(self) -> int:
        return int(self._call(self._runtime.streamCreateWithFlags, _NON_BLOCKING))

    def make_event(self) -> int:
        if self._driver is None:
            return int(self._call(self._runtime.eventCreateWithFlags, _DISABLE_TIMING))
        event = ctypes.c_void_p()
        status = self._call(self._driver.cuEventCreate, ctypes.byref(event), _DISABLE_TIMING)
        if status != _SUCCESS or not event.value:
            raise DeviceError(f"no event was made: CUDA error {status}")
        return event.value

    def destroy_event(self, event: int) -> None:
        self._call(self._runtime.eventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        if self._driver is None:
            self._call(self._runtime.eventRecord, event, stream)
            return
        status = self._call(self._driver.cuEventRecord, event, stream)
        if status != _SUCCESS:
            raise DeviceError(f"an event was not recorded: CUDA error {status}")

    def wait(self, stream: int, event: int) -> None:
        self._call(self._runtime.streamWaitEvent, stream, event)

    def happened(self, event: int) -> bool:
        driver, runtime = self._driver, self._runtime
        query = runtime.eventQuery if driver is None else driver.cuEventQuery
        status = int(self._call(query, event))
        if status not in {_SUCCESS, _NOT_READY}:
            raise DeviceError(f"an event failed with CUDA error {status}")
        return status == _SUCCESS

    def copy_in(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._call(self._runtime.memcpyAsync, target, source, size_bytes, _TO_DEVICE, stream)

    def copy_out(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._call(self._runtime.memcpyAsync, target, source, size_bytes, _TO_HOST, stream)

    def copy_on(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._call(self._runtime.memcpyAsync, target, source, size_bytes, _ON_DEVICE, stream)

    def fill(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        self._call(self._runtime.memsetAsync, target, value, size_bytes, stream)

    def launch(self, call: Call, stream: int) -> None:
        values = [
            _TYPES[kind](value)
            for kind, value in zip(NAMES[call.name], call.arguments, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        grid, block, at = (call.grid, 1, 1), (THREADS, 1, 1), ctypes.addressof(addresses)
        function = self._call(lambda: self._kernels[call.name].kernel.ptr)
        launch = self._cupy.cuda.driver.launchKernel
        self._call(launch, function, *grid, *block, 0, stream, at, 0)  # copies what `at` names

    def alloc(self, size_bytes: int) -> int:
        return int(self._call(self._runtime.malloc, size_bytes))

    def free(self, address: int) -> None:
        self._call(self._runtime.free, address)

    def alloc_pinned(self, size_bytes: int) -> int:
        return int(self._call(self._runtime.hostAlloc, size_bytes, _PORTABLE))

    def free_bytes(self) -> int:
        return int(self._call(self._runtime.memGetInfo)[0])

    def register(self, address: int, size_bytes: int) -> None:
        self._call(self._runtime.hostRegister, address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call(self._runtime.hostUnregister, address)

    def export(self, address: int) -> bytes:
        return bytes(self._call(self._runtime.ipcGetMemHandle, address))

    def open(self, handle: bytes) -> int:
        return int(self._call(self._runtime.ipcOpenMemHandle, handle, _LAZY_PEER))

    def close(self, address: int) -> None:
        self._call(self._runtime.ipcCloseMemHandle, address)
