"""`kvd drain`: let the daemon finish, write down what is only in memory, and end."""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.commands._shared import add_json, add_socket, connected, dump, say

if TYPE_CHECKING:
    from kvd.admin.client import Admin

EPILOG: Final = """\
examples:
  kvd drain
  kvd drain --wait 300 --json
  kvd drain --wait 0                      ask for it, and do not wait

The same as `systemctl stop kvd`: no new sessions, leases or stores; open ones get [limits] drain_s;
then [nvme] flush_s for what is not on NVMe yet. Engines go on with misses. For root and the
daemon's own user.

exit codes:
  0  the daemon has ended, or was told to (--wait 0)
  1  no daemon
  2  wrong option, or this user may not
  3  it is still draining after --wait seconds
"""
EXIT_DRAINING: Final = 3
WAIT_S: Final = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=_seconds,
        default=WAIT_S,
        help=f"for its end (default: {WAIT_S:.0f})",
    )
    add_socket(parser)
    add_json(parser)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86_400:  # noqa: PLR2004 - a day
        raise argparse.ArgumentTypeError(f"{text!r}: write seconds, from 0 to 86400")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Ask for the drain and wait; raises KvdError."""
    from kvd_client import wire
    from kvd_client.paths import default_socket

    socket = options.socket or default_socket()
    began_s = time.monotonic()
    with connected(options) as admin:
        admin.ask(wire.Drain)
        ended = bool(options.wait) and _wait(admin, socket, options.wait, loud=not options.json)
    seconds = round(time.monotonic() - began_s, 3)
    pid = admin.welcome.pid
    if options.json:
        dump({"pid": pid, "ended": ended, "seconds": seconds})
    elif ended:
        say([f"kvd {pid} has ended after {seconds:.1f} s"])
    elif options.wait:
        say([f"kvd {pid} is still draining: kvd stat shows how far"])
    else:
        say([f"kvd {pid} drains"])
    return 0 if ended or not options.wait else EXIT_DRAINING


def _wait(admin: Admin, socket: str, limit_s: float, *, loud: bool) -> bool:
    """Wait for the daemon's end; say on stderr what it still waits for."""
    from kvd import statpage
    from kvd_client.paths import stat_page_name

    last: list[str] = []

    def look() -> None:
        try:
            stats = statpage.read(stat_page_name(socket)).stats
        except statpage.NoStatPage:
            return
        text = _left(stats)
        if loud and [text] != last:
            last[:] = [text]
            sys.stderr.write(f"draining: {text}\n")

    return admin.wait_for_end(limit_s, look)


def _left(stats: dict[str, Any]) -> str:
    """Say what a draining daemon still waits for."""
    from kvd.sizes import about

    text = f"{stats.get('session_count', 0)} sessions, {stats.get('leases', 0)} leases"
    nvme = stats.get("nvme")
    if isinstance(nvme, dict):
        text += f", {about(nvme.get('dirty_bytes', 0))} to write down"
    return text
