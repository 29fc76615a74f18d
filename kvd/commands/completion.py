"""`kvd completion`: what a shell runs at its start, so that Tab completes kvd's commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
examples:
  eval "$(kvd completion bash)"           in ~/.bashrc
  eval "$(kvd completion zsh)"            in ~/.zshrc
  kvd completion fish > ~/.config/fish/completions/kvd.fish

exit codes:
  0  printed
  2  wrong option, or argcomplete is not installed
"""
SHELLS: Final = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=SHELLS, help="whose set-up to print")


def run(options: argparse.Namespace) -> int:
    """Print it."""
    from argcomplete.shell_integration import shellcode

    shell = "bash" if options.shell == "zsh" else options.shell  # one script serves both
    sys.stdout.write(shellcode(["kvd"], shell=shell) + "\n")
    return 0
