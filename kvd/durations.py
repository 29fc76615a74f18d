"""Times as people write them. Pure."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,6}))?[ \t]*([A-Za-z]*)")


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as "90", "90s", "15m", "1.5h", "2d" or "1w" means.

    Raises:
        ValueError: It is none; the text says what to write.
    """
    match = _DURATION.fullmatch(text.strip())
    factor = _UNITS.get(match[3].lower()) if match is not None else None
    if match is None or factor is None:
        raise ValueError(
            f'"{text[:40]}" is no time; write a number and s, m, h, d or w, as in "2h"'
        )
    return float(f"{match[1]}.{match[2] or 0}") * factor
