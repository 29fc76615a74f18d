"""Real daemons with a directory: what they tell, and that engines never feel it go."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd.peer.membership import host_key
from kvd.statpage import read
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import load, namespace, small_layout, store, tokens
from tests.redis_kit import make_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._daemon import DaemonProcess
    from tests.redis_kit import Server

__all__ = ["make_server"]

WAIT_S = 30.0


def configured(make_daemon: Callable[..., DaemonProcess], name: str, url: str) -> DaemonProcess:
    """Start a daemon that has this directory."""
    daemon = make_daemon(name, arguments=("--config", "{config}"))
    config = daemon.directory / "kvd.toml"
    config.write_text(
        f'[peer]\nhost = "{name}"\ndirectory = "{url}"\nheartbeat_s = 0.5\nlookup_ms = 200\n',
        encoding="utf-8",
    )
    daemon._command = [str(config) if part == "{config}" else part for part in daemon._command]
    daemon.start()
    return daemon


def until(stat: Callable[[], dict[str, Any]], *path: str, least: int) -> None:
    """Wait until a figure of the page is large enough."""
    end = time.monotonic() + WAIT_S
    while True:
        figure: Any = stat()
        for name in path:
            figure = figure[name]
        if figure >= least:
            return
        assert time.monotonic() < end, stat()
        time.sleep(0.05)


def page(daemon: DaemonProcess) -> dict[str, Any]:
    """Read a daemon's statistics."""
    return read(stat_page_name(daemon.socket)).stats


@pytest.mark.timeout(120)
def test_daemons_tell_and_engines_feel_nothing(
    make_daemon: Callable[..., DaemonProcess],
    make_server: Callable[..., Server],
) -> None:
    """Two daemons see each other; with Redis stopped, killed and empty again engines go on."""
    server = make_server()
    a, b = (configured(make_daemon, name, server.url) for name in "ab")
    client = kvd_client.connect(
        a.socket,
        namespace=namespace(),
        layout=small_layout(),
        required=True,
        timeout_s=20.0,
        wait_s=20.0,
    )
    hashes = client.chunk_hashes(tokens(40))
    assert store(client, hashes) == 40
    until(lambda: page(a), "directory", "counters", "told", least=40)
    until(lambda: page(b), "directory", "hosts", least=2)
    redis = server.client()
    assert sum(b"host" not in key for key in redis.scan_iter("kvd:{*}*")) == 40

    for seed, harm in enumerate((lambda: server.send(signal.SIGSTOP), server.kill), 1):
        harm()
        more = client.chunk_hashes(tokens(40, seed=seed))
        begun = time.monotonic()
        assert store(client, more) == 40
        assert load(client, more) == 40
        assert time.monotonic() - begun < WAIT_S, "a call that hangs for each message takes longer"
        if server._process is not None:
            server.send(signal.SIGCONT)
    until(lambda: page(a), "directory", "counters", "trips", least=1)
    server.start()
    until(
        lambda: {"entries": len(list(server.client().scan_iter("kvd:{*}*")))}, "entries", least=122
    )
    client.close()
    a.process.terminate()
    assert a.process.wait(WAIT_S) == 0
    until(lambda: {"gone": server.client().get(host_key("kvd", "a")) is None}, "gone", least=1)
