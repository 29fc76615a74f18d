"""Checks of the disk under the NVMe tier: its file system, room, O_DIRECT."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvd.doctor.base import Finding, Host, check, fail, ok, warn
from kvd.sizes import about

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NETWORKED: Final = {"nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "virtiofs"}
IN_MEMORY: Final = {"tmpfs", "ramfs"}


def existing(path: Path) -> Path:
    """Return the path, or the nearest one above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def mount_of(host: Host, path: Path) -> tuple[str, str, str]:
    """Return (device, mount point, type) of the file system a path is on."""
    best = ("", "/", "")
    real = os.path.realpath(path)
    for line in host.read("/proc/self/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:  # noqa: PLR2004 - device, place, type
            continue
        place = fields[1].replace("\\040", " ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[1]):
            best = (fields[0], place, fields[2])
    return best


@check("file-system", "disk", "what is under the NVMe tier")
def file_system(host: Host) -> Iterator[Finding]:
    """It is a local file system with room for the tier."""
    nvme = host.config.nvme if host.config is not None else None
    if nvme is None or not nvme.size_bytes:
        yield ok("no NVMe tier configured ([nvme] bytes)")
        return
    path = existing(host.path(nvme.directory))
    device, place, kind = mount_of(host, path)
    if kind in NETWORKED:
        yield warn(f"{place} is {kind}: slow, and a lock there may lie", "use a local disk")
    elif kind in IN_MEMORY:
        yield fail(f"{place} is {kind}: it is memory, not a disk", "set [nvme] directory elsewhere")
    elif kind == "overlay":
        yield warn(f"{place} is a container's overlay", "mount a volume at [nvme] directory")
    else:
        yield ok(f"{kind or 'unknown'} on {device or '?'} at {place}")
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    held = 0
    with suppress(OSError):
        held = sum(item.stat().st_size for item in (path / "regions").iterdir())
    text = f"{about(free)} free, {about(held)} taken by kvd, of {about(nvme.size_bytes)} to be used"
    if free + held < nvme.size_bytes:
        yield fail(text, "lower [nvme] bytes, or make room: the tier closes when the disk is full")
    else:
        yield ok(text)


@check("direct-io", "disk", "O_DIRECT")
def direct_io(host: Host) -> Finding:
    """Reads and writes go past the page cache."""
    nvme = host.config.nvme if host.config is not None else None
    if nvme is None or not nvme.size_bytes:
        return ok("no NVMe tier configured ([nvme] bytes)")
    path = existing(host.path(nvme.directory))
    try:
        with tempfile.NamedTemporaryFile(prefix=".kvd-doctor-", dir=path) as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            return fail(
                f"{path} may not be written ({error.strerror})", f"chown kvd {nvme.directory}"
            )
        return warn(
            f"{path}: {error.strerror}: memory is spent twice", "use ext4 or XFS for the NVMe tier"
        )
    return ok(f"works at {path}")


@check("rates", "disk", "what memory and disk were measured to give")
def stored_rates(host: Host) -> Finding:
    """The cost gate and `kvd plan` have something to begin with."""
    from kvd import rates

    if host.config is None:
        return ok("not looked for: no configuration")
    found = rates.read(host.path(host.config.state_dir))
    if found == rates.NONE:
        text = "not measured: the cost gate learns them while serving"
        return warn(text, "kvd doctor --measure") if host.config.nvme.size_bytes else ok(text)
    return ok(
        f"memory {found.host_bytes_s / 1e9:.2f}, disk reads {found.nvme_read_bytes_s / 1e9:.2f}, "
        f"writes {found.nvme_write_bytes_s / 1e9:.2f} GB/s"
    )
