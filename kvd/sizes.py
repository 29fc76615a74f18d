"""Byte sizes as people write them. Pure."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,9}))?[ \t]*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the bytes that a text such as "8GiB", "1.5 GiB", "8GB" or "8192" means.

    A part of a byte is dropped.

    Raises:
        ValueError: It is none; the text says what to write.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text[:40]}" is no size; write a number and a unit, as in "8GiB"')
    whole, part, unit = match[1], match[2] or "", match[3]
    factor = _UNITS.get(unit.lower())
    if factor is None:
        letter = unit[:1].lower()
        mend = f"{match[1]}{letter.upper() if letter in 'kmgt' else 'G'}iB"
        raise ValueError(
            f'"{text[:40]}" has the unknown unit {unit[:10]}; write "{mend}"'
            " (KiB, MiB, GiB and TiB; kB, MB, GB and TB count in thousands)"
        )
    digits: int = 10 ** len(part)
    return int(whole + part) * factor // digits


def format_size(size_bytes: int) -> str:
    """Return the shortest text in binary units that `parse_size` reads back as the same size."""
    assert size_bytes >= 0
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def about(size_bytes: float) -> str:
    """Return a size for reading: three digits and a unit, as in "1.23 GiB"."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1000:  # noqa: PLR2004 - so that three digits are enough
            break
        amount, unit = amount / KIB, larger
    places = 0 if unit == "B" or abs(amount) >= 99.95 else 1 if abs(amount) >= 9.995 else 2  # noqa: PLR2004
    return f"{amount:.{places}f} {unit}"


def many(count: float) -> str:
    """Return a count for reading: whole below ten million, then as in "12.3 M"."""
    if count < 1e7:  # noqa: PLR2004
        return f"{count:,.0f}"
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6))
    unit, size = next((unit, size) for unit, size in units if count >= size)
    return f"{count / size:.3g} {unit}"
