"""How much memory the host, or the control group the daemon runs in, has left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE_KIB = 2048
"""The huge pages kvd uses."""


class Memory(NamedTuple):
    """Bytes that may still be taken, and who says so."""

    available_bytes: int
    limit: str


def available(root: Path = Path("/"), *, huge_pages: bool = True) -> Memory | None:
    """Return the tightest of what the host and the control groups above us leave.

    Page cache counts as available: the kernel gives it up. Free huge pages of the host come on
    top, because they are set aside already and no control group for memory counts them.

    Returns:
        None when nothing says how much there is.
    """
    meminfo = _table(root / "proc/meminfo")
    found = list(_group_limits(root))
    if "MemAvailable:" in meminfo:
        found.append(Memory(meminfo["MemAvailable:"] << 10, "available on this host"))
    if not found:
        return None
    least = min(found)
    huge_kib = 0
    if huge_pages and meminfo.get("Hugepagesize:") == HUGE_KIB:
        huge_kib = meminfo.get("HugePages_Free:", 0) * HUGE_KIB
    return least._replace(available_bytes=max(0, least.available_bytes) + (huge_kib << 10))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _group_limits(root: Path) -> Iterator[Memory]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _limits(root / "sys/fs/cgroup", path, names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(root / "sys/fs/cgroup/memory", path, names)


def _limits(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[Memory]:
    """Read the limit of a group and of all above it.

    In a container the path may be the host's, and not there; the mount itself is the group then.
    """
    limit_name, used_name, cache_name = names
    group = mount / path.strip("/")
    while group.is_relative_to(mount):
        limit = _number(group / limit_name)
        if limit is not None:
            used = _number(group / used_name) or 0
            cache = _table(group / "memory.stat").get(cache_name, 0)
            yield Memory(limit - used + cache, "left of this control group's memory limit")
        group = group.parent
