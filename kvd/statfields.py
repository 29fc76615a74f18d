"""Fields of a statistics page, whatever it holds: what is missing or odd is 0 or empty. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.sizes import about
from kvd.tables import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def getters(values: dict[str, Any]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return two ways to read a map: as a count, and as a size."""
    return (
        lambda name: f"{number_of(values, name):,.0f}",
        lambda name: about(number_of(values, name)),
    )


def number_of(values: dict[str, Any], name: str) -> float:
    """Return a number to count or compute with: none of them can be below 0 or beyond 64 bits."""
    value = values.get(name)
    return value if isinstance(value, int | float) and 0 <= value < 1 << 64 else 0


def id_of(values: dict[str, Any], name: str) -> str:
    """Return a number that names something, "-" when there is none."""
    value = values.get(name)
    return str(value) if isinstance(value, int) else "-"


def text_of(values: dict[str, Any], name: str) -> str:
    """Return a text, "" when there is none, that cannot steer the terminal."""
    value = values.get(name)
    return clean(value) if isinstance(value, str | int | float) else ""


def map_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a map, empty when there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def list_of(values: dict[str, Any], name: str) -> Sequence[Any]:
    """Return a list, empty when there is none."""
    value = values.get(name)
    return value if isinstance(value, list) else []


def rows_of(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the maps of a list."""
    return [row for row in list_of(values, name) if isinstance(row, dict)]
