"""`kvd evict`: give up chunks, by namespace, tenant and last use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvd.commands._shared import add_json, add_socket, complete_labels, connected, dump, say, time_s
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import argparse

    from kvd.admin.client import Admin
    from kvd.admin.names import SpaceRow

EPILOG: Final = """\
examples:
  kvd evict old-model@v1 --dry-run            what would go
  kvd evict old-model@v1                      retire a namespace: memory and NVMe
  kvd evict --tenant search --older-than 7d
  kvd evict --older-than 1h --tier host       free memory of what NVMe has; nothing is lost

What is leased, pinned, being filled or moved stays, with all before it in its chain; --wait tries
again for so long. A chunk not used since the daemon's start counts as old as that.

exit codes:
  0  done
  1  no daemon
  2  wrong option, or no such namespace
  3  done, but some chunks are held, or could not be deleted on NVMe
"""
EXIT_HELD: Final = 3
RETRY_S: Final = 0.5
SUMMED: Final = ("chunks", "host_bytes", "nvme_bytes", "held", "undeleted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    space = parser.add_argument(
        "space", metavar="NAMESPACE", nargs="?", help="label, pattern or id"
    )
    complete_labels(space)
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's")
    parser.add_argument(
        "--older-than",
        dest="older_s",
        metavar="TIME",
        type=time_s,
        help="only what was not used for so long, as in 30m, 2h or 7d",
    )
    parser.add_argument(
        "--tier",
        choices=("any", "host"),
        default="any",
        help="host: only free the memory of what has a copy on NVMe (default: any, all copies)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go; change nothing")
    parser.add_argument(
        "--wait", metavar="TIME", type=time_s, default=0.0, help="for what is held, as in 30s"
    )
    add_socket(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Evict and print what went; raises KvdError."""
    from kvd.admin import names

    if options.space is None and options.tenant is None and options.older_s is None:
        raise KvdError("say what: a namespace, --tenant or --older-than; try it with --dry-run")
    deadline_s = time.monotonic() + options.wait
    with connected(options) as admin:
        known = names.spaces(admin)
        chosen = known if options.space is None else names.find(known, options.space)
        if options.tenant is not None:
            chosen = [row for row in chosen if row.tenant == options.tenant]
            if not chosen:
                tenants = ", ".join(sorted({row.tenant for row in known})) or "none"
                raise KvdError(
                    f"--tenant {options.tenant} has no such namespace; there are: {tenants}"
                )
        total = dict.fromkeys(SUMMED, 0)
        for row in chosen:
            done = _evict(admin, row, options)
            while done["held"] and time.monotonic() < deadline_s:
                time.sleep(RETRY_S)
                again = _evict(admin, row, options)
                done = {name: done[name] + again[name] for name in SUMMED} | {"held": again["held"]}
            total = {name: total[name] + done[name] for name in SUMMED}
    _show(total, chosen, options)
    return EXIT_HELD if total["held"] or total["undeleted"] else 0


def _evict(admin: Admin, space: SpaceRow, options: argparse.Namespace) -> dict[str, int]:
    from kvd.admin.client import Denied
    from kvd_client import wire

    total = dict.fromkeys(SUMMED, 0)
    what = (int(options.older_s or 0), int(options.tier == "host"), int(options.dry_run))
    try:
        for rows in admin.pages(wire.Evict, space.space, *what):
            total = {name: total[name] + rows[0][at] for at, name in enumerate(SUMMED)}
    except Denied as denied:
        if "is gone" not in str(denied):  # with its last chunk
            raise
    return total


def _show(total: dict[str, int], chosen: list[SpaceRow], options: argparse.Namespace) -> None:
    from kvd.sizes import about

    if options.json:
        found: dict[str, Any] = {"dry_run": options.dry_run, **total}
        dump(found | {"namespaces": [row.id for row in chosen]})
        return
    verb = "would give up" if options.dry_run else "gave up"
    where = f"{about(total['host_bytes'])} in memory, {about(total['nvme_bytes'])} on NVMe"
    lines = [f"{verb} {total['chunks']:,} chunks in {len(chosen)} namespaces: {where}"]
    if total["held"]:
        lines.append(f"{total['held']:,} chunks stay: leased, pinned, moving, or before such ones")
    if total["undeleted"]:
        lines.append(
            f"{total['undeleted']:,} could not be deleted on NVMe: they may come back at a restart"
        )
    say(lines)
