"""The command line: finds the command's module, runs it, and turns its errors into exit codes.

`kvd.commands` has the list. Only the module of the command that is given is imported, so that
`kvd stat` answers in a few milliseconds, whatever else is installed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

from kvd import __version__
from kvd.commands import COMMANDS
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_EPILOG = """\
example:
  kvd serve --host-bytes 8GiB &
  kvd stat

`kvd COMMAND --help` shows a command's options, examples and exit codes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors become one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KvdError as error:
        sys.stderr.write(f"kvd: error: {error}\n")
        return getattr(error, "exit_code", EXIT_ERROR)
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
    command = COMMANDS.get(name)
    module = importlib.import_module(command.module) if command is not None else None
    options = parser(name, module).parse_args(arguments)
    assert module is not None  # the parser has refused every other name
    return int(module.run(options))


def _complete() -> None:
    """Answer the shell's Tab and end, where argcomplete is installed; else go on."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        return
    words = os.environ.get("COMP_LINE", "").split()
    name = words[1] if len(words) > 1 else ""
    command = COMMANDS.get(name)
    module = importlib.import_module(command.module) if command is not None else None
    argcomplete.autocomplete(parser(name, module))


def parser(name: str, module: ModuleType | None) -> argparse.ArgumentParser:
    """Build the parser; only the command `name` gets its options, from its module."""
    built = argparse.ArgumentParser(
        prog="kvd",
        description="Keep the KV cache of this host's LLM engines, and share it among them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    built.add_argument("--version", action="version", version=f"kvd {__version__}")
    commands = built.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for each, (_, what) in COMMANDS.items():
        chosen = module if each == name else None
        added = commands.add_parser(
            each,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=getattr(chosen, "EPILOG", ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if chosen is not None:
            chosen.add_arguments(added)
    return built
