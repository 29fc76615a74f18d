"""What several commands share: the socket's option, a connection, JSON on one line."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.admin.client import Admin


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Add `--socket`."""
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's (default: $KVD_SOCKET, else the usual one)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def complete_labels(action: argparse.Action) -> None:
    """Let Tab offer the labels of the namespaces that there are."""

    def labels(**_: object) -> list[str]:
        from kvd import statpage
        from kvd.statfields import rows_of, text_of
        from kvd_client.paths import default_socket, stat_page_name

        try:
            stats = statpage.read(stat_page_name(default_socket())).stats
        except statpage.NoStatPage:
            return []
        return sorted({text_of(space, "label") for space in rows_of(stats, "spaces")})

    action.completer = labels  # type: ignore[attr-defined]


def _argument(read: Callable[[str], float], low: float, high: float, text: str) -> float:
    try:
        value = read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: write one from {low:g} to {high:g}")
    return value


def size(text: str) -> int:
    """Read a size, as in 8GiB."""
    from kvd.sizes import TIB, parse_size

    return int(_argument(parse_size, 1, 1024 * TIB, text))


def time_s(text: str) -> float:
    """Read a time, as in 2h; at most a hundred years."""
    from kvd.durations import parse_duration

    return _argument(parse_duration, 0, 3_155_760_000, text)


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
