"""Sizes as people write them."""

from __future__ import annotations

import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.sizes import GIB, KIB, MIB, TIB, about, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("8kB", 8000),
        ("1.5GiB", GIB + 512 * MIB),
        ("0.0001KiB", 0),
        ("1024", KIB),
        ("7B", 7),
        ("2TiB", 2 * TIB),
    ],
)
def test_size_forms(text: str, size: int) -> None:
    """Binary and decimal units, fractions, and a bare number of bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "1GiBs", "8G", "1,5GiB", "٣GiB", "1_0"]
)
def test_size_refused(text: str) -> None:
    """Anything else is refused with an example of what to write."""
    with pytest.raises(ValueError, match="GiB"):
        parse_size(text)


@given(st.integers(0, 1 << 62))
def test_size_round_trip(size: int) -> None:
    """A size that kvd prints is read back as the same size."""
    assert parse_size(format_size(size)) == size


@given(st.text(alphabet=string.printable, max_size=12))
def test_size_parser_raises_nothing_else(text: str) -> None:
    """Any text is a size or a ValueError."""
    with suppress(ValueError):
        assert parse_size(text) >= 0


@given(st.integers(0, 900 * TIB))
def test_about_is_near(size: int) -> None:
    """The size for reading is short and within half a percent of the true one."""
    text = about(size)
    assert len(text) <= 8
    assert abs(parse_size(text) - size) <= 1 + size // 199  # what is read back has no half bytes
