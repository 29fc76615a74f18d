"""`kvd version`: which release this is, and which formats it speaks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from kvd import __version__

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
examples:
  kvd version
  kvd version --json

exit codes:
  0  always
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print it."""
    from kvd_client.wire import PROTOCOL

    if options.json:
        import json

        text = json.dumps({"version": __version__, "protocol": PROTOCOL})
    else:
        text = f"kvd {__version__} (protocol {PROTOCOL})"
    sys.stdout.write(text + "\n")
    return 0
