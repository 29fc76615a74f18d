"""The status page: HTML from a snapshot and the last hour. Pure, no script, every text escaped.

A browser gets a document and one style sheet, both from here. It loads itself anew every five
seconds. Whatever the page in shared memory holds is shown as far as it makes sense.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from kvd.http import charts
from kvd.measures import TIERS
from kvd.sizes import about

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.health import Health
    from kvd.http.history import History
    from kvd.statpage import Snapshot

REFRESH_S: Final = 5
ROWS_MAX: Final = 16
_WORDS: Final = {"ok": "all is well", "degraded": "degraded", "failing": "failing"}
_HEAD: Final = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvd</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_S}">
<link rel="stylesheet" href="/style.css"></head><body>
"""
_FOOT: Final = """<footer>Loads itself anew every 5 s, and runs no script. The same as
<a href="/metrics">metrics for Prometheus</a>, <a href="/stat.json">JSON</a> and
<a href="/health">health</a>.</footer></body></html>
"""


def render(snapshot: Snapshot | None, health: Health, history: History, now_s: float) -> str:
    """Return the whole document."""
    parts = [_HEAD, _header(snapshot, health)]
    if snapshot is not None:
        stats = snapshot.stats
        parts += [
            _tiles(stats, history, now_s),
            *_tiers(stats),
            charts.section(history, now_s),
            _tenants(stats),
            _spaces(stats),
        ]
    return "".join([*parts, _FOOT])


def _header(snapshot: Snapshot | None, health: Health) -> str:
    stats = snapshot.stats if snapshot else {}
    facts = []
    if snapshot is not None:
        facts = [
            f"version {_text(stats, 'version')}",
            f"process {snapshot.pid}",
            f"up {_duration(_number(stats, 'uptime_s'))}",
            _counted(_number(stats, "session_count"), "session"),
            _counted(_number(stats, "leases"), "lease"),
            f"figures {snapshot.age_s:.1f} s old",
        ]
    why = "".join(f"<li>{_clean(line)}</li>" for line in health.why[:ROWS_MAX])
    return (
        f'<header><h1>kvd</h1><p class="socket">{_text(stats, "socket")}</p>'
        f'<p class="health {health.level}" id="health">{_WORDS[health.level]}</p></header>'
        f'<p class="facts">{" · ".join(facts)}</p>'
        + (f'<ul class="why {health.level}">{why}</ul>' if why else "")
    )


