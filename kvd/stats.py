"""What the statistics page says: gathered from the loop's state, bounded in size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd import __version__
from kvd.config_gpu import word_of
from kvd.events.feed import EventFeed
from kvd.quota import Resource

if TYPE_CHECKING:
    from kvd.daemon import Daemon
    from kvd.types import Tenant

LISTED_MAX = 64
"""Most sessions and spaces listed; the counts beside them are complete."""


def gather(daemon: Daemon) -> dict[str, Any]:
    """Collect the page's content; on the loop, well under a millisecond."""
    now_ns = daemon.clock.now_ns()
    return {
        "version": __version__,
        "epoch": daemon.epoch,
        "uptime_s": (now_ns - daemon.started_ns) / 1e9,
        "state": "draining" if daemon.dispatcher.draining else "serving",
        "socket": daemon.config.socket,
        "loop_lag_ms": round(daemon.loop_lag_ms, 3),
        "late": daemon.pulse.late(now_ns),
        "sessions": _sessions(daemon),
        "session_count": len(daemon.sessions),
        "orphans": len(daemon.orphans),
        "host": _host(daemon),
        "tenants": [_tenant(daemon, name) for name in daemon.pool.shares],
        "spaces": _spaces(daemon),
        "chunks": daemon.catalog.chunk_count(),
        "leases": len(daemon.leases),
        "leases_overdue": daemon.leases.overdue_count(),
        "nvme": _nvme(daemon),
        "directory": daemon.directory.stats() if daemon.directory is not None else None,
        "peer": daemon.peers.stats() if daemon.peers is not None else None,
        "gpu": daemon.gpu.stats() if daemon.gpu is not None else None,
        "counters": daemon.counters.page(),
        "events": _events(daemon),
        "measures": daemon.counters.measures.page(),
    }


def _events(daemon: Daemon) -> dict[str, Any] | None:
    """Describe what routers are told, None if nothing."""
    feeds = [side.page() for side in daemon.sides if isinstance(side, EventFeed)]
    return feeds[0] if feeds else None


def _nvme(daemon: Daemon) -> dict[str, Any] | None:
    """Describe the tier below, None without one."""
    cold = daemon.cold
    if cold is None:
        return None
    found = cold.store.stats()
    found["dirty_bytes"] = sum(daemon.catalog.eviction.dirty_bytes.values())
    found["demoting"] = daemon.catalog.eviction.demoting
    found["form"] = daemon.config.nvme.form
    found["note"] = cold.forms.note
    return found


def _sessions(daemon: Daemon) -> list[dict[str, Any]]:
    return [
        {
            "id": session.owner,
            "tenant": session.tenant,
            "name": session.name,
            "pid": session.pid,
            "label": session.caller.space.label if session.caller else "",
            "rank": session.caller.rank if session.caller else 0,
            "leases": daemon.leases.count(session.owner),
            "filling": daemon.catalog.fillings.count(session.owner),
        }
        for session in list(daemon.sessions.values())[:LISTED_MAX]
    ]


def _host(daemon: Daemon) -> dict[str, Any]:
    pool, quota, tier = daemon.pool, daemon.quota, daemon.tier
    used = sum(pool.used_bytes(tenant) for tenant in pool.shares)
    filling = sum(quota.used(tenant, Resource.FILLING_BYTES) for tenant in pool.shares)
    quarantined = daemon.catalog.quarantined_bytes
    damaged = sum(slot.size_bytes for slot in daemon.catalog.damaged)
    verifier = daemon.verifier
    return {
        "capacity_bytes": daemon.config.host.slab_count * daemon.slab_bytes,
        "ready_bytes": tier.ready_bytes,
        "slab_bytes": daemon.slab_bytes,
        "slabs_blank": pool.blank_count(),
        "slabs_held": sum(pool.held_count(tenant) for tenant in pool.shares),
        "used_bytes": used,
        "published_bytes": used - filling - damaged,
        "reserved_bytes": filling - quarantined,
        "quarantined_bytes": quarantined,
        "damaged_bytes": damaged,
        "pinned_bytes": sum(quota.used(t, Resource.PINNED_BYTES) for t in pool.shares),
        "locked_bytes": tier.locked_bytes,
        "huge_bytes": tier.huge_bytes,
        "notes": daemon.notes[:8],
        "verify": word_of(daemon.config.host.verify),
        **(verifier.stats() if verifier is not None else {}),
    }


def _tenant(daemon: Daemon, name: Tenant) -> dict[str, Any]:
    pool, quota = daemon.pool, daemon.quota
    filling = quota.used(name, Resource.FILLING_BYTES)
    damaged = sum(slot.size_bytes for slot in daemon.catalog.damaged if slot.tenant == name)
    return {
        "name": name,
        "share_bytes": pool.shares[name] * daemon.slab_bytes,
        "held_bytes": pool.held_count(name) * daemon.slab_bytes,
        "published_bytes": pool.used_bytes(name) - filling - damaged,
        "pinned_bytes": quota.used(name, Resource.PINNED_BYTES),
        "filling_bytes": filling,
        "sessions": quota.used(name, Resource.SESSIONS),
        **daemon.counters.measures.usage(name).page(),
    }


def _spaces(daemon: Daemon) -> list[dict[str, Any]]:
    return [
        {
            "tenant": space.tenant,
            "label": space.label,
            "layout": space.layout.id.hex()[:12],
            "chunks": len(space.chunks),
            "sessions": space.sessions,
            "prefill_tokens_s": round(space.gate.prefill.per_s),
            "gate": space.gate.why,
            **space.usage.page(),
        }
        for space in list(daemon.catalog.spaces.values())[:LISTED_MAX]
    ]
