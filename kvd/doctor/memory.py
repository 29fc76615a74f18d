"""Checks of memory: limits on locking, control groups, huge pages, /dev/shm, NUMA, swap."""

from __future__ import annotations

import os
import re
import resource
from typing import TYPE_CHECKING, Final

from kvd.doctor.base import Finding, Host, check, fail, ok, warn
from kvd.sizes import GIB, MIB, about

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE_BYTES: Final = 2 * MIB
PAGE_BYTES: Final = 256 << 10
"""What a statistics page takes of /dev/shm, and some."""


def host_bytes(host: Host) -> int:
    """Return what the host tier is to take."""
    return host.config.host.size_bytes if host.config is not None else GIB


@check("memory", "memory", "room for the host tier")
def memory(host: Host) -> Finding:
    """The tier fits what is available."""
    need = host_bytes(host)
    match = re.search(r"^MemAvailable:\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    if match is None:
        return warn("/proc/meminfo says nothing of MemAvailable", "mount -t proc proc /proc")
    available = int(match[1]) << 10
    text = f"{about(available)} available, the host tier takes {about(need)}"
    if need > available:
        return fail(f"{text}, or has it already if kvd runs", "lower [host] bytes in kvd.toml")
    return ok(text)


@check("memlock", "memory", "memory that may be locked")
def memlock(host: Host) -> Finding:
    """The tier can be locked, so that it is never swapped out."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wish = host.config.host.lock if host.config is not None else "auto"
    if wish == "off":
        return ok("not asked for ([host] lock)")
    if os.geteuid() == 0:
        return ok("root may lock all of it")
    if hard == resource.RLIM_INFINITY or hard >= host_bytes(host):
        return ok("unlimited" if hard == resource.RLIM_INFINITY else f"up to {about(hard)}")
    text = f"{about(hard)}, less than the host tier's {about(host_bytes(host))}"
    mend = "LimitMEMLOCK=infinity in kvd.service, or a memlock line in /etc/security/limits.d/"
    return fail(text, mend) if wish == "require" else warn(f"{text}: it may be swapped out", mend)


@check("cgroup", "memory", "limit of the control group")
def cgroup(host: Host) -> Iterator[Finding]:
    """No control group above this process allows less than the tier."""
    match = re.search(r"^0::(.*)$", host.read("/proc/self/cgroup"), re.MULTILINE)
    if match is None:
        yield ok("no unified control group here")
        return
    tightest: tuple[int, str] | None = None
    parts = [part for part in match[1].split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
        limit = host.number(f"{folder}/memory.max")
        if limit is not None and (tightest is None or limit < tightest[0]):
            tightest = (limit, folder)
    if tightest is None:
        yield ok("unlimited")
        return
    limit, folder = tightest
    need = host_bytes(host)
    if need > limit:
        yield fail(
            f"{folder} allows {about(limit)}, the host tier takes {about(need)}",
            "raise MemoryMax= in kvd.service (or the container's limit), or lower [host] bytes",
        )
    elif need > limit * 7 // 8:
        yield warn(
            f"{folder} allows {about(limit)}: with a host tier of {about(need)} the kernel may "
            "kill kvd",
            "raise MemoryMax= in kvd.service (or the container's limit), or lower [host] bytes",
        )
    else:
        yield ok(f"{folder} allows {about(limit)}")


@check("huge-pages", "memory", "reserved 2 MiB pages")
def huge_pages(host: Host) -> Finding:
    """Enough huge pages are free for the tier, where it is to have any."""
    wish = host.config.host.huge_pages if host.config is not None else "auto"
    if wish == "off":
        return ok("not asked for ([host] huge_pages)")
    folder = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    free, total = host.number(f"{folder}/free_hugepages"), host.number(f"{folder}/nr_hugepages")
    need = -(-host_bytes(host) // HUGE_BYTES)
    if free is None or total is None:
        text, mend = "this kernel has none", 'set [host] huge_pages = "off"'
        return fail(text, mend) if wish == "require" else ok(text)
    mend = f"sysctl vm.nr_hugepages={total - free + need}"
    if free >= need:
        return ok(f"{free} of {total} free, the host tier takes {need}")
    text = f"{free} of {total} free, the host tier would take {need}"
    if wish == "require":
        return fail(text, mend)
    return warn(f"{text}: it starts slower, and CUDA registers it slower", mend)


@check("shm", "memory", "shared memory for the statistics page")
def shm(host: Host) -> Finding:
    """There is a little room, and it may be written."""
    path = host.path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory
    try:
        stats = os.statvfs(path)
    except OSError as error:
        mend = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        return fail(f"not there ({error.strerror}): `kvd stat` needs it", mend)
    free = stats.f_bavail * stats.f_frsize
    if free < PAGE_BYTES:
        return fail(f"{about(free)} free", "remove what fills it: ls -lS /dev/shm")
    if not os.access(path, os.W_OK):
        return fail("may not be written by this user", "chmod 1777 /dev/shm")
    return ok(f"{about(free)} free")


@check("numa", "memory", "memory nodes")
def numa(host: Host) -> Finding:
    """Where there are several nodes, copies across them are slower."""
    folder = "/sys/devices/system/node"
    nodes = [name for name in host.names(folder) if re.fullmatch(r"node\d+", name)]
    if len(nodes) < 2:  # noqa: PLR2004 - one node is no choice
        return ok("one node")
    balancing = host.number("/proc/sys/kernel/numa_balancing")
    if balancing:
        return warn(
            f"{len(nodes)} nodes, and automatic balancing moves pages while engines read them",
            "sysctl kernel.numa_balancing=0",
        )
    return ok(f"{len(nodes)} nodes; numactl --membind puts the tier beside the GPU")


@check("swap", "memory", "swapping")
def swap(host: Host) -> Finding:
    """What is not locked is not swapped out early."""
    match = re.search(r"^SwapTotal:\s+(\d+) kB", host.read("/proc/meminfo"), re.MULTILINE)
    if match is None or int(match[1]) == 0:
        return ok("none")
    eager = host.number("/proc/sys/vm/swappiness")
    locked = os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] >= host_bytes(host)
    text = f"{about(int(match[1]) << 10)}, swappiness {eager}"
    if locked:
        return ok(f"{text}; the host tier can be locked")
    return warn(f"{text}: the host tier may be swapped out", "raise LimitMEMLOCK=, or swapoff -a")
