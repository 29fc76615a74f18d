"""`kvd serve` with a fake GPU: the same command line, with the device put in its place.

The product has no switch for this: a daemon takes the GPU that it is told to, or none.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

from kvd import cli
from kvd.tiers import gpu
from tests.gpu.shared_device import SharedDevice

if TYPE_CHECKING:
    from kvd_client.cuda.device import Device


def fake(index: int) -> Device:
    """Give the fake, which fails after so many calls if the test says so."""
    assert index == 0
    device = SharedDevice(os.getpid())
    device.fail_after = int(os.environ.get("TEST_GPU_FAILS_AFTER", "-1"))
    if os.environ.get("TEST_GPU_SPOILS") == "1":
        spoil(device)
    return device


def spoil(device: SharedDevice) -> None:
    """Let every copy to host memory come out wrong in one byte, a different one each time."""
    copy_out, places = device.copy_out, itertools.count(1)

    def wrong(target: int, source: int, size_bytes: int, stream: int) -> None:
        copy_out(target, source, size_bytes, stream)
        device.fill(target + next(places), 0xFF, 1, stream)

    device.copy_out = wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    gpu.open_device = fake
    sys.exit(cli.main())
