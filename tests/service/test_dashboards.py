"""The dashboard and the alert rules: they parse, fire as they should, and name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvd.http.catalogue import METRICS
from kvd.http.exposition import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "dashboards"
HISTOGRAM_ENDS: Final = ("_bucket", "_sum", "_count")


def known() -> set[str]:
    """Every series' name."""
    names = set(OWN)
    for metric in METRICS:
        ends = HISTOGRAM_ENDS if metric.kind == "histogram" else ("",)
        names |= {metric.name + end for end in ends}
    return names


def expressions() -> Iterator[str]:
    """Every query of the dashboard, with Grafana's variables replaced by what it puts there."""
    board = json.loads((FOLDER / "kvd.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")


def promtool(*arguments: str) -> str:
    """Run promtool; return what it says when it finds no fault."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [tool, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_parse_and_fire() -> None:
    """Prometheus' own checker accepts the rules, and its test of when they fire."""
    assert "SUCCESS" in promtool("check", "rules", str(FOLDER / "alerts.yml"))
    assert "SUCCESS" in promtool("test", "rules", str(FOLDER / "alerts_test.yml"))


def test_the_dashboard_s_queries_parse(tmp_path: Path) -> None:
    """Each query of the dashboard is one that Prometheus understands."""
    rules = [
        {"record": f"kvd:panel:{number}", "expr": expression}
        for number, expression in enumerate(expressions())
    ]
    file = tmp_path / "panels.yml"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


@pytest.mark.parametrize("name", ["kvd.json", "alerts.yml"])
def test_they_name_metrics_that_there_are(name: str) -> None:
    """No query asks for a metric that kvd does not have."""
    text = (FOLDER / name).read_text()
    asked = set(re.findall(r"\bkvd_[a-z_]+", text))
    assert len(asked) > 5
    assert not asked - known()


def test_the_dashboard_is_whole() -> None:
    """Panels have numbers of their own, do not lie over each other, and say what they show."""
    board: dict[str, Any] = json.loads((FOLDER / "kvd.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "stat" or panel["description"]
