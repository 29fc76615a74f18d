"""Bars and curves as SVG. Pure; colours come from the style sheet, so that none is inline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.http.history import POINTS, STEP_S
from kvd.sizes import about

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.http.history import History

WIDTH, HEIGHT = 560.0, 120.0
"""Of a curve's area, in its own units; a browser scales it."""
BAR: Final = 1000.0


class Chart(NamedTuple):
    """One picture: a title, what it draws as (figure, colour, word), and how to write a value."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    write: Callable[[float], str]


def _tokens(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit} tok/s"
    return f"{value:.3g} tok/s"


def _bytes(value: float) -> str:
    return f"{about(value)}/s"


RARE: Final = ("hit_gpu", "hit_peer")
"""Drawn where there is anything: few hosts have GPU memory for it, or others to ask."""
CHARTS: Final = (
    Chart(
        "Prompt tokens",
        (
            ("asked", "asked", "asked for"),
            ("hit_gpu", "gpu", "hit in GPU memory"),
            ("hit_host", "host", "hit in host memory"),
            ("hit_nvme", "nvme", "hit on NVMe"),
            ("hit_peer", "filling", "hit on other hosts"),
        ),
        _tokens,
    ),
    Chart(
        "Engines",
        (("loaded", "host", "loaded"), ("stored", "filling", "stored")),
        _bytes,
    ),
    Chart(
        "Between host memory and NVMe",
        (("demoted", "nvme", "down"), ("promoted", "pinned", "up")),
        _bytes,
    ),
    Chart("Freed from host memory", (("evicted", "garbage", "evicted"),), _bytes),
)


def bar(capacity: float, parts: list[tuple[str, str, float]]) -> str:
    """Draw a tier: each part's share of the capacity, side by side."""
    at, pieces = 0.0, []
    for kind, label, size in parts:
        width = min(BAR - at, BAR * size / capacity) if capacity else 0.0
        if width > 0:
            pieces.append(
                f'<rect class="{kind}" x="{at:.2f}" y="0" height="20"'
                f' width="{max(width, 1.5):.2f}">'
                f"<title>{label} {about(size)}</title></rect>"
            )
            at += width
    return (
        f'<svg class="bar" viewBox="0 0 {BAR:.0f} 20" preserveAspectRatio="none" role="img">'
        f'<rect class="empty" x="0" y="0" width="{BAR:.0f}" height="20"/>{"".join(pieces)}</svg>'
    )


def section(history: History, now_s: float) -> str:
    """Draw all curves of the last hour."""
    drawn = "".join(_chart(chart, history, now_s) for chart in CHARTS)
    return f'<section><h2>The last hour</h2><div class="charts">{drawn}</div></section>'


def _chart(chart: Chart, history: History, now_s: float) -> str:
    curves = {name: history.curves(name, now_s) for name, _, _ in chart.lines}
    shown = [line for line in chart.lines if line[0] not in RARE or _any(curves[line[0]])]
    values = [rate for pieces in curves.values() for piece in pieces for _, rate in piece]
    top = _nice(max(values, default=0.0), binary=chart.write is _bytes)
    drawn = "".join(line for name, colour, _ in shown for line in _lines(curves[name], colour, top))
    legend = "".join(
        f'<li><span class="key {colour}"></span>{word}'
        f" {chart.write(history.recent(name, now_s))}</li>"
        for name, colour, word in shown
    )
    empty = "" if values else f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}">nothing yet</text>'
    marks = "".join(
        f'<line class="grid" x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{HEIGHT:.0f}"/>'
        for x in (0.0, WIDTH / 4, WIDTH / 2, 3 * WIDTH / 4, WIDTH)
    )
    return (
        f'<figure><figcaption>{chart.title}<span class="of">top: {chart.write(top)}</span>'
        f'</figcaption><svg class="curve" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
        f' preserveAspectRatio="none" role="img">{marks}{drawn}{empty}</svg>'
        '<p class="axis"><span>1 h ago</span><span>30 min</span><span>now</span></p>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _any(pieces: list[list[tuple[float, float]]]) -> bool:
    return any(rate for piece in pieces for _, rate in piece)


def _lines(pieces: list[list[tuple[float, float]]], colour: str, top: float) -> Iterator[str]:
    """Draw the pieces of one curve, each with the area below it."""
    span_s = POINTS * STEP_S
    for piece in pieces:
        points = [
            (WIDTH * (1 - age_s / span_s), HEIGHT - (HEIGHT - 4) * rate / top)
            for age_s, rate in piece
        ]
        if len(points) == 1:  # a dot would not be seen: draw the step it stands for
            x, y = points[0]
            points = [(x - WIDTH / POINTS, y), (x, y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        first, last = points[0][0], points[-1][0]
        ground = f"{first:.1f},{HEIGHT:.0f} {path} {last:.1f},{HEIGHT:.0f}"
        yield f'<polygon class="area {colour}" points="{ground}"/>'
        yield f'<polyline class="line {colour}" points="{path}"/>'


def _nice(value: float, *, binary: bool) -> float:
    """Return a round number that is not below a value; a power of two for bytes."""
    if value <= 0:
        return 1.0
    if binary:
        return float(1 << (math.ceil(value) - 1).bit_length())
    step = 1.0
    while step * 10 < value:
        step *= 10
    while step > value:
        step /= 10
    return next(step * factor for factor in (1, 2, 3, 5, 10) if step * factor >= value)
