"""On which line a key of a TOML text stands; `tomllib` does not tell. Pure.

For texts that `tomllib` has accepted: every rule of the grammar that only refuses is left out.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str, ...]

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
_KEY = re.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})'
    r"|'''.*?'''(?:'{0,2})"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_COMMENT = re.compile(r"#[^\n]*")


def _path(key: str) -> Path:
    """Take a written key apart, quotes and escapes included."""
    found: list[str] = []
    inner: object = tomllib.loads(f"{key} = 0")
    while isinstance(inner, dict):
        ((name, inner),) = inner.items()
        found.append(name)
    return tuple(found)


class _Scanner:
    """Walks a text once; `lines` is the result."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._table: Path = ()
        self._counted = (0, 1)

    def scan(self) -> dict[Path, int]:
        """Read statements: a table's header, or a key and its value."""
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char == "#":
                self._skip(_COMMENT)
            elif char.isspace():
                self.at += 1
            elif char == "[":
                self._header()
            else:
                self._pair(self._table, ends="\n")
        return self.lines

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:  # not TOML after all: step on, so that the walk ends
            self.at += 1
            return ""
        self.at = match.end()
        return match.group()

    def _note(self, path: Path) -> None:
        counted, line = self._counted
        line += self.text.count("\n", counted, self.at)
        self._counted = (self.at, line)
        for end in range(1, len(path) + 1):
            self.lines.setdefault(path[:end], line)

    def _key(self) -> Path:
        written = self._skip(_KEY)
        return _path(written) if written else ()

    def _header(self) -> None:
        while self.text[self.at : self.at + 1] in {"[", " ", "\t"}:
            self.at += 1
        self._table = self._key()
        self._note(self._table)
        while self.text[self.at : self.at + 1] in {"]", " ", "\t"}:
            self.at += 1

    def _pair(self, table: Path, ends: str) -> None:
        path = (*table, *self._key())
        self._note(path)
        equals = self.text.find("=", self.at)
        self.at = len(self.text) if equals < 0 else equals + 1
        self._value(path, ends)

    def _value(self, path: Path, ends: str) -> None:
        """Read a value, or an array's values, up to one of `ends`, which stays unread."""
        text = self.text
        while self.at < len(text) and text[self.at] not in ends:
            char = text[self.at]
            if char == "#":
                self._skip(_COMMENT)
            elif char in "\"'":
                self._skip(_STRING)
            elif char == "[":
                self.at += 1
                self._value(path, ends="]")
                self.at += 1
            elif char == "{":
                self.at += 1
                self._inline_table(path)
            else:
                self.at += 1

    def _inline_table(self, path: Path) -> None:
        text = self.text
        while self.at < len(text) and text[self.at] != "}":
            char = text[self.at]
            if char == "#":
                self._skip(_COMMENT)
            elif char == "," or char.isspace():
                self.at += 1
            else:
                self._pair(path, ends=",}")
        self.at += 1


def key_lines(text: str) -> dict[Path, int]:
    """Return for each key and table, by its path, the line where it is first named."""
    return _Scanner(text).scan()
