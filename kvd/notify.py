"""Tell systemd how the daemon is: ready, what it does, stopping, alive. Nothing without systemd."""

from __future__ import annotations

import os
import socket


def ready(status: str = "") -> bool:
    """Say that clients are served now."""
    return _send("READY=1", *_status(status))


def status(text: str) -> bool:
    """Say what the daemon is doing, in one line for `systemctl status`."""
    return _send(*_status(text))


def stopping(status: str = "") -> bool:
    """Say that the daemon is on its way out."""
    return _send("STOPPING=1", *_status(status))


def watchdog() -> bool:
    """Say that the loop still turns."""
    return _send("WATCHDOG=1")


def watchdog_interval_s() -> float | None:
    """Return how often to call `watchdog`: at half of systemd's limit; None when it sets none."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    for_pid = os.environ.get("WATCHDOG_PID", "")
    if not limit_us.isdecimal() or int(limit_us) == 0 or for_pid not in {"", str(os.getpid())}:
        return None
    return int(limit_us) / 2e6


def _status(text: str) -> list[str]:
    return [f"STATUS={' '.join(text.split())}"] if text else []


def _send(*lines: str) -> bool:
    """Send a datagram; False when there is no one to tell. Never waits and never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not lines or not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract name
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        with socket.socket(socket.AF_UNIX, kind) as sender:
            sender.sendto("\n".join(lines).encode(), address)
    except OSError:
        return False
    return True
