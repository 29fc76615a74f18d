"""Statistics for people and for programs: `kvd stat`.

Whatever the page holds is shown as far as it makes sense: a field that is missing or of another
type is left out or 0, because the daemon may be older or newer than this command.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from kvd import statpage, stattables
from kvd.health import SILENT_S
from kvd.sizes import about
from kvd.statfields import getters, list_of, map_of, number_of, text_of
from kvd.tables import aligned, clean, duration, folded
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.statpage import Snapshot

ROWS_MAX = 8
REASON_CHARS_MAX = 60
COLUMNS = 80
NAME_CHARS = 10
_MEANS = {"clean": " (still on NVMe)", "capacity": " (lost, for room)"}
"""What becomes of an object that leaves host memory, where the reason's name is not enough."""

EXIT_OK, EXIT_NO_DAEMON, EXIT_SILENT = 0, 1, 3

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def run(socket: str, *, as_json: bool, watch_s: float | None) -> int:
    """Show the statistics of the daemon at a socket, once or until Ctrl-C; return the exit code."""
    if watch_s is None:
        return _show(socket, as_json=as_json)
    if sys.stdout.isatty() and not as_json:
        return _watch(socket, watch_s)
    try:
        while True:
            _show(socket, as_json=as_json)
            if not as_json:
                sys.stdout.write("\n")
            sys.stdout.flush()
            time.sleep(watch_s)
    except KeyboardInterrupt:
        return EXIT_OK


def _watch(socket: str, watch_s: float) -> int:
    """Show a live screen."""
    from kvd import watch

    def look() -> Snapshot | str:
        try:
            return statpage.read(stat_page_name(socket))
        except statpage.NoStatPage as error:
            return f"kvd: {clean(socket)}: {error}"

    blocks = watch.BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else watch.PLAIN
    return watch.run(look, watch_s, colours=not os.environ.get("NO_COLOR"), blocks=blocks)


def _show(socket: str, *, as_json: bool) -> int:
    try:
        snapshot = statpage.read(stat_page_name(socket))
    except statpage.NoStatPage as error:
        sys.stderr.write(f"kvd: {clean(socket)}: {error}\n")
        return EXIT_NO_DAEMON
    if as_json:
        sys.stdout.write(_json(snapshot) + "\n")
    else:
        on_terminal = sys.stdout.isatty()
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if on_terminal else COLUMNS
        colours = on_terminal and not os.environ.get("NO_COLOR")
        sys.stdout.write(render(snapshot, colours=colours, columns=max(COLUMNS, columns)) + "\n")
    if not snapshot.alive:
        return EXIT_NO_DAEMON
    hangs = snapshot.age_s > SILENT_S or list_of(snapshot.stats, "late")
    return EXIT_SILENT if hangs else EXIT_OK


def _json(snapshot: Snapshot) -> str:
    import json

    page = {
        "age_s": round(snapshot.age_s, 3),
        "pid": snapshot.pid,
        "alive": snapshot.alive,
        "stopped": snapshot.stopped,
    }
    return json.dumps({**snapshot.stats, "page": page})


def render(snapshot: Snapshot, *, colours: bool = False, columns: int = COLUMNS) -> str:
    """Return the screen: some 25 lines, 10 more with an NVMe tier; by itself 80 columns wide."""

    def paint(how: str, text: str) -> str:
        return f"\x1b[{_SGR[how]}m{text}\x1b[0m" if colours and text else text

    stats = snapshot.stats
    lines = [_title(snapshot, paint)]
    for style, text in warnings(snapshot):
        lines += [paint(style, line) for line in folded(text, columns)]
    lines += [*_listed(stattables.tiers(stats), paint, columns), ""]
    for name, text in _figures(stats):
        first, *more = folded(text, columns - NAME_CHARS)
        lines.append(f"{paint('bold', f'{name:<{NAME_CHARS}}')}{first}")
        lines += [" " * NAME_CHARS + line for line in more]
    tables = [
        stattables.tenants(stats),
        stattables.usage(stats, "tenants", "name"),
        stattables.usage(stats, "spaces", "label"),
        stattables.spaces(stats),
        stattables.sessions(stats),
    ]
    if map_of(stats, "nvme"):
        tables.append(stattables.gates(stats))
    if map_of(stats, "peer"):
        tables.append(stattables.peers(stats))
    for table in tables:
        lines += _listed(table, paint, columns)
    return "\n".join(lines)


def _title(snapshot: Snapshot, paint: Callable[[str, str], str]) -> str:
    stats = snapshot.stats
    state = text_of(stats, "state") or "state unknown"
    return "  ".join(
        [
            paint("bold", f"kvd {text_of(stats, 'version')}".strip()),
            paint("green" if state == "serving" else "yellow", state),
            f"pid {snapshot.pid}",
            f"up {duration(number_of(stats, 'uptime_s'))}",
            paint("dim", f"page {snapshot.age_s:.1f} s old"),
            text_of(stats, "socket"),
        ]
    )


