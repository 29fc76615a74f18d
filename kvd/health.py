"""How a daemon is, judged from its statistics page alone: ok, degraded or failing. Pure.

    ok        it serves, and every tier takes part
    degraded  it serves, but a tier is closed or slow, or the host gave less than was asked for
    failing   it is gone, stopped, silent, or one of its tasks or threads hangs or has died: engines
              see misses, or soon will

The page is judged by somebody else than the daemon, so that a daemon which can no longer say
anything is found to be failing as well. `SILENT_S` and the daemon's own limit for its tasks are
shorter than the watchdog's time in the unit file: health is red before systemd acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Level = Literal["ok", "degraded", "failing"]

SILENT_S = 2.0
"""A daemon writes its page several times a second; older than this means that it is stuck."""


class Health(NamedTuple):
    """A verdict.

    Attributes:
        level: The worst that was found.
        why: What was found, a line each, the worst first; empty when all is well.
    """

    level: Level
    why: tuple[str, ...]


def judge(
    stats: dict[str, Any], *, age_s: float, pid: int, alive: bool, stopped: bool = False
) -> Health:
    """Judge what a page says, and how it was found.

    Args:
        stats: The page's map; what is missing or odd in it counts as well.
        age_s: Seconds since it was written.
        pid: Who wrote it.
        alive: Whether that process still lives.
        stopped: Whether it is stopped by a signal or debugger.
    """
    failing = list(_failing(stats, age_s=age_s, pid=pid, alive=alive, stopped=stopped))
    degraded = list(_degraded(stats))
    level: Level = "failing" if failing else "degraded" if degraded else "ok"
    return Health(level, (*failing, *degraded))


def _failing(
    stats: dict[str, Any], *, age_s: float, pid: int, alive: bool, stopped: bool
) -> Iterator[str]:
    if not alive:
        yield f"process {pid} is gone"
    elif stopped:
        yield f"process {pid} is stopped by a signal or a debugger"
    elif age_s > SILENT_S:
        yield f"process {pid} has written nothing for {age_s:.0f} s: its loop is stuck or starved"
    for name in _texts(stats.get("late")):
        yield f"its {name} hangs or has died"


def _degraded(stats: dict[str, Any]) -> Iterator[str]:
    if stats.get("state") == "draining":
        yield "draining: nothing new is taken in"
    host = stats.get("host")
    if isinstance(host, dict):
        yield from _texts(host.get("notes"))
    nvme = stats.get("nvme")
    if isinstance(nvme, dict):
        state, note = nvme.get("state"), nvme.get("note")
        if isinstance(state, str) and state != "open":
            yield f"NVMe takes nothing in: it is {state}"
        if isinstance(note, str) and note:
            yield f"NVMe: {note}"
    gpu = stats.get("gpu")
    if isinstance(gpu, dict) and gpu.get("state") == "failed":
        yield f"GPU memory takes no part: {gpu.get('note')}"
    peer = stats.get("peer")
    if isinstance(peer, dict) and peer.get("source") == "down":
        yield "other hosts get nothing: the source process is down; it is started anew"
    directory = stats.get("directory")
    if isinstance(directory, dict):
        state = directory.get("state")
        if isinstance(state, str) and state != "open":
            yield f"the fleet's directory is {state}"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, list | tuple):
        yield from (text for text in value if isinstance(text, str))
