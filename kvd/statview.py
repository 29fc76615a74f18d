"""Statistics for people and for programs: `kvd stat`.

Whatever the page holds is shown as far as it makes sense: a field that is missing or of another
type is left out or 0, because the daemon may be older or newer than this command.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from kvd import statpage
from kvd.health import SILENT_S
from kvd.sizes import about
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.statpage import Snapshot

ROWS_MAX = 8
CELL_CHARS_MAX = 28
REASON_CHARS_MAX = 60

EXIT_OK, EXIT_NO_DAEMON, EXIT_SILENT = 0, 1, 3

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def run(socket: str, *, as_json: bool, watch_s: float | None) -> int:
    """Show the statistics of the daemon at a socket, once or until Ctrl-C; return the exit code."""
    if watch_s is None:
        return _show(socket, as_json=as_json, clear=False)
    on_screen = sys.stdout.isatty() and not as_json
    try:
        while True:
            _show(socket, as_json=as_json, clear=on_screen)
            if not on_screen and not as_json:
                sys.stdout.write("\n")
            sys.stdout.flush()
            time.sleep(watch_s)
    except KeyboardInterrupt:
        return EXIT_OK


def _show(socket: str, *, as_json: bool, clear: bool) -> int:
    try:
        snapshot = statpage.read(stat_page_name(socket))
    except statpage.NoStatPage as error:
        text = f"kvd: {_clean(socket)}: {error}\n"
        if clear:
            sys.stdout.write("\x1b[H\x1b[J" + text)
        else:
            sys.stderr.write(text)
        return EXIT_NO_DAEMON
    if as_json:
        text = _json(snapshot) + "\n"
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        text = render(snapshot, colours=colours) + "\n"
    sys.stdout.write("\x1b[H\x1b[J" + text if clear else text)
    if not snapshot.alive:
        return EXIT_NO_DAEMON
    hangs = bool(_list(snapshot.stats, "late"))
    return EXIT_SILENT if hangs or snapshot.age_s > SILENT_S else EXIT_OK


def _json(snapshot: Snapshot) -> str:
    import json

    page = {
        "age_s": round(snapshot.age_s, 3),
        "pid": snapshot.pid,
        "alive": snapshot.alive,
        "stopped": snapshot.stopped,
    }
    return json.dumps({**snapshot.stats, "page": page})


def render(snapshot: Snapshot, *, colours: bool = False) -> str:
    """Return the table: some 25 lines, 10 more with an NVMe tier."""

    def paint(how: str, text: str) -> str:
        return f"\x1b[{_SGR[how]}m{text}\x1b[0m" if colours and text else text

    stats = snapshot.stats
    lines = [_title(snapshot, paint), *_warnings(snapshot, paint), ""]
    for name, text in _figures(stats):
        lines.append(f"{paint('bold', f'{name:<10}')}{text}")
    for table in (_tenants(stats), _sessions(stats), _spaces(stats)):
        lines += _aligned(table, paint)
    if _map(stats, "nvme"):
        lines += _aligned(_gates(stats), paint, REASON_CHARS_MAX)
    if _map(stats, "peer"):
        lines += _aligned(_peers(stats), paint, REASON_CHARS_MAX)
    return "\n".join(lines)


def _title(snapshot: Snapshot, paint: Callable[[str, str], str]) -> str:
    stats = snapshot.stats
    state = _text(stats, "state") or "state unknown"
    return "  ".join(
        [
            paint("bold", f"kvd {_text(stats, 'version')}".strip()),
            paint("green" if state == "serving" else "yellow", state),
            _text(stats, "socket"),
            f"pid {snapshot.pid}",
            f"up {_duration(_number(stats, 'uptime_s'))}",
            paint("dim", f"page {snapshot.age_s:.1f} s old"),
        ]
    )


def _warnings(snapshot: Snapshot, paint: Callable[[str, str], str]) -> Iterator[str]:
    age = _duration(snapshot.age_s)
    if not snapshot.alive:
        yield paint(
            "red", f"no daemon: process {snapshot.pid} is gone; its last figures, {age} old:"
        )
    elif snapshot.stopped:
        yield paint(
            "red", f"daemon is stopped: page is {age} old; go on with kill -CONT {snapshot.pid}"
        )
    elif snapshot.age_s > SILENT_S:
        yield paint(
            "red", f"daemon does not answer: page is {age} old; process {snapshot.pid} is alive"
        )
    for name in _list(snapshot.stats, "late"):
        yield paint("red", f"daemon's task {_clean(name)} hangs: systemd will start it anew")
    for note in _list(_map(snapshot.stats, "host"), "notes"):
        yield paint("yellow", f"note: {_clean(note)}")
    nvme = _map(snapshot.stats, "nvme")
    if note := _text(nvme, "note"):
        yield paint("yellow", f"note: {note}")
    state = _text(nvme, "state")
    if state not in {"", "open"}:
        yield paint("yellow", f"note: NVMe takes nothing in: it is {state}")


def _figures(stats: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _host(_map(stats, "host"))
    nvme = _map(stats, "nvme")
    if nvme:
        yield from _nvme(nvme)
    gpu = _map(stats, "gpu")
    if gpu:
        yield from _gpu(gpu)
    directory = _map(stats, "directory")
    if directory:
        yield from _directory(directory)
    peer = _map(stats, "peer")
    if peer:
        yield from _peer(peer)
    count, _ = _getters(stats)
    now = (
        f"{count('chunks')} chunks in {len(_list(stats, 'spaces'))} spaces,"
        f" {count('leases')} leases ({count('leases_overdue')} overdue),"
        f" {count('orphans')} orphans"
    )
    yield "cache", now
    counters = _map(stats, "counters")
    yield from _traffic(counters, gated=bool(nvme))
    if nvme:
        yield from _moves(counters)
    so_far, _ = _getters(counters)
    sessions = (
        f"{count('session_count')} now, {so_far('sessions')} so far,"
        f" {so_far('sessions_refused')} refused, {so_far('sessions_ended_badly')} ended badly"
    )
    yield "sessions", sessions
    lag_ms = _number(stats, "loop_lag_ms")
    yield "loop", f"{so_far('messages')} messages, {lag_ms:.1f} ms behind"


def _traffic(counters: dict[str, Any], *, gated: bool) -> Iterator[tuple[str, str]]:
    count, size = _getters(counters)
    asked = _number(counters, "lookup_chunks_asked")
    found = _number(counters, "lookup_chunks_found")
    rate = f"hit rate {100 * found / asked:.1f} % of {asked:,.0f} chunks" if asked else "none asked"
    if gated and found:
        rate += f"; {count('lookup_chunks_worth')} of {found:,.0f} found worth loading"
    yield "lookups", f"{count('lookups')}, {rate}"
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
    reasons = _map(counters, "evictions")
    by_reason = ", ".join(f"{_number(reasons, why):,.0f} {_clean(why)}" for why in reasons)
    yield "evicted", f"{size('bytes_evicted')} in objects: {by_reason}" if by_reason else "nothing"


def _host(host: dict[str, Any]) -> Iterator[tuple[str, str]]:
    _, size = _getters(host)
    capacity = _number(host, "capacity_bytes")
    held, blank = (_number(host, name) for name in ("slabs_held", "slabs_blank"))
    slabs = f"{held:.0f} of {held + blank:.0f} slabs of {size('slab_bytes')} held"
    yield "host", f"{_bar(host)}; {slabs}"
    # "Filling" is one word for one thing, here and in the table of tenants: reserved and
    # quarantined, which is what the limit on it counts.
    filling = _number(host, "reserved_bytes") + _number(host, "quarantined_bytes")
    contents = (
        f"published {size('published_bytes')}, filling {about(filling)}"
        f" ({size('quarantined_bytes')} of it quarantined), pinned {size('pinned_bytes')}"
    )
    yield "", contents
    ready = _number(host, "ready_bytes")
    warming = f"; {about(ready)} ready so far" if ready < capacity else ""
    yield "", f"locked {size('locked_bytes')}, in huge pages {size('huge_bytes')}{warming}"


def _peer(peer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = _getters(peer)
    serves = (
        f"{_text(peer, 'host')} at {_text(peer, 'address')}, {_text(peer, 'transport')}, source"
        f" {_text(peer, 'source')}; serves {count('served_hosts')} hosts,"
        f" {size('held_bytes')} held for them, {count('offered')} chunks offered"
    )
    yield "peers", serves
    refused = sum(_number(_map(peer, "asks_refused"), why) for why in _map(peer, "asks_refused"))
    bad = (
        f"{size('quarantined_bytes')} quarantined; refused {refused:,.0f} asks,"
        f" {count('connections_refused')} connections; {count('waiting')} wait"
    )
    yield "", bad


def _peers(stats: dict[str, Any]) -> list[list[str]]:
    """One row a peer: how it is, how fast, what is under way, what was refused."""
    rows = [["peer", "state", "epoch", "rate", "in flight", "fetched", "refused", "quarantined"]]
    for peer in _list(_map(stats, "peer"), "peers"):
        if isinstance(peer, dict):
            count, size = _getters(peer)
            refused = sum(_number(peer, name) for name in ("refused", "corrupt", "turned_down"))
            rows.append(
                [
                    _text(peer, "host"),
                    _text(peer, "state"),
                    f"{int(_number(peer, 'epoch')) % 10**6:06d}",
                    f"{size('bytes_s')}/s",
                    size("in_flight_bytes"),
                    f"{count('chunks')}, {size('bytes')}",
                    f"{refused:,.0f}",
                    f"{size('quarantined_bytes')}, {count('fenced')} fenced",
                ]
            )
    return rows


def _directory(directory: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, _ = _getters(directory)
    so_far, _ = _getters(_map(directory, "counters"))
    late = f"{so_far('lookups_late')} late, {so_far('lookups_shut')} while shut"
    asked = f"found {so_far('chunks_found')} of {so_far('chunks_asked')} chunks asked for, {late}"
    yield "directory", f"{_text(directory, 'state')}, {count('hosts')} hosts; {asked}"
    told = f"told {so_far('told')}, withdrew {so_far('withdrawn')}, {so_far('dropped')} dropped"
    yield "", f"{told}; {count('waiting')} waiting; {so_far('wrong')} hints were wrong"


def _nvme(nvme: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = _getters(nvme)
    direct = "direct I/O" if nvme.get("direct") is True else "through the page cache"
    yield "nvme", f"{_bar(nvme)}; {_text(nvme, 'state')}, form {_text(nvme, 'form')}, {direct}"
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
    count, size = _getters(counters)
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
    written = _number(counters, "bytes_written") + _number(counters, "bytes_rewritten")
    read = _number(counters, "bytes_read")
    wear = f"{written / read:.2f} bytes written for each one read" if read else "nothing read yet"
    kept = f"{size('bytes_rewritten')} rewritten, {size('bytes_cold_dropped')} given up for room"
    yield "wear", f"{wear}; {kept}"


def _gpu(gpu: dict[str, Any]) -> Iterator[tuple[str, str]]:
    count, size = _getters(gpu)
    yield "gpu", f"{_bar(gpu)}; {_text(gpu, 'state')}, {count('objects')} objects"
    yield "", f"{size('bytes_down')} down, {size('bytes_up')} up, {count('lost')} stores lost"
    if note := _text(gpu, "note"):
        yield "", note


def _bar(tier: dict[str, Any]) -> str:
    """Draw how full a tier is."""
    capacity, used = _number(tier, "capacity_bytes"), _number(tier, "used_bytes")
    part = min(1.0, used / capacity) if capacity else 0.0
    bar = "#" * round(20 * part) + "." * (20 - round(20 * part))
    return f"[{bar}] {100 * part:.0f} %, {about(used)} of {about(capacity)}"


def _tenants(stats: dict[str, Any]) -> list[list[str]]:
    rows = [["TENANT", "SESSIONS", "SHARE", "HELD", "PUBLISHED", "PINNED", "FILLING"]]
    for tenant in _rows(stats, "tenants"):
        count, size = _getters(tenant)
        sizes = ("share", "held", "published", "pinned", "filling")
        cells = [size(f"{name}_bytes") for name in sizes]
        rows.append([_text(tenant, "name"), count("sessions"), *cells])
    return rows


def _sessions(stats: dict[str, Any]) -> list[list[str]]:
    rows = [["SESSION", "PID", "RANK", "LEASES", "FILLING", "TENANT", "CLIENT", "LABEL"]]
    for session in _rows(stats, "sessions"):
        cells = [_id(session, name) for name in ("id", "pid", "rank", "leases", "filling")]
        rows.append([*cells, *(_text(session, name) for name in ("tenant", "name", "label"))])
    return rows


def _spaces(stats: dict[str, Any]) -> list[list[str]]:
    rows = [["SPACE", "CHUNKS", "SESSIONS", "TENANT", "LAYOUT"]]
    for space in _rows(stats, "spaces"):
        count, _ = _getters(space)
        texts = [_text(space, name) for name in ("label", "tenant", "layout")]
        rows.append([texts[0], count("chunks"), count("sessions"), *texts[1:]])
    return rows


def _gates(stats: dict[str, Any]) -> list[list[str]]:
    """Tabulate how fast engines say they compute, and what the last look-up made of it."""
    rows = [["SPACE", "TOKENS/S", "LOAD OR COMPUTE"]]
    for space in _rows(stats, "spaces"):
        rate = _number(space, "prefill_tokens_s")
        rows.append([_text(space, "label"), f"{rate:,.0f}" if rate else "-", _text(space, "gate")])
    return rows


def _aligned(
    rows: list[list[str]], paint: Callable[[str, str], str], last_chars: int = CELL_CHARS_MAX
) -> Iterator[str]:
    """Lay out a table, its longer part left to --json; columns of numbers to the right."""
    if len(rows) == 1:
        return
    more = len(rows) - 1 - ROWS_MAX
    rows = [
        [*(_cut(cell) for cell in row[:-1]), _cut(row[-1], last_chars)]
        for row in rows[: ROWS_MAX + 1]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(map(_is_amount, column[1:])) for column in zip(*rows, strict=True)]
    yield ""
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        yield paint("bold", line) if number == 0 else line
    if more > 0:
        yield paint("dim", f"and {more} more; --json shows them")


def _is_amount(cell: str) -> bool:
    """Tell a number, perhaps with a unit, from a text."""
    return cell == "-" or (cell[:1].isdigit() and cell.count(" ") <= 1)


def _cut(cell: str, chars: int = CELL_CHARS_MAX) -> str:
    return cell if len(cell) <= chars else cell[: chars - 2] + ".."


def _getters(values: dict[str, Any]) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return two ways to read a map: as a count, and as a size."""
    return (
        lambda name: f"{_number(values, name):,.0f}",
        lambda name: about(_number(values, name)),
    )


def _number(values: dict[str, Any], name: str) -> float:
    """Return a number to count or compute with: none of them can be below 0 or beyond 64 bits."""
    value = values.get(name)
    return value if isinstance(value, int | float) and 0 <= value < 1 << 64 else 0


def _id(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return str(value) if isinstance(value, int) else "-"


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return _clean(value) if isinstance(value, str | int | float) else ""


def _clean(value: object) -> str:
    """Keep a client's text from steering the terminal."""
    return "".join(char if char.isprintable() else "?" for char in str(value))


def _map(values: dict[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _list(values: dict[str, Any], name: str) -> Sequence[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []


def _rows(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in _list(values, name) if isinstance(row, dict)]


def _duration(seconds: float) -> str:
    """Return a time to read: the two largest units."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s"
