"""Records: one printable line each, no secrets, no flood, and never an exception."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import log
from kvd.clock import SimClock


def written(record: str) -> str:
    """A record without its time."""
    return record.split("  ", 1)[1] if record.lstrip()[:1].isdigit() else record


def test_a_record(capsys: pytest.CaptureFixture[str]) -> None:
    """Name, event and fields in their order, quoted where a reader would be misled."""
    log.get("session").info(
        "session open", tenant="a b", pid=7, lag=0.25, ok=True, empty="", e="x=1"
    )
    err = capsys.readouterr().err
    expected = 'session: session open tenant="a b" pid=7 lag=0.25 ok=yes empty="" e="x=1"\n'
    assert err.endswith(expected)
    assert err[:10].strip().replace(".", "").isdigit()


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    """Levels other than info are named; debug is not written unless asked for."""
    own = log.get("a")
    own.debug("d")
    own.warning("w")
    own.error("e", name="n")
    lines = [line.lstrip("0123456789. ") for line in capsys.readouterr().err.splitlines()]
    assert lines == ["warning: a: w", "error: a: e name=n"]


def test_debug_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lower threshold debug records are written."""
    monkeypatch.setattr(log.Threshold, "priority", log.PRIORITIES["debug"])
    log.get("a").debug("d")
    assert capsys.readouterr().err.endswith("debug: a: d\n")


def test_journald_priority(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stderr connected to journald a record begins with its priority, and has no time."""
    here = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{here.st_dev}:{here.st_ino}")
    log.get("a").info("i")
    log.get("a").error("e")
    assert capfd.readouterr().err == "<6>a: i\n<3>error: a: e\n"
    monkeypatch.setenv("JOURNAL_STREAM", f"{here.st_dev}:{here.st_ino + 1}")
    log.get("a").info("i")
    assert not capfd.readouterr().err.startswith("<")


@given(st.text(max_size=400), st.one_of(st.text(max_size=400), st.binary(max_size=40)))
def test_one_printable_line(event: str, value: Any) -> None:
    """Whatever an event or field holds, the record is one line of bounded, printable text."""
    record = log.format_record("a", "info", event, {"value": value, "after": 1})
    assert record.isprintable()
    assert record.endswith(" after=1")
    assert len(record) < len(event) + 10 * log.VALUE_CHARS_MAX + 40


@given(st.text(max_size=30), st.text(max_size=30))
def test_fields_cannot_be_forged(first: str, second: str) -> None:
    """A value cannot end its own quotes and pose as another field."""
    record = log.format_record("a", "info", "e", {"x": first, "y": second})
    rest = record.removeprefix("a: e ")
    assert _fields(rest) == ["x", "y"]


def _fields(text: str) -> list[str]:
    names = []
    while text:
        name, _, text = text.partition("=")
        names.append(name)
        at = 0
        if text.startswith('"'):
            at = 1
            while text[at] != '"':
                at += 2 if text[at] == "\\" else 1
            at += 1
        else:
            at = text.find(" ") if " " in text else len(text)
        text = text[at + 1 :]
    return names


def test_bytes_are_not_written() -> None:
    """Of bytes only their number is told: they may be a key, a salt or a payload."""
    record = log.format_record("a", "info", "e", {"key": b"secret", "view": memoryview(b"secret")})
    assert record == "a: e key=bytes[6] view=bytes[6]"


def test_same_event_is_limited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of one event is cut, others are not, and the next minute tells how many."""
    clock = SimClock()
    own = log.Log("a", log.Limiter(3, clock.now_ns))
    for n in range(10):
        own.limited("flood", n=n)
    own.limited("other")
    assert capsys.readouterr().err.count("flood") == 3
    clock.advance_ms(59_999)
    own.limited("flood")
    assert capsys.readouterr().err == ""
    clock.advance_ms(1)
    own.limited("flood", n=1)
    own.limited("flood", n=2)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("warning: a: flood n=1 suppressed=8")
    assert second.endswith("flood n=2")


def test_limiter_is_bounded() -> None:
    """Ever new events do not make it grow, nor get round it."""
    limiter = log.Limiter(1, SimClock().now_ns)
    admitted = sum(limiter.admit(f"event {n}") is not None for n in range(10_000))
    assert admitted == log.EVENTS_MAX + 1
    assert len(limiter._windows) <= log.EVENTS_MAX + 1


class _Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError


@pytest.mark.parametrize("broken", [_Broken(), None])
def test_a_dead_stderr_is_no_fault(
    broken: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that cannot be written does not end the daemon."""
    if broken is None:
        broken = io.StringIO()
        broken.close()
    monkeypatch.setattr(sys, "stderr", broken)
    log.get("a").error("e")
