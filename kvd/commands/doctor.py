"""`kvd doctor`: what this host lacks for kvd, and the command that mends it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from kvd.tables import clean, folded
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from kvd.doctor import Result
    from kvd.doctor.base import Check, Host

EPILOG: Final = """\
examples:
  kvd doctor
  kvd doctor --config kvd.toml --only memlock --only huge-pages
  kvd doctor --engine vllm --python /opt/vllm/bin/python
  kvd doctor --measure                    also measure memory and disk, and store it for the daemon
  kvd doctor --json | jq '.findings[] | select(.level != "ok")'

Run it as the user that runs the daemon. It changes nothing; --measure writes 256 MiB to the NVMe
tier's directory, removes them, and stores the rates in the state directory: the cost gate and
`kvd plan` begin with them.

exit codes:
  0  kvd works here; warnings, if any, cost speed or safety
  1  something fails; each such line has the command that mends it
  2  wrong option
"""
_COLOURS: Final = {"ok": "32", "warn": "33", "fail": "31"}
_NAME_CHARS: Final = 14
_INDENT: Final = 8 + _NAME_CHARS
_COLUMNS: Final = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the daemon's (default: $KVD_CONFIG, else /etc/kvd/kvd.toml if there is one)",
    )
    parser.add_argument("--socket", metavar="PATH", help="the daemon's, if not as configured")
    parser.add_argument("--engine", choices=["vllm"], help="also look at an engine's environment")
    parser.add_argument(
        "--python", metavar="PATH", help="that engine's interpreter (default: this one)"
    )
    parser.add_argument(
        "--only", metavar="CHECK", action="append", help="run this check; may be given again"
    )
    parser.add_argument(
        "--measure", action="store_true", help="measure memory and disk, and store the rates"
    )
    parser.add_argument("--list", action="store_true", help="list the checks and run none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Examine the host and print what was found."""
    from kvd import doctor

    known = doctor.checks()
    chosen = _chosen(known, options.only)
    if options.list:
        _show_list(chosen, as_json=options.json)
        return 0
    results = []
    host = _host(options)
    for result in doctor.examine(host, chosen):
        results.append(result)
        if not options.json:
            _show(result, results)
    measured = _measure(host) if options.measure else None
    levels = [result.finding.level.value for result in results]
    if options.json:
        _show_json(results, levels, measured)
    else:
        if measured is not None:
            _show_measured(measured)
        counts = ", ".join(f"{levels.count(level)} {level}" for level in _COLOURS)
        sys.stdout.write(f"\n{counts}\n")
    return 1 if "fail" in levels else 0


def _chosen(known: dict[str, Check], only: Sequence[str] | None) -> list[Check]:
    for name in only or ():
        if name not in known:
            raise KvdError(f"--only {name}: no such check; use one of {', '.join(known)}")
    return [each for name, each in known.items() if not only or name in only]


def _host(options: argparse.Namespace) -> Host:
    from kvd import config
    from kvd.doctor.base import Host

    given = vars(options) | {"config": config.find_file(options.config)}
    try:
        loaded = config.load(options.config, {"socket": options.socket})
    except KvdError as error:
        return Host(config_error=str(error), options=given)
    return Host(config=loaded, options=given)


def _show(result: Result, so_far: Sequence[Result]) -> None:
    """Print a finding, with its group's name above the first of the group."""
    check, (level, text, mend) = result
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    mark = f"{level.value:<4}"
    if colours:
        mark = f"\x1b[{_COLOURS[level.value]}m{mark}\x1b[0m"
    before = so_far[-2].check if len(so_far) > 1 else None
    if before is None or before.group != check.group:
        sys.stdout.write(f"{check.group}\n")
    name = check.name if before is not check else ""
    first, *more = folded(clean(text), _COLUMNS - _INDENT)
    sys.stdout.write(f"  {mark}  {name:<{_NAME_CHARS}}{first}\n")
    sys.stdout.writelines(f"{'':<{_INDENT}}{line}\n" for line in more)
    if mend:
        sys.stdout.write(f"        {'':<{_NAME_CHARS}}mend: {mend}\n")
    sys.stdout.flush()


def _show_list(chosen: Iterable[Check], *, as_json: bool) -> None:
    if as_json:
        _dump({"checks": [{"name": c.name, "group": c.group, "about": c.about} for c in chosen]})
        return
    for check in chosen:
        sys.stdout.write(f"{check.group:<8}{check.name:<{_NAME_CHARS}}{check.about}\n")


def _measure(host: Host) -> dict[str, Any]:
    """Measure and store; raises KvdError."""
    from kvd import rates
    from kvd.doctor.measure import measure

    if host.config is None:
        raise KvdError(f"--measure needs a configuration: {host.config_error}")
    found = measure(host)
    return {**found._asdict(), "stored": rates.write(host.config.state_dir, found)}


def _show_measured(measured: dict[str, Any]) -> None:
    gb = {name: f"{value / 1e9:.2f} GB/s" for name, value in measured.items() if name != "stored"}
    text = (
        f"measured\n  memory      copies at {gb['host_bytes_s']}, one thread\n"
        f"  disk        reads at {gb['nvme_read_bytes_s']}, writes at {gb['nvme_write_bytes_s']}\n"
        f"  one read    of 1 MiB in {measured['nvme_read_s'] * 1e3:.2f} ms\n"
        f"  stored      {measured['stored']}\n"
    )
    sys.stdout.write(text)


def _show_json(
    results: Iterable[Result], levels: list[str], measured: dict[str, Any] | None
) -> None:
    found = [
        {
            "check": check.name,
            "group": check.group,
            "level": finding.level.value,
            "text": finding.text,
            "mend": finding.mend,
        }
        for check, finding in results
    ]
    told: dict[str, Any] = {level: levels.count(level) for level in _COLOURS}
    if measured is not None:
        told["measured"] = measured
    _dump({"findings": found, **told})


def _dump(value: dict[str, Any]) -> None:
    import json

    sys.stdout.write(json.dumps(value) + "\n")
