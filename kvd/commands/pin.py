"""`kvd pin`: keep a namespace, or a chain of chunks, in host memory for a time; list the pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvd.commands._shared import (
    add_json,
    add_socket,
    complete_labels,
    connected,
    dump,
    say,
    size,
    time_s,
)
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from kvd.admin.client import Admin
    from kvd.admin.names import SpaceRow

EPILOG: Final = """\
examples:
  kvd pin                                     list the pins
  kvd pin llama-3-8b@main --budget 4GiB --for 8h --note "launch day"
  kvd pin llama-3-8b@main --chunk 2db178a4ff86 --warm

A pin of a namespace takes in what is there now and what is stored later, the beginnings of chains
first, up to its budget; one with --chunk holds that chunk with all before it. All pins of a tenant
together hold at most half of what its leases may. Pins end after --for, by `kvd unpin`, and with
the daemon. --warm brings up from NVMe first.

exit codes:
  0  pinned, or listed
  1  no daemon
  2  wrong option, no such namespace or chunk, or nothing of the chain is in host memory
"""
PIN_S: Final = 86_400.0
_HEX_MIN: Final = 6
FIELDS: Final = (
    *("pin", "space", "tenant", "label", "chunk", "uid", "operator", "note"),
    *("budget_bytes", "held_bytes", "chunks", "left_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    space = parser.add_argument(
        "space", metavar="NAMESPACE", nargs="?", help="label or id of `kvd ls`"
    )
    complete_labels(space)
    parser.add_argument("--chunk", metavar="HASH", help="only this chunk and those before it")
    parser.add_argument("--budget", metavar="SIZE", type=size, help="most to hold, as in 4GiB")
    parser.add_argument(
        "--for",
        dest="ttl_s",
        metavar="TIME",
        type=time_s,
        default=PIN_S,
        help="how long, as in 30m, 8h or 2d (default: 1d, at most 30d)",
    )
    parser.add_argument("--note", metavar="TEXT", default="", help="why, for those who list pins")
    parser.add_argument("--warm", action="store_true", help="bring it up from NVMe first")
    add_socket(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Pin or list; raises KvdError."""
    from kvd.admin import names
    from kvd_client import wire

    with connected(options) as admin:
        if options.space is None:
            pins = [plain(row) for rows in admin.pages(wire.ListPins) for row in rows]
            show(pins, as_json=options.json)
            return 0
        space = names.find_one(names.spaces(admin), options.space)
        if options.warm:
            from kvd.commands.warm import warm

            warm(admin, space, options.budget)
        tip = bytes(32) if options.chunk is None else _find_chunk(admin, space, options.chunk)
        ask = (space.space, tip, options.budget or 0, int(options.ttl_s) or 1, options.note)
        _, rows = admin.ask(wire.Pin, *ask)
        show(map(plain, rows), as_json=options.json)
    return 0


def _find_chunk(admin: Admin, space: SpaceRow, word: str) -> bytes:
    """Return the whole hash of a chunk from its beginning."""
    from kvd_client import wire

    word = word.lower()
    if word.strip("0123456789abcdef") or not _HEX_MIN <= len(word) <= 64:  # noqa: PLR2004 - digits
        raise KvdError(
            f"--chunk {word}: write at least {_HEX_MIN} hex digits of `kvd ls NAMESPACE`"
        )
    pages = admin.pages(wire.ListChunks, space.space, 3)
    found = {bytes(row[0]) for rows in pages for row in rows if row[0].hex().startswith(word)}
    if len(found) != 1:
        what = "names several chunks: write more digits" if found else "is no chunk of it"
        raise KvdError(f"--chunk {word}: {what}; `kvd ls {space.id} --limit 0` lists them")
    return found.pop()


def plain(row: list[Any]) -> dict[str, Any]:
    """Return a pin for JSON."""
    pin: dict[str, Any] = dict(zip(FIELDS, row, strict=True))
    pin["space"], pin["chunk"] = pin["space"].hex(), pin["chunk"].hex()
    pin["operator"] = bool(pin["operator"])
    return pin


def show(pins: Iterable[dict[str, Any]], *, as_json: bool) -> None:
    """Print pins."""
    from kvd.sizes import about
    from kvd.tables import aligned, clean, duration

    pins = list(pins)
    if as_json:
        dump({"pins": pins})
        return
    head = ["PIN", "TENANT", "HOLDS", "OF", "CHUNKS", "ENDS IN", "BY", "NAMESPACE", "CHAIN", "NOTE"]
    rows = [
        [
            str(pin["pin"]),
            clean(pin["tenant"]),
            about(pin["held_bytes"]),
            about(pin["budget_bytes"]) if pin["budget_bytes"] else "-",
            f"{pin['chunks']:,}",
            duration(pin["left_s"]),
            f"uid {pin['uid']}",
            clean(pin["label"]),
            pin["chunk"][:12] or "all",
            clean(pin["note"]),
        ]
        for pin in pins
    ]
    say(aligned([head, *rows]) if rows else ["no pins"])
