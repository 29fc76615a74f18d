"""Checks of the GPU that the [gpu] table names: its driver, CuPy, room, and handles."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from kvd.doctor.base import Finding, Host, check, fail, ok, warn
from kvd.sizes import about

PROBE_S: Final = 18.0
_PROBE: Final = """
import sys
from kvd.tiers.gpu import open_device
from kvd_client.cuda.device import DeviceError, IPC_BYTES, SLAB_MULTIPLE_BYTES
try:
    device = open_device(int(sys.argv[1]))
    free = device.free_bytes()
    address = device.alloc(SLAB_MULTIPLE_BYTES)
    handle = device.export(address)
    device.free(address)
except DeviceError as error:
    print("error", error)
else:
    print("ok" if len(handle) == IPC_BYTES else "handle", free)
"""


@check("gpu-driver", "gpu", "NVIDIA driver")
def driver(host: Host) -> Finding:
    """It is loaded, and the device files are there."""
    asked = host.config is not None and bool(host.config.gpu.size_bytes)
    version = host.read("/proc/driver/nvidia/version").partition("\n")[0]
    uvm = "nvidia-uvm" in host.names("/dev")
    devices = [n for n in host.names("/dev") if n.removeprefix("nvidia").isdigit()]
    if version and devices and asked and not uvm:
        return fail(
            "there is no /dev/nvidia-uvm: CUDA does not start, and the service may not make it",
            "nvidia-modprobe -u -c 0; at boot: nvidia-uvm in /etc/modules-load.d/nvidia-uvm.conf",
        )
    if version and devices:
        return ok(f"{len(devices)} GPUs; {version}")
    if not asked:
        return ok("no GPU here, and [gpu] bytes is 0")
    what = "no NVIDIA driver is loaded" if not version else "there is no /dev/nvidia0"
    return fail(
        f"[gpu] bytes is set, but {what}",
        "install the driver and look at nvidia-smi, or set [gpu] bytes to 0",
    )


@check("gpu-tier", "gpu", "room and handles on the GPU of [gpu] device")
def tier(host: Host) -> Finding:
    """CuPy opens it, exports a handle, and has the room; in a process of its own."""
    if host.config is None or not host.config.gpu.size_bytes:
        return ok("not used: [gpu] bytes is 0")
    knobs = host.config.gpu
    try:
        done = subprocess.run(  # noqa: S603 - ourselves, with a number
            [sys.executable, "-c", _PROBE, str(knobs.device)],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return fail(f"the GPU did not answer within {PROBE_S:.0f} s", "nvidia-smi -q | less")
    word, _, rest = (done.stdout.strip().splitlines() or ["error"])[-1].partition(" ")
    if word != "ok":
        why = rest or (done.stderr.strip().splitlines() or ["the probe died"])[-1]
        return fail(f"GPU {knobs.device}: {why}", "pip install 'kvd[cuda13]' or 'kvd[cuda12]'")
    free = int(rest)
    if free < knobs.size_bytes:
        return warn(
            f"[gpu] bytes is {about(knobs.size_bytes)}, and {about(free)} are free",
            "start kvd before the engines, or set [gpu] bytes lower",
        )
    daemon = os.geteuid()
    users = {uid for tenant in host.config.tenants for uid in tenant.uids}
    if len(users | {daemon} - {0}) > 1:
        return warn(
            f"GPU {knobs.device} exports handles, but the driver opens them for processes of one"
            " user: engines of others than the daemon's get host memory",
            "run engines as the daemon's user, or set [gpu] bytes to 0",
        )
    return ok(f"GPU {knobs.device} exports handles; {about(free)} free")
