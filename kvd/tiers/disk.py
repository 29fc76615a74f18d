"""The seam between the NVMe tier and the host: files, syncs, directories, aligned memory.

`RealDisk` is the operating system; the tests put a simulated disk behind the same calls. LMDB does
its own I/O and is not behind it.

Any thread. An `OSError` leaves this module as it is; it never crosses the border of `nvme.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer

BLOCK: Final = 4096
HUGE_BYTES: Final = 2 << 20
FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class TierError(KvdError):
    """Root of what the NVMe store raises; always a miss or a refusal, never a wrong answer."""


class TierFailed(TierError):
    """The disk or the index failed, or the tier is closed; the text says why."""


class TierBusy(TierError):
    """Refused at once: too much in flight, or the disk is stalling."""


class NoSpace(TierError):
    """No region is free (reclaim one), or the file system is full."""


class Corrupt(TierError):
    """What lies there is not that bundle, or not whole: a miss, and the caller deletes the key."""


class Disk(Protocol):
    """What the tier asks of the host. Paths are absolute, handles are small ints."""

    def make_dir(self, path: Path) -> None:
        """Make a directory for the owner only; no error if it is there."""
        ...

    def names(self, path: Path) -> list[str]:
        """List a directory, sorted; empty if it is not there."""
        ...

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """Open for reading and writing; `create` makes a new file, mode 0600.

        Raises:
            FileNotFoundError: It is not there.
            FileExistsError: `create`, and it is.
        """
        ...

    def close(self, handle: int) -> None:
        """Let go of a handle."""
        ...

    def size(self, handle: int) -> int:
        """Return a file's length in bytes."""
        ...

    def allocate(self, handle: int, size_bytes: int) -> None:
        """Give a file its whole length, backed by space where the file system can."""
        ...

    def pwritev(self, handle: int, buffers: Sequence[ReadableBuffer], offset_bytes: int) -> int:
        """Write some of it; returns how many bytes."""
        ...

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        """Read some of it; returns how many bytes, 0 at the end."""
        ...

    def fdatasync(self, handle: int) -> None:
        """Make what was written durable, with the length; a failure is final for the file."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """Make a directory's names durable."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over another, or nothing."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file; no error if it is not there."""
        ...

    def lock(self, path: Path) -> int:
        """Take the only lock on a file, made if needed; the handle holds it.

        Raises:
            BlockingIOError: Somebody else has it.
        """
        ...


class RealDisk:
    """The operating system's files."""

    def make_dir(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - names, not paths
        except FileNotFoundError:
            return []

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def close(self, handle: int) -> None:
        os.close(handle)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def allocate(self, handle: int, size_bytes: int) -> None:
        os.posix_fallocate(handle, 0, size_bytes)

    def pwritev(self, handle: int, buffers: Sequence[ReadableBuffer], offset_bytes: int) -> int:
        return os.pwritev(handle, buffers, offset_bytes)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        return os.preadv(handle, buffers, offset_bytes)

    def fdatasync(self, handle: int) -> None:
        os.fdatasync(handle)

    def fsync_dir(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def lock(self, path: Path) -> int:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return handle


def _pieces(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    """Return what is left of the buffers after `skip` bytes."""
    rest = []
    for buffer in buffers:
        if skip < buffer.nbytes:
            rest.append(buffer[skip:])
        skip = max(0, skip - buffer.nbytes)
    return rest


def write_all(disk: Disk, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> None:
    """Write every byte; OSError if the file takes no more.

    A direct write that stopped between blocks goes on from the block's start.
    """
    total = sum(buffer.nbytes for buffer in buffers)
    done = 0
    while done < total:
        wrote = disk.pwritev(handle, _pieces(buffers, done), offset_bytes + done)
        ahead = (done + wrote) // BLOCK * BLOCK if done + wrote < total else total
        if wrote <= 0 or ahead <= done:
            raise OSError(errno.EIO, "the file takes no more bytes")
        done = ahead


def read_all(disk: Disk, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> None:
    """Fill the buffers; OSError (ENODATA) if the file ends before."""
    total = sum(buffer.nbytes for buffer in buffers)
    done = 0
    while done < total:
        got = disk.preadv(handle, _pieces(buffers, done), offset_bytes + done)
        ahead = (done + got) // BLOCK * BLOCK if done + got < total else total
        if got <= 0 or ahead <= done:
            raise OSError(errno.ENODATA, "the file ends early")
        done = ahead


def read_file(disk: Disk, path: Path, size_max: int) -> bytes | None:
    """Return a small file's content, None if it is not there; OSError if it is too long."""
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        size = disk.size(handle)
        if size > size_max:
            raise OSError(errno.EFBIG, "the file is too long")
        content = memoryview(bytearray(size))
        read_all(disk, handle, [content], 0)
        return bytes(content)
    finally:
        disk.close(handle)


def replace_file(disk: Disk, path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a small file so that it is there whole or not at all.

    It is durable once the directory is synced. Without `sync` a power cut may leave part of it: for
    content that vouches for itself.
    """
    fresh = path.with_name(path.name + ".new")
    disk.unlink(fresh)
    handle = disk.open(fresh, create=True)
    try:
        write_all(disk, handle, [memoryview(content)], 0)
        if sync:
            disk.fdatasync(handle)
    finally:
        disk.close(handle)
    disk.rename(fresh, path)


def page_memory(size_bytes: int) -> mmap.mmap:
    """Map zeroed memory of this process alone, in huge pages where it is long enough for one.

    Private on purpose: Python's default is shared memory, whose pages take longer to fault in.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def aligned_memory(size_bytes: int) -> memoryview:
    """Return zeroed, page-aligned memory of at least `size_bytes`, whole blocks."""
    return memoryview(page_memory(max(BLOCK, -(-size_bytes // BLOCK) * BLOCK)))


def is_aligned(view: memoryview) -> bool:
    """Whether a direct read or write may use this memory; False for what cannot be told."""
    if view.readonly:
        array = np.frombuffer(view, np.uint8)
        return bool(array.ctypes.data % BLOCK == 0)
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK == 0


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the GIL; both have the same length."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
