"""Every metric there is, and which figure of the statistics page it shows. Pure.

Names follow Prometheus: unit last, `_total` for what only rises, seconds and bytes.
"""

from __future__ import annotations

from typing import Final

from kvd.http.catalogue_fleet import FLEET, FLEET_NOW
from kvd.http.catalogue_gpu import GPU, GPU_NOW
from kvd.http.figures import Kind, Metric, Source, labelled, one


def _of_tenant(column: str) -> tuple[Source, ...]:
    return one(f"tenants.[tenant=name].{column}")


def _of_space(column: str) -> tuple[Source, ...]:
    return one(f"spaces.[tenant=tenant,space=label,layout=layout].{column}")


_REQUESTS: Final = (
    (
        "kvd_hit_tokens_total",
        "Tokens of leases granted to rank 0, by the tier they lay in when asked for.",
        one("tenants.[tenant=name].hit_tokens.*tier"),
    ),
    (
        "kvd_asked_tokens_total",
        "Tokens of chains looked up, each chain once, by rank 0.",
        _of_tenant("asked_tokens"),
    ),
    (
        "kvd_hit_bytes_total",
        "Bytes told to readers, each time and rank, by the same tier: what engines copy out.",
        one("tenants.[tenant=name].hit_bytes.*tier"),
    ),
    (
        "kvd_stored_bytes_total",
        "Bytes published: what engines copied in.",
        _of_tenant("stored_bytes"),
    ),
    (
        "kvd_space_hit_tokens_total",
        "kvd_hit_tokens_total of a namespace and layout; the first 64 of them.",
        _of_space("hit_tokens.*tier"),
    ),
    (
        "kvd_space_asked_tokens_total",
        "kvd_asked_tokens_total of a namespace and layout.",
        _of_space("asked_tokens"),
    ),
    (
        "kvd_space_hit_bytes_total",
        "kvd_hit_bytes_total of a namespace and layout.",
        _of_space("hit_bytes.*tier"),
    ),
    (
        "kvd_space_stored_bytes_total",
        "kvd_stored_bytes_total of a namespace and layout.",
        _of_space("stored_bytes"),
    ),
    ("kvd_lookups_total", "Look-ups answered.", one("counters.lookups")),
    (
        "kvd_lookup_chunks_asked_total",
        "Chunks asked for in look-ups.",
        one("counters.lookup_chunks_asked"),
    ),
    (
        "kvd_lookup_chunks_found_total",
        "Chunks of usable prefixes in the answers.",
        one("counters.lookup_chunks_found"),
    ),
    (
        "kvd_lookup_chunks_elsewhere_total",
        "Of those, chunks that only other hosts seemed to have.",
        one("counters.lookup_chunks_elsewhere"),
    ),
    (
        "kvd_lookup_chunks_worth_total",
        "Of those found, chunks worth loading rather than computing.",
        one("counters.lookup_chunks_worth"),
    ),
    (
        "kvd_acquires_total",
        "Acquires, by outcome; those cut short are granted, or missed, as well.",
        labelled(
            "outcome",
            granted="counters.acquires",
            missed="counters.acquires_missed",
            cut_by_quota="counters.acquires_over_quota",
            cut_unverified="counters.acquires_unverified",
        ),
    ),
    (
        "kvd_acquired_chunks_total",
        "Chunks under the leases granted, each time.",
        one("counters.chunks_acquired"),
    ),
    (
        "kvd_acquired_bytes_total",
        "Bytes told to readers, each time, over all tenants.",
        one("counters.bytes_acquired"),
    ),
    (
        "kvd_objects_total",
        "Objects, by how far their store came.",
        labelled(
            "step",
            reserved="counters.objects_reserved",
            published="counters.objects_published",
            refused="counters.reserves_refused",
            expired="counters.reserves_expired",
        ),
    ),
    (
        "kvd_published_bytes_total",
        "Bytes of objects made findable, over all tenants.",
        one("counters.bytes_published"),
    ),
    ("kvd_messages_total", "Ring messages handled.", one("counters.messages")),
    (
        "kvd_sessions_total",
        "Sessions, by how they began or ended.",
        labelled(
            "outcome",
            welcomed="counters.sessions",
            refused="counters.sessions_refused",
            ended_badly="counters.sessions_ended_badly",
        ),
    ),
)
_MOVES: Final = (
    (
        "kvd_evicted_objects_total",
        "Objects freed from host memory, by reason.",
        one("counters.evictions.*reason"),
    ),
    ("kvd_evicted_bytes_total", "Their bytes.", one("counters.bytes_evicted")),
    (
        "kvd_demotions_total",
        "Chunks on their way from host memory to NVMe, by outcome.",
        labelled(
            "outcome",
            written="counters.demotions",
            failed="counters.demotions_failed",
            not_admitted="counters.chunks_not_admitted",
        ),
    ),
    (
        "kvd_demoted_bytes_total",
        "Objects' bytes that went down, before their cold form.",
        one("counters.bytes_demoted"),
    ),
    (
        "kvd_promotions_total",
        "Chunks on their way from NVMe to host memory, by outcome.",
        labelled("outcome", read="counters.promotions", failed="counters.promotions_failed"),
    ),
    (
        "kvd_promoted_bytes_total",
        "Objects' bytes that came up, after their cold form.",
        one("counters.bytes_promoted"),
    ),
    (
        "kvd_record_bytes_total",
        "Bytes of records on NVMe, by what happened to them.",
        labelled(
            "move",
            written="counters.bytes_written",
            rewritten="counters.bytes_rewritten",
            read="counters.bytes_read",
            given_up="counters.bytes_cold_dropped",
        ),
    ),
    (
        "kvd_cold_drops_total",
        "Chunks whose NVMe copy was given up for room.",
        one("counters.cold_drops"),
    ),
)
_NVME_COUNTS: Final = (
    (
        "kvd_nvme_io_total",
        "Bundles of records written durably, and read.",
        labelled("op", write="nvme.counters.writes", read="nvme.counters.reads"),
    ),
    (
        "kvd_nvme_io_bytes_total",
        "Their bytes, rewrites included.",
        labelled("op", write="nvme.counters.write_bytes", read="nvme.counters.read_bytes"),
    ),
    (
        "kvd_nvme_refused_total",
        "Calls the NVMe store refused, by reason.",
        labelled(
            "reason",
            busy="nvme.counters.refused_busy",
            space="nvme.counters.refused_space",
            closed="nvme.counters.refused_closed",
        ),
    ),
    (
        "kvd_nvme_errors_total",
        "Failures of the disk or the index, by what failed.",
        labelled(
            "op",
            write="nvme.counters.errors_write",
            read="nvme.counters.errors_read",
            sync="nvme.counters.errors_sync",
            index="nvme.counters.errors_index",
        ),
    ),
    (
        "kvd_nvme_bad_reads_total",
        "Reads that gave nothing usable: damaged, or given up meanwhile.",
        labelled("why", corrupt="nvme.counters.corrupt", gone="nvme.counters.gone"),
    ),
    ("kvd_nvme_deletes_total", "Keys deleted from the index.", one("nvme.counters.deletes")),
    ("kvd_nvme_reclaims_total", "Regions given up.", one("nvme.counters.reclaims")),
    (
        "kvd_nvme_changes_total",
        "Changes of the tier's state.",
        labelled(
            "to",
            closed="nvme.counters.closures",
            open="nvme.counters.openings",
            slow="nvme.counters.stalls",
        ),
    ),
    ("kvd_nvme_index_commits_total", "Transactions of the index.", one("nvme.index_commits")),
    ("kvd_nvme_index_changes_total", "Changes in them.", one("nvme.index_jobs")),
)
_EVENTS: Final = (
    ("kvd_events_total", "KV events sent to routers.", one("events.events")),
    (
        "kvd_event_batches_total",
        "Batches of them, by whether the sending thread had room.",
        labelled("outcome", sent="events.batches", refused="events.events_refused"),
    ),
    (
        "kvd_event_retellings_total",
        "How often routers were told everything anew; one at the start.",
        one("events.retellings"),
    ),
)
_TIERS: Final = (
    (
        "kvd_tier_capacity_bytes",
        "Bytes a tier is configured to have.",
        labelled(
            "tier",
            gpu="gpu.capacity_bytes",
            host="host.capacity_bytes",
            nvme="nvme.capacity_bytes",
        ),
    ),
    (
        "kvd_tier_used_bytes",
        "Bytes in use, whatever for.",
        labelled("tier", gpu="gpu.used_bytes", host="host.used_bytes", nvme="nvme.used_bytes"),
    ),
    (
        "kvd_host_bytes",
        "Host memory, by what it holds or is.",
        labelled(
            "state",
            ready="host.ready_bytes",
            published="host.published_bytes",
            reserved="host.reserved_bytes",
            quarantined="host.quarantined_bytes",
            damaged="host.damaged_bytes",
            pinned="host.pinned_bytes",
            locked="host.locked_bytes",
            huge="host.huge_bytes",
        ),
    ),
    ("kvd_host_slab_bytes", "Size of a slab.", one("host.slab_bytes")),
    (
        "kvd_host_slabs",
        "Slabs, by whose they are.",
        labelled("state", blank="host.slabs_blank", held="host.slabs_held"),
    ),
    (
        "kvd_nvme_bytes",
        "Bytes on NVMe, by state; dirty: in host memory only, to be written.",
        labelled(
            "state", live="nvme.live_bytes", garbage="nvme.garbage_bytes", dirty="nvme.dirty_bytes"
        ),
    ),
    ("kvd_nvme_chunks", "Chunks that the index names.", one("nvme.live_count")),
    (
        "kvd_nvme_regions",
        "Region files.",
        labelled("state", held="nvme.regions_held", free="nvme.regions_free"),
    ),
    (
        "kvd_nvme_queue",
        "Calls under way or waiting for a thread.",
        labelled(
            "op", read="nvme.reads_queued", write="nvme.writes_queued", commit="nvme.index_queued"
        ),
    ),
    (
        "kvd_nvme_rate_bytes",
        "Bytes a second while anything was under way, as measured.",
        labelled("op", read="nvme.read_bytes_per_s", write="nvme.write_bytes_per_s"),
    ),
    ("kvd_nvme_direct", "1 when reads and writes go past the page cache.", one("nvme.direct")),
    (
        "kvd_nvme_demoting",
        "1 when what is dirty waits for its copy on NVMe.",
        one("nvme.demoting"),
    ),
)
_VERIFIED: Final = (
    (
        "kvd_host_summed_objects_total",
        "Objects in host memory that got a sum of their bytes when they were published.",
        one("host.summed"),
    ),
    (
        "kvd_host_verified_objects_total",
        "Sums compared with the object's, by what came out.",
        labelled("outcome", all="host.verified", differed="host.differed"),
    ),
)
_NOW: Final = (
    ("kvd_host_verifying", "Objects that wait for a sum, or are summed.", one("host.verifying")),
    ("kvd_epoch", "Which life of the daemon: another number is another life.", one("epoch")),
    ("kvd_events_waiting", "Hashes that wait for the next batch.", one("events.waiting")),
    ("kvd_uptime_seconds", "Seconds since the start.", one("uptime_s")),
    ("kvd_loop_lag_seconds", "How late the last tick of the loop was.", one("loop_lag_ms", 1e-3)),
    ("kvd_chunks", "Chunks known, warm or cold.", one("chunks")),
    ("kvd_leases", "Leases held.", one("leases")),
    ("kvd_leases_overdue", "Of them, past their time and still read.", one("leases_overdue")),
    ("kvd_sessions", "Sessions open.", one("session_count")),
    ("kvd_orphans", "Closed sessions whose living process still holds something.", one("orphans")),
    (
        "kvd_tenant_bytes",
        "Host memory of a tenant, by what it is; share is the most it may hold.",
        tuple(
            Source(f"tenants.[tenant=name].{state}_bytes", (("state", state),))
            for state in ("share", "held", "published", "pinned", "filling")
        ),
    ),
    ("kvd_tenant_sessions", "Sessions of a tenant, orphans included.", _of_tenant("sessions")),
    (
        "kvd_space_chunks",
        "Chunks of a namespace and layout; the first 64 of them.",
        _of_space("chunks"),
    ),
    ("kvd_space_sessions", "Sessions in a namespace and layout.", _of_space("sessions")),
    (
        "kvd_space_prefill_tokens_per_second",
        "How fast its engines say they compute; 0: not told.",
        _of_space("prefill_tokens_s"),
    ),
)
_HISTOGRAMS: Final = (
    (
        "kvd_acquire_wait_seconds",
        "How long acquires waited for promotions; those that need none do not count.",
        one("measures.seconds.acquire_wait"),
    ),
    (
        "kvd_demote_seconds",
        "How long a chunk took to NVMe, its change of form included.",
        one("measures.seconds.demote"),
    ),
    (
        "kvd_promote_seconds",
        "How long a chunk took from NVMe, from its turn on.",
        one("measures.seconds.promote"),
    ),
    (
        "kvd_loop_late_seconds",
        "How late ticks of the loop were.",
        one("measures.seconds.loop_lag"),
    ),
    ("kvd_load_size_bytes", "Bytes of a reading lease.", one("measures.bytes.load")),
    ("kvd_store_size_bytes", "Bytes of a publish.", one("measures.bytes.store")),
    (
        "kvd_demote_size_bytes",
        "Bytes of a chunk that went down, before its cold form.",
        one("measures.bytes.demote"),
    ),
    ("kvd_promote_size_bytes", "Bytes of a chunk that came up.", one("measures.bytes.promote")),
)

_TABLES: Final[tuple[tuple[Kind, tuple[tuple[str, str, tuple[Source, ...]], ...]], ...]] = (
    ("counter", _REQUESTS + _MOVES + _VERIFIED + _NVME_COUNTS + _EVENTS + FLEET + GPU),
    ("gauge", _TIERS + _NOW + FLEET_NOW + GPU_NOW),
    ("histogram", _HISTOGRAMS),
)
METRICS: Final[tuple[Metric, ...]] = tuple(
    Metric(name, kind, text, sources) for kind, table in _TABLES for name, text, sources in table
)
"""In the order in which they are shown."""

NOT_SHOWN: Final = {
    "sessions": "a row a process: kvd_sessions and kvd_tenant_sessions count them",
    "late": "kvd_health, and /health with the names",
    "host.notes": "kvd_health, and /health with the text",
    "cut_short": "the lists in the page are cut, no figure is",
}
"""Parts of the page that are no metric, and what shows them instead."""
