"""Counters of the daemon since its start; every one is shown by `kvd stat --json`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Counts that only rise.

    Attributes:
        lookups: Look-ups answered.
        lookup_chunks_asked: Chunks asked for in look-ups.
        lookup_chunks_found: Chunks of usable prefixes in the answers.
        acquires: Leases granted.
        acquires_missed: Acquires that found nothing to hold.
        acquires_over_quota: Acquires cut short by the tenant's pinned bytes.
        chunks_acquired: Chunks under the leases granted, each time.
        bytes_acquired: Bytes told to readers, each time.
        objects_reserved: Slots handed out for filling.
        objects_published: Objects made findable.
        bytes_published: Their bytes.
        reserves_refused: Objects refused a slot: no space, over quota, orphan.
        reserves_expired: Reservations whose deadline passed.
        evictions: Objects dropped, by reason.
        bytes_evicted: Their bytes.
        sessions: Sessions welcomed.
        sessions_refused: Greetings refused.
        sessions_ended_badly: Sessions ended for breaking the protocol.
        messages: Ring messages handled.
    """

    lookups: int = 0
    lookup_chunks_asked: int = 0
    lookup_chunks_found: int = 0
    acquires: int = 0
    acquires_missed: int = 0
    acquires_over_quota: int = 0
    chunks_acquired: int = 0
    bytes_acquired: int = 0
    objects_reserved: int = 0
    objects_published: int = 0
    bytes_published: int = 0
    reserves_refused: int = 0
    reserves_expired: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    bytes_evicted: int = 0
    sessions: int = 0
    sessions_refused: int = 0
    sessions_ended_badly: int = 0
    messages: int = 0

    def count_eviction(self, reason: str, objects: int, size_bytes: int) -> None:
        """Count objects dropped for a reason."""
        self.evictions[reason] = self.evictions.get(reason, 0) + objects
        self.bytes_evicted += size_bytes
