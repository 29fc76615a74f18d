"""Leases: who may read what until when. Pure.

    ACTIVE --release | holder dead--> ENDED
    ACTIVE --deadline, not reading--> ENDED
    ACTIVE --deadline, reading--> OVERDUE --release | holder dead--> ENDED
    ACTIVE --session lost, reading--> OVERDUE

L1. A lease that reads pins its chunks until its holder says that it is done, or is dead; time only
    takes away its token. Its bytes are bounded by the tenant's quota instead.
L2. A lease that does not read ends by time: nobody looks at its bytes under it.
L3. A token is good while its lease is active, and for the same tenant only.
"""

from __future__ import annotations

import heapq
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.entry import Chunk, Slot
    from kvd.hits import Had
    from kvd.types import LeaseId, OwnerId, Tenant


class LeaseState(Enum):
    """Where a lease is in its life."""

    ACTIVE = "active"
    OVERDUE = "overdue"
    ENDED = "ended"


class Lease:
    """One hold on the chunks of a chain.

    Attributes:
        id: Its number, never used again in an epoch.
        token: For others of the tenant to attach.
        owner: Whose.
        tenant: The owner's tenant.
        chunks: What it pins; `first` is the index of the first of them in the chain.
        first: See `chunks`.
        had: What was in host slots when it was asked for, see `kvd.hits`; None: all of it.
        sure: The watched objects that were checked for it; None where nothing is verified.
        reading: Whether its owner was told where the bytes are.
        deadline_ns: When it is overdue or ends.
        state: See the module.
    """

    __slots__ = (
        "chunks",
        "deadline_ns",
        "first",
        "had",
        "id",
        "owner",
        "reading",
        "state",
        "sure",
        "tenant",
        "token",
    )

    def __init__(
        self,
        lease: LeaseId,
        token: bytes,
        *,
        owner: OwnerId,
        tenant: Tenant,
        chunks: tuple[Chunk, ...],
        first: int,
        reading: bool,
        deadline_ns: int,
        had: Had | None = None,
        sure: frozenset[Slot] | None = None,
    ) -> None:
        """Start active."""
        self.id = lease
        self.token = token
        self.owner = owner
        self.tenant = tenant
        self.chunks = chunks
        self.first = first
        self.had = had
        self.sure = sure
        self.reading = reading
        self.deadline_ns = deadline_ns
        self.state = LeaseState.ACTIVE


class LeaseBook:
    """All leases of the daemon."""

    SLACK = 1024
    """Deadlines of ended leases kept beyond as many as there are live ones."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_id: dict[LeaseId, Lease] = {}
        self._by_token: dict[bytes, Lease] = {}
        self._by_owner: dict[OwnerId, dict[LeaseId, Lease]] = {}
        self._deadlines: list[tuple[int, LeaseId]] = []

    def __len__(self) -> int:
        """Count the leases that have not ended."""
        return len(self._by_id)

    def all(self) -> list[Lease]:
        """Return the leases that have not ended."""
        return list(self._by_id.values())

    def add(self, lease: Lease) -> None:
        """Take in an active lease."""
        assert lease.id not in self._by_id
        assert lease.token not in self._by_token
        self._by_id[lease.id] = lease
        self._by_token[lease.token] = lease
        self._by_owner.setdefault(lease.owner, {})[lease.id] = lease
        heapq.heappush(self._deadlines, (lease.deadline_ns, lease.id))
        if len(self._deadlines) > 2 * len(self._by_id) + self.SLACK:
            self._deadlines = [(held.deadline_ns, held.id) for held in self._by_id.values()]
            heapq.heapify(self._deadlines)

    def by_token(self, token: bytes, tenant: Tenant) -> Lease | None:
        """Return the active lease of this token if it is the tenant's (L3)."""
        lease = self._by_token.get(token)
        return lease if lease is not None and lease.tenant == tenant else None

    def of(self, lease: LeaseId, owner: OwnerId) -> Lease | None:
        """Return the lease if it is the owner's."""
        return self._by_owner.get(owner, {}).get(lease)

    def count(self, owner: OwnerId) -> int:
        """Count an owner's leases."""
        return len(self._by_owner.get(owner, {}))

    def end(self, lease: Lease) -> None:
        """Forget a lease; its chunks are the caller's to unpin."""
        assert lease.state is not LeaseState.ENDED
        lease.state = LeaseState.ENDED
        del self._by_id[lease.id]
        self._by_token.pop(lease.token, None)
        owned = self._by_owner[lease.owner]
        del owned[lease.id]
        if not owned:
            del self._by_owner[lease.owner]

    def _overdue(self, lease: Lease) -> None:
        if lease.state is LeaseState.ACTIVE:
            lease.state = LeaseState.OVERDUE
            del self._by_token[lease.token]

    def sweep(self, now_ns: int) -> list[Lease]:
        """End what time ends (L2) and return it; take the tokens of the rest (L1)."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, number = heapq.heappop(self._deadlines)
            lease = self._by_id.get(number)
            if lease is None:
                continue
            if lease.reading:
                self._overdue(lease)
            else:
                self.end(lease)
                ended.append(lease)
        return ended

    def leave(self, owner: OwnerId, *, dead: bool) -> list[Lease]:
        """End and return an owner's leases: all if it is dead, else those that do not read."""
        ended = []
        for lease in list(self._by_owner.get(owner, {}).values()):
            if dead or not lease.reading:
                self.end(lease)
                ended.append(lease)
            else:
                self._overdue(lease)
        return ended

    def overdue_count(self) -> int:
        """Count leases past their time whose holders still read."""
        return sum(lease.state is LeaseState.OVERDUE for lease in self._by_id.values())
