"""The log says nothing that it should not, has priorities, and cannot be flooded."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd import log
from kvd_client import wire
from tests.daemon_fixture import join, namespace, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from bench._daemon import DaemonProcess

ROOT: Final = Path(__file__).resolve().parents[2]
SECRET: Final = b"salt-of-the-earth-0123456789abcd"
CONFIG: Final = '[nvme]\nslow_s = 30\nbytes = "64MiB"\nregion_bytes = "8MiB"\nform = "raw"\n'
WORDS: Final = {"hash", "hashes", "key", "keys", "salt", "token", "tokens", "secret", "password"}


def spellings(secret: bytes) -> set[bytes]:
    """How bytes could turn up in a text."""
    number = int.from_bytes(secret[-8:], "big")
    return {secret, secret.hex().encode()[:16], secret[:12], repr(secret[:6]).encode()[2:-1]} | {
        str(number).encode()
    }


def test_nothing_secret_is_told(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    """After stores, loads, refusals and a broken session neither log nor page nor metrics have a
    salt, a hash or a lease's token.
    """
    file = tmp_path / "kvd.toml"
    file.write_text(CONFIG)
    daemon = make_daemon(host_bytes=8 << 20, arguments=["--config", str(file)])
    daemon.start()
    client = join(daemon, namespace=namespace(salt=SECRET))
    chain = client.chunk_hashes(tokens(64))
    first = 0
    while first < len(chain):
        first += store(client, chain, first)
    secrets = {SECRET, *chain}
    with client.acquire(chain[:8]) as lease:
        secrets.add(lease.token)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
        rude.connect(daemon.socket)
        rude.send(b"\xc1" + SECRET)
        with suppress(OSError):
            rude.recv(wire.PACKET_BYTES_MAX)
    shown = b"{}"
    deadline = time.monotonic() + 30
    while json.loads(shown).get("counters", {}).get("acquires") != 1:  # a page five times a second
        assert time.monotonic() < deadline, shown
        shown = subprocess.run(
            [sys.executable, "-m", "kvd", "stat", "--json", "--socket", daemon.socket],
            capture_output=True,
            timeout=30,
            check=False,  # an old page is code 3
        ).stdout
    client.close()
    assert daemon.stop() == 0
    told = daemon.log.read_bytes() + shown
    assert b"session closed" in told
    for secret in secrets:
        for spelling in spellings(secret):
            assert spelling not in told, f"{spelling!r} is told"


def log_calls() -> list[tuple[str, ast.Call]]:
    """Every call that writes a record."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path in (ROOT / "kvd").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "_LOG"
    ]


def test_records_have_a_fixed_event_and_no_secret_field() -> None:
    """An event is a constant, so that it can be searched for and limited; no field is named after
    what must not be told, and none takes a hash, a token or a salt.
    """
    calls = log_calls()
    assert len(calls) > 20
    for where, call in calls:
        assert isinstance(call.args[0], ast.Constant), f"{where}: an event made up on the way"
        for field in call.keywords:
            assert field.arg is not None or "report" in ast.dump(field.value), where
            assert field.arg not in WORDS, f"{where}: {field.arg}"
            last = field.value.attr if isinstance(field.value, ast.Attribute) else ""
            assert last not in WORDS, f"{where}: {last}"


def test_journald_gets_priorities(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its standard error a stream of the journal, every line begins with its priority."""
    stream = tmp_path / "stream"
    with stream.open("wb") as end:
        here = os.fstat(end.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{here.st_dev}:{here.st_ino}")
        program = "from kvd import log; x = log.get('t'); x.info('a'); x.warning('b'); x.error('c')"
        subprocess.run([sys.executable, "-c", program], stderr=end, timeout=60, check=True)
    assert stream.read_text().splitlines() == ["<6>t: a", "<4>warning: t: b", "<3>error: t: c"]


def test_a_client_cannot_flood_the_log(
    make_daemon: Callable[..., DaemonProcess],
) -> None:
    """Three hundred sessions that come and go are a limited number of lines, and the count of
    those left out is told.
    """
    daemon = make_daemon(host_bytes=16 << 20)
    daemon.start(until="ready")
    for _ in range(300):
        join(daemon).close()
    deadline = time.monotonic() + 30
    while daemon.log.read_text().count("session closed") < log.OFTEN_PER_MINUTE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert daemon.stop() == 0
    text = daemon.log.read_text()
    assert len(re.findall("session (open|closed)", text)) <= 4 * log.OFTEN_PER_MINUTE
