"""`kvd doctor`: what this host lacks for kvd, and the command that mends it.

A check is a function (`base.py` says how); its module is named in `MODULES` and imported only when
checks run. Modules import what is heavy inside their checks.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.doctor.base import CHECK_S, CHECKS, Check, Finding, Host, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODULES: Final = ("kernel", "memory", "disk", "gpu", "peer", "daemon", "engine")
"""Modules of this package with checks, in the order in which their findings are shown."""


class Result(NamedTuple):
    """A finding and whose it is."""

    check: Check
    finding: Finding


def checks() -> dict[str, Check]:
    """Import all checks and return them by name, in order."""
    for module in MODULES:
        importlib.import_module(f"kvd.doctor.{module}")
    place = {f"kvd.doctor.{module}": number for number, module in enumerate(MODULES)}
    ordered = sorted(CHECKS.items(), key=lambda item: place.get(item[1].look.__module__, 0))
    return dict(ordered)


def examine(host: Host, chosen: Sequence[Check], limit_s: float = CHECK_S) -> Iterator[Result]:
    """Run checks one after the other, and yield what each says as soon as it does."""
    for each in chosen:
        for finding in _findings(each, host, limit_s):
            yield Result(each, finding)


def _findings(each: Check, host: Host, limit_s: float) -> list[Finding]:
    """Run one check in a thread, so that one that hangs is left behind; never raises."""
    found: list[Finding] = []

    def look() -> None:
        try:
            result = each.look(host)
            found.extend([result] if isinstance(result, Finding) else result)
        except Exception as error:  # noqa: BLE001 - a fault in one check must not hide the others
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(warn(f"the check itself failed: {what}", "report it with this line"))

    thread = threading.Thread(target=look, name=f"doctor-{each.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        return [*found, warn(f"no answer within {limit_s:.0f} s", "see what hangs: dmesg | tail")]
    return found
