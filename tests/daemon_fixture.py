"""Fixtures: a real daemon of the test's own, and small clients for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from bench._daemon import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK_TOKENS = 16
OBJECT_BYTES = 64 << 10
PATIENCE_S = 20.0
"""How long a client waits for a daemon that answers: far beyond what a busy machine takes."""


def small_layout(object_bytes: int = OBJECT_BYTES, *, tp: int = 1) -> kvd_client.Layout:
    """Return a layout with one full-attention group and small objects."""
    group = kvd_client.Group("full", 2, 2, 64, object_bytes)
    return kvd_client.Layout(CHUNK_TOKENS, CHUNK_TOKENS, "float32", (group,), tp=tp)


def namespace(**fields: object) -> kvd_client.Namespace:
    """Return a namespace; fields may be replaced."""
    return kvd_client.Namespace("model", "1", "float32")._replace(**fields)  # type: ignore[arg-type]


def tokens(chunks: int, seed: int = 0) -> list[int]:
    """Return that many chunks of tokens, different for each seed."""
    return [seed * 1_000_003 + index for index in range(chunks * CHUNK_TOKENS)]


def stamp(key: bytes, size_bytes: int) -> bytes:
    """Return the bytes that belong to a key in these tests."""
    return (key * (size_bytes // len(key) + 1))[:size_bytes]


def store(client: kvd_client.Client, hashes: list[bytes], first: int = 0) -> int:
    """Store stamped objects; return how many were published."""
    with client.reserve(hashes, first=first) as reservation:
        for slot in reservation.placed:
            assert slot.buffer is not None
            slot.buffer[:] = stamp(hashes[slot.chunk], len(slot.buffer))
        return client.publish(reservation).count(kvd_client.Status.OK)


def load(client: kvd_client.Client, hashes: list[bytes]) -> int:
    """Read the usable prefix, check every byte; return its chunks."""
    with client.acquire(hashes) as lease:
        for chunk in range(lease.first, lease.chunks):
            view = lease.view(chunk)
            assert bytes(view) == stamp(hashes[chunk], len(view)), "a wrong hit"
        return lease.chunks


def join(daemon: DaemonProcess, **options: Any) -> kvd_client.Client:
    """Connect a client that waits out a busy machine; options may be replaced."""
    usual: dict[str, Any] = {
        "namespace": namespace(),
        "layout": small_layout(),
        "required": True,
        "timeout_s": PATIENCE_S,
        "wait_s": PATIENCE_S,
    }
    return kvd_client.connect(daemon.socket, **usual | options)


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """Make daemons, described but not started; all are stopped at the end."""
    made: list[DaemonProcess] = []
    with tempfile.TemporaryDirectory(prefix="kvd-") as directory:

        def make(name: str = "a", **options: object) -> DaemonProcess:
            path = Path(directory) / name
            path.mkdir(exist_ok=True)
            options.setdefault("host_bytes", 64 << 20)
            daemon = DaemonProcess(path, **options)  # type: ignore[arg-type]
            made.append(daemon)
            return daemon

        yield make
        for daemon in made:
            daemon.clean_up()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """Run a daemon with a host tier of 64 MiB."""
    running = make_daemon()
    running.start()
    return running


@pytest.fixture
def connect(daemon: DaemonProcess) -> Iterator[Callable[..., kvd_client.Client]]:
    """Connect clients to `daemon`; all are closed at the end."""
    made: list[kvd_client.Client] = []

    def make(**options: object) -> kvd_client.Client:
        made.append(join(daemon, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()
