"""The page as Prometheus reads it. Any thread; nothing is kept between two scrapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from kvd.http.catalogue import METRICS
from kvd.http.figures import Metric, Sample, labels_of, samples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric as Family

    from kvd.health import Health
    from kvd.statpage import Snapshot

__all__ = ["CONTENT_TYPE", "OWN", "expose"]

OWN: Final = {
    "kvd_up": ("gauge", "1 when the daemon's page could be read and its process lives.", ""),
    "kvd_health": ("gauge", "1 for the level it is at: ok, degraded or failing.", "level"),
    "kvd_page_age_seconds": ("gauge", "Seconds since the daemon wrote its page.", ""),
    "kvd_build_info": ("gauge", "Always 1, with the daemon's version.", "version"),
    "kvd_nvme_open": ("gauge", "1 when the NVMe tier takes part fully, 0 when slow or closed.", ""),
}
"""Metrics about the page rather than in it: kind, help, label."""


class _Once:
    """A collector of families that are there already."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        """Yield them."""
        yield from self._families


def expose(snapshot: Snapshot | None, health: Health) -> bytes:
    """Return the whole text of a scrape.

    Args:
        snapshot: What the page said; None when there is none.
        health: The verdict on it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once([*_own(snapshot, health), *_of_page(snapshot)]))
    return generate_latest(registry)


def _own(snapshot: Snapshot | None, health: Health) -> Iterator[Family]:
    def gauge(name: str, *values: tuple[str, float]) -> GaugeMetricFamily:
        _, text, label = OWN[name]
        family = GaugeMetricFamily(name, text, labels=[label] if label else [])
        for of, value in values:
            family.add_metric([of] if label else [], value)
        return family

    yield gauge("kvd_up", ("", float(snapshot is not None and snapshot.alive)))
    levels = ("ok", "degraded", "failing")
    yield gauge("kvd_health", *((level, float(level == health.level)) for level in levels))
    if snapshot is None:
        return
    yield gauge("kvd_page_age_seconds", ("", snapshot.age_s))
    yield gauge("kvd_build_info", (str(snapshot.stats.get("version", "")), 1.0))
    nvme = snapshot.stats.get("nvme")
    if isinstance(nvme, dict):
        yield gauge("kvd_nvme_open", ("", float(nvme.get("state") == "open")))


def _of_page(snapshot: Snapshot | None) -> Iterator[Family]:
    if snapshot is None:
        return
    for metric in METRICS:
        found = list(samples(snapshot.stats, metric))
        if found:
            yield _family(metric, found)


def _family(metric: Metric, found: list[Sample]) -> Family:
    names = labels_of(metric)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.text, labels=names)
        for labels, value in found:
            values = [labels.get(name, "") for name in names]
            histogram.add_metric(values, _buckets(value), value["total"])
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.text, labels=names)
    for labels, value in found:
        family.add_metric([labels.get(name, "") for name in names], float(value))
    return family


def _buckets(value: dict[str, Any]) -> list[tuple[str, float]]:
    """Return classes as Prometheus has them: each with all below it, up to +Inf."""
    ends = [*(repr(float(end)) for end in value["ends"]), "+Inf"]
    total = 0
    buckets = []
    for end, count in zip(ends, value["counts"], strict=True):
        total += count
        buckets.append((end, total))
    return buckets
