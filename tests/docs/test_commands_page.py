"""docs/commands.md says what `kvd COMMAND --help` says: options, arguments, examples, exit codes.

    python -m tests.docs.test_commands_page

writes the marked parts anew; the words around them are people's.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kvd import cli
from kvd.commands import COMMANDS

if TYPE_CHECKING:
    import argparse

PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "commands.md"
MARKED: Final = r"(<!-- command: {name} -->\n).*?(<!-- end -->)"


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of one command, as the command line builds it."""
    built = cli.parser(name, importlib.import_module(COMMANDS[name].module))
    (commands,) = [action for action in built._actions if action.dest == "command"]
    assert isinstance(commands.choices, dict)
    return commands.choices[name]  # type: ignore[no-any-return]


def written(action: argparse.Action) -> str:
    """An option or argument as one types it."""
    metavar = action.metavar
    if metavar is None and action.choices is not None:
        metavar = "{" + ",".join(map(str, action.choices)) + "}"
    value = str(metavar or action.dest.upper())
    if not action.option_strings:
        return f"[{value}]" if action.nargs in {"?", "*"} else value
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    return f"{name} [{value}]" if action.nargs in {"?", "*"} else f"{name} {value}"


def section(name: str) -> str:
    """What the page says of a command, from its parser."""
    built = parser_of(name)
    rows = [
        f"| `{written(action)}` | {(action.help or '').replace('|', chr(92) + '|')} |\n"
        for action in built._actions
        if action.dest != "help"
    ]
    table = "".join(["| option | |\n| --- | --- |\n", *rows, "\n"]) if rows else ""
    assert built.epilog is not None
    return f"{table}```text\n{built.epilog.rstrip()}\n```\n"


def with_sections(text: str) -> str:
    """Replace each marked part by what the code says."""
    for name in COMMANDS:
        pattern = re.compile(MARKED.format(name=re.escape(name)), re.DOTALL)
        fresh = section(name)
        text, count = pattern.subn(lambda m, s=fresh: m[1] + s + m[2], text)  # type: ignore[misc]
        assert count == 1, f"no place, or more than one, for the command {name}"
    return text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_on_the_page(name: str) -> None:
    """Its section has what its --help has; the module says how to renew it."""
    page = PAGE.read_text(encoding="utf-8")
    assert f"\n## kvd {name}\n" in page
    assert section(name) in page


def test_no_other_command_is_on_the_page() -> None:
    """The page has the commands there are, in their order, and no part of another."""
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## kvd (.+)$", page, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"<!-- command: (.+) -->", page) == list(COMMANDS)
    assert with_sections(page) == page


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    """No option without a line of help, and each help text begins small and ends without a stop."""
    for action in parser_of(name)._actions:
        assert action.help, action
        assert not action.help.endswith("."), action.help


if __name__ == "__main__":
    PAGE.write_text(with_sections(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
