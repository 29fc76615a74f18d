"""An engine to be killed, on the fake GPU; on a GPU it is `bench.gpu_check --child`."""

from __future__ import annotations

import sys

from bench import gpu_check
from tests.gpu.shared_device import SharedDevice

if __name__ == "__main__":
    _, _, socket, number = sys.argv
    gpu_check.child(SharedDevice(int(number)), socket, int(number), "cpu")
