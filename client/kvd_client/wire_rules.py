"""What a field of a message must be. Pure; any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Rule(NamedTuple):
    """What a field must be: a test, and the same in words."""

    holds: Callable[[Any], bool]
    words: str


def integer(high: int) -> Rule:
    """Demand a whole number."""
    return Rule(lambda v: type(v) is int and 0 <= v <= high, f"a whole number from 0 to {high}")


def binary(unit: int, most: int) -> Rule:
    """Demand bytes in units, at most so many of them."""
    return Rule(
        lambda v: type(v) is bytes and len(v) % unit == 0 and len(v) <= unit * most,
        f"bytes in units of {unit}, at most {most} of them",
    )


def exactly(size: int) -> Rule:
    """Demand so many bytes."""
    return Rule(lambda v: type(v) is bytes and len(v) == size, f"exactly {size} bytes")
