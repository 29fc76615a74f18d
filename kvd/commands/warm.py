"""`kvd warm`: bring up from NVMe what was used last, into free host memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from kvd.commands._shared import add_json, add_socket, complete_labels, connected, dump, say, size

if TYPE_CHECKING:
    import argparse

    from kvd.admin.client import Admin
    from kvd.admin.names import SpaceRow

EPILOG: Final = """\
examples:
  kvd warm llama-3-8b@main
  kvd warm llama-3-8b@main --bytes 8GiB --json

For after a restart: what was used last comes first, each chunk after what is before it in its
chain. Only memory that is free is used; nothing goes for it. Engines' own loads go on meanwhile.

exit codes:
  0  as much as there was, or as there is room for
  1  no daemon
  2  wrong option, no such namespace, or a daemon without NVMe tier
  3  some chunks did not come up: see `kvd stat` and the daemon's log
"""
EXIT_FAILED: Final = 3
ALL: Final = 1 << 62


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    space = parser.add_argument("space", metavar="NAMESPACE", help="label or id of `kvd ls`")
    complete_labels(space)
    parser.add_argument(
        "--bytes", metavar="SIZE", type=size, help="most to bring up (default: what is free)"
    )
    add_socket(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Warm it and print what came; raises KvdError."""
    from kvd.admin import names
    from kvd.sizes import about

    with connected(options) as admin:
        space = names.find_one(names.spaces(admin), options.space)
        done = warm(admin, space, options.bytes)
    if options.json:
        dump(done | {"space": space.space.hex()})
    else:
        say([f"brought up {done['chunks']:,} chunks, {about(done['host_bytes'])}"])
        if done["failed"]:
            say([f"{done['failed']:,} did not come up: see `kvd stat` and the daemon's log"])
        if done["full"]:
            say(["no more free memory for this tenant, or --bytes is reached"])
    return EXIT_FAILED if done["failed"] else 0


def warm(admin: Admin, space: SpaceRow, budget_bytes: int | None) -> dict[str, Any]:
    """Warm a namespace step by step; says how far it is on a terminal's stderr."""
    from kvd.sizes import about
    from kvd_client import wire

    done: dict[str, Any] = {"chunks": 0, "host_bytes": 0, "failed": 0, "full": False}
    after, left = 0, budget_bytes or ALL
    while True:
        after, ((chunks, host_bytes, failed, full),) = admin.ask(
            wire.Warm, space.space, left, after
        )
        done["chunks"] += chunks
        done["host_bytes"] += host_bytes
        done["failed"] += failed
        done["full"] |= bool(full)
        left = max(0, left - host_bytes)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done['chunks']:,} chunks, {about(done['host_bytes'])}  ")
        if not after:
            break
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return done
