"""`kvd stat`: what the daemon holds and does, from its page in shared memory."""

from __future__ import annotations

import argparse
import math
from typing import Final

EPILOG: Final = """\
examples:
  kvd stat
  kvd stat --watch 2
  kvd stat --json | jq .counters

exit codes:
  0  the daemon is there and answers; --watch ended by Ctrl-C
  1  no daemon
  2  wrong option
  3  a daemon is there but has written nothing for 2 seconds, or one of its tasks hangs
"""
_INTERVAL_S: Final = (0.05, 86_400.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's (default: $KVD_SOCKET, else the usual one)"
    )
    parser.add_argument("--json", action="store_true", help="everything, on one line")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=interval,
        const=1.0,
        help="show it again and again (default: every second)",
    )


def interval(text: str) -> float:
    """Read a number of seconds between two looks."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _INTERVAL_S[0] <= seconds <= _INTERVAL_S[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: write seconds, from 0.05 to 86400")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Show it once, or until Ctrl-C."""
    from kvd import statview
    from kvd_client.paths import default_socket

    return statview.run(
        options.socket or default_socket(), as_json=options.json, watch_s=options.watch
    )
