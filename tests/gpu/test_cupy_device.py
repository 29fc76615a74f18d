"""`CupyDevice` against a stand-in for CuPy: which calls it makes, and what becomes of its errors.

CuPy itself is not imported: it is not among the tests' packages, and there is no GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvd_client.cuda import cupy_device
from kvd_client.cuda.cupy_device import CupyDevice
from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.kernels import NAMES, Call
from tests.gpu.cpu_kernels import COMPILER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOAD_DRIVER = cupy_device._load_driver
COPY = Call("kvd_scatter_16", 12, (1, 2, 3, 4, 5, 6, 7, 8, 9))


class RuntimeFault(RuntimeError):
    """Stands for CuPy's own error."""


class DriverFault(RuntimeError):
    """Stands for its error of the driver's calls."""


class CompileFault(Exception):
    """Stands for its compiler's."""


class FakeRuntime:
    """Records calls; fails where told. Each thread has a current context, as in CUDA, or none."""

    CUDARuntimeError = RuntimeFault

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.count, self.event_status = 2, 0
        self.fails = ""
        self.made: set[int] = set()  # GPUs with a context
        self.capturing: set[int] = set()  # streams
        self._thread = threading.local()
        self.uuid = b"\x01\x02"  # a zero byte ended it early

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.fails:
                raise RuntimeFault(f"cuda error in {name}")
            self.calls.append((name, *arguments))
            self.setDevice(self.getDevice())  # whatever needs a context makes one
            return 77

        return call

    @property
    def context(self) -> int:
        """The calling thread's: 0 for none, else its GPU's number and 1."""
        return getattr(self._thread, "context", 0)

    def set_context(self, context: int) -> None:
        """As the driver's call."""
        self._thread.context = context

    def last(self) -> tuple[Any, ...]:
        """The last call and its arguments."""
        return self.calls[-1]

    def getDevice(self) -> int:  # noqa: N802 - CuPy's names
        return max(0, self.context - 1)

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.made.add(index)
        self.set_context(index + 1)

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        return stream in self.capturing

    def getDeviceCount(self) -> int:  # noqa: N802
        if self.fails == "getDeviceCount":
            raise RuntimeFault("no driver")
        return self.count

    def getDeviceProperties(self, index: int) -> dict[str, Any]:  # noqa: ARG002, N802
        return {"uuid": self.uuid, "name": b"H200\0\0", "multiProcessorCount": 132}

    def eventQuery(self, event: int) -> int:  # noqa: ARG002, N802
        return self.event_status


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Put the stand-in where CuPy is imported from."""
    fake = FakeRuntime()
    launched = fake.calls

    def launch(*arguments: Any) -> None:
        if not fake.context:
            raise DriverFault("CUDA_ERROR_INVALID_CONTEXT")
        launched.append(("launchKernel", *arguments))

    class Module:
        def __init__(self, **options: Any) -> None:
            assert options["backend"] == "nvrtc"
            if fake.fails == "compile":
                raise CompileFault("kernels.cu(1): error")

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1000 + list(NAMES).index(name)))

    driver = SimpleNamespace(
        launchKernel=launch, ctxGetCurrent=lambda: fake.context, ctxSetCurrent=fake.set_context
    )
    module: Any = ModuleType("cupy")
    stream = SimpleNamespace(ptr=5)
    module.cuda = SimpleNamespace(
        runtime=fake,
        driver=driver,
        get_current_stream=lambda index: stream,  # noqa: ARG005
    )
    module.RawModule = Module
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(cupy_device, "_load_driver", lambda: None)  # a GPU host has the real one
    return fake


def test_it_knows_its_gpu_even_by_a_short_id(runtime: FakeRuntime) -> None:
    """The id has always 16 bytes, and a context is made on the GPU asked for only."""
    device = CupyDevice(1)
    assert (runtime.made, device.name, device.multiprocessors) == ({1}, "H200", 132)
    assert device.uuid == b"\x01\x02" + bytes(14)


def test_what_is_missing_is_said(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such GPU, no driver and no CuPy are one line each."""
    with pytest.raises(DeviceError, match="no CUDA device 2: this process sees 2"):
        CupyDevice(2)
    runtime.fails = "getDeviceCount"
    with pytest.raises(DeviceError, match="CUDA does not work here: no driver"):
        CupyDevice(0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"pip install 'kvd\[cuda13\]'"):
        CupyDevice(0)


def test_a_home_that_cannot_be_written_is_not_taken_for_no_cupy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuPy makes a folder when it is imported; the mend is another than to install it."""

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cupy":
                raise PermissionError(13, "Permission denied", "/var/lib/engine/.cupy")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(DeviceError, match=r"/var/lib/engine/\.cupy.*set CUPY_CACHE_DIR"):
        CupyDevice(0)


def test_an_event_is_over_only_when_cuda_says_so(runtime: FakeRuntime) -> None:
    """Success is over, not ready is not, and everything else is a failure of the device."""
    device = CupyDevice(0)
    assert device.happened(5)
    runtime.event_status = 600
    assert not device.happened(5)
    runtime.event_status = 700
    with pytest.raises(DeviceError, match="700"):
        device.happened(5)


def test_calls_go_to_its_gpu_and_their_errors_are_its_own(runtime: FakeRuntime) -> None:
    """The engine's own GPU stays the current one; CuPy's error becomes a DeviceError."""
    device = CupyDevice(1)
    runtime.setDevice(0)
    used: list[int] = []
    device._call(lambda: used.append(runtime.getDevice()))
    assert (used, runtime.getDevice()) == ([1], 0)
    device.copy_in(10, 20, 30, 40)
    assert runtime.last() == ("memcpyAsync", 10, 20, 30, 1, 40)
    device.copy_out(1, 2, 3, 4)
    assert runtime.last() == ("memcpyAsync", 1, 2, 3, 2, 4)
    device.register(4096, 8192)
    assert runtime.last() == ("hostRegister", 4096, 8192, 1)
    runtime.fails = "malloc"
    with pytest.raises(DeviceError, match="malloc"):
        device.alloc(1)


def test_a_launch_names_kernel_grid_block_and_stream(runtime: FakeRuntime) -> None:
    """The function of the name is launched with 256 threads a block on the stream."""
    device = CupyDevice(0)
    device.prepare()
    device.launch(COPY, 99)
    name, function, *shape, shared, stream, at, extra = runtime.last()
    assert (name, function) == ("launchKernel", 1000 + list(NAMES).index("kvd_scatter_16"))
    assert (shape, shared, stream, extra) == ([12, 1, 1, 256, 1, 1], 0, 99, 0)
    assert at


def on_a_new_thread(what: Callable[[], object]) -> list[Exception]:
    """Call on a thread that CUDA has never seen; what it raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the test says which
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


