"""`CupyDevice` against a stand-in for CuPy: which calls it makes, and what becomes of its errors.

CuPy itself is not imported: it is not among the tests' packages, and there is no GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvd_client.cuda.cupy_device import CupyDevice
from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.kernels import NAMES, Call


class RuntimeFault(RuntimeError):
    """Stands for CuPy's own error."""


class FakeRuntime:
    """Records calls; fails where told."""

    CUDARuntimeError = RuntimeFault

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current, self.count, self.event_status = 0, 2, 0
        self.fails = ""
        self.uuid = b"\x01\x02"  # a zero byte ended it early

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.fails:
                raise RuntimeFault(f"cuda error in {name}")
            self.calls.append((name, *arguments))
            return 77

        return call

    def last(self) -> tuple[Any, ...]:
        """The last call and its arguments."""
        return self.calls[-1]

    def getDevice(self) -> int:  # noqa: N802 - CuPy's names
        return self.current

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.current = index

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
        launched.append(("launchKernel", *arguments))

    class Module:
        def __init__(self, **options: Any) -> None:
            assert options["backend"] == "nvrtc"

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1000 + list(NAMES).index(name)))

    driver = SimpleNamespace(CUDADriverError=type("Fault", (Exception,), {}), launchKernel=launch)
    compiler = SimpleNamespace(CompileException=type("Compile", (Exception,), {}))
    module: Any = ModuleType("cupy")
    module.cuda = SimpleNamespace(runtime=fake, driver=driver, compiler=compiler)
    module.RawModule = Module
    monkeypatch.setitem(sys.modules, "cupy", module)
    return fake


def test_it_knows_its_gpu_even_by_a_short_id(runtime: FakeRuntime) -> None:
    """The id has always 16 bytes, and the GPU asked for becomes the current one."""
    device = CupyDevice(1)
    assert (runtime.current, device.name, device.multiprocessors) == (1, "H200", 132)
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
    """Another current GPU is changed first; CuPy's error becomes a DeviceError."""
    device = CupyDevice(1)
    runtime.current = 0
    device.copy_in(10, 20, 30, 40)
    assert runtime.current == 1
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
    arguments = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    device.launch(Call("kvd_scatter_16", 12, arguments), 99)
    name, function, *shape, shared, stream, at, extra = runtime.last()
    assert (name, function) == ("launchKernel", 1000 + list(NAMES).index("kvd_scatter_16"))
    assert (shape, shared, stream, extra) == ([12, 1, 1, 256, 1, 1], 0, 99, 0)
    assert at
