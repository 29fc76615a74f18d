"""NIXL writes on after a release; the death of the process stops it. Both with the real library."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from kvd.memory import make_memfd
from kvd.peer.nixl_agent import environment, load
from kvd.peer.process import MoverProcess
from tests.peer.nixl_child import REUSED, SENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
MIB = 1 << 20
SLAB_BYTES = 64 * MIB


@pytest.fixture(autouse=True)
def nixl() -> None:
    """Skip where the library is not installed."""
    try:
        load()
    except ImportError as error:
        pytest.skip(str(error))


class Child:
    """A `nixl_child` process."""

    def __init__(self, role: str) -> None:
        """Start it, and read what it says of itself."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.peer.nixl_child", role],
            env={**os.environ, **environment("tcp", ["lo"])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self.hear()

    def hear(self) -> dict[str, Any]:
        """Return its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **fields: object) -> dict[str, Any]:
        """Tell it to do something; return what it says."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def test_a_released_read_still_writes() -> None:
    """A transfer whose handle was released lands in memory that is somebody else's by then."""
    source, reader = Child("source"), Child("reader")
    try:
        assert reader.ask(do="first", **source.about)["first"] == SENT
        os.kill(source.process.pid, signal.SIGSTOP)
        assert reader.ask(do="read and release", **source.about)["state"] == "going"
        os.kill(source.process.pid, signal.SIGCONT)
        late = 0
        deadline = time.monotonic() + 60
        while not late and time.monotonic() < deadline:
            time.sleep(0.2)
            late = reader.ask(do="count", **source.about)["overwritten"]
        assert late > 0, "NIXL has learnt to cancel: simplify kvd"
    finally:
        source.close()
        reader.close()


def test_the_fence_stops_it() -> None:
    """The same with kvd's mover: once it has been killed and reaped, nothing of it lands."""
    asyncio.run(_fenced())


async def _fenced() -> None:
    loop = asyncio.get_running_loop()
    said: dict[str, asyncio.Queue[list[Any]]] = {"source": asyncio.Queue(), "sink": asyncio.Queue()}

    def start(role: str) -> MoverProcess:
        return MoverProcess(
            loop,
            role,
            transport="tcp",
            devices=["lo"],
            on_message=said[role].put_nowait,
            on_gone=lambda: said[role].put_nowait(["gone"]),
        )

    fds = [make_memfd(f"kvd-test-{i}", SLAB_BYTES) for i in range(2)]
    theirs, ours = (mmap.mmap(fd, SLAB_BYTES) for fd in fds)
    theirs[:] = bytes([SENT]) * SLAB_BYTES
    source, sink = start("source"), start("sink")
    try:
        async with asyncio.timeout(90):
            assert (await said["source"].get())[0] == (await said["sink"].get())[0] == "up"
            source.send("slab", 0, SLAB_BYTES, 0, fds=[fds[0]])
            sink.send("slab", 0, SLAB_BYTES, 1, fds=[fds[1]])
            _, _, base, version, metadata = await said["source"].get()
            await said["sink"].get()
            sink.send("agent", version, metadata)
            sink.send("read", 1, version, [[0, 0, base, MIB]])
            assert (await said["sink"].get())[0] == "landed"
            assert ours[0] == SENT
            os.kill(source.process.pid, signal.SIGSTOP)
            sink.send("read", 2, version, [[0, 0, base, SLAB_BYTES]])
            await asyncio.sleep(0.3)  # it is posted, and hangs
            assert said["sink"].empty()
            sink.kill()
            assert await said["sink"].get() == ["gone"]
            ours[:] = bytes([REUSED]) * SLAB_BYTES
            os.kill(source.process.pid, signal.SIGCONT)
            await asyncio.sleep(2)
            assert ours[:].count(REUSED) == SLAB_BYTES
    finally:
        for one in (source, sink):
            one.kill()
        async with asyncio.timeout(30):
            while None in {source.process.returncode, sink.process.returncode}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for fd in fds:
            os.close(fd)
