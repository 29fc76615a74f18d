"""A trace of what engines ask for, taken from live traffic: which chains, and when. On the loop.

Only hashes are kept, and only until the recording command has fetched them; it turns them into
numbers. Nothing is kept while nobody records.

O1. What waits to be fetched is bounded; requests beyond are counted as lost, never waited for.
O2. A request is noted once: the look-up and the acquire of one chain by one session are one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvd_client import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.clock import Clock
    from kvd.entry import Space
    from kvd.types import OwnerId, Tenant

HELD_MAX: Final = 1 << 17
"""Hashes that wait to be fetched: some 12 MB."""
ROW_HASHES: Final = 256
"""Hashes of one row; longer chains come in several."""
PAGE_HASHES: Final = 384
"""Hashes of one page: 12 KiB."""
PAGE_ROWS: Final = 60


class Noted(NamedTuple):
    """One request: when it came, the tokens of a chunk, and its chain."""

    at_ns: int
    chunk_tokens: int
    chain: tuple[bytes, ...]


class Caller(Protocol):
    """What is asked of who asks (`kvd.ipc.dispatch.Caller`)."""

    owner: OwnerId
    space: Space
    rank: int


class Recorder:
    """One recording."""

    def __init__(self, clock: Clock, *, tenant: Tenant | None, space: Space | None) -> None:
        """Begin; `tenant` and `space` narrow what is noted, None does not."""
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._tenant = tenant
        self._space = space
        self._waiting: deque[Noted] = deque()
        self._held = 0
        self._sent = 0
        self._last: dict[OwnerId, tuple[bytes, bool]] = {}
        self.lost = 0

    def hear(self, caller: Caller, message: object) -> None:
        """Hear of a request; look-ups and acquires by rank 0 are noted (O2)."""
        if caller.rank == 0 and isinstance(message, wire.Lookup | wire.Acquire):
            hashes = wire.split_hashes(message.hashes)
            self._note(caller, hashes, acquired=isinstance(message, wire.Acquire))

    def _note(self, caller: Caller, hashes: Sequence[bytes], *, acquired: bool) -> None:
        owner, space = caller.owner, caller.space
        if not hashes or self._space not in {None, space}:
            return
        if self._tenant not in {None, space.tenant}:
            return
        tail, served = self._last.get(owner, (b"", False))
        self._last[owner] = (hashes[-1], acquired)
        if tail == hashes[-1] and not served:
            return
        if self._held + len(hashes) > HELD_MAX:
            self.lost += 1
            return
        self._held += len(hashes)
        self._waiting.append(Noted(self._clock.now_ns(), space.layout.chunk_tokens, tuple(hashes)))

    def fetch(self) -> list[list[Any]]:
        """Take out what has come, as far as a page holds it.

        Returns:
            Rows of milliseconds since the beginning, tokens a chunk, chunks of the chain, the
            place of the first hash of this row in it, and hashes joined.
        """
        rows: list[list[Any]] = []
        left = PAGE_HASHES
        while self._waiting and left and len(rows) < PAGE_ROWS:
            noted = self._waiting[0]
            part = noted.chain[self._sent : self._sent + min(ROW_HASHES, left)]
            at_ms = (noted.at_ns - self._began_ns) // 10**6
            rows.append([at_ms, noted.chunk_tokens, len(noted.chain), self._sent, b"".join(part)])
            left -= len(part)
            self._sent += len(part)
            if self._sent == len(noted.chain):
                self._waiting.popleft()
                self._held -= len(noted.chain)
                self._sent = 0
        return rows
