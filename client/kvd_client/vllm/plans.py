"""What kvd does for one request of the engine until it runs: a state machine. Pure.

    FRESH --ask--> ASKED --found--> WANTED --hold--> HOLDING --held--> HELD --allocated--> LOADING
      ^              |                                  |                |                   |
      |              +----------- nothing --------------+----------------+    loaded, or failed
      |                                |                                                     |
      +------ a while later ------- SETTLED <------------------------------------------------+

The scheduler half (`scheduler.py`) asks `Plan.next` what to do each time the engine considers the
request, does it, and tells the plan what came of it.

Invariants:

P1. An answer names only chunks that a lease holds at that moment.
P2. It never covers the last token of the request: the engine has to compute one to go on.
P3. Every wait ends: what is under way at `until` is given up.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

HOLD_S: Final = 5.0
"""For how long a lease may wait for the engine to have room; then it is asked anew."""
AGAIN_S: Final = 1.0
"""After that a request that still waits is looked up again: others may have stored meanwhile."""


class Stage(Enum):
    """How far it is."""

    FRESH = auto()
    ASKED = auto()
    WANTED = auto()
    HOLDING = auto()
    HELD = auto()
    LOADING = auto()
    SETTLED = auto()


class Action(Enum):
    """What to do now."""

    MISS = auto()
    """Tell the engine that there is nothing."""
    ASK = auto()
    """Begin a look-up, then call `asked`."""
    WAIT = auto()
    """Look whether the ticket has ended; else tell the engine to ask again later."""
    HOLD = auto()
    """Begin to acquire `first` to `chunks`, then call `holding`."""
    DROP = auto()
    """Give up the ticket or lease, call `dropped`, and ask for the next action."""
    LOAD = auto()
    """Tell the engine that chunks up to `chunks` can be loaded."""


class Plan:
    """One request.

    Attributes:
        stage: How far it is.
        first: First chunk wanted; those before are the engine's own.
        chunks: One past the last chunk wanted, or held.
        saved: Chunks of the request that kvd has, or was asked to take, as far as is known.
        until: When what is under way is given up, or a settled one asked again.
    """

    __slots__ = ("_lookup_s", "_promote_s", "chunks", "first", "saved", "stage", "until")

    def __init__(self, *, lookup_s: float, promote_s: float) -> None:
        """Know how long a look-up and a promotion may take."""
        self._lookup_s = lookup_s
        self._promote_s = promote_s
        self.stage = Stage.FRESH
        self.first = 0
        self.chunks = 0
        self.saved = 0
        self.until = 0.0

    def next(self, now: float, first: int, limit: int) -> Action:
        """Say what to do.

        Args:
            now: Seconds, monotonic.
            first: Whole chunks that the engine has itself.
            limit: Whole chunks of all tokens but the last (P2).
        """
        if self.stage is Stage.SETTLED and now >= self.until:
            self.stage = Stage.FRESH
        if self.stage is Stage.FRESH:
            return Action.ASK if first < limit else Action.MISS
        if self.stage is Stage.WANTED:
            if first >= self.chunks:
                self._settle(now)
                return Action.MISS
            self.first = first
            return Action.HOLD
        if self.stage in {Stage.ASKED, Stage.HOLDING}:
            return Action.WAIT if now < self.until else Action.DROP
        if self.stage is Stage.HELD:
            stale = now >= self.until or first < self.first or limit < self.chunks
            return Action.DROP if stale or first >= self.chunks else Action.LOAD
        return Action.MISS  # settled; or loading, when the engine does not ask

    def asked(self, now: float) -> None:
        """Take in that a look-up has begun."""
        assert self.stage is Stage.FRESH
        self.stage, self.until = Stage.ASKED, now + self._lookup_s

    def found(self, now: float, chunks: int, worth: int) -> None:
        """Take in a look-up's answer: chunks that are there, and how many are worth loading."""
        assert self.stage is Stage.ASKED
        assert 0 <= worth <= chunks
        self.saved = max(self.saved, chunks)
        if worth:
            self.stage, self.chunks = Stage.WANTED, worth
        else:
            self._settle(now)

    def holding(self, now: float) -> None:
        """Take in that an acquire has begun."""
        assert self.stage is Stage.WANTED
        self.stage, self.until = Stage.HOLDING, now + self._promote_s

    def held(self, now: float, chunks: int) -> None:
        """Take in what an acquire holds: chunks `first` to `chunks` - 1; none if not more."""
        assert self.stage is Stage.HOLDING
        assert chunks <= self.chunks
        if chunks < self.chunks:  # what was found cannot be had: it is offered anew
            self.saved = min(self.saved, max(self.first, chunks))
        if chunks > self.first:
            self.stage, self.chunks, self.until = Stage.HELD, chunks, now + HOLD_S  # P1
        else:
            self._settle(now)

    def dropped(self, now: float) -> None:
        """Take in that the ticket or lease was given up."""
        if self.stage is Stage.HELD and now >= self.until:
            self.stage = Stage.FRESH  # it may still be worth it
        else:
            self._settle(now)

    def allocated(self, *, load: bool) -> None:
        """Take in that the engine has given the request its blocks, to `load` into or to run.

        A request that was put back (preempted) is asked for anew.
        """
        assert self.stage is Stage.HELD or not load  # P1
        self.stage = Stage.LOADING if load else Stage.FRESH

    def loaded(self, now: float) -> None:
        """Take in the end of a load. A failed one is not tried again at once."""
        if self.stage is Stage.LOADING:
            self._settle(now)

    def _settle(self, now: float) -> None:
        self.stage, self.until = Stage.SETTLED, now + AGAIN_S
