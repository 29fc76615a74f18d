"""Print a bench's figures: a table for people or one JSON object for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def cell(value: object) -> str:
    """Give a value as people read it: three significant digits, whole numbers whole."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows under the first row's keys; numbers to the right, text to the left."""
    print(title)
    if not rows:
        print("  (nothing)")
        return
    names = list(rows[0])
    lines = [names, *([cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    numeric = [isinstance(rows[0][name], (int, float)) for name in names]
    for line in lines:
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        print("  " + "  ".join(cells).rstrip())


def to_json(figures: Mapping[str, object]) -> str:
    """Give one JSON object on one line, floats to four significant digits."""
    rounded = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }
    return json.dumps(rounded)


def print_json(figures: Mapping[str, object]) -> None:
    """Print one JSON object on one line, floats to four significant digits."""
    print(to_json(figures))


def keep(path: str, figures: Mapping[str, object]) -> None:
    """Write what there is so far to a file, whole or not at all; an empty path writes nothing."""
    if path:
        new = Path(f"{path}.new")
        new.write_text(to_json(figures) + "\n", encoding="utf-8")
        new.replace(path)


def report(title: str, figures: Mapping[str, object], *, as_json: bool) -> None:
    """Print named figures: one JSON object, or a line a figure."""
    if as_json:
        print_json(figures)
    else:
        print_table(title, [{"figure": name, "value": cell(figures[name])} for name in figures])
