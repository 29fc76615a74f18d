"""What this host gives: `kvd doctor --measure`. Seconds of load on memory and disk, nothing else.

The disk is measured in the NVMe tier's directory, as the tier uses it: 4 MiB blocks past the page
cache where the file system allows it, as many at once as `[nvme] threads`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvd.doctor.disk import existing
from kvd.rates import HostRates
from kvd.sizes import MIB
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.doctor.base import Host

COPY_BYTES: Final = 256 * MIB
FILE_BYTES: Final = 256 * MIB
BLOCK_BYTES: Final = 4 * MIB
READ_BYTES: Final = MIB
READS: Final = 32
ROUNDS: Final = 3
PHASE_S: Final = 10.0
"""Longest time for one phase: a slow disk is measured on less."""


def measure(host: Host) -> HostRates:
    """Measure memory and the disk under the NVMe tier.

    Raises:
        KvdError: The directory cannot be written.
    """
    assert host.config is not None
    nvme = host.config.nvme
    folder = existing(host.path(nvme.directory))
    try:
        read, write, latency = _disk(str(folder), nvme.threads)
    except OSError as error:
        raise KvdError(
            f"{folder}: {error.strerror}; run it as the daemon's user, or make room"
        ) from error
    return HostRates(_copies(), read, write, latency)


def _copies() -> float:
    """Return the bytes a second that one thread copies out of shared memory: the best of a few."""
    import numpy as np

    source = np.frombuffer(mmap.mmap(-1, COPY_BYTES), dtype=np.uint8)
    target = np.empty_like(source)
    source[:: mmap.PAGESIZE] = 1
    best = 0.0
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        np.copyto(target, source)
        best = max(best, COPY_BYTES / (time.perf_counter() - began_s))
    return best


def _disk(folder: str, threads: int) -> tuple[float, float, float]:
    """Return read and write rates, and the seconds that one small read takes alone."""
    with tempfile.NamedTemporaryFile(prefix=".kvd-measure-", dir=folder) as file:
        try:
            fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            fd = os.open(file.name, os.O_RDWR)
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            with ThreadPoolExecutor(threads) as pool:
                write = _phase(pool, fd, os.pwritev)
                began_s = time.perf_counter()
                os.fdatasync(fd)
                synced_s = time.perf_counter() - began_s
                write = 1 / (1 / write + synced_s / FILE_BYTES)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                read = _phase(pool, fd, os.preadv)
            return read, write, _latency(fd)
        finally:
            os.close(fd)


def _phase(
    pool: ThreadPoolExecutor, fd: int, call: Callable[[int, list[mmap.mmap], int], int]
) -> float:
    """Move the file's blocks, several at once; return bytes a second."""
    began_s = time.perf_counter()

    def move(at: int) -> int:
        if time.perf_counter() - began_s > PHASE_S:
            return 0
        block = mmap.mmap(-1, BLOCK_BYTES)  # whole pages, as O_DIRECT wants them
        block[:: mmap.PAGESIZE] = os.urandom(BLOCK_BYTES // mmap.PAGESIZE)
        return call(fd, [block], at)

    moved = sum(pool.map(move, range(0, FILE_BYTES, BLOCK_BYTES)))
    return max(moved, 1) / (time.perf_counter() - began_s)


def _latency(fd: int) -> float:
    """Return the median time of a small read, one at a time, all over the file."""
    block = mmap.mmap(-1, READ_BYTES)
    times = []
    step = FILE_BYTES // READS // READ_BYTES * READ_BYTES
    for index in range(READS):
        at = index * 7 % READS * step
        began_s = time.perf_counter()
        os.preadv(fd, [block], at)
        times.append(time.perf_counter() - began_s)
    return sorted(times)[READS // 2]
