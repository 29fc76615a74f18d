"""What systemd is told, and that nobody waits for it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from kvd import notify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["path", "abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """Systemd's end, at either kind of address."""
    address = f"@kvd-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "n")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address.replace("@", "\0", 1))
        receiver.settimeout(30)
        yield receiver


def test_states(systemd: socket.socket) -> None:
    """Each state is one datagram in systemd's form; a status stays on one line."""
    assert notify.ready("serving\nREADY=0")
    assert systemd.recv(999) == b"READY=1\nSTATUS=serving READY=0"
    assert notify.status("half full")
    assert systemd.recv(999) == b"STATUS=half full"
    assert notify.stopping()
    assert systemd.recv(999) == b"STOPPING=1"
    assert notify.watchdog()
    assert systemd.recv(999) == b"WATCHDOG=1"


def test_a_deaf_systemd_is_not_waited_for(systemd: socket.socket) -> None:
    """When nobody reads, telling fails at once instead of blocking the loop."""
    assert any(not notify.watchdog() for _ in range(100_000))


@pytest.mark.parametrize("address", [None, "", "relative", "/nowhere/at/all"])
def test_nothing_without_systemd(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a socket, or with one nobody has, nothing happens."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify.ready("x")


@pytest.mark.parametrize(
    ("limit_us", "pid", "expected"),
    [
        ("30000000", None, 15.0),
        ("30000000", str(os.getpid()), 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
        (None, None, None),
    ],
)
def test_watchdog_interval(
    limit_us: str | None,
    pid: str | None,
    expected: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of systemd's limit, if it is meant for this process."""
    for name, value in (("WATCHDOG_USEC", limit_us), ("WATCHDOG_PID", pid)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert notify.watchdog_interval_s() == expected