def _tiles(stats: dict[str, Any], history: History, now_s: float) -> str:
    tenants = _rows(stats, "tenants")
    asked = sum(_number(row, "asked_tokens") for row in tenants)
    hit = sum(_hits(row) for row in tenants)
    recent = sum(history.recent(f"hit_{tier}", now_s) for tier in TIERS)
    asked_now = history.recent("asked", now_s)
    tiles = [
        (
            "Hit rate",
            f"{100 * recent / asked_now:.0f} %" if asked_now else "no look-ups",
            f"of tokens, last minute; {100 * hit / asked:.1f} % since the start" if asked else "",
        ),
        ("Reused", f"{recent:,.0f} tok/s", f"{hit:,.0f} tokens since the start"),
        (
            "Loaded by engines",
            f"{about(history.recent('loaded', now_s))}/s",
            f"{about(_number(_map(stats, 'counters'), 'bytes_acquired'))} since the start",
        ),
        (
            "Stored by engines",
            f"{about(history.recent('stored', now_s))}/s",
            f"{about(_number(_map(stats, 'counters'), 'bytes_published'))} since the start",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><h2>{title}</h2><p class="big">{big}</p><p>{small}</p></div>'
        for title, big, small in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _hits(row: dict[str, Any], what: str = "hit_tokens") -> float:
    """Sum what a tenant or a namespace got, over all tiers."""
    return sum(_number(_map(row, what), tier) for tier in TIERS)


def _rate(row: dict[str, Any]) -> str:
    asked = _number(row, "asked_tokens")
    return f"{100 * _hits(row) / asked:.1f} %" if asked else "-"


def _tiers(stats: dict[str, Any]) -> Iterator[str]:
    yield "<section><h2>Tiers</h2>"
    gpu = _map(stats, "gpu")
    if gpu:
        pinned = min(_number(gpu, "pinned_bytes"), _number(gpu, "used_bytes"))
        yield _tier(
            f"GPU memory{_state(gpu)}",
            _number(gpu, "capacity_bytes"),
            [
                ("gpu", "published", _number(gpu, "used_bytes") - pinned),
                ("pinned", "held by leases", pinned),
            ],
            f"{_number(gpu, 'objects'):,.0f} objects; {_number(gpu, 'rising'):.0f} on their way up,"
            f" {_number(gpu, 'falling'):.0f} down",
        )
    host = _map(stats, "host")
    filling = _number(host, "reserved_bytes")
    pinned = min(_number(host, "pinned_bytes"), _number(host, "published_bytes"))
    yield _tier(
        "Host memory",
        _number(host, "capacity_bytes"),
        [
            ("host", "published", _number(host, "published_bytes") - pinned),
            ("pinned", "held by leases", pinned),
            ("filling", "being filled", filling),
            ("bad", "in quarantine", _number(host, "quarantined_bytes")),
        ],
        f"{_number(host, 'slabs_held'):.0f} slabs of {about(_number(host, 'slab_bytes'))} held",
    )
    nvme = _map(stats, "nvme")
    if nvme:
        note = (
            f"{_number(nvme, 'live_count'):,.0f} chunks, form {_text(nvme, 'form')};"
            f" queued {_number(nvme, 'reads_queued'):.0f} reads,"
            f" {_number(nvme, 'writes_queued'):.0f} writes;"
            f" reads {about(_number(nvme, 'read_bytes_per_s'))}/s,"
            f" writes {about(_number(nvme, 'write_bytes_per_s'))}/s;"
            f" {about(_number(nvme, 'dirty_bytes'))} still to write"
        )
        yield _tier(
            f"NVMe{_state(nvme)}",
            _number(nvme, "capacity_bytes"),
            [
                ("nvme", "live", _number(nvme, "live_bytes")),
                ("garbage", "garbage", _number(nvme, "garbage_bytes")),
            ],
            note,
        )
    yield "</section>"


def _state(tier: dict[str, Any]) -> str:
    """Mark a tier that does not take part fully."""
    state = _text(tier, "state")
    return "" if state in {"open", ""} else f' <span class="slow">{state}</span>'


def _tier(name: str, capacity: float, parts: list[tuple[str, str, float]], note: str) -> str:
    used = sum(size for _, _, size in parts)
    share = min(1.0, used / capacity) if capacity else 0.0
    legend = "".join(
        f'<li><span class="key {kind}"></span>{label} {about(size)}</li>'
        for kind, label, size in parts
        if size
    )
    return (
        f'<div class="tier"><h3>{name}<span class="of">{about(used)} of {about(capacity)},'
        f" {100 * share:.0f} %</span></h3>{charts.bar(capacity, parts)}"
        f'<ul class="legend">{legend}<li class="note">{note}</li></ul></div>'
    )


def _tenants(stats: dict[str, Any]) -> str:
    head = ["Tenant", "Sessions", "Held", "of its share", "Pinned", "Filling", "Hit rate", "Loaded"]
    rows = []
    for row in _rows(stats, "tenants"):
        share, held = _number(row, "share_bytes"), _number(row, "held_bytes")
        rows.append(
            [
                _text(row, "name"),
                f"{_number(row, 'sessions'):.0f}",
                about(held),
                f"{100 * held / share:.0f} %" if share else "-",
                about(_number(row, "pinned_bytes")),
                about(_number(row, "filling_bytes")),
                _rate(row),
                about(_hits(row, "hit_bytes")),
            ]
        )
    return _table("Tenants", head, rows)


def _spaces(stats: dict[str, Any]) -> str:
    rows = []
    for row in _rows(stats, "spaces"):
        rate = _number(row, "prefill_tokens_s")
        rows.append(
            [
                _text(row, "label") or "-",
                _text(row, "tenant"),
                _text(row, "layout"),
                f"{_number(row, 'chunks'):,.0f}",
                f"{_number(row, 'sessions'):.0f}",
                _rate(row),
                about(_hits(row, "hit_bytes")),
                f"{rate:,.0f}" if rate else "-",
                _text(row, "gate") or "-",
            ]
        )
    head = ["Namespace", "Tenant", "Layout", "Chunks", "Sessions", "Hit rate", "Loaded"]
    return _table("Namespaces", [*head, "Prefill tok/s", "Last weighed"], rows)


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    more = len(rows) - ROWS_MAX
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[:ROWS_MAX]
    )
    note = (
        f'<p class="note">and {more} more, in <a href="/stat.json">JSON</a></p>' if more > 0 else ""
    )
    return (
        f"<section><h2>{title}</h2><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table>{note}</section>"
    )


def _number(values: dict[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1 << 64 else 0.0


def _text(values: dict[str, Any], name: str) -> str:
    """Return a text, escaped, and without what could steer its line."""
    return _clean(str(values.get(name, ""))[:120])


def _clean(text: str) -> str:
    return escape("".join(char if char.isprintable() else "?" for char in text))


def _counted(count: float, one: str) -> str:
    return f"{count:,.0f} {one}{'' if count == 1 else 's'}"


def _map(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _rows(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = values.get(name)
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _duration(seconds: float) -> str:
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds) % 60} s"
