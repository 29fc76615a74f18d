"""Checks of the kernel, the processor, the clock and the limits of processes."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from typing import TYPE_CHECKING, Final

from kvd.doctor.base import Finding, Host, check, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNEL_NEEDED: Final = (5, 14)
KERNEL_WISHED: Final = (6, 5)
"""From here on the kernel names a client's process without a race (SO_PEERPIDFD)."""
DESCRIPTORS: Final = 4096
"""Enough for some sessions: each takes three, and a slab one."""


@check("kernel", "host", "version of Linux")
def kernel(host: Host) -> Finding:
    """The kernel is new enough."""
    release = host.read("/proc/sys/kernel/osrelease") or platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < KERNEL_NEEDED:
        return fail(f"Linux {release}; kvd needs 5.14 or newer", "install a newer kernel")
    if version < KERNEL_WISHED:
        return warn(
            f"Linux {release}: a client that dies while it connects can be taken for another",
            "install kernel 6.5 or newer",
        )
    return ok(f"Linux {release}")


@check("processor", "host", "architecture and CPUs")
def processor(host: Host) -> Finding:
    """The processor is one that kvd is tested on, with a CPU to spare."""
    machine, cpus = platform.machine(), len(os.sched_getaffinity(0))
    if machine != "x86_64":
        return warn(f"{machine}: kvd is tested on x86_64 only", "use an x86_64 host")
    model = re.search(r"^model name\s*:\s*(.+)$", host.read("/proc/cpuinfo"), re.MULTILINE)
    text = f"{cpus} CPUs, {model[1] if model else machine}"
    if cpus == 1:
        return warn(f"{text}: engines and kvd wait for each other", "give the host another CPU")
    return ok(text)


@check("python", "host", "interpreter")
def python(host: Host) -> Finding:  # noqa: ARG001 - a check's signature
    """The interpreter keeps kvd's own checks."""
    version = platform.python_version()
    if sys.flags.optimize:
        return fail("python -O leaves kvd's own checks out", "unset PYTHONOPTIMIZE")
    return ok(f"Python {version}")


@check("libraries", "host", "what the daemon imports")
def libraries(host: Host) -> Iterator[Finding]:  # noqa: ARG001 - a check's signature
    """What the extra `daemon` brings is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found, missing = [], []
    for name in ("numpy", "numba", "lmdb", "zstandard", "xxhash", "posix-ipc", "aiofiles"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield fail(f"not installed: {', '.join(missing)}", "pip install 'kvd[daemon]'")
    else:
        yield ok(", ".join(found))


@check("descriptors", "host", "open files a process may have")
def descriptors(host: Host) -> Finding:  # noqa: ARG001 - a check's signature
    """The daemon raises its own limit to the hard one: is that enough."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS:
        return warn(
            f"at most {hard}: some {hard // 4} sessions",
            "LimitNOFILE=65536 in kvd.service, or `ulimit -Hn 65536`",
        )
    return ok(f"up to {hard}")


@check("clock", "host", "clock source and synchronisation")
def clock(host: Host) -> Iterator[Finding]:
    """Reading the clock is cheap, and log times of hosts can be compared."""
    folder = "/sys/devices/system/clocksource/clocksource0"
    source = host.read(f"{folder}/current_clocksource")
    if source in {"hpet", "acpi_pm"}:
        tsc = "tsc" in host.read(f"{folder}/available_clocksource").split()
        mend = f"echo tsc > {folder}/current_clocksource" if tsc else "boot with tsc=reliable"
        yield warn(f"{source}: each look at it takes a microsecond and more", mend)
    else:
        yield ok(f"source {source or 'unknown'}")
    if host.path("/run/systemd/timesync/synchronized").exists():
        yield ok("synchronised by systemd-timesyncd")
    elif host.names("/run/chrony") or host.path("/run/chronyd.pid").exists():
        yield ok("chrony runs")
    elif host.path("/run/systemd/system").is_dir():
        yield warn(
            "nothing seems to set the clock: logs of hosts cannot be compared",
            "timedatectl set-ntp true",
        )
