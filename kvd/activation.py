"""What systemd hands over at the start: listening sockets and stored descriptors, by name.

The protocol is three environment variables and descriptors from 3 on (sd_listen_fds(3)). They are
meant for one process; so that no child takes them for its own, they are taken out of the
environment, and the descriptors are closed on exec.
"""

from __future__ import annotations

import os
from typing import NamedTuple

FIRST_FD = 3
FDS_MAX = 4096
"""More than any unit passes; a larger number is a mistake, not a wish."""


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


def take_socket(name: str) -> int | None:
    """Return the listening socket of a name, or the only one without; others are closed."""
    fds = {item.name: item.fd for item in take()}
    wanted = fds.pop(name, None)
    if wanted is None:
        wanted = fds.pop("unknown", None)
    for fd in fds.values():
        os.close(fd)
    return wanted
