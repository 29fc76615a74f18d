"""The mover's turn-taking: the link is never idle for a sum. Its loop is real, NIXL is played."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import xxhash

from kvd.peer import mover

if TYPE_CHECKING:
    from collections.abc import Iterator

SLAB, SIZE = 1 << 16, 4096
DAEMON, OTHER = b"daemon", b"other"


class Agent:
    """NIXL, played: reads end when the test says so; what is done is written down."""

    def __init__(self, name: str) -> None:
        """Know nobody."""
        self.name = name
        self.log: list[str] = []
        self.states: dict[int, str] = {}
        self.gone = False
        self._reads = 0

    def register(self, address: int, size_bytes: int) -> None:
        """Note nothing."""

    def metadata(self) -> bytes:
        """Return something."""
        return b"m"

    def load(self, metadata: bytes) -> str:
        """Call a peer by its metadata."""
        self.log.append(f"load {metadata.decode()}")
        return metadata.decode()

    def forget(self, peer: str) -> None:
        """Note it."""
        self.log.append(f"forget {peer}")

    def read(self, peer: str, into: list[Any], source: list[Any]) -> int | None:
        """Post a read, numbered from 1."""
        del into, source
        if self.gone:
            return None
        self._reads += 1
        self.log.append(f"read {self._reads} of {peer}")
        self.states[self._reads] = "going"
        return self._reads

    def state(self, handle: int) -> str:
        """Tell what the test has said."""
        return self.states[handle]

    def release(self, handle: int) -> None:
        """Note it."""
        self.log.append(f"release {handle}")


class Played:
    """A mover on one end of a channel, the test on the other; turned by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start it with one slab and a peer."""
        monkeypatch.setattr(mover, "Agent", Agent)
        monkeypatch.setattr(mover, "POSTED_BYTES", 2 * SIZE)
        self.channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(0)
        self.mover = mover.Mover("sink", self._theirs)
        self.agent: Any = self.mover._agent
        digest = self.mover._digest

        def noted(slab: int, offset: int, size_bytes: int) -> bytes:
            self.agent.log.append(f"sum {offset // SIZE}")
            return digest(slab, offset, size_bytes)

        monkeypatch.setattr(self.mover, "_digest", noted)
        fd = os.memfd_create("kvd-slab")
        os.ftruncate(fd, SLAB)
        self.tell("slab", 0, SLAB, 1, fds=[fd])
        os.close(fd)
        self.tell("agent", 1, DAEMON)
        assert [kind for kind, *_ in self.said()] == ["up", "mapped"]

    def tell(self, *message: object, fds: tuple[int, ...] | list[int] = ()) -> None:
        """Say something to the mover, which hears it."""
        socket.send_fds(self.channel, [msgpack.packb(message)], fds)
        assert self.mover._hear()

    def read(self, number: int, version: int = 1) -> None:
        """Ask for object NUMBER."""
        self.tell("read", number, version, [[0, number * SIZE, 1 << 20, SIZE]])

    def said(self) -> list[list[Any]]:
        """Return what the mover has said."""
        found = []
        while True:
            try:
                found.append(msgpack.unpackb(self.channel.recv(1 << 17)))
            except BlockingIOError:
                return found

    def close(self) -> None:
        """End it."""
        self.channel.close()
        self._theirs.close()

    def done(self) -> list[str]:
        """Return what has been done since the last call."""
        found, self.agent.log[:] = list(self.agent.log), []
        return found


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Make one."""
    made = Played(monkeypatch)
    yield made
    made.close()


def test_the_next_read_is_begun_before_the_last_is_summed(played: Played) -> None:
    """Two at a time: the third waits for its turn, and then for nothing."""
    for number in (1, 2, 3, 4):
        played.read(number)
    assert played.done() == ["load daemon", "read 1 of daemon", "read 2 of daemon"]
    played.agent.states[2] = "done"
    assert played.mover._look()
    assert played.done() == ["release 2", "read 3 of daemon", "sum 2"]
    assert played.said() == [["landed", 2, [xxhash.xxh3_128_digest(bytes(SIZE))]]]
    assert not played.mover._look()
    played.agent.states.update({1: "done", 3: "done"})
    played.mover._look()
    assert played.done() == ["release 1", "release 3", "read 4 of daemon", "sum 1", "sum 3"]
    assert [message[:2] for message in played.said()] == [["landed", 1], ["landed", 3]]


def test_a_read_that_waits_goes_to_the_peer_it_was_meant_for(played: Played) -> None:
    """Newer metadata that comes meanwhile is for the reads that come after it."""
    for number in (1, 2, 3):
        played.read(number)
    played.tell("agent", 2, OTHER)
    played.read(4, version=2)
    played.done()
    played.agent.states.update({1: "done", 2: "done"})
    played.mover._look()
    assert [line for line in played.done() if line.split()[0] in {"load", "read", "forget"}] == [
        "read 3 of daemon",
        "load other",
        "forget daemon",
        "read 4 of other",
    ]


def test_what_waits_for_a_peer_that_is_gone_fails(played: Played) -> None:
    """Each read gets an answer, and the metadata is loaded anew with the next."""
    for number in (1, 2, 3):
        played.read(number)
    played.agent.gone = True
    played.agent.states.update({1: "lost", 2: "lost"})
    played.mover._look()
    assert sorted(message[:2] for message in played.said()) == [["failed", n] for n in (1, 2, 3)]
    played.agent.gone = False
    played.done()
    played.read(4)
    assert played.done() == ["load daemon", "read 3 of daemon"]
