"""The command line: which options there are and which module acts on them; no logic.

Imports of a command's module wait until that command is given, so that `kvd stat` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from typing import TYPE_CHECKING

from kvd import __version__
from kvd.errors import StartError
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_MODULES = {"check": "kvd.check", "demo": "kvd.demo.main", "replay": "kvd.replay_cli"}
"""Commands whose module adds their options and runs them; imported when they are given."""

_SERVE = """\
examples:
  kvd serve                           with /etc/kvd/kvd.toml, or the defaults
  kvd serve --host-bytes 8GiB --nvme-bytes 200GiB
  kvd serve --config kvd.toml --check

exit codes:
  0  stopped as asked, or the configuration is good (--check)
  1  ended by a fault; the last record on stderr says which
  2  cannot start: wrong option, configuration or host; stderr says what to change
"""
_STAT = """\
examples:
  kvd stat
  kvd stat --watch 2
  kvd stat --json | jq .counters

exit codes:
  0  the daemon is there and answers; --watch ended by Ctrl-C
  1  no daemon
  2  wrong option
  3  a daemon is there but has written nothing for 2 seconds
"""
_CHECK = """\
examples:
  kvd check /var/lib/kvd/nvme
  kvd check /var/lib/kvd/nvme --repair
  kvd check /var/lib/kvd/nvme --json

Stop the daemon first. Nothing is changed without --repair.

exit codes:
  0  all is whole, or was repaired
  1  something is damaged
  2  wrong option, no NVMe tier there, or a daemon uses it; stderr says what to change
"""
_DEMO = """\
examples:
  kvd demo
  kvd demo --json

exit codes:
  0  it worked
  1  it did not; stderr says why
  2  wrong option, or something it needs is missing

It takes a minute on two cores, 1 GiB of memory and some 800 MB of disk, most of it the model,
which is kept in the user's cache folder.
"""
_VERSION = """\
example:
  kvd version

exit code: 0
"""
_COMMANDS = """\
example:
  kvd serve --host-bytes 8GiB &
  kvd stat

`kvd COMMAND --help` shows a command's options, examples and exit codes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors become one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KvdError as error:
        sys.stderr.write(f"kvd: error: {error}\n")
        return EXIT_ERROR
    except ModuleNotFoundError as error:
        if (error.name or "kvd").partition(".")[0] in {"kvd", "kvd_client"}:
            raise
        text = f"needs {error.name}, which is not installed: pip install 'kvd[daemon]'"
        sys.stderr.write(f"kvd: error: this command {text}\n")
        return EXIT_ERROR
    except BrokenPipeError:  # `kvd stat | head -1`: nobody reads on, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _run(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else ""
    module = importlib.import_module(_MODULES[name]) if name in _MODULES else None
    options = _parser(name, module).parse_args(arguments)
    match options.command:
        case "serve":
            return _serve(options)
        case "stat":
            return _stat(options)
        case "version":
            return _version()
        case _:
            assert module is not None
            return int(module.run(options))


def _parser(name: str, module: ModuleType | None) -> argparse.ArgumentParser:
    """Build the parser; only the command `name`, if it has a module, gets that one's options."""
    parser = argparse.ArgumentParser(
        prog="kvd",
        description="Keep the KV cache of this host's LLM engines, and share it among them.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvd {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(_add(commands, "serve", "run the daemon", _SERVE))
    _add_stat(_add(commands, "stat", "show what the daemon holds and does", _STAT))
    _add(commands, "check", "verify every byte of an NVMe tier, offline", _CHECK)
    replay_help = getattr(module, "EPILOG", "")
    _add(commands, "replay", "replay a trace against policies and sizes", replay_help)
    _add(commands, "demo", "show engines sharing one cache, in memory and on NVMe", _DEMO)
    _add(commands, "version", "print the version", _VERSION)
    if module is not None:
        module.add_arguments(commands.choices[name])
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, epilog: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
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
        "--check", action="store_true", help="print the complete configuration and exit"
    )


def _add_stat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's (default: $KVD_SOCKET, else the usual one)"
    )
    parser.add_argument("--json", action="store_true", help="everything, on one line")
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=_interval,
        const=1.0,
        help="show it again and again (default: every second)",
    )


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 86_400:  # noqa: PLR2004
        raise argparse.ArgumentTypeError(f"{text!r}: write seconds, from 0.05 to 86400")
    return seconds


def _serve(options: argparse.Namespace) -> int:
    from kvd import config

    overrides = {
        "socket": options.socket,
        "state_dir": options.state_dir,
        "host.bytes": options.host_bytes,
        "nvme.bytes": options.nvme_bytes,
    }
    loaded = config.load(options.config, overrides)
    if options.check:
        print(config.dump(loaded), end="")
        return 0
    if sys.flags.optimize:
        raise StartError("python -O leaves kvd's own checks out; start it without -O")
    from kvd import daemon

    return daemon.run(loaded)


def _stat(options: argparse.Namespace) -> int:
    from kvd import statview
    from kvd_client.paths import default_socket

    return statview.run(
        options.socket or default_socket(), as_json=options.json, watch_s=options.watch
    )


def _version() -> int:
    from kvd_client.wire import PROTOCOL

    print(f"kvd {__version__} (protocol {PROTOCOL})")
    return 0
