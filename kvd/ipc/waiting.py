"""Acquires that wait: for other hosts, for promotions, for a check of the bytes. Answered once.

An acquire that waits for promotions goes on when the last has ended, time is up or a drain begins;
so does one that waits for a check. One that waits for other hosts holds what is here meanwhile, and
is then dealt with as if it had just come.

W1. While it waits, an acquire owns the pins on its chunks; afterwards its lease does, or nobody.
W2. It is answered exactly once, and not at all if its session has gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.entry import Chunk, Slot
    from kvd.hits import Had
    from kvd.ipc.caller import Caller
    from kvd.verifying import Check
    from kvd_client.wire import Status

    Later = Callable[[bytes], None]


class Waiting:
    """One acquire under way."""

    def __init__(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        *,
        later: Later,
        deadline_ns: int,
        had: Had,
        finish: Callable[[Waiting], None],
    ) -> None:
        """Own the pins on `chunks`; `later` takes the reply, `had` is what was there."""
        self.caller = caller
        self.ask = ask
        self.chunks = chunks
        self.later = later
        self.deadline_ns = deadline_ns
        self.rising: dict[Chunk, Callable[[bool], None]] = {}
        self.over = False
        self.had = had
        self.began_ns = 0
        self._finish = finish

    def risen(self, chunk: Chunk) -> Callable[[bool], None]:
        """Return what a promotion of a chunk calls at its end."""

        def done(read: bool) -> None:  # noqa: ARG001, FBT001 - the chunk's own state tells
            self.rising.pop(chunk, None)
            if not self.rising:
                self.end()

        self.rising[chunk] = done
        return done

    def end(self) -> None:
        """Go on, with as much as is there."""
        if not self.over:
            self._finish(self)


class Checking:
    """One acquire that waits for a check of its objects' bytes."""

    def __init__(
        self,
        caller: Caller,
        ask: wire.Acquire,
        chunks: tuple[Chunk, ...],
        *,
        later: Later,
        deadline_ns: int,
        had: Had | None,
        watched: frozenset[Slot],
        finish: Callable[[Checking], None],
    ) -> None:
        """Own the pins on `chunks`; `later` takes the reply, `had` is what was there.

        `watched` is what is checked.
        """
        self.caller = caller
        self.ask = ask
        self.chunks = chunks
        self.later = later
        self.deadline_ns = deadline_ns
        self.had = had
        self.watched = watched
        self._finish = finish
        self.over = False
        self.check: Check

    def end(self) -> None:
        """Go on, with as much as has been checked."""
        if not self.over:
            self._finish(self)


class Fetching:
    """One acquire that waits for other hosts."""

    def __init__(
        self, caller: Caller, ask: wire.Acquire, chunks: tuple[Chunk, ...], later: Later
    ) -> None:
        """Own the pins on `chunks`, what is here of the chain."""
        self.caller = caller
        self.ask = ask
        self.chunks = chunks
        self.later = later
        self.over = False
        self.had: Had | None = None


def no_lease(request: int, first: int, status: Status) -> wire.AcquireReply:
    """Return the answer to an acquire that gets nothing."""
    return wire.AcquireReply(request, status, 0, bytes(wire.TOKEN_BYTES), first, first, 0, b"")
