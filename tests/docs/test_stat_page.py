"""docs/stat.md explains every line that `kvd stat` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvd import statview

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "stat.md"
FULL: Final[dict[str, Any]] = {
    "host": {"capacity_bytes": 1},
    "nvme": {"capacity_bytes": 1, "state": "open"},
    "counters": {"evictions": {"clean": 1}},
}


def test_every_line_is_explained() -> None:
    """Each line's name, and the first word of each line without one, has a row."""
    text = PAGE.read_text(encoding="utf-8")
    seen = 0
    for name, shown in statview._figures(FULL):
        word = name or shown.split()[0]
        assert f"| `{word}`" in text, f"no row for {word!r} in docs/stat.md"
        seen += 1
    assert seen > 12
