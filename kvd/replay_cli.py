"""`kvd replay`: a trace against policies and sizes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Final

from kvd.policies import ADMISSIONS, DEFAULT, POLICIES, make, make_admission
from kvd.replay import Tier, Tiers, replay, replay_optimum, replay_tiers
from kvd.trace import BLOCK_TOKENS, read_trace
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.replay import Outcome
    from kvd.trace import Trace

EPILOG: Final = """\
examples:
  kvd replay trace.jsonl --capacity 1000 --capacity 10000
  kvd replay trace.jsonl.gz --capacity 10000 --policy lru --policy lifetable --policy optimum
  kvd replay trace.jsonl --capacity 1000 --lower-capacity 10000 --admission predicted --json

A trace has one JSON object a line: timestamp (ms), input_length, output_length (tokens; may be
null), hash_ids (the prompt's blocks, each id standing for the whole prefix up to it). Capacities
are in blocks. `optimum` is what knowing the future would reach; no policy can.

exit codes:
  0  replayed
  2  wrong option, or a trace that cannot be read; stderr says what to change
"""
OPTIMUM: Final = "optimum"
REMEMBERED_PER_BLOCK: Final = 4
"""Uses that second-touch remembers, for each block of the two tiers."""
_COUNT_MAX: Final = 10**12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("trace", metavar="TRACE", help="JSON lines, plain or gzip")
    parser.add_argument(
        "--capacity",
        metavar="BLOCKS",
        type=_count,
        action="append",
        required=True,
        help="of the tier, or the upper one; may be given again for more sizes",
    )
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, OPTIMUM),
        action="append",
        help=f"may be given again for more policies (default: {DEFAULT})",
    )
    parser.add_argument(
        "--lower-capacity", metavar="BLOCKS", type=_count, help="replay over two tiers"
    )
    parser.add_argument(
        "--admission", choices=ADMISSIONS, help="what the lower tier takes (default: all)"
    )
    parser.add_argument(
        "--threshold",
        metavar="P",
        type=_chance,
        help="chance of reuse from which `predicted` takes a block (default: 0.1)",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="TOKENS",
        type=_count,
        default=BLOCK_TOKENS,
        help=f"size of the trace's blocks (default: {BLOCK_TOKENS})",
    )
    parser.add_argument(
        "--whole-blocks", action="store_true", help="never keep a partly filled last block"
    )
    parser.add_argument(
        "--ignore-output", action="store_true", help="as if the length of answers were unknown"
    )
    parser.add_argument("--json", action="store_true", help="one object a line for each result")


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 0 < count <= _COUNT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1 on")
    return count


def _chance(text: str) -> float:
    try:
        chance = float(text)
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a chance from 0 to 1")
    return chance


def run(options: argparse.Namespace) -> int:
    """Replay and print.

    Raises:
        KvdError: Options that do not go together, or a bad trace.
    """
    policies: list[str] = options.policy or [DEFAULT]
    _check_options(options, policies)
    trace = read_trace(options.trace, options.block_tokens)
    if options.whole_blocks:
        trace = trace.whole_blocks()
    if options.ignore_output:
        trace = trace.without_output()
    rows = _results(trace, options, policies)
    if options.json:
        for row in rows:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()  # each takes a while
    else:
        _print_table(list(rows))
    return 0


def _check_options(options: argparse.Namespace, policies: list[str]) -> None:
    """Refuse what argparse cannot see."""
    if options.lower_capacity is None:
        for name, value in (("admission", options.admission), ("threshold", options.threshold)):
            if value is not None:
                raise KvdError(f"--{name} is about the lower tier; add --lower-capacity BLOCKS")
        return
    if OPTIMUM in policies:
        raise KvdError("--policy optimum knows one tier only; leave --lower-capacity out")
    if options.admission == "predicted":
        for policy in policies:
            if policy != "lifetable":
                raise KvdError(f"--policy {policy} predicts nothing; use --policy lifetable")
    elif options.threshold is not None:
        raise KvdError("--threshold is for predicted reuse; add --admission predicted")


def _results(
    trace: Trace, options: argparse.Namespace, policies: list[str]
) -> Iterator[dict[str, object]]:
    for capacity in options.capacity:
        for policy in policies:
            row: dict[str, object] = {"policy": policy, "capacity": capacity}
            if options.lower_capacity is not None:
                yield row | _two_tiers(trace, options, policy, capacity)
            elif policy == OPTIMUM:
                yield row | _figures(replay_optimum(trace, capacity))
            else:
                yield row | _figures(replay(trace, make(policy), capacity))


def _figures(outcome: Outcome) -> dict[str, object]:
    return {
        "block_hit_ratio": round(outcome.block_hit_ratio, 6),
        "token_savings": round(outcome.token_savings, 6),
    }


def _two_tiers(
    trace: Trace, options: argparse.Namespace, policy: str, capacity: int
) -> dict[str, object]:
    name: str = options.admission or "all"
    lower = Tier(make(policy), options.lower_capacity)
    admission = make_admission(
        name,
        lower.policy,
        remembered=REMEMBERED_PER_BLOCK * (capacity + lower.capacity),
        threshold=0.1 if options.threshold is None else options.threshold,
    )
    outcome = replay_tiers(trace, Tiers(Tier(make(policy), capacity), lower, admission))
    return {
        "lower_capacity": lower.capacity,
        "admission": name,
        **_figures(outcome.total),
        "written": outcome.written,
        "read": outcome.lower_hits,
        "write_amplification": round(outcome.write_amplification, 6),
    }


def _print_table(rows: list[dict[str, object]]) -> None:
    names = list(rows[0])
    lines = [[name.replace("_", " ") for name in names]]
    lines += [[_cell(name, row) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    for line in lines:
        cells = [
            text.ljust(width) if isinstance(rows[0][name], str) else text.rjust(width)
            for text, width, name in zip(line, widths, names, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _cell(name: str, row: Mapping[str, object]) -> str:
    value = row[name]
    if isinstance(value, float):
        return f"{value:.2f}" if name == "write_amplification" else f"{100 * value:.1f} %"
    return str(value)
