"""Counters of the daemon since its start; every one is shown by `kvd stat --json`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvd.measures import Measures


@dataclass(slots=True)
class Counters:
    """Counts that only rise.

    Attributes:
        lookups: Look-ups answered.
        lookup_chunks_asked: Chunks asked for in look-ups.
        lookup_chunks_found: Chunks of usable prefixes in the answers.
        lookup_chunks_elsewhere: Of those, chunks that only other hosts seemed to have.
        lookup_chunks_worth: Of those found, chunks worth loading rather than computing.
        acquires: Leases granted.
        acquires_missed: Acquires that found nothing to hold.
        acquires_over_quota: Acquires cut short by the tenant's pinned bytes.
        acquires_unverified: Acquires cut short because not all could be verified in time.
        chunks_acquired: Chunks under the leases granted, each time.
        bytes_acquired: Bytes told to readers, each time.
        objects_reserved: Slots handed out for filling.
        objects_published: Objects made findable.
        bytes_published: Their bytes.
        reserves_refused: Engines' objects refused a slot: no space, over quota, orphan.
        reserves_expired: Reservations whose deadline passed.
        evictions: Objects dropped, by reason.
        bytes_evicted: Their bytes.
        demotions: Chunks written to the tier below.
        chunks_not_admitted: Chunks not written down: too large, or too unlikely to be used again.
        demotions_failed: Demotions that failed; the chunks stayed where they were.
        bytes_demoted: Objects' bytes written down, before the cold form.
        bytes_written: Bytes of records written for them.
        bytes_rewritten: Bytes of records written again when their region was reclaimed.
        promotions: Chunks brought up from the tier below.
        promotions_failed: Promotions that failed: damaged, gone, or the disk.
        bytes_promoted: Objects' bytes they gave.
        bytes_read: Bytes of records read for them.
        cold_drops: Cold copies given up for room.
        bytes_cold_dropped: Their records.
        sessions: Sessions welcomed.
        sessions_refused: Greetings refused.
        sessions_ended_badly: Sessions ended for breaking the protocol.
        messages: Ring messages handled.
        measures: Distributions and tenants' shares of the above; pages of their own.
    """

    lookups: int = 0
    lookup_chunks_asked: int = 0
    lookup_chunks_found: int = 0
    lookup_chunks_elsewhere: int = 0
    lookup_chunks_worth: int = 0
    acquires: int = 0
    acquires_missed: int = 0
    acquires_over_quota: int = 0
    acquires_unverified: int = 0
    chunks_acquired: int = 0
    bytes_acquired: int = 0
    objects_reserved: int = 0
    objects_published: int = 0
    bytes_published: int = 0
    reserves_refused: int = 0
    reserves_expired: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    bytes_evicted: int = 0
    demotions: int = 0
    chunks_not_admitted: int = 0
    demotions_failed: int = 0
    bytes_demoted: int = 0
    bytes_written: int = 0
    bytes_rewritten: int = 0
    promotions: int = 0
    promotions_failed: int = 0
    bytes_promoted: int = 0
    bytes_read: int = 0
    cold_drops: int = 0
    bytes_cold_dropped: int = 0
    sessions: int = 0
    sessions_refused: int = 0
    sessions_ended_badly: int = 0
    messages: int = 0
    measures: Measures = field(default_factory=Measures)

    def page(self) -> dict[str, Any]:
        """Return the counts for the statistics page."""
        return {
            each.name: dict(value) if isinstance(value, dict) else value
            for each in fields(self)
            if not isinstance(value := getattr(self, each.name), Measures)
        }

    def count_eviction(self, reason: str, objects: int, size_bytes: int) -> None:
        """Count objects dropped for a reason."""
        self.evictions[reason] = self.evictions.get(reason, 0) + objects
        self.bytes_evicted += size_bytes

    def count_demotion(self, raw_bytes: int, record_bytes: int, seconds: float) -> None:
        """Count a chunk written down, and how long that took, its change of form included."""
        self.measures.sizes["demote"].note(raw_bytes)
        self.measures.seconds["demote"].note(seconds)
        self.demotions += 1
        self.bytes_demoted += raw_bytes
        self.bytes_written += record_bytes

    def count_promotion(self, raw_bytes: int, record_bytes: int, seconds: float) -> None:
        """Count a chunk brought up, and how long that took from its turn on."""
        self.measures.sizes["promote"].note(raw_bytes)
        self.measures.seconds["promote"].note(seconds)
        self.promotions += 1
        self.bytes_promoted += raw_bytes
        self.bytes_read += record_bytes

    def count_cold_drop(self, record_bytes: int) -> None:
        """Count a cold copy given up for room."""
        self.cold_drops += 1
        self.bytes_cold_dropped += record_bytes
