"""Tell systemd how the daemon is: ready, what it does, stopping, alive. Nothing without systemd.

It also keeps descriptors for the next start (sd_pid_notify_with_fds(3), FDSTORE=1).
"""

from __future__ import annotations

import os
import select
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

STORE_S: Final = 2.0
"""What systemd gets to read what came before, where it matters that it hears."""


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


def listening() -> bool:
    """Tell whether there is somebody to tell."""
    return os.environ.get("NOTIFY_SOCKET", "").startswith(("/", "@"))


def store(name: str, fd: int) -> bool:
    """Have systemd keep a descriptor, and pass it on at the next start."""
    return _send("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=(fd,), wait_s=STORE_S)


def unstore(name: str) -> bool:
    """Have systemd let go of what it keeps by a name."""
    return _send("FDSTOREREMOVE=1", f"FDNAME={name}", wait_s=STORE_S)


def barrier(limit_s: float) -> bool:
    """Wait until systemd has dealt with everything that was sent before."""
    reader, writer = os.pipe()
    try:
        sent = _send("BARRIER=1", fds=(writer,), wait_s=limit_s)
        os.close(writer)
        writer = -1
        poller = select.poll()
        poller.register(reader, 0)  # its other end is closed: that is told unasked
        return sent and bool(poller.poll(limit_s * 1e3))
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def watchdog_interval_s() -> float | None:
    """Return how often to call `watchdog`: at half of systemd's limit; None when it sets none."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    for_pid = os.environ.get("WATCHDOG_PID", "")
    if not limit_us.isdecimal() or int(limit_us) == 0 or for_pid not in {"", str(os.getpid())}:
        return None
    return int(limit_us) / 2e6


def _status(text: str) -> list[str]:
    return [f"STATUS={' '.join(text.split())}"] if text else []


def _send(*lines: str, fds: Sequence[int] = (), wait_s: float = 0) -> bool:
    """Send a datagram; False when there is no one to tell. Never raises, and waits `wait_s`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not lines or not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract name
        address = "\0" + address[1:]
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
    try:
        with socket.socket(socket.AF_UNIX, kind) as sender:
            sender.settimeout(wait_s)
            text = "\n".join(lines).encode()
            if fds:
                sender.connect(address)
                socket.send_fds(sender, [text], fds)
            else:
                sender.sendto(text, address)
    except OSError:
        return False
    return True
