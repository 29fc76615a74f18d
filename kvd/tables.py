"""Tables for a terminal: columns as wide as they need, numbers to the right. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CELL_CHARS_MAX: Final = 28
TEXT_CHARS_MIN: Final = 8


def clean(value: object) -> str:
    """Keep a client's text from steering the terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(value))


def cut(cell: str, chars: int = CELL_CHARS_MAX) -> str:
    """Shorten a cell that is too long."""
    return cell if len(cell) <= chars else cell[: chars - 2] + ".."


def is_amount(cell: str) -> bool:
    """Tell a number, perhaps with a unit, from a text."""
    return cell in {"", "-"} or (cell[:1].isdigit() and cell.count(" ") <= 1)


def duration(seconds: float) -> str:
    """Return a time to read: the two largest units."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s"


def aligned(
    rows: Sequence[Sequence[str]],
    paint: Callable[[str, str], str] = lambda _, text: text,
    last_chars: int = CELL_CHARS_MAX,
    columns: int = 0,
) -> Iterator[str]:
    """Lay out a table, its head first.

    Args:
        rows: Cells; clean, and equally many in each row.
        paint: Colours a line, by the name of a style.
        last_chars: What the last column may have.
        columns: What a line may have, at the cost of the widest texts; 0: whatever it needs.
    """
    cells = [[*map(cut, row[:-1]), cut(row[-1], last_chars)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(map(is_amount, column[1:])) for column in zip(*cells, strict=True)]
    texts = [index for index, to_right in enumerate(right) if not to_right]
    while columns and texts and sum(widths) + 2 * (len(widths) - 1) > columns:
        widest = max(texts, key=widths.__getitem__)
        if widths[widest] <= TEXT_CHARS_MIN:
            break
        widths[widest] -= 1
    cells = [list(map(cut, row, widths)) for row in cells]
    for number, row in enumerate(cells):
        line = "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        yield paint("bold", line) if number == 0 else line


def folded(text: str, columns: int) -> list[str]:
    """Break a line that is too long at spaces, best after a semicolon or a comma."""
    lines = []
    while len(text) > columns:
        ends = [text.rfind(mark, 0, columns + 1 - len(mark)) + len(mark) for mark in ("; ", ", ")]
        at = next((end for end in ends if end > columns // 2), text.rfind(" ", 0, columns) + 1)
        at = at or columns
        lines.append(text[:at].rstrip())
        text = text[at:]
    return [*lines, text]
