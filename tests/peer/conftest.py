"""Fixtures: a fleet of three hosts in network namespaces, whole again before each test."""

from __future__ import annotations

import itertools
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvd_client
from bench._fleet import Fleet, Host, lacking, wait_for
from tests.daemon_fixture import namespace, small_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OBJECT_BYTES = 1 << 20
NAMES = ("a", "b", "c")
_SEEDS = itertools.count(10, 10)
PEER = {"hold_s": 5.0, "quarantine_bytes": 64 << 20, "heartbeat_s": 1.0}
"""A host that is slow for less than three seconds is not gone, and its counts go on."""


@pytest.fixture(scope="session")
def whole_fleet() -> Iterator[Fleet]:
    """Make the fleet once: three daemons in three namespaces, Redis in a fourth."""
    why = lacking()
    if why:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="kvd-fleet-") as directory:
        fleet = Fleet(Path(directory))
        try:
            for name in NAMES:  # one of them verifies what is in its memory, and has to get on
                verify = "always" if name == "c" else "off"
                fleet.host(name, peer=PEER, host_bytes=512 << 20, verify=verify)
            yield fleet
        finally:
            fleet.close()


@pytest.fixture
def fleet(whole_fleet: Fleet) -> Fleet:
    """Mend whatever a test before this one has broken; every host is linked to every other."""
    if whole_fleet.redis is None or whole_fleet.redis.poll() is not None:
        whole_fleet.start_redis()
    hosts = list(whole_fleet.hosts.values())
    for host in hosts:
        host.mend()
        if host.process is not None and host.process.poll() is None:
            host.signal(signal.SIGCONT)
    for host in hosts:
        if host.process is None or host.process.poll() is not None:
            host.start()
    for host in hosts:
        for other in hosts:
            if other is not host:
                wait_for(lambda h=host, o=other: _ready(h.peer(o.name)), f"{host.name}")  # type: ignore[misc]
    return whole_fleet


def _ready(peer: dict[str, object]) -> bool:
    return peer.get("state") == "ready" and peer.get("mover") == "up"


@pytest.fixture
def client() -> Iterator[Callable[..., kvd_client.Client]]:
    """Connect clients to hosts; all are closed at the end."""
    made: list[kvd_client.Client] = []

    def make(host: Host, **options: object) -> kvd_client.Client:
        options.setdefault("namespace", namespace())
        options.setdefault("layout", small_layout(OBJECT_BYTES))
        options.setdefault("timeout_s", 30.0)
        found = kvd_client.connect(host.socket, required=True, wait_s=30.0, **options)  # type: ignore[arg-type]
        made.append(found)
        return found

    yield make
    for one in made:
        one.close()


@pytest.fixture
def seed() -> int:
    """Return a number that, with the nine after it, no other test uses: tokens of its own."""
    return next(_SEEDS)
