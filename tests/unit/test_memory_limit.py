"""How much memory is left, as the kernel tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.memory_limit import available
from kvd.sizes import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder that stands for the host's root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 99 kB\nMemAvailable: 1048576 kB\nHugePages_Free: 3\nHugepagesize: 2048 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, GIB),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{512 * MIB}",
                "sys/fs/cgroup/a/memory.current": f"{100 * MIB}",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {40 * MIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            452 * MIB,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/not/here\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{300 * MIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{200 * MIB}",
            },
            100 * MIB,
        ),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "odd\n"}, GIB),
    ],
)
def test_memory_of_host_and_groups(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    """The tightest of host and control groups counts; free huge pages come on top."""
    root = tree(tmp_path, files)
    found = available(root, huge_pages=False)
    assert (found.available_bytes if found else None) == expected
    with_huge = available(root)
    assert (with_huge.available_bytes if with_huge else None) == (
        None if expected is None else expected + 6 * MIB
    )
