"""Sealed memfds: make, fault in, lock. The only place that calls libc.

A memfd has no name, dies with its last holder and, sealed against resizing before anybody else
has it, cannot be cut short under a reader (a shrunk map is SIGBUS). F_SEAL_SEAL keeps clients from
adding seals against the daemon.

Any thread; ctypes lets go of the GIL during each call.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

_LIBC = ctypes.CDLL(None, use_errno=True)
_MFD_NOEXEC_SEAL = 0x8
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_MADV_POPULATE_WRITE = 23
HUGE_BYTES = 2 << 20
PIECE_BYTES = 16 << 20
"""Faulted in and locked at a time, so that a stop is noticed."""


def make_memfd(name: str, size_bytes: int, *, huge: bool = False) -> int:
    """Make a memfd of a fixed size; the caller owns the fd.

    Args:
        name: For /proc only.
        size_bytes: Whole pages (huge ones with `huge`).
        huge: From the reserved 2 MiB pages.

    Raises:
        OSError: No memory, no descriptors, or no huge pages left; nothing is left behind.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(name, flags)  # before Linux 6.3 there is no such flag
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def address_of(memory: mmap.mmap) -> int:
    """Return where a map begins; good while the map is open."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def populate(memory: mmap.mmap, offset_bytes: int, size_bytes: int) -> None:
    """Fault in part of a map for writing, instead of page by page at first use.

    Raises:
        OSError: No memory is left.
    """
    start = ctypes.c_void_p(address_of(memory) + offset_bytes)
    _call("madvise", start, ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)


def lock(memory: mmap.mmap, offset_bytes: int, size_bytes: int) -> None:
    """Keep part of a map in memory.

    Raises:
        OSError: The limit on locked memory does not allow it.
    """
    start = ctypes.c_void_p(address_of(memory) + offset_bytes)
    _call("mlock", start, ctypes.c_size_t(size_bytes))


def set_undumpable() -> None:
    """Keep other processes of this uid from taking descriptors or memory, and cores off disk."""
    pr_set_dumpable = 4
    _call("prctl", pr_set_dumpable, 0, 0, 0, 0)


def huge_pages_free() -> int:
    """Return the 2 MiB pages that are reserved and unused."""
    path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - one line of sysfs
            return int(file.read())
    except (OSError, ValueError):
        return 0
