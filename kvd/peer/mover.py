"""The process that moves bytes between hosts: `python -m kvd.peer.mover ROLE FD`.

It maps the slabs that the daemon passes to it and runs one NIXL agent. A *source* lets peers read
and sums objects; a *sink* reads from one peer, and its end is the fence (ADR 0024): the daemon
kills it, reaps it, and knows that nothing it posted can land any more. It decides nothing.

Messages are msgpack lists in a SOCK_SEQPACKET socket, fds beside them. To the mover:

    slab    id, bytes, writable; with its fd
    agent   version, metadata       how the peer is reached
    read    number, version, [[slab, offset, address, bytes], ...]
    sum     number, [[slab, offset, bytes], ...]

and from it:

    up      name of the agent
    mapped  slab, base address, version, metadata
    landed  number, [xxh3-128 of each object]
    failed  number          the peer is gone: nothing more of it lands
    summed  number, [xxh3-128 of each object]

A read waits its turn here, and the next is begun before what has landed is summed: so the link is
never idle for a sum or for a word with the daemon.

Whatever else goes wrong ends the process, which is always safe. One thread, plus NIXL's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import signal
import socket
import sys
from collections import deque
from typing import Any, Final, NamedTuple

import msgpack
import xxhash

from kvd.peer.nixl_agent import Agent

PACKET_BYTES_MAX: Final = 128 * 1024
POLL_S: Final = (0.0002, 0.001)
"""Between two looks at reads under way: at first, and when nothing has happened for long."""
POSTED_BYTES: Final = 96 << 20
"""Read at once: three objects of 32 MiB. More would share the link, and the first come last."""
_PROT_READ: Final = 1
_PR_SET_PDEATHSIG: Final = 1


class Read(NamedTuple):
    """A read that the daemon asked for.

    Attributes:
        number: The daemon's.
        version: Of the peer's metadata.
        metadata: That version of it; None if it was not told.
        objects: Slab, offset there, address at the peer, bytes; of each object.
    """

    number: int
    version: int
    metadata: bytes | None
    objects: list[Any]

    def size_bytes(self) -> int:
        """Return the bytes of all its objects."""
        return sum(size for _, _, _, size in self.objects)


class Mover:
    """All that one mover process has."""

    def __init__(self, role: str, channel: socket.socket) -> None:
        """Make the agent; its name is of this life alone, so that nobody takes it for another."""
        self._channel = channel
        self._agent = Agent(f"kvd-{role}-{os.getpid()}-{secrets.token_hex(8)}")
        self._slabs: dict[int, tuple[memoryview, int]] = {}
        self._peer = ("", -1)
        self._known: dict[int, bytes] = {}
        self._waiting: deque[Read] = deque()
        self._posted: dict[int, tuple[object, Read]] = {}
        self._version = 0
        self._say("up", self._agent.name)

    def _say(self, *message: object) -> None:
        self._channel.sendall(msgpack.packb(message, use_bin_type=True))

    def run(self) -> None:
        """Serve until the daemon's end of the channel closes."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        pause_s = POLL_S[0]
        while True:
            timeout_ms = pause_s * 1e3 if self._posted else None
            if poller.poll(timeout_ms):
                if not self._hear():
                    return
                pause_s = POLL_S[0]
            elif self._look():
                pause_s = POLL_S[0]
            else:
                pause_s = min(POLL_S[1], 1.5 * pause_s)

    def _hear(self) -> bool:
        payload, fds, _, _ = socket.recv_fds(self._channel, PACKET_BYTES_MAX, 1)
        if not payload:
            return False
        kind, *fields = msgpack.unpackb(payload)
        if kind == "slab":
            slab, size_bytes, writable = fields
            self._map(slab, size_bytes, writable, fds[0])
        elif kind == "agent":
            version, metadata = fields
            self._known = {version: metadata}
        elif kind == "read":
            number, version, objects = fields
            self._waiting.append(Read(number, version, self._known.get(version), objects))
            self._post()
        else:
            assert kind == "sum", kind
            number, objects = fields
            self._say("summed", number, [self._digest(*item) for item in objects])
        self._look()
        return True

    def _map(self, slab: int, size_bytes: int, writable: int, fd: int) -> None:
        """Map a slab and register it; a source over TCP maps it read-only: no peer can write it."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # its pages are there: no fault a page later
        view = memoryview(mmap.mmap(fd, size_bytes, flags=flags, prot=access))
        os.close(fd)
        base = _address(view)
        self._agent.register(base, size_bytes)
        self._slabs[slab] = (view, base)
        self._version += 1
        self._say("mapped", slab, base, self._version, self._agent.metadata())

    def _digest(self, slab: int, offset: int, size_bytes: int) -> bytes:
        return xxhash.xxh3_128_digest(self._slabs[slab][0][offset : offset + size_bytes])

    def _post(self) -> None:
        """Begin the reads whose turn it is, in the daemon's order."""
        room_bytes = POSTED_BYTES - sum(read.size_bytes() for _, read in self._posted.values())
        while self._waiting:
            size_bytes = self._waiting[0].size_bytes()
            if self._posted and size_bytes > room_bytes:
                return
            read = self._waiting.popleft()
            handle = self._begin(read)
            if handle is None:
                self._say("failed", read.number)
            else:
                self._posted[read.number] = (handle, read)
                room_bytes -= size_bytes

    def _begin(self, read: Read) -> object:
        """Post one read; None if its peer is gone, and then nothing of it lands."""
        name, loaded = self._peer
        if read.version != loaded:
            if read.metadata is None:
                return None
            fresh = self._agent.load(read.metadata)
            if name and fresh != name:
                self._agent.forget(name)
            self._peer = (fresh, read.version)
        into = [(self._slabs[slab][1] + offset, size) for slab, offset, _, size in read.objects]
        source = [(address, size) for _, _, address, size in read.objects]
        handle = self._agent.read(self._peer[0], into, source)
        if handle is None:
            self._lost()
        return handle

    def _lost(self) -> None:
        """Forget a peer that is gone; its metadata is loaded anew with the next read."""
        if self._peer[0]:
            self._agent.forget(self._peer[0])
            self._peer = ("", -1)

    def _look(self) -> bool:
        """See which reads have ended, oldest first; the link gets its next work before all else."""
        ended: list[tuple[Read, bool]] = []
        for number, (handle, read) in list(self._posted.items()):
            state = self._agent.state(handle)
            if state == "going":
                continue
            self._agent.release(handle)
            del self._posted[number]
            ended.append((read, state == "done"))
        if not self._posted and not all(done for _, done in ended):
            self._lost()
        self._post()
        for read, done in ended:
            if done:
                digests = [self._digest(slab, offset, n) for slab, offset, _, n in read.objects]
                self._say("landed", read.number, digests)
            else:
                self._say("failed", read.number)
        return bool(ended)


def _address(view: memoryview) -> int:
    """Return where a map lies; ctypes takes no read-only buffer, numpy does."""
    import numpy as np

    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address


def main() -> None:
    """Run a mover on the channel that the daemon passed; die with the daemon."""
    role, fd = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the daemon says when to end
    channel = socket.socket(fileno=int(fd))
    Mover(role, channel).run()
    os._exit(0)  # without UCX's own farewell: nothing waits for it, and the sockets close anyway


if __name__ == "__main__":
    main()
