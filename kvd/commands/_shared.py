"""What several commands share: the socket's option, a connection, JSON on one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from kvd.admin.client import Admin


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Add `--socket`."""
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's (default: $KVD_SOCKET, else the usual one)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def connected(options: argparse.Namespace) -> Admin:
    """Connect to the daemon that the options name; raises KvdError."""
    from kvd.admin.client import Admin
    from kvd_client.paths import default_socket

    return Admin(options.socket or default_socket(), name=f"kvd {options.command}")


def dump(value: dict[str, Any]) -> None:
    """Print one JSON object on a line."""
    import json

    sys.stdout.write(json.dumps(value) + "\n")


def say(lines: Iterable[str]) -> None:
    """Print lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def ago(age_s: int | None) -> str:
    """Say how long ago a use was."""
    from kvd.tables import duration

    return "-" if age_s is None else duration(age_s)
