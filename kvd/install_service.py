"""`kvd install-service`: the systemd units and what they need, written where systemd looks.

Nothing is enabled or started: what is left to do is printed, so that an operator sees each step. A
kvd.toml that is there stays as it is. Each file is replaced as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.errors import StartError

if TYPE_CHECKING:
    import argparse

EPILOG: Final = """\
examples:
  kvd install-service --dry-run       show every file, change nothing
  sudo kvd install-service
  kvd install-service --root build    into another root, as packagers need it

Files of an earlier `kvd install-service` are replaced; /etc/kvd/kvd.toml never is. Changes of yours
to the units belong into drop-ins (`systemctl edit kvd`), which stay.

exit codes:
  0  written, or shown
  2  wrong option, or a file cannot be written; stderr says what to change
"""
PLACES: Final = {
    "kvd.service": "etc/systemd/system/kvd.service",
    "kvd.socket": "etc/systemd/system/kvd.socket",
    "kvd.sysusers": "etc/sysusers.d/kvd.conf",
    "kvd.tmpfiles": "etc/tmpfiles.d/kvd.conf",
    "kvd.toml": "etc/kvd/kvd.toml",
}
"""Files of the folder systemd/, and where each goes."""
KEPT: Final = "kvd.toml"
COMMAND: Final = "/usr/bin/kvd"
"""How the unit in the folder names the command; replaced by where this one lies."""
NEXT: Final = (
    "systemd-sysusers",
    "systemd-tmpfiles --create",
    "systemctl daemon-reload",
    "$EDITOR /etc/kvd/kvd.toml    # [host] bytes, and a [tenants.NAME] with the engines' users",
    "kvd serve --check --config /etc/kvd/kvd.toml",
    "systemctl enable --now kvd.socket kvd.service",
)
_HIDDEN: Final = ("/home", "/root", "/run/user")
"""What `ProtectHome=` hides from the service."""


class Step(NamedTuple):
    """What is done about one file.

    Attributes:
        path: Where it goes.
        action: `write`, `replace`, `same` or `keep`.
        text: Its content.
    """

    path: Path
    action: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--dry-run", action="store_true", help="show the files, change nothing")
    parser.add_argument(
        "--root", metavar="DIRECTORY", default="/", help="write below another root (default: /)"
    )
    parser.add_argument(
        "--command",
        dest="kvd_command",  # `command` is the name of the command line's own choice
        metavar="PATH",
        help="the kvd that the service runs (default: this one)",
    )
    parser.add_argument("--json", action="store_true", help="what was done, as one JSON object")


def folder() -> Path:
    """Return where the files to install lie: a checkout's, or the installed package's.

    Raises:
        StartError: Neither is there.
    """
    checkout = Path(__file__).resolve().parent.parent / "systemd"
    installed = Path(sysconfig.get_path("data")) / "share/kvd/systemd"
    for place in (checkout, installed):
        if (place / "kvd.service").is_file():
            return place
    raise StartError(f"the unit files are not at {installed}: install the whole package of kvd")


def this_command() -> str:
    """Return the absolute path of the kvd that runs, as a unit file can name it."""
    named = Path(sys.argv[0]).absolute()
    if named.name == "kvd" and os.access(named, os.X_OK):
        return str(named)
    beside = Path(sys.executable).absolute().with_name("kvd")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("kvd") or COMMAND


def plan(root: Path, command: str) -> list[Step]:
    """Return what is to be done, in order; changes nothing.

    Raises:
        StartError: The command cannot stand in a unit, or a file cannot be read.
    """
    if not command.startswith("/") or any(c.isspace() or c in "%$\"'\\" for c in command):
        raise StartError(
            f"--command {command!r}: name an absolute path without spaces, quotes, % and $"
        )
    steps = []
    for name, place in PLACES.items():
        text = (folder() / name).read_text(encoding="utf-8")
        if name == "kvd.service":
            assert f"ExecStart={COMMAND} " in text
            text = text.replace(f"ExecStart={COMMAND} ", f"ExecStart={command} ")
        path = root / place
        try:
            there = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            steps.append(Step(path, "write", text))
            continue
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}; run it as root") from error
        action = "same" if there == text else "keep" if name == KEPT else "replace"
        steps.append(Step(path, action, text))
    return steps


def carry_out(step: Step) -> None:
    """Write one file; raises StartError."""
    if step.action not in {"write", "replace"}:
        return
    beside = step.path.with_name(f".{step.path.name}.new")
    try:
        step.path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(step.text, encoding="utf-8")
        beside.chmod(0o644)
        beside.replace(step.path)
    except OSError as error:
        msg = f"cannot write {step.path}: {error.strerror}; run it as root, or give another --root"
        raise StartError(msg) from error


def run(options: argparse.Namespace) -> int:
    """Show or write the files; return the exit code."""
    command = options.kvd_command or this_command()
    steps = plan(Path(options.root), command)
    if command.startswith(_HIDDEN) and options.root == "/":
        sys.stderr.write(
            f"kvd: warning: {command} lies where the service may not look (ProtectHome=):"
            " install kvd elsewhere, as in /opt/kvd, and run that one's install-service\n"
        )
    if not options.dry_run:
        for step in steps:
            carry_out(step)
    if options.json:
        files = [{"path": str(step.path), "action": step.action} for step in steps]
        sys.stdout.write(
            json.dumps({"dry_run": options.dry_run, "command": command, "files": files}) + "\n"
        )
        return 0
    would = "would " if options.dry_run else ""
    for step in steps:
        sys.stdout.write(f"{would}{step.action:<8}{step.path}\n")
        if options.dry_run and step.action in {"write", "replace"}:
            lines = step.text.splitlines()
            sys.stdout.write("".join(f"    | {line}".rstrip() + "\n" for line in lines))
    sys.stdout.write("\nthen:\n" + "".join(f"    {line}\n" for line in NEXT))
    return 0
