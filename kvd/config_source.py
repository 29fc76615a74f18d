"""A configuration file and the options over it, as values that know where they were written."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from kvd.errors import ConfigError
from kvd.sizes import parse_size
from kvd.toml_lines import key_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.toml_lines import Path

FILE_BYTES_MAX = 256 << 10
"""Longest file: far more than anyone writes, and little to read by mistake."""
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class Source:
    """What was written, and where."""

    def __init__(self, path: str | None, overrides: Mapping[str, object]) -> None:
        """Read the file, if any, and lay the overrides over it.

        Args:
            path: A TOML file.
            overrides: Values by dotted key ("host.bytes"); None counts as not given.

        Raises:
            ConfigError: The file cannot be read or is not TOML.
        """
        self._file = path
        self._lines: dict[Path, int] = {}
        self._options: set[Path] = set()
        self.values: dict[str, object] = {} if path is None else self._read(path)
        for name, value in overrides.items():
            if value is not None:
                self._override(tuple(name.split(".")), value)

    def _read(self, path: str) -> dict[str, object]:
        try:
            with FilePath(path).open("rb") as file:
                raw = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            reason = (error.strerror or "cannot be read").lower()
            raise ConfigError(
                f"{path}: {reason}; name another file with --config, or correct this one"
            ) from error
        if len(raw) > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: longer than {FILE_BYTES_MAX} bytes; is it the right file?")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from error
        try:
            values = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(self._syntax(path, text, str(error))) from error
        self._lines = key_lines(text.replace("\r\n", "\n"))
        return values

    @staticmethod
    def _syntax(path: str, text: str, reason: str) -> str:
        place = _PLACE.search(reason)
        line = int(place[1]) if place and place[1] else len(text.splitlines()) or 1
        reason = _PLACE.sub("", reason)
        mend = 'write text in quotes, as in bytes = "8GiB"'
        return f"{path}:{line}: not TOML: {reason}; {mend}"

    def _override(self, path: Path, value: object) -> None:
        table = self.values
        for name in path[:-1]:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise self.error(path[:-1], "must be a table")
            table = inner
        table[path[-1]] = value
        self._options.add(path)

    def where(self, path: Path) -> str:
        """Return where a key was written: an option, a line, or the nearest table's line."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._options:
                return "--" + "-".join(path[:end]).replace("_", "-")
            if path[:end] in self._lines:
                return f"{self._file}:{self._lines[path[:end]]}"
        return self._file or "configuration"

    def error(self, path: Path, text: str) -> ConfigError:
        """Return an error about a key, to be raised."""
        return ConfigError(f"{self.where(path)}: {dotted(path)} {text}")

    def table(self, path: Path, known: Mapping[str, Iterable[str]], like: str = "") -> Table:
        """Return a table, empty when it is not there, after a check of its keys.

        Args:
            path: The table's, () for the whole file.
            known: For each table by its dotted name the keys it may have; a table that is not
                named there may have any.
            like: Its name there, where that is another.
        """
        values: object = self.values
        for name in path:
            values = values.get(name, {}) if isinstance(values, dict) else {}
        if not isinstance(values, dict):
            raise self.error(path, f"must be a table; write [{dotted(path)}] on a line of its own")
        like = like or dotted(path)
        for key in values:
            if key not in known.get(like, values):
                raise self._unknown((*path, key), like, known)
        return Table(self, path, values)

    def _unknown(self, path: Path, like: str, known: Mapping[str, Iterable[str]]) -> ConfigError:
        key, names = path[-1], list(known[like])
        for table, others in known.items():  # right key, wrong table: the commonest slip in TOML
            if key in others:
                place = f"into [{table}]" if table else "to the top of the file"
                return self.error(path, f"is not known there; move it {place}")
        if near := difflib.get_close_matches(key, names, 1, 0.6):
            return self.error(path, f"is not known; did you mean {near[0]}?")
        return self.error(path, f"is not known; remove it, or use one of: {', '.join(names)}")


class Table:
    """One table's values, checked as they are taken out."""

    def __init__(self, source: Source, path: Path, values: Mapping[str, object]) -> None:
        """Wrap; `values` is only read."""
        self._source = source
        self._path = path
        self.values = values

    def error(self, key: str, text: str) -> ConfigError:
        """Return an error about a key, with its value as written, to be raised."""
        if key in self.values:
            text = f"= {shown(self.values[key])}: {text}"
        return self._source.error((*self._path, key), text)

    def hidden(self, key: str, text: str) -> ConfigError:
        """Return an error about a key that does not show its value, to be raised."""
        return self._source.error((*self._path, key), text)

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        value = self.values.get(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"write a whole number from {low} to {high}, without quotes")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """Return a number from `low` to `high`; keys that end in `_s` are seconds."""
        value = self.values.get(key, default)
        if type(value) not in {int, float} or not isinstance(value, int | float):
            value = math.nan
        if not low <= value <= high:
            unit = " of seconds" if key.endswith("_s") else ""
            raise self.error(key, f"write a number{unit} from {low} to {high}, without quotes")
        return float(value)

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """Return one of a few words."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in choices:
            words = " or ".join(f'"{word}"' for word in choices)
            raise self.error(key, f"write {words}")
        return value

    def size(self, key: str, default: int) -> int:
        """Return a number of bytes: 0 or more, and 0 also for "auto" where that is the default."""
        value = self.values.get(key, default)
        if value == "auto" and default == 0:
            return 0
        if isinstance(value, str):
            try:
                return parse_size(value)
            except ValueError as error:
                text = "".join(char if char.isprintable() else "?" for char in str(error))
                raise self._source.error((*self._path, key), f"= {text}") from error
        if type(value) is not int or value < 0:
            raise self.error(key, 'write a size, as in "8GiB", or a whole number of bytes')
        return value

    def file_path(self, key: str, default: str) -> str:
        """Return an absolute path."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
            raise self.error(
                key, "write an absolute path, in quotes; ~ and variables stay as they are"
            )
        return value


def dotted(path: Path) -> str:
    """Return a key's path as TOML writes it."""
    return ".".join(name if re.fullmatch(r"[\w-]+", name) else shown(name) for name in path)


def shown(value: object) -> str:
    """Return a value much as TOML writes it, cut to what fits on a line."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= 60 else text[:56] + " ..."  # noqa: PLR2004 - about half a line
