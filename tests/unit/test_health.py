"""Who is well: the verdict on a daemon from its page, and which of its tasks still turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvd import health
from kvd.pulse import Pulse

GOOD: dict[str, Any] = {
    "state": "serving",
    "late": [],
    "host": {"notes": []},
    "nvme": {"state": "open", "note": ""},
}


def level(change: dict[str, Any], **found: Any) -> str:
    """Judge a good page after a change."""
    how = {"age_s": 0.1, "pid": 7, "alive": True, "stopped": False, **found}
    return health.judge({**GOOD, **change}, **how).level


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        ({}, {}, "ok"),
        ({"nvme": None}, {}, "ok"),
        ({"state": "draining"}, {}, "degraded"),
        ({"host": {"notes": ["not locked"]}}, {}, "degraded"),
        ({"nvme": {"state": "slow"}}, {}, "degraded"),
        ({"nvme": {"state": "closed: full"}}, {}, "degraded"),
        ({"nvme": {"state": "open", "note": "writing raw"}}, {}, "degraded"),
        ({"gpu": {"state": "starting"}, "directory": {"state": "open"}}, {}, "ok"),
        ({"gpu": {"state": "failed", "note": "no device"}}, {}, "degraded"),
        ({"directory": {"state": "shut: refused"}}, {}, "degraded"),
        ({"peer": {"source": "down"}}, {}, "degraded"),
        ({"peer": {"source": "up"}}, {}, "ok"),
        ({"late": ["mover"]}, {}, "failing"),
        ({}, {"alive": False}, "failing"),
        ({}, {"stopped": True}, "failing"),
        ({}, {"age_s": health.SILENT_S + 0.1}, "failing"),
        ({"nvme": {"state": "slow"}, "late": ["mover"]}, {}, "failing"),
        ({"host": 3, "nvme": "?", "late": 4}, {}, "ok"),
    ],
)
def test_verdict(change: dict[str, Any], found: dict[str, Any], expected: str) -> None:
    """The worst finding decides; a page of another release is judged as far as it makes sense."""
    assert level(change, **found) == expected


def test_every_finding_is_told() -> None:
    """What is wrong is named, the worst first."""
    page = {**GOOD, "late": ["mover"], "nvme": {"state": "slow"}}
    found = health.judge(page, age_s=9, pid=7, alive=True)
    assert len(found.why) == 3
    assert "9 s" in found.why[0]
    assert "mover" in found.why[1]
    assert "slow" in found.why[2]


def test_a_task_is_late_after_its_limit() -> None:
    """A task that turns is not late; one that has not for its limit is, until it turns again."""
    pulse = Pulse()
    assert pulse.late(0) == []
    pulse.beat("mover", 0, 2.0)
    pulse.beat("peer", 0, 5.0)
    assert pulse.late(2 * 10**9) == []
    assert pulse.late(2 * 10**9 + 1) == ["mover"]
    assert pulse.late(6 * 10**9) == ["mover", "peer"]
    pulse.beat("mover", 6 * 10**9, 2.0)
    pulse.forget("peer")
    assert pulse.late(7 * 10**9) == []
