"""What systemd hands over at the start: listening sockets and stored descriptors, by name.

The protocol is three environment variables and descriptors from 3 on (sd_listen_fds(3)). They are
meant for one process; so that no child takes them for its own, they are taken out of the
environment, and the descriptors are closed on exec.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

STORED = "kvd-"
"""How names begin of what the daemon has stored itself."""
FIRST_FD = 3
FDS_MAX = 5000
"""More than our unit lets be stored and passes; a larger number is a mistake, not a wish."""


class Inherited(NamedTuple):
    """A descriptor from systemd; the caller owns it.

    Attributes:
        name: As `FileDescriptorName=` or FDNAME= gave it, "unknown" without.
        fd: The descriptor.
    """

    name: str
    fd: int


def take() -> list[Inherited]:
    """Return what this process was passed, once: a second call finds nothing."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) > FDS_MAX:
        return []
    found = []
    for index in range(int(count)):
        fd = FIRST_FD + index
        os.set_inheritable(fd, False)  # noqa: FBT003 - os has no keyword for it
        name = names[index] if index < len(names) and names[index] else "unknown"
        found.append(Inherited(name, fd))
    return found


def take_named(name: str) -> tuple[int | None, dict[str, int]]:
    """Return the listening socket of a name, or the only one without, and what was stored.

    What was stored is by name, as `kvd.keeping` gives it; all else is closed.
    """
    fds: dict[str, int] = {}
    for item in take():
        if item.name in fds:
            os.close(fds[item.name])
        fds[item.name] = item.fd
    wanted = fds.pop(name, None)
    if wanted is None:
        wanted = fds.pop("unknown", None)
    stored = {name: fd for name, fd in fds.items() if name.startswith(STORED)}
    for other in fds.keys() - stored.keys():
        os.close(fds[other])
    return wanted, stored


def stored_bytes() -> int:
    """Return the memory that stored descriptors hold already; what `take` will return stays."""
    if os.environ.get("LISTEN_PID", "") != str(os.getpid()):
        return 0
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    slabs = [at for at, name in enumerate(names) if name.startswith(STORED)]
    total = 0
    for at in slabs:
        with suppress(OSError):
            total += os.fstat(FIRST_FD + at).st_size
    return total
