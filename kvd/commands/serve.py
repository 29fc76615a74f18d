"""`kvd serve`: run the daemon."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from kvd import config_http
from kvd.errors import StartError

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
examples:
  kvd serve                           with /etc/kvd/kvd.toml, or the defaults
  kvd serve --host-bytes 8GiB --nvme-bytes 200GiB
  kvd serve --http                    with metrics and a status page
  kvd serve --config kvd.toml --check --json | jq .host

exit codes:
  0  stopped as asked, or the configuration is good (--check)
  1  ended by a fault; the last record on stderr says which
  2  cannot start: wrong option, configuration or host; stderr says what to change
  4  drained, but something hung and was left; nothing durable is lost
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file (default: $KVD_CONFIG, else /etc/kvd/kvd.toml if there is one)",
    )
    parser.add_argument("--socket", metavar="PATH", help="where clients connect")
    parser.add_argument("--state-dir", metavar="PATH", help="where the daemon keeps its own files")
    parser.add_argument("--host-bytes", metavar="SIZE", help="host memory to use, as in 8GiB")
    parser.add_argument("--nvme-bytes", metavar="SIZE", help="disk to use below it, as in 200GiB")
    parser.add_argument(
        "--http",
        metavar="ADDRESS",
        nargs="?",
        const=config_http.DEFAULT,
        help=f"metrics and a status page, here without an address: {config_http.DEFAULT}",
    )
    parser.add_argument(
        "--check", action="store_true", help="print the complete configuration and exit"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --check: print it as one JSON object"
    )


def run(options: argparse.Namespace) -> int:
    """Run it, or print the configuration.

    Raises:
        KvdError: It cannot start; the text says what to change.
    """
    from kvd import config

    overrides = {
        "socket": options.socket,
        "state_dir": options.state_dir,
        "host.bytes": options.host_bytes,
        "nvme.bytes": options.nvme_bytes,
        "http.listen": options.http,
    }
    if options.json and not options.check:
        raise StartError("--json is for --check; a running daemon's figures: kvd stat --json")
    loaded = config.load(options.config, overrides)
    if options.check:
        text = config.dump(loaded)
        sys.stdout.write(_json(text) if options.json else text)
        return 0
    if sys.flags.optimize:
        raise StartError("python -O leaves kvd's own checks out; start it without -O")
    from kvd import daemon

    return daemon.run(loaded)


def _json(text: str) -> str:
    """Return a configuration in TOML as JSON: the same tables, keys and values."""
    import json
    import tomllib

    return json.dumps(tomllib.loads(text)) + "\n"
