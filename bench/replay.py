"""Eviction policies on real traces: hits beside LRU and the offline optimum.

    python -m bench.replay [--json] [--capacity BLOCKS ...] [--tiers] [--ranks]

Replays both traces of tests/data/traces at each capacity (default: four) with each policy, and
says for the default policy whether it reaches the floors of docs/adr/0011: a block hit ratio, and
a share of the way from LRU to the optimum. Some 25 seconds of one idle core, 35 with --tiers. The
exit code is 1 if a floor is missed. `--ranks` drives the daemon's own catalog as well (`_ranks.py`;
five minutes): one rank, and two that store one after the other. Nothing is random.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench._ranks import replay_ranks
from bench._table import print_json, print_table
from kvd.policies import make, make_admission
from kvd.replay import Tier, Tiers, replay, replay_optimum, replay_tiers
from kvd.trace import Trace, read_trace

TRACES = Path(__file__).resolve().parent.parent / "tests" / "data" / "traces"
NAMES = ("conversation", "synthetic")
CAPACITIES = (1000, 3000, 10_000, 30_000)
UPPER, LOWER = 1000, 10_000
REMEMBERED = 4 * (UPPER + LOWER)
LAGS = {"one_rank": (1, 0.0), "two": (2, 0.0), "two_4_s_apart": (2, 4.0), "two_8_s_apart": (2, 8.0)}
"""Ranks, and how long one stores after the other."""

FLOORS = {
    "conversation": {1000: (6.9, 17), 3000: (12.5, 26), 10_000: (23.1, 12), 30_000: (32.8, 6)},
    "synthetic": {1000: (8.6, 1), 3000: (20.9, 7), 10_000: (48.6, 32), 30_000: (63.4, 64)},
}
"""Block hits in per cent, and per cent of the way from LRU to the optimum."""

ADMISSIONS: tuple[tuple[str, str, float], ...] = (
    ("lru", "all", 0),
    ("lru", "second-touch", 0),
    ("lifetable", "all", 0),
    ("lifetable", "second-touch", 0),
    ("lifetable", "predicted", 0.1),
    ("lifetable", "predicted", 0.2),
    ("lifetable", "predicted", 0.3),
)


def load(name: str) -> Trace:
    """Read one of the traces."""
    return read_trace(str(TRACES / f"{name}_trace.jsonl.gz"))


def measure(name: str, trace: Trace, capacity: int) -> dict[str, str | float]:
    """Replay one trace at one capacity with each policy; in per cent."""
    start = time.perf_counter()
    outcomes = {
        "lru": replay(trace, make("lru"), capacity),
        "s3fifo": replay(trace, make("s3fifo"), capacity),
        "lifetable": replay(trace, make("lifetable"), capacity),
        "no_output": replay(trace.without_output(), make("lifetable"), capacity),
        "optimum": replay_optimum(trace, capacity),
    }
    hits = {policy: 100 * outcome.block_hit_ratio for policy, outcome in outcomes.items()}
    row: dict[str, str | float] = {"trace": name, "capacity": capacity}
    row |= {policy: round(percent, 2) for policy, percent in hits.items()}
    row["gap"] = round(100 * gap_closed(hits["lru"], hits["lifetable"], hits["optimum"]), 1)
    row["savings"] = round(100 * outcomes["lifetable"].token_savings, 2)
    floors = FLOORS[name].get(capacity)
    if floors is not None:
        reached = (
            hits["lifetable"] >= floors[0]
            and 100 * gap_closed(hits["lru"], hits["lifetable"], hits["optimum"]) >= floors[1]
        )
        row |= {"floor": floors[0], "gap_floor": floors[1]}
        row["verdict"] = "reached" if reached else "missed"
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def gap_closed(lru: float, policy: float, optimum: float) -> float:
    """Return how far a policy gets on the way from LRU to the optimum."""
    return (policy - lru) / (optimum - lru) if optimum > lru else 1.0


def measure_tiers(name: str, trace: Trace) -> list[dict[str, str | float]]:
    """Replay one trace over two tiers with each admission."""
    rows: list[dict[str, str | float]] = []
    for policy, admission, threshold in ADMISSIONS:
        lower = Tier(make(policy), LOWER)
        decides = make_admission(
            admission, lower.policy, remembered=REMEMBERED, threshold=threshold
        )
        outcome = replay_tiers(trace, Tiers(Tier(make(policy), UPPER), lower, decides))
        rows.append(
            {
                "trace": name,
                "policy": policy,
                "admission": f"p>={threshold}" if threshold else admission,
                "percent": round(100 * outcome.total.block_hit_ratio, 2),
                "written": outcome.written,
                "read": outcome.lower_hits,
                "write_amplification": round(outcome.write_amplification, 2),
            }
        )
    return rows


def measure_ranks(name: str, trace: Trace) -> list[dict[str, str | float]]:
    """Replay one trace through the daemon's catalog; whole blocks found, in per cent."""
    return [
        {"trace": name, "policy": policy, "capacity": capacity}
        | {lag: round(replay_ranks(trace, capacity, policy, *LAGS[lag]), 2) for lag in LAGS}
        for capacity in (UPPER, LOWER)
        for policy in ("lru", "lifetable")
    ]


def figures(
    rows: list[dict[str, str | float]],
    tiers: list[dict[str, str | float]],
    ranks: list[dict[str, str | float]],
) -> dict[str, str | float]:
    """Flatten the tables for JSON: trace, capacity or admission, and figure make a name."""
    flat: dict[str, str | float] = {}
    for row in rows:
        prefix = f"{row.pop('trace')}_{row.pop('capacity')}"
        flat |= {f"{prefix}_{name}": value for name, value in row.items()}
    for row in tiers:
        prefix = f"{row.pop('trace')}_tiers_{row.pop('policy')}_{row.pop('admission')}"
        flat |= {f"{prefix}_{name}": value for name, value in row.items()}
    for row in ranks:
        prefix = f"{row.pop('trace')}_{row.pop('capacity')}_{row.pop('policy')}"
        flat |= {f"{prefix}_{name}": value for name, value in row.items()}
    return flat


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--capacity", type=int, action="append", metavar="BLOCKS")
    parser.add_argument("--tiers", action="store_true", help="two tiers and admission as well")
    parser.add_argument("--ranks", action="store_true", help="the daemon's catalog as well")
    options = parser.parse_args()
    traces = {name: load(name) for name in NAMES}
    rows = [
        measure(name, trace, capacity)
        for name, trace in traces.items()
        for capacity in options.capacity or CAPACITIES
    ]
    tiers = []
    if options.tiers:
        tiers = [row for name, trace in traces.items() for row in measure_tiers(name, trace)]
    ranks = []
    if options.ranks:
        ranks = [row for name, trace in traces.items() for row in measure_ranks(name, trace)]
    missed = sum(row.get("verdict") == "missed" for row in rows)
    if options.json:
        print_json({**figures(rows, tiers, ranks), "floors_missed": missed})
    else:
        print_table("Block hits, per cent", rows)
        if tiers:
            print_table(f"Two tiers, {UPPER} over {LOWER} blocks", tiers)
        if ranks:
            print_table("Whole blocks found by the daemon's catalog, per cent", ranks)
        print(f"floors missed: {missed}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
