"""Where daemon, client and tools find each other."""

from __future__ import annotations

import os
from hashlib import blake2b

SYSTEM_SOCKET = "/run/kvd/kvd.sock"
STAT_PAGE_PREFIX = "/kvd-stat-"


def default_socket() -> str:
    """Return the socket to use when none is named.

    `KVD_SOCKET` decides; else the system daemon's socket when it is there, or for root; else the
    user's own.
    """
    named = os.environ.get("KVD_SOCKET")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.geteuid() and not os.path.exists(SYSTEM_SOCKET):  # noqa: PTH110 - pathlib costs 10 ms to import
        return f"{runtime}/kvd/kvd.sock"
    return SYSTEM_SOCKET


def stat_page_name(socket_path: str) -> str:
    """Return the POSIX shared-memory name of the statistics page of the daemon at a socket."""
    digest = blake2b(os.path.realpath(socket_path).encode(), digest_size=12)
    return f"{STAT_PAGE_PREFIX}{digest.hexdigest()}"