def warnings(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield what the operator should see first, as (colour, text)."""
    age = duration(snapshot.age_s)
    pid = snapshot.pid
    if not snapshot.alive:
        yield "red", f"no daemon: process {pid} is gone; its last figures, {age} old:"
    elif snapshot.stopped:
        yield "red", f"daemon is stopped: page is {age} old; go on with kill -CONT {pid}"
    elif snapshot.age_s > SILENT_S:
        yield "red", f"daemon does not answer: page is {age} old; process {pid} is alive"
    for name in list_of(snapshot.stats, "late"):
        yield "red", f"daemon's {clean(name)} hangs or has died: systemd will start it anew"
    for note in list_of(map_of(snapshot.stats, "host"), "notes"):
        yield "yellow", f"note: {clean(note)}"
    nvme = map_of(snapshot.stats, "nvme")
    if note := text_of(nvme, "note"):
        yield "yellow", f"note: {note}"
    state = text_of(nvme, "state")
    if state not in {"", "open"}:
        yield "yellow", f"note: NVMe takes nothing in: it is {state}"


def _figures(stats: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _host(map_of(stats, "host"))
    nvme = map_of(stats, "nvme")
    if nvme:
        yield from _nvme(nvme)
    gpu = map_of(stats, "gpu")
    if gpu:
        yield from _gpu(gpu)
    directory = map_of(stats, "directory")
    if directory:
        yield from _directory(directory)
    peer = map_of(stats, "peer")
    if peer:
        yield from _peer(peer)
    count, _ = getters(stats)
    now = (
        f"{count('chunks')} chunks in {len(list_of(stats, 'spaces'))} namespaces,"
        f" {count('leases')} leases ({count('leases_overdue')} overdue),"
        f" {count('orphans')} orphans"
    )
    yield "cache", now
    counters = map_of(stats, "counters")
    yield from _traffic(counters, gated=bool(nvme))
    if nvme:
        yield from _moves(counters)
    so_far, _ = getters(counters)
    sessions = (
        f"{count('session_count')} now, {so_far('sessions')} so far,"
        f" {so_far('sessions_refused')} refused, {so_far('sessions_ended_badly')} ended badly"
    )
    yield "sessions", sessions
    lag_ms = number_of(stats, "loop_lag_ms")
    yield "loop", f"{so_far('messages')} messages, {lag_ms:.1f} ms behind"


def _traffic(counters: dict[str, Any], *, gated: bool) -> Iterator[tuple[str, str]]:
    count, size = getters(counters)
    asked = number_of(counters, "lookup_chunks_asked")
    found = number_of(counters, "lookup_chunks_found")
    part = f"{found:,.0f} ({100 * found / asked:.1f} %) of {asked:,.0f}" if asked else "none"
    worth = f"; {count('lookup_chunks_worth')} worth loading" if gated and found else ""
    yield "lookups", f"{count('lookups')}; chunks found {part}{worth}"
    reads = (
        f"{size('bytes_acquired')} in {count('chunks_acquired')} chunks,"
        f" {count('acquires')} leases;"
        f" {count('acquires_missed')} missed, {count('acquires_over_quota')} cut by quota"
    )
    yield "reads", reads
    writes = (
        f"{size('bytes_published')} in {count('objects_published')} of"
        f" {count('objects_reserved')} objects reserved;"
        f" {count('reserves_refused')} refused, {count('reserves_expired')} expired"
    )
    yield "writes", writes
    reasons = map_of(counters, "evictions")
    by_reason = ", ".join(
        f"{number_of(reasons, why):,.0f} {clean(why)}{_MEANS.get(why, '')}" for why in reasons
    )
    yield "evicted", f"{size('bytes_evicted')} in objects; {by_reason}" if by_reason else "nothing"


def _host(host: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = getters(host)
    capacity = number_of(host, "capacity_bytes")
    held, blank = (number_of(host, name) for name in ("slabs_held", "slabs_blank"))
    slabs = f"{held:.0f} of {held + blank:.0f} slabs of {size('slab_bytes')} held"
    yield "host", f"{_bar(host)}; {slabs}"
    # "Filling" is one word for one thing, here and in the table of tenants: reserved and
    # quarantined, which is what the limit on it counts.
    filling = number_of(host, "reserved_bytes") + number_of(host, "quarantined_bytes")
    contents = (
        f"published {size('published_bytes')}, filling {about(filling)}"
        f" ({size('quarantined_bytes')} of it quarantined), pinned {size('pinned_bytes')}"
    )
    yield "", contents
    ready = number_of(host, "ready_bytes")
    warming = f"; {about(ready)} ready so far" if ready < capacity else ""
    yield "", f"locked {size('locked_bytes')}, in huge pages {size('huge_bytes')}{warming}"
    if (verify := text_of(host, "verify")) not in {"", "off"}:
        checked = (
            f"verified {verify}: {count('summed')} objects summed, {count('verified')} checked,"
            f" {count('differed')} differed ({size('damaged_bytes')} out of use for good)"
        )
        yield "", checked


def _peer(peer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = getters(peer)
    serves = (
        f"{text_of(peer, 'host')} at {text_of(peer, 'address')}, {text_of(peer, 'transport')},"
        f" source {text_of(peer, 'source')}; serves {count('served_hosts')} hosts,"
        f" {size('held_bytes')} held for them, {count('offered')} chunks offered"
    )
    yield "peers", serves
    refused = sum(
        number_of(map_of(peer, "asks_refused"), why) for why in map_of(peer, "asks_refused")
    )
    bad = (
        f"{size('quarantined_bytes')} quarantined; refused {refused:,.0f} asks,"
        f" {count('connections_refused')} connections; {count('waiting')} wait"
    )
    yield "", bad


def _directory(directory: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, _ = getters(directory)
    so_far, _ = getters(map_of(directory, "counters"))
    late = f"{so_far('lookups_late')} late, {so_far('lookups_shut')} while shut"
    asked = f"found {so_far('chunks_found')} of {so_far('chunks_asked')} chunks asked for, {late}"
    yield "directory", f"{text_of(directory, 'state')}, {count('hosts')} hosts; {asked}"
    told = f"told {so_far('told')}, withdrew {so_far('withdrawn')}, {so_far('dropped')} dropped"
    yield "", f"{told}; {count('waiting')} waiting; {so_far('wrong')} hints were wrong"


def _nvme(nvme: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = getters(nvme)
    direct = "direct I/O" if nvme.get("direct") is True else "through the page cache"
    yield "nvme", f"{_bar(nvme)}; {text_of(nvme, 'state')}, form {text_of(nvme, 'form')}, {direct}"
    contents = (
        f"live {size('live_bytes')} in {count('live_count')} chunks,"
        f" garbage {size('garbage_bytes')}; still to write {size('dirty_bytes')}"
    )
    yield "", contents
    queues = (
        f"queued {count('reads_queued')} reads, {count('writes_queued')} writes,"
        f" {count('index_queued')} commits;"
        f" reading {size('read_bytes_per_s')}/s, writing {size('write_bytes_per_s')}/s"
    )
    yield "", queues


def _moves(counters: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Say what went down and up, before and after its cold form, and what that cost the flash."""
    count, size = getters(counters)
    down = (
        f"{size('bytes_demoted')} in {count('demotions')} chunks, as {size('bytes_written')}"
        f" on disk; {count('demotions_failed')} failed,"
        f" {count('chunks_not_admitted')} not admitted"
    )
    yield "demoted", down
    up = (
        f"{size('bytes_promoted')} in {count('promotions')} chunks, from {size('bytes_read')}"
        f" on disk; {count('promotions_failed')} failed"
    )
    yield "promoted", up
    written = number_of(counters, "bytes_written") + number_of(counters, "bytes_rewritten")
    read = number_of(counters, "bytes_read")
    wear = f"{written / read:.2f} bytes written for each one read" if read else "nothing read yet"
    kept = f"{size('bytes_rewritten')} rewritten, {size('bytes_cold_dropped')} given up for room"
    yield "wear", f"{wear}; {kept}"


def _gpu(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = getters(gpu)
    yield "gpu", f"{_bar(gpu)}; {text_of(gpu, 'state')}, {count('objects')} objects"
    yield "", f"{size('bytes_down')} down, {size('bytes_up')} up, {count('lost')} stores lost"
    if note := text_of(gpu, "note"):
        yield "", note


def _bar(tier: dict[str, Any]) -> str:
    """Draw how full a tier is."""
    capacity, used = number_of(tier, "capacity_bytes"), number_of(tier, "used_bytes")
    part = min(1.0, used / capacity) if capacity else 0.0
    bar = "#" * round(20 * part) + "." * (20 - round(20 * part))
    return f"[{bar}] {100 * part:.0f} %, {about(used)} of {about(capacity)}"


def _listed(rows: list[list[str]], paint: Callable[[str, str], str], columns: int) -> Iterator[str]:
    """Lay out a table, its longer part left to --json."""
    if len(rows) == 1:
        return
    more = len(rows) - 1 - ROWS_MAX
    yield ""
    yield from aligned(rows[: ROWS_MAX + 1], paint, REASON_CHARS_MAX, columns)
    if more > 0:
        yield paint("dim", f"and {more} more; --json shows them")
