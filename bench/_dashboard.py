"""Draw the dashboard's panels from a Prometheus that has scraped a daemon, and the status page.

    python -m bench._dashboard --prometheus http://127.0.0.1:9090 --minutes 30 --out docs/images

The queries are those of dashboards/kvd.json, as Prometheus answers them; only the drawing is ours,
so that a picture can be made without Grafana.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

BOARD: Final = Path(__file__).resolve().parent.parent / "dashboards" / "kvd.json"
POINTS: Final = 240
COLOURS: Final = ("#1b998b", "#4d6cfa", "#f2a541", "#a06cd5", "#d7263d", "#6b7a8f")
UNITS: Final = {"Bps": ("/s", 1024.0), "bytes": ("", 1024.0)}


def ask(prometheus: str, expression: str, minutes: float) -> list[dict[str, Any]]:
    """Return a query's series over the last minutes."""
    end = time.clock_gettime(time.CLOCK_REALTIME)
    step = max(5.0, minutes * 60 / POINTS)
    query = urllib.parse.urlencode(
        {"query": expression, "start": end - minutes * 60, "end": end, "step": step}
    )
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=30) as answer:  # noqa: S310 - an address of ours
        found = json.load(answer)
    assert found["status"] == "success", found
    series: list[dict[str, Any]] = found["data"]["result"]
    return series


def written(value: float, unit: str) -> str:
    """Write a value at an axis."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    suffix, base = UNITS.get(unit, ("", 1000.0))
    names = ["B", "KiB", "MiB", "GiB", "TiB"] if unit in UNITS else ["", "k", "M", "G", "T"]
    at = min(4, int(math.log(value, base))) if value >= 1 else 0
    return f"{value / base**at:.3g} {names[at]}{suffix}".strip()


def draw(prometheus: str, minutes: float, out: Path) -> int:
    """Draw every curve of the dashboard; return how many series there were."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    panels = [p for p in json.loads(BOARD.read_text())["panels"] if p["type"] == "timeseries"]
    rows = -(-len(panels) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 2.9 * rows), layout="constrained")
    count = 0
    for panel, axis in zip(panels, axes.flat, strict=False):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        number = 0
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "30s")
            for series in ask(prometheus, expression.replace("$instance", ".*"), minutes):
                times = [float(at) for at, _ in series["values"]]
                values = [float(value) for _, value in series["values"]]
                label = target["legendFormat"]
                for name, value in series["metric"].items():
                    label = label.replace("{{" + name + "}}", value)
                last = times[-1]
                ages = [(at - last) / 60 for at in times]
                label = label.replace("127.0.0.1:9810", "this host")
                axis.plot(ages, values, color=COLOURS[number % 6], linewidth=1.4, label=label)
                axis.fill_between(ages, values, color=COLOURS[number % 6], alpha=0.08)
                number += 1
        count += number
        axis.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _, u=unit: written(v, u)))
        axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if number:
            axis.legend(fontsize=7, loc="upper left", frameon=False, ncols=2)
        else:
            axis.text(0.5, 0.5, "none so far", ha="center", transform=axis.transAxes, fontsize=9)
    figure.supxlabel("minutes", fontsize=9)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "dashboard.png", dpi=80)
    return count


def main() -> None:
    """Draw, and say what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    count = draw(options.prometheus, options.minutes, options.out)
    print(f"{options.out / 'dashboard.png'}: {count} series")


if __name__ == "__main__":
    main()
