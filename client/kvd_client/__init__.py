"""kvd's client: share LLM KV cache with the other engines of this host.

Light on purpose: importing it pulls in neither torch, numpy, asyncio nor the daemon.
"""

from kvd_client.client import Client, connect
from kvd_client.errors import (
    DaemonUnavailable,
    HandleClosed,
    KvdError,
    Refused,
    RingError,
    WireError,
)
from kvd_client.handles import Found, Lease, Reservation, Slot, Ticket
from kvd_client.identity import Group, Layout, Namespace, chunk_hashes
from kvd_client.wire import Status

__all__ = [
    "Client",
    "DaemonUnavailable",
    "Found",
    "Group",
    "HandleClosed",
    "KvdError",
    "Layout",
    "Lease",
    "Namespace",
    "Refused",
    "Reservation",
    "RingError",
    "Slot",
    "Status",
    "Ticket",
    "WireError",
    "chunk_hashes",
    "connect",
]
