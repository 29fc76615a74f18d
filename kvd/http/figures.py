"""How a metric names its figures in the statistics page. Pure.

A source names a figure by a path into the page:

    counters.lookups                     a number
    counters.evictions.*reason           each entry of a map, its key as the label `reason`
    tenants.[tenant=name].pinned_bytes   each row of a list, its column `name` as the label `tenant`

and may have labels of its own. A metric is there whenever the page has its figure: a daemon without
an NVMe tier shows no NVMe metrics, rather than zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind = Literal["counter", "gauge", "histogram"]


class Source(NamedTuple):
    """One figure, or one a row: its path, labels of its own, and what a unit of it is."""

    path: str
    labels: tuple[tuple[str, str], ...] = ()
    scale: float = 1.0


class Metric(NamedTuple):
    """A metric: its name as Prometheus has it, kind, help, and where its figures come from."""

    name: str
    kind: Kind
    text: str
    sources: tuple[Source, ...]


class Sample(NamedTuple):
    """A value with its labels; a histogram's value is its map in the page."""

    labels: dict[str, str]
    value: Any


def one(path: str, scale: float = 1.0) -> tuple[Source, ...]:
    """Return a single source without labels of its own."""
    return (Source(path, (), scale),)


def labelled(label: str, **paths: str) -> tuple[Source, ...]:
    """One source each, the keyword as the label's value."""
    return tuple(Source(path, ((label, value),)) for value, path in paths.items())


def figures(page: object, path: str) -> Iterator[Sample]:
    """Yield what a path names in a page, with the labels on its way."""
    yield from _walk(page, path.split("."), {})


def _walk(here: object, path: list[str], labels: dict[str, str]) -> Iterator[Sample]:
    if not path:
        if isinstance(here, dict) or (isinstance(here, int | float) and here >= 0):
            yield Sample(labels, here)
        return
    step, rest = path[0], path[1:]
    if step.startswith("["):
        columns = dict(pair.split("=") for pair in step[1:-1].split(","))
        for row in here if isinstance(here, list | tuple) else ():
            if isinstance(row, dict):
                found = {label: str(row.get(column, "")) for label, column in columns.items()}
                yield from _walk(row, rest, {**labels, **found})
    elif isinstance(here, dict) and step.startswith("*"):
        for key, value in here.items():
            yield from _walk(value, rest, {**labels, step[1:]: str(key)})
    elif isinstance(here, dict) and step in here:
        yield from _walk(here[step], rest, labels)


def samples(page: object, metric: Metric) -> Iterator[Sample]:
    """Yield a metric's values in a page, scaled to its unit; each set of labels once."""
    seen = set()
    for source in metric.sources:
        for labels, value in figures(page, source.path):
            whole = {**labels, **dict(source.labels)}
            key = tuple(sorted(whole.items()))
            if key in seen or isinstance(value, dict) != (metric.kind == "histogram"):
                continue
            seen.add(key)
            yield Sample(whole, value if metric.kind == "histogram" else value * source.scale)


def labels_of(metric: Metric) -> list[str]:
    """Return the names of a metric's labels, as its sources give them."""
    found: dict[str, None] = {}
    for source in metric.sources:
        for step in source.path.split("."):
            if step.startswith("*"):
                found[step[1:]] = None
            elif step.startswith("["):
                found.update(dict.fromkeys(pair.split("=")[0] for pair in step[1:-1].split(",")))
        found.update(dict.fromkeys(label for label, _ in source.labels))
    return list(found)
