"""The metrics: every figure of the page has one, each is documented, and they count right.

    python -m tests.service.test_metrics

writes the table in docs/metrics.md anew.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import textwrap
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvd import health, statpage
from kvd.gpu import GpuSide
from kvd.http import exposition
from kvd.http.catalogue import METRICS, NOT_SHOWN
from kvd.http.figures import labels_of, samples
from kvd.measures import Histogram
from kvd.peer.asker import COUNTS
from kvd.peer.redis_directory import DirectoryCounters
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import (
    CHUNK_TOKENS,
    OBJECT_BYTES,
    join,
    load,
    small_layout,
    store,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import kvd_client
    from bench._daemon import DaemonProcess

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "metrics.md"
CONFIG: Final = """
[host]
verify = "always"

[nvme]
slow_s = 30
bytes = "64MiB"
region_bytes = "8MiB"
form = "raw"
"""
MIB: Final = 1 << 20


@pytest.fixture
def busy(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    """Run a daemon with an NVMe tier and 8 MiB of host memory."""
    config = tmp_path / "kvd.toml"
    config.write_text(CONFIG + f'[events]\nendpoint = "ipc://{tmp_path}/events"\n')
    daemon = make_daemon(host_bytes=8 * MIB, arguments=["--config", str(config)])
    daemon.start()
    return daemon


def connect(daemon: DaemonProcess) -> kvd_client.Client:
    """Connect a client to a daemon."""
    return join(daemon)


def stats_of(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the page."""
    return dict(statpage.read(stat_page_name(daemon.socket)).stats)


def until(daemon: DaemonProcess, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first page of which something holds."""
    deadline = time.monotonic() + 30
    while not what(stats := stats_of(daemon)):
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)
    return stats


def scraped(daemon: DaemonProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the metrics of a daemon, as Prometheus' own parser reads them."""
    snapshot = statpage.read(stat_page_name(daemon.socket))
    text = exposition.expose(snapshot, health.Health("ok", ())).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def numbers(value: object, path: str = "") -> Iterator[str]:
    """Path of every number in a page; rows of a list share one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from numbers(inner, path)
    elif isinstance(value, int | float):
        yield path


def shape(path: str) -> re.Pattern[str]:
    """What a source's path covers."""
    steps = [
        "" if step.startswith("[") else r"\.[^.]+" if step.startswith("*") else rf"\.{step}"
        for step in path.split(".")
    ]
    return re.compile("".join(steps).removeprefix(r"\.") + r"(\.(ends|counts|total))?")


def test_every_number_of_the_page_has_a_metric(busy: DaemonProcess) -> None:
    """Each figure is shown by a metric, or is on the short list of those shown otherwise."""
    client = connect(busy)
    hashes = client.chunk_hashes(tokens(4))
    store(client, hashes)
    load(client, hashes)

    def told(page: dict[str, Any]) -> bool:
        counters = page["counters"]
        return counters["demotions"] == 4 and counters["acquires"] == 1 and bool(page["spaces"])

    stats = until(busy, told)
    client.close()
    shapes = [shape(source.path) for metric in METRICS for source in metric.sources]
    found = {path for path in numbers(stats) if path.split(".")[0] not in NOT_SHOWN}
    bare = {path for path in found if not any(each.fullmatch(path) for each in shapes)}
    assert not bare, f"no metric in kvd/http/catalogue.py for: {sorted(bare)}"
    assert "nvme.counters.writes" in found, "looked at nothing"
    empty = {metric.name for metric in METRICS if not list(samples(stats, metric))}
    others = ("kvd_peer_", "kvd_directory_", "kvd_gpu_")  # not of a host like this one
    alone = {name for name in empty if not name.startswith(others)}
    assert alone <= {"kvd_evicted_objects_total"}, "sources that name nothing of a page"


def test_every_count_of_the_fleet_has_a_metric() -> None:
    """What is counted about other hosts and the directory is shown, though this host is alone."""
    paths = {source.path for metric in METRICS for source in metric.sources}
    assert {f"peer.peers.[peer=host].{name}" for name in COUNTS} <= paths
    counts = {f"directory.counters.{field.name}" for field in fields(DirectoryCounters)}
    assert counts <= paths


def test_every_figure_of_the_gpu_has_a_metric() -> None:
    """What `GpuSide.stats` tells, but for words, is shown, though this host may have no GPU."""
    source = ast.parse(textwrap.dedent(inspect.getsource(GpuSide.stats)))
    (told,) = [node for node in ast.walk(source) if isinstance(node, ast.Dict)]
    keys = {str(key.value) for key in told.keys if isinstance(key, ast.Constant)}
    paths = {source.path for metric in METRICS for source in metric.sources}
    assert {"capacity_bytes", "bytes_up"} <= keys
    assert {f"gpu.{key}" for key in keys - {"state", "note"}} <= paths


def row(name: str, kind: str, labels: str, text: str) -> str:
    """Return a metric's line in the docs."""
    return f"| `{name}` | {kind} | {labels} | {text} |"


def table() -> str:
    """Return the table of the docs."""
    own = [row(n, kind, f"`{of}`" if of else "", t) for n, (kind, t, of) in exposition.OWN.items()]
    of_page = [
        row(m.name, m.kind, ", ".join(f"`{label}`" for label in labels_of(m)), m.text)
        for m in METRICS
    ]
    return "\n".join(["| metric | kind | labels | |", "| --- | --- | --- | --- |", *own, *of_page])


def test_every_metric_is_documented() -> None:
    """docs/metrics.md has each metric's line, and no other; the module says how to renew it."""
    assert f"<!-- metrics -->\n{table()}\n<!-- end -->" in PAGE.read_text(encoding="utf-8")


def test_names_are_by_the_conventions() -> None:
    """Names are unique, begin with kvd_, and end in their unit or, if they only rise, _total."""
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"kvd_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_bytes")), metric.name
        assert metric.text.endswith(".")


