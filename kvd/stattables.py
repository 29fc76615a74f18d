"""The tables of `kvd stat`: rows of cells, the head first. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvd.sizes import about, many
from kvd.statfields import getters, id_of, list_of, map_of, number_of, rows_of, text_of

TIERS: Final = ("gpu", "host", "nvme", "peer")
"""From the engine away; a peer is another host, which gave what it had over the network."""


def tiers_of(stats: dict[str, Any]) -> list[str]:
    """Return the tiers that the daemon has; peers are one if it takes part in a fleet."""
    return [
        name
        for name in TIERS
        if number_of(map_of(stats, name), "capacity_bytes") or (name == "peer" and stats.get(name))
    ]


def hits_of(row: dict[str, Any], what: str = "hit_tokens") -> float:
    """Sum what a tenant or namespace got, over all tiers."""
    hits = map_of(row, what)
    return sum(number_of(hits, tier) for tier in hits)


def tiers(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate the tiers: what each has, what of it is free or out of use, and what it gave."""
    rows = [["TIER", "STATE", "USED", "FREE", "LEASED", "QUARANTINE", "HIT TOKENS", "HIT BYTES"]]
    for name in tiers_of(stats):
        tier = map_of(stats, name)
        hits = [
            sum(number_of(map_of(row, what), name) for row in rows_of(stats, "tenants"))
            for what in ("hit_tokens", "hit_bytes")
        ]
        cells = [text_of(tier, "source") or "-", "-", "-"] if name == "peer" else _room(tier)
        leased, quarantined = (
            about(number_of(tier, f"{what}_bytes")) if name in places else "-"
            for what, places in (("pinned", ("host",)), ("quarantined", ("host", "peer")))
        )
        rows.append([name, *cells, leased, quarantined, many(hits[0]), about(hits[1])])
    return rows


def _room(tier: dict[str, Any]) -> list[str]:
    """Say how a tier is, and how full."""
    size, used = (number_of(tier, f"{what}_bytes") for what in ("capacity", "used"))
    ready = number_of(tier, "ready_bytes") if "ready_bytes" in tier else size
    state = text_of(tier, "state").partition(":")[0]
    state = state or ("ready" if ready >= size else f"{100 * ready / size:.0f} %")
    return [state, about(used), about(max(0.0, size - used))]


def tenants(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate what each tenant has of host memory."""
    rows = [["TENANT", "SESSIONS", "SHARE", "HELD", "PUBLISHED", "PINNED", "FILLING"]]
    for tenant in rows_of(stats, "tenants"):
        count, size = getters(tenant)
        sizes = ("share", "held", "published", "pinned", "filling")
        cells = [size(f"{name}_bytes") for name in sizes]
        rows.append([text_of(tenant, "name"), count("sessions"), *cells])
    return rows


def usage(stats: dict[str, Any], rows_in: str, column: str) -> list[list[str]]:
    """Tabulate what each tenant or namespace asked for since the start, and where it was found.

    Args:
        stats: The page.
        rows_in: Its list, `tenants` or `spaces`.
        column: What names a row of it.
    """
    shown = tiers_of(stats)
    first = {"tenants": "TENANT", "spaces": "NAMESPACE"}[rows_in]
    rows = [[first, "ASKED", "HIT", *map(str.upper, shown), "LOADED", "STORED"]]
    for row in rows_of(stats, rows_in):
        asked = number_of(row, "asked_tokens")
        if asked:
            parts = [number_of(map_of(row, "hit_tokens"), tier) for tier in shown]
            rows.append(
                [
                    text_of(row, column),
                    many(asked),
                    f"{100 * hits_of(row) / asked:.1f} %",
                    *(f"{100 * part / asked:.1f} %" for part in parts),
                    about(hits_of(row, "hit_bytes")),
                    about(number_of(row, "stored_bytes")),
                ]
            )
    return rows


def sessions(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate the engines' processes."""
    rows = [["SESSION", "PID", "RANK", "LEASES", "FILLING", "TENANT", "CLIENT", "NAMESPACE"]]
    for session in rows_of(stats, "sessions"):
        cells = [id_of(session, name) for name in ("id", "pid", "rank", "leases", "filling")]
        rows.append([*cells, *(text_of(session, name) for name in ("tenant", "name", "label"))])
    return rows


def spaces(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate the namespaces: how large, how fast its engines compute, and what that decides."""
    rows = [["NAMESPACE", "LAYOUT", "TENANT", "CHUNKS", "SESSIONS", "COMPUTES"]]
    for space in rows_of(stats, "spaces"):
        count, _ = getters(space)
        rate = number_of(space, "prefill_tokens_s")
        texts = [text_of(space, name) for name in ("label", "layout", "tenant")]
        computes = f"{many(rate)} tok/s" if rate else "-"
        rows.append([*texts, count("chunks"), count("sessions"), computes])
    return rows


def gates(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate what the last look-up that found something slow made of loading it."""
    rows = [["NAMESPACE", "LOAD OR COMPUTE, WEIGHED LAST"]]
    for space in rows_of(stats, "spaces"):
        why = text_of(space, "gate")
        if why:
            rows.append([text_of(space, "label"), why])
    return rows


def peers(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate the peers: how each is, how fast, what is under way, what was refused."""
    rows = [["PEER", "STATE", "EPOCH", "RATE", "IN FLIGHT", "FETCHED", "REFUSED", "QUARANTINED"]]
    for peer in list_of(map_of(stats, "peer"), "peers"):
        if isinstance(peer, dict):
            count, size = getters(peer)
            refused = sum(number_of(peer, name) for name in ("refused", "corrupt", "turned_down"))
            rows.append(
                [
                    text_of(peer, "host"),
                    text_of(peer, "state"),
                    f"{int(number_of(peer, 'epoch')) % 10**6:06d}",
                    f"{size('bytes_s')}/s",
                    size("in_flight_bytes"),
                    f"{count('chunks')}, {size('bytes')}, {count('spare')} spare",
                    f"{refused:,.0f}",
                    f"{size('quarantined_bytes')}, {count('fenced')} fenced",
                ]
            )
    return rows
