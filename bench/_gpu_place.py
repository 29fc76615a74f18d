"""Where GPU checks and benches run: GPU 0, or for tests a fake one with everything made small.

With `KVD_BENCH_FAKE_GPU=1` in the environment it is the tests' fake GPU in host memory. The benches
then run as they do on a GPU, and no figure means anything: `mark` says so in each result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from bench._daemon import DaemonProcess
    from kvd_client.cuda.device import Device

GIB: Final = 1 << 30
MIB: Final = 1 << 20
FAKE_VARIABLE: Final = "KVD_BENCH_FAKE_GPU"
DRY_RUN: Final = "dry run on a fake GPU in host memory: no figure here is a measurement"
FAKE_DAEMON: Final = "tests.gpu.gpu_daemon"
SMALL: Final = _gpu.Shape(layers=4, heads=4, dim=64, tokens=1024, blocks=512)
BUSY: Final = _gpu.Shape(layers=8, tokens=2048, blocks=512)
BENCH: Final = _gpu.Shape()
PROMPT: Final = _gpu.Shape(tokens=32768, blocks=4608)
_TINY: Final = _gpu.Shape(layers=2, heads=2, dim=64, page=16, chunk=64, tokens=256, blocks=64)


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, and how much of everything is used on it.

    Attributes:
        device: The GPU.
        where: torch's name for its memory.
        main: The module that is run as daemon.
        kills: How often engines and daemons are killed.
        together: Engines to kill that are started side by side; a CUDA context takes seconds.
        lanes: Daemons that are killed and started side by side.
        small: KV of the checks of bytes.
        busy: KV of the checks that kill: a copy takes milliseconds.
        check_bytes: Host tier, GPU tier and its slabs in the checks.
        shape: KV of the bench.
        bench_bytes: Host tier, GPU tier and its slabs in the bench.
        first_use_bytes: Host tier that an engine joins for `first_use_ms`.
        prompt: KV of the time to the first token, which has room for two prompts.
        prompt_host_bytes: Host tier of that.
        lengths: Of its prompts.
        model: Hidden and inner size of its model.
        rounds: Times that something is timed.
    """

    device: Device
    where: str = "cuda"
    main: str = "kvd"
    kills: int = 20
    together: int = 5
    lanes: int = 4
    small: _gpu.Shape = SMALL
    busy: _gpu.Shape = BUSY
    check_bytes: tuple[int, int, int] = (GIB, 512 * MIB, 128 * MIB)
    shape: _gpu.Shape = BENCH
    bench_bytes: tuple[int, int, int] = (4 * GIB, 4 * GIB, 256 * MIB)
    first_use_bytes: int = 16 * GIB
    prompt: _gpu.Shape = PROMPT
    prompt_host_bytes: int = 8 * GIB
    lengths: tuple[int, ...] = (1024, 8192, 32768)
    model: tuple[int, int] = (4096, 14336)
    rounds: int = 7

    def daemon(self, *, gpu: bool = True) -> AbstractContextManager[DaemonProcess]:
        """Run a daemon as the checks need it, with or without a GPU tier."""
        host_bytes, gpu_bytes, slab_bytes = self.check_bytes
        own = gpu_bytes if gpu else 0
        return _gpu.daemon(host_bytes, own, slab_bytes=slab_bytes, main=self.main)

    def engine(
        self, socket: str, shape: _gpu.Shape, *, fp8: bool = False, seed: int = 0
    ) -> _gpu.Engine:
        """Make an engine here."""
        return _gpu.Engine(self.device, socket, shape, where=self.where, fp8=fp8, seed=seed)

    @property
    def fake(self) -> bool:
        """Whether this is the tests' fake GPU."""
        return self.where != "cuda"


def fake(device: Device) -> Place:
    """Describe a fake GPU: small sizes, few rounds."""
    return Place(
        device,
        "cpu",
        FAKE_DAEMON,
        kills=2,
        together=2,
        lanes=1,  # it has one stream of work for all that use it
        small=_TINY,
        busy=_TINY,
        check_bytes=(64 * MIB, 16 * MIB, 4 * MIB),
        shape=_TINY,
        bench_bytes=(8 * MIB, 16 * MIB, 4 * MIB),
        first_use_bytes=32 * MIB,
        prompt=_TINY._replace(tokens=512, blocks=96),
        prompt_host_bytes=64 * MIB,
        lengths=(128, 300),
        model=(128, 256),
        rounds=1,
    )


def here(seed: int = 0) -> Place:
    """Give the place that this process is told to use; raises `_gpu.NotHere`."""
    if os.environ.get(FAKE_VARIABLE) != "1":
        return Place(_gpu.real_device())
    from tests.gpu.shared_device import SharedDevice

    return fake(SharedDevice(seed))


def mark(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Say in a result that it is a dry run, where it is one."""
    if os.environ.get(FAKE_VARIABLE) != "1":
        return dict(figures)
    return {"dry_run": DRY_RUN, **figures}
