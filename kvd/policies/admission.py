"""Which blocks that leave a tier are written to the one below. Pure.

Writes wear flash and cost bandwidth; a block that is not written is lost. What decides is told
every request, as the policies are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol

from kvd.policies.base import B

if TYPE_CHECKING:
    from kvd.policies.base import Request
    from kvd.policies.lifetable import LifeTable


class Admission(Protocol[B]):
    """Decides, when a block leaves a tier, whether the next one takes it."""

    def touched(self, request: Request[B]) -> None:
        """A request uses a chain; told once for a request."""

    def admits(self, block: B) -> bool:
        """Whether to write a block that is about to go."""


class AdmitAll(Generic[B]):
    """Write everything."""

    def touched(self, request: Request[B]) -> None:
        """Learn nothing."""

    def admits(self, block: B) -> bool:  # noqa: ARG002
        """Return True."""
        return True


class SecondTouch(Generic[B]):
    """Write what was used twice while it was remembered; gives up every first return."""

    def __init__(self, remembered: int) -> None:
        """Start empty.

        Args:
            remembered: How many blocks to count, those used last.
        """
        assert remembered > 0
        self._remembered = remembered
        self._again: OrderedDict[B, bool] = OrderedDict()

    def touched(self, request: Request[B]) -> None:
        """Note the uses of a chain's blocks."""
        again = self._again
        for block in request.chain:
            seen = block in again
            again[block] = seen
            again.move_to_end(block)
        while len(again) > self._remembered:
            again.popitem(last=False)

    def admits(self, block: B) -> bool:
        """Whether the block was used twice."""
        return self._again.get(block, False)


class Predicted(Generic[B]):
    """Write what is likely to be used again while the lower tier would keep it."""

    def __init__(self, lower: LifeTable[B], threshold: float) -> None:
        """Ask the lower tier's policy, which is told every request too.

        Args:
            lower: Knows the chance of reuse by age, and how long its blocks stay.
            threshold: Write from this chance on.
        """
        assert 0 <= threshold <= 1
        self._lower = lower
        self._threshold = threshold

    def touched(self, request: Request[B]) -> None:
        """Learn nothing: the lower tier's policy does."""

    def admits(self, block: B) -> bool:
        """Whether reuse is likely enough."""
        return self._lower.reuse_probability(block, self._lower.stay_ns) >= self._threshold