@pytest.mark.parametrize("index", [0, 1])
def test_a_thread_that_cuda_has_never_seen_may_launch(runtime: FakeRuntime, index: int) -> None:
    """The driver's launch needs a current context, which only the runtime's calls make."""
    device = CupyDevice(index)
    device.prepare()
    assert not on_a_new_thread(lambda: device.launch(COPY, 99))
    assert not on_a_new_thread(device.make_event)
    assert runtime.last() == ("eventCreateWithFlags", 2)
    assert runtime.made == {index}  # a context takes half a GiB: none where none is used
    runtime.set_context(0)  # another library has taken it away
    device.launch(COPY, 99)


def test_threads_of_its_own_keep_the_gpu(runtime: FakeRuntime) -> None:
    """They need not set it again and again, and the driver that is missing here is no failure."""
    device = CupyDevice(1)
    kept: list[int] = []

    def run() -> None:
        device.own_thread()
        device.make_event()
        kept.append(runtime.getDevice())

    assert not on_a_new_thread(run)
    assert kept == [1]


def test_a_stream_that_is_recorded_into_a_graph_is_refused(runtime: FakeRuntime) -> None:
    """An event of it would be a node of the graph, and never happen."""
    device = CupyDevice(0)
    assert device.current_stream() == 5
    runtime.capturing.add(5)
    with pytest.raises(DeviceError, match="graph"):
        device.current_stream()


def test_a_compiler_that_fails_at_the_first_launch_is_the_devices_failure(
    runtime: FakeRuntime,
) -> None:
    """Its error is of a type of its own: a thread that launches must not die of it."""
    device = CupyDevice(0)
    runtime.fails = "compile"
    with pytest.raises(DeviceError, match=r"kernels\.cu does not compile here"):
        device.prepare()
    with pytest.raises(DeviceError, match="error"):
        device.launch(COPY, 99)


class FakeDriver:
    """The two calls of the driver's library; the real one releases the GIL."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, int]] = []
        self.status = 0

    def cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        self.recorded.append((event, stream))
        return self.status

    def cuEventQuery(self, event: int) -> int:  # noqa: ARG002, N802
        return self.status


DRIVER = """
typedef unsigned long long u64;
u64 event, stream;
int mode;
int cuEventCreate(void **e, unsigned flags) { *e = (void *)(0x7F1234567890AB00 + flags); return 0; }
int cuEventRecord(void *e, void *s) { event = (u64)e; stream = (u64)s; return 0; }
int cuEventQuery(void *e) { return event == (u64)e ? 0 : 600; }
int cuThreadExchangeStreamCaptureMode(int *m) { int old = mode; mode = *m; *m = old; return 0; }
"""
"""The calls as cuda.h declares them, without a suffix in CUDA 11 to 13."""


def test_the_drivers_calls_take_whole_addresses(
    runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events and streams are pointers: ctypes cuts what it is not told of to 32 bits."""
    library = tmp_path / "libcuda.so.1"
    if COMPILER is None:
        pytest.skip("no C compiler")
    build = [COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(build, input=DRIVER, text=True, check=True, timeout=60)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / name)))
    monkeypatch.setattr(cupy_device, "_load_driver", LOAD_DRIVER)
    device = CupyDevice(0)
    event, stream = device.make_event(), 0x7F00_0000_0000_0010
    assert event == 0x7F12_3456_7890_AB02
    device.record(event, stream)
    seen = load(str(library))
    told = [ctypes.c_uint64.in_dll(seen, name).value for name in ("event", "stream")]
    assert told == [event, stream]
    assert device.happened(event)
    assert not device.happened(event & 0xFFFF_FFFF)
    device.own_thread()
    assert ctypes.c_int.in_dll(seen, "mode").value == 2
    assert not [call for call in runtime.calls if call[0].startswith("event")]


def test_events_go_to_the_driver_past_cupy(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy holds the GIL while it records one, and that waits where the stream's queue is full."""
    driver = FakeDriver()
    monkeypatch.setattr(cupy_device, "_load_driver", lambda: driver)
    device = CupyDevice(0)
    device.record(8, 0)
    assert device.happened(8)
    driver.status = 600
    assert not device.happened(8)
    driver.status = 700
    with pytest.raises(DeviceError, match="700"):
        device.happened(8)
    with pytest.raises(DeviceError, match="700"):
        device.record(8, 9)
    assert driver.recorded == [(8, 0), (8, 9)]
    assert not [call for call in runtime.calls if call[0].startswith("event")]
