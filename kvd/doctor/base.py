"""What a check of `kvd doctor` is: a function that looks at the host and says what it found.

    @check("memlock", "memory", "locked memory")
    def memlock(host: Host) -> Finding:
        return ok("unlimited")

A check returns one finding, or yields several. It changes nothing on the host, and ends by itself
within `CHECK_S`: what may hang (a device's driver, a foreign disk) it runs in a process of its own.
One that raises is itself reported, as a warning.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.config import Config

    Look = Callable[["Host"], "Finding | Iterable[Finding]"]

CHECK_S: Final = 20.0
"""What one check gets; after that it counts as hanging."""
READ_BYTES_MAX: Final = 1 << 20


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """kvd works, but slower, or less safely than it could."""
    FAIL = "fail"
    """kvd, or something the configuration asks for, does not work."""


class Finding(NamedTuple):
    """What a check says.

    Attributes:
        level: How bad it is.
        text: One line: what is there.
        mend: The command that mends it, or what to change; empty when all is well.
    """

    level: Level
    text: str
    mend: str = ""


class Check(NamedTuple):
    """A check: its name for `--only`, the group it is shown in, what it is about, how it looks."""

    name: str
    group: str
    about: str
    look: Look


@dataclass(frozen=True, slots=True)
class Host:
    """What checks look at.

    Attributes:
        root: In front of every path of the host; a test puts a tree of its own there.
        config: The daemon's configuration; None when it cannot be loaded.
        config_error: Why not.
        options: The command's other options, by name.
    """

    root: Path = Path("/")
    config: Config | None = None
    config_error: str = ""
    options: dict[str, object] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return a path of the host."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Return a small file's text, "" when it is not there or may not be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(READ_BYTES_MAX).decode(errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int | None:
        """Return the number a file begins with, None when there is none."""
        words = self.read(name).split()
        return int(words[0]) if words and words[0].lstrip("-").isdigit() else None

    def names(self, name: str) -> list[str]:
        """Return the names in a directory, sorted; none when it is not there."""
        try:
            return sorted(os.listdir(self.path(name)))  # noqa: PTH208 - names, not paths
        except OSError:
            return []


def ok(text: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, text)


def warn(text: str, mend: str) -> Finding:
    """It works, but worse than it could."""
    return Finding(Level.WARN, text, mend)


def fail(text: str, mend: str) -> Finding:
    """It does not work."""
    return Finding(Level.FAIL, text, mend)


CHECKS: Final[dict[str, Check]] = {}
"""By name, in the order in which their modules are listed in `kvd.doctor.MODULES`."""


def check(name: str, group: str, about: str) -> Callable[[Look], Look]:
    """Register a check.

    Args:
        name: Unique, short, without spaces: for `kvd doctor --only NAME`.
        group: Where it is shown: "host", "memory", "disk", "gpu", "peer", "engine", "kvd".
        about: What it looks at, in a few words.
    """

    def register(look: Look) -> Look:
        assert name not in CHECKS
        CHECKS[name] = Check(name, group, about, look)
        return look

    return register
