"""The small files of an NVMe store, and making region files. Blocks; any thread.

lock        held by the daemon, or by `kvd check`
store       identity: format version, uuid, region size; written once
clean       what vouches for the index; written last at a clean stop, removed first at a start;
                never synced, since it holds the index's checksum and its own
ballast     space to let go of when the disk is full, so that deletes can be committed
probe       while it is tried whether the disk works
index.mdb   the index (index.py)
regions/    one file a region, named by its number
"""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvd.errors import StartError
from kvd.tiers.disk import (
    FULL_ERRNOS,
    aligned_memory,
    read_all,
    read_file,
    replace_file,
    write_all,
)
from kvd.tiers.region import (
    BLOCK,
    FORMAT_VERSION,
    REGION_BYTES_MAX,
    REGION_BYTES_MIN,
    UUID_BYTES,
    encode_region,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.tiers.disk import Disk
    from kvd.tiers.extents import Region
    from kvd.tiers.region import RegionHeader

BALLAST_BYTES: Final = 4 << 20
_IDENTITY: Final = struct.Struct("<8sII16sQ")
_IDENTITY_MAGIC: Final = b"KVDSTOR\0"
_CLEAN_MAGIC: Final = b"KVDCLEAN"


class Identity(NamedTuple):
    """The file `store`."""

    uuid: bytes
    region_bytes: int


def encode_identity(identity: Identity) -> bytes:
    """Return the content of the file `store`."""
    body = _IDENTITY.pack(_IDENTITY_MAGIC, FORMAT_VERSION, 0, *identity)
    return body + xxhash.xxh3_64_digest(body)


def read_identity(disk: Disk, directory: Path) -> Identity | None:
    """Return who the store is, None for a directory without one.

    Raises:
        StartError: It is of another format version, or damaged.
        OSError: The disk failed.
    """
    content = read_file(disk, directory / "store", BLOCK)
    if content is None:
        return None
    where = f"the NVMe store in {directory}"
    if len(content) != _IDENTITY.size + 8 or content[:8] != _IDENTITY_MAGIC:
        raise StartError(f"{where} has a damaged file `store`: empty the directory to begin anew")
    _, version, _, uuid, region_bytes = _IDENTITY.unpack(content[:-8])
    if version != FORMAT_VERSION:
        raise StartError(
            f"{where} has format {version}, this kvd reads {FORMAT_VERSION}: "
            "use that kvd's version, or empty the directory"
        )
    whole = content[-8:] == xxhash.xxh3_64_digest(content[:-8])
    if not whole or not REGION_BYTES_MIN <= region_bytes <= REGION_BYTES_MAX:
        raise StartError(f"{where} has a damaged file `store`: empty the directory to begin anew")
    return Identity(uuid, region_bytes)


def encode_clean(uuid: bytes, mark: bytes) -> bytes:
    """Return the content of the file `clean`."""
    body = _CLEAN_MAGIC + uuid + mark
    return body + xxhash.xxh3_64_digest(body)


def read_clean(disk: Disk, directory: Path, uuid: bytes) -> bytes:
    """Return what vouches for the index, empty if nothing does."""
    try:
        content = read_file(disk, directory / "clean", BLOCK) or b""
    except OSError:
        return b""
    head = len(_CLEAN_MAGIC) + UUID_BYTES
    if content[:head] != _CLEAN_MAGIC + uuid or len(content) < head + 8:
        return b""
    if content[-8:] != xxhash.xxh3_64_digest(content[:-8]):
        return b""
    return content[head:-8]


def lay_ballast(disk: Disk, directory: Path) -> None:
    """Take the space that `ballast` stands for, if it can be had."""
    try:
        handle = disk.open(directory / "ballast", create=True)
    except FileExistsError:
        return
    try:
        disk.allocate(handle, BALLAST_BYTES)
    except OSError:
        disk.unlink(directory / "ballast")
    finally:
        disk.close(handle)


def takes_direct(disk: Disk, directory: Path) -> bool:
    """Try whether the file system takes O_DIRECT; raises OSError if it takes nothing."""
    path = directory / "probe"
    disk.unlink(path)
    disk.close(disk.open(path, create=True))
    try:
        handle = disk.open(path, direct=True)
        try:
            return disk.pwritev(handle, [aligned_memory(BLOCK)], 0) == BLOCK
        finally:
            disk.close(handle)
    except OSError as error:
        return error.errno in FULL_ERRNOS  # it was opened, and that is what tells
    finally:
        disk.unlink(path)


def region_path(directory: Path, number: int) -> Path:
    """Return where a region lies."""
    return directory / "regions" / f"{number:08d}"


def prepare_region(
    disk: Disk, directory: Path, region: Region, header: RegionHeader, *, direct: bool
) -> None:
    """Make the region's file if it is not there, and begin a new use of it.

    Nobody else has the region meanwhile. The header needs no sync of its own: that of the first
    record covers it.

    Raises:
        OSError: A file that this made is gone again.
    """
    path = region_path(directory, region.id)
    handle = region.handle
    fresh = handle < 0
    if fresh:
        disk.unlink(path)
        disk.close(disk.open(path, create=True))
        handle = disk.open(path, direct=direct)
    try:
        if fresh:
            disk.allocate(handle, header.region_bytes)
        block = aligned_memory(BLOCK)
        block[:] = encode_region(header)
        write_all(disk, handle, [block], 0)
        if fresh:
            disk.fsync_dir(path.parent)
    except OSError:
        if fresh:
            disk.close(handle)
            disk.unlink(path)
        raise
    region.handle = handle


def probe_disk(disk: Disk, directory: Path, *, direct: bool) -> None:
    """Find out whether the disk takes, keeps and gives back; lays new ballast. OSError if not."""
    path = directory / "probe"
    disk.unlink(path)
    disk.close(disk.open(path, create=True))
    handle = disk.open(path, direct=direct)
    try:
        disk.allocate(handle, BALLAST_BYTES)
        block, back = aligned_memory(BLOCK), aligned_memory(BLOCK)
        block[:] = os.urandom(BLOCK)
        write_all(disk, handle, [block], 0)
        disk.fdatasync(handle)
        read_all(disk, handle, [back], 0)
        if back != block:
            raise OSError(errno.EIO, "the disk gives back other bytes")
    finally:
        disk.close(handle)
        disk.unlink(path)
    lay_ballast(disk, directory)


def take(disk: Disk, directory: Path) -> int:
    """Make the directory and take its lock.

    Raises:
        StartError: Somebody else has it.
    """
    disk.make_dir(directory)
    disk.make_dir(directory / "regions")
    try:
        return disk.lock(directory / "lock")
    except BlockingIOError as error:
        msg = f"the NVMe store in {directory} is in use by another process"
        raise StartError(msg) from error


def identify(disk: Disk, directory: Path, region_bytes: int) -> Identity:
    """Return who the store is; makes a new one in an empty directory.

    Raises:
        StartError: It cannot be used; the text says what to change.
    """
    identity = read_identity(disk, directory)
    if identity is None:
        if disk.names(directory / "regions"):
            raise StartError(
                f"{directory} has regions but no file `store`: empty the directory to begin anew"
            )
        identity = Identity(os.urandom(UUID_BYTES), region_bytes)
        # The name is synced with that of the index, in the same directory, before the first write.
        replace_file(disk, directory / "store", encode_identity(identity))
        disk.fsync_dir(directory.parent)
    if identity.region_bytes != region_bytes:
        raise StartError(
            f"the NVMe store in {directory} has regions of {identity.region_bytes} bytes: "
            "set [nvme] region_bytes to that, or empty the directory"
        )
    return identity
