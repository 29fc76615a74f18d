r"""What every eviction policy is told and asked. Pure.

A tier keeps a forest of blocks: a block is worth nothing without its parent, so only blocks
without children in the same tier may go. The tier (the daemon's catalog, or `kvd replay`) knows
its forest and its pins and tells the policy; the policy only orders what may go.

                  touched (any number of times, resident or not)
                     |
    unknown -- inserted --> held <== evictable / held ==> evictable -- removed --> not resident
                              \________________ removed ______________________________/

What a tier promises:

B1. Time does not run backwards from one call to the next.
B2. `inserted` names a block that is not resident; `evictable` and `removed` one that is.
B3. A block is evictable exactly while it is a leaf of its tier that nobody holds or fills.
B4. `touched` is called once for a request, before the blocks that it brings are inserted.

What a policy promises:

P1. `victim` names an evictable block if there is one, and goes on naming it until it is told
    something new.
P2. Nothing but `removed` ends a residence: asking for a victim frees nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

B = TypeVar("B", bound=Hashable)
"""A block's name: what is named equal is the same block, whether it is here or was."""


@dataclass(frozen=True, slots=True)
class Request(Generic[B]):
    """One use of a chain by one request.

    Attributes:
        now_ns: When.
        chain: Its blocks from the root on, here or not; the blocks of one prompt.
        output_tokens: How long its answer is; None if that is not known.
        partial: The last block is not full, so no longer prompt can begin with it.
    """

    now_ns: int
    chain: Sequence[B]
    output_tokens: int | None = None
    partial: bool = False


class Policy(Protocol[B]):
    """Orders the evictable blocks of one tier. Events in, one block out; no clock, no I/O."""

    def touched(self, request: Request[B]) -> None:
        """A request uses a chain. Blocks of it that are not resident are told all the same."""

    def served(self, block: B) -> None:
        """Another host takes a copy of a block: it is used, but there, and will be there again."""

    def inserted(self, block: B, parent: B | None, now_ns: int) -> None:
        """A block has become resident, and is held; `parent` is None for the first of a chain."""

    def evictable(self, block: B) -> None:
        """A resident block may go from now on; again is no change."""

    def held(self, block: B) -> None:
        """A block may not go: it has got a child or a holder; again is no change."""

    def removed(self, block: B) -> None:
        """A block is no longer resident, whoever decided it."""

    def victim(self) -> B | None:
        """Return the block to evict next; None if nothing may go."""

    def worth(self, block: B) -> float | None:
        """Return what keeping a block is worth, the larger the more; None if it is unknown.

        Comparable between two objects of the same policy, and with nothing else.
        """

    def check(self) -> None:
        """Recount everything; raises AssertionError if the parts disagree."""
