"""`kvd unpin`: end pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.commands._shared import add_json, add_socket, connected
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
examples:
  kvd unpin 3
  kvd unpin 3 4 5 --json
  kvd unpin --all

What a pin held stays where it is until room is needed.

exit codes:
  0  ended
  1  no daemon
  2  wrong option, no such pin, or an operator's
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("pin", metavar="PIN", nargs="*", type=int, help="its number of `kvd pin`")
    parser.add_argument("--all", action="store_true", help="every pin that this user may end")
    add_socket(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """End them; raises KvdError."""
    from kvd.commands.pin import plain, show
    from kvd_client import wire

    if bool(options.pin) == options.all:
        raise KvdError("name pins by number, or say --all; `kvd pin` lists them")
    if any(not 0 < number < 1 << 63 for number in options.pin):
        raise KvdError("a pin's number is a whole number from 1 on; `kvd pin` lists them")
    with connected(options) as admin:
        numbers = options.pin
        if options.all:
            rows = [row for rows in admin.pages(wire.ListPins) for row in rows]
            mine = [row for row in rows if not (row[6] and admin.welcome.tenant)]
            numbers = [row[0] for row in mine]
        ended = [admin.ask(wire.Unpin, number)[1][0] for number in numbers]
    show(map(plain, ended), as_json=options.json)
    return 0
