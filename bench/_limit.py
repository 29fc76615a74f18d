"""A disk held to a rate by the kernel: the block I/O controller, version 1 or 2, on a real device.

Needs root. What this process and its children read and write directly counts, each way on its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

V1 = Path("/sys/fs/cgroup/blkio")
V2 = Path("/sys/fs/cgroup")
NAME = "kvd-bench"


@contextlib.contextmanager
def limited_disk(directory: Path, bytes_s: int) -> Iterator[None]:
    """Hold the disk under a directory to a rate for this process and what it starts.

    Raises:
        OSError: Not root, no such controller, or a file system without a device of its own.
    """
    device = _whole_device(directory.stat().st_dev)
    group = (V1 if V1.is_dir() else V2) / NAME
    group.mkdir(exist_ok=True)
    try:
        if V1.is_dir():
            for way in ("read", "write"):
                (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {bytes_s}")
        else:
            (V2 / "cgroup.subtree_control").write_text("+io")
            (group / "io.max").write_text(f"{device} rbps={bytes_s} wbps={bytes_s}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # a child that has not ended yet
            group.rmdir()


def _whole_device(number: int) -> str:
    """Give the numbers of the disk that a file system's device is, or is a part of."""
    name = f"{os.major(number)}:{os.minor(number)}"
    path = Path("/sys/dev/block") / name
    if (path / "partition").exists():
        return (path.resolve().parent / "dev").read_text().strip()
    return name