def test_promtool_finds_no_fault(busy: DaemonProcess) -> None:
    """Prometheus' own checker accepts a scrape, names and help texts included."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    snapshot = statpage.read(stat_page_name(busy.socket))
    text = exposition.expose(snapshot, health.Health("ok", ()))
    done = subprocess.run(
        [tool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr


def test_metrics_match_a_scripted_workload(busy: DaemonProcess) -> None:
    """After a workload of known sizes every byte is where it should be: stored, loaded, down, up.

    32 chunks of 64 KiB are stored, and looked up and read, in each of 8 chains: 16 MiB through a
    tier of 8 MiB. All go down; the first chain has left host memory by then, and comes up again.
    """
    chunks, chains = 32, 8
    client = connect(busy)
    hashes = [client.chunk_hashes(tokens(chunks, seed=seed)) for seed in range(chains)]
    for chain in hashes:
        assert client.lookup(chain).chunks == 0
        first = 0
        deadline = time.monotonic() + 30
        while first < chunks:  # a store that finds no room is refused in part
            first += store(client, chain, first)
            assert time.monotonic() < deadline
        assert load(client, chain) == chunks
    every = chunks * chains
    until(busy, lambda s: s["counters"]["demotions"] == every)
    assert client.lookup(hashes[0]).chunks == chunks
    with client.acquire(hashes[0]) as lease:
        assert lease.chunks == chunks
    stats = until(busy, lambda s: s["counters"]["acquires"] == chains + 1)
    client.close()
    assert stats["counters"]["promotions"] == chunks, "the first chain was still in host memory"
    metrics = scraped(busy)
    record_bytes = metrics["kvd_record_bytes_total", frozenset({("move", "written")})]

    def value(name: str, **labels: str) -> float:
        return metrics[name, frozenset(labels.items())]

    object_bytes, loads, risen_bytes = OBJECT_BYTES, every + chunks, chunks * OBJECT_BYTES
    left_bytes = value("kvd_tier_used_bytes", tier="host")
    layout = small_layout().id.hex()[:12]
    space = {"tenant": "default", "space": "model@1", "layout": layout}
    for name, labels, expected in (
        ("kvd_asked_tokens_total", {"tenant": "default"}, loads * CHUNK_TOKENS),
        ("kvd_hit_tokens_total", {"tenant": "default", "tier": "host"}, every * CHUNK_TOKENS),
        ("kvd_hit_tokens_total", {"tenant": "default", "tier": "nvme"}, chunks * CHUNK_TOKENS),
        ("kvd_stored_bytes_total", {"tenant": "default"}, every * object_bytes),
        ("kvd_published_bytes_total", {}, every * object_bytes),
        ("kvd_hit_bytes_total", {"tenant": "default", "tier": "host"}, every * object_bytes),
        ("kvd_hit_bytes_total", {"tenant": "default", "tier": "nvme"}, risen_bytes),
        ("kvd_hit_bytes_total", {"tenant": "default", "tier": "peer"}, 0),
        ("kvd_hit_tokens_total", {"tenant": "default", "tier": "peer"}, 0),
        ("kvd_space_asked_tokens_total", space, loads * CHUNK_TOKENS),
        ("kvd_space_hit_tokens_total", {**space, "tier": "host"}, every * CHUNK_TOKENS),
        ("kvd_space_hit_tokens_total", {**space, "tier": "nvme"}, chunks * CHUNK_TOKENS),
        ("kvd_space_hit_bytes_total", {**space, "tier": "host"}, every * object_bytes),
        ("kvd_space_hit_bytes_total", {**space, "tier": "nvme"}, risen_bytes),
        ("kvd_space_stored_bytes_total", space, every * object_bytes),
        ("kvd_acquired_bytes_total", {}, loads * object_bytes),
        ("kvd_demoted_bytes_total", {}, every * object_bytes),
        ("kvd_promoted_bytes_total", {}, risen_bytes),
        ("kvd_evicted_bytes_total", {}, loads * object_bytes - left_bytes),
        ("kvd_nvme_io_bytes_total", {"op": "write"}, record_bytes),
        ("kvd_record_bytes_total", {"move": "read"}, record_bytes / every * chunks),
        ("kvd_nvme_io_total", {"op": "write"}, every),
        ("kvd_load_size_bytes_sum", {}, loads * object_bytes),
        ("kvd_load_size_bytes_count", {}, chains + 1),
        ("kvd_store_size_bytes_sum", {}, every * object_bytes),
        ("kvd_demote_size_bytes_count", {}, every),
        ("kvd_promote_size_bytes_sum", {}, risen_bytes),
        ("kvd_promote_seconds_count", {}, chunks),
        ("kvd_acquire_wait_seconds_count", {}, 1),
    ):
        assert value(name, **labels) == expected, (name, labels)
    assert record_bytes > every * object_bytes, "raw records have headers"


def test_classes_of_a_histogram() -> None:
    """A value at an end belongs below it; sums and counts are what Prometheus expects."""
    held = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        held.note(value)
    assert held.page() == {"ends": (1.0, 2.0), "counts": [2, 2, 1], "total": 14.0}
    assert exposition._buckets(held.page()) == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]


def test_no_daemon_is_a_metric_too() -> None:
    """Without a page kvd_up is 0 and health is failing, and nothing else is claimed."""
    text = exposition.expose(None, health.Health("failing", ("no daemon here",))).decode()
    assert "kvd_up 0.0" in text
    assert 'kvd_health{level="failing"} 1.0' in text
    assert "kvd_lookups" not in text


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- metrics -->\n")
    after = rest[rest.index("<!-- end -->") :]
    PAGE.write_text(f"{before}<!-- metrics -->\n{table()}\n{after}", encoding="utf-8")
