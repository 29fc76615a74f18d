"""Times as people write them."""

from __future__ import annotations

import pytest

from kvd.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("1.5h", 5400),
        ("2 d", 172_800),
        ("1w", 604_800),
        ("0", 0),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    """A number and a unit; seconds without one."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "1y", "1h30", "ten", "1e3", "1" * 12])
def test_what_is_no_time_is_told(text: str) -> None:
    """The error says what to write."""
    with pytest.raises(ValueError, match='as in "2h"'):
        parse_duration(text)
