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
from typing import Any, Final

import msgpack
import xxhash

from kvd.peer.nixl_agent import Agent

PACKET_BYTES_MAX: Final = 128 * 1024
POLL_S: Final = (0.0002, 0.002)
"""Between two looks at reads under way: at first, and when nothing has happened for long."""
_PROT_READ: Final = 1
_PR_SET_PDEATHSIG: Final = 1


class Mover:
    """All that one mover process has."""

    def __init__(self, role: str, channel: socket.socket) -> None:
        """Make the agent; its name is of this life alone, so that nobody takes it for another."""
        self._channel = channel
        self._agent = Agent(f"kvd-{role}-{os.getpid()}-{secrets.token_hex(8)}")
        self._slabs: dict[int, tuple[memoryview, int]] = {}
        self._peer = ("", -1)
        self._known: dict[int, bytes] = {}
        self._reads: dict[int, tuple[object, list[Any]]] = {}
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
            timeout_ms = pause_s * 1e3 if self._reads else None
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
            self._read(*fields)
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

    def _read(self, number: int, version: int, objects: list[Any]) -> None:
        name, loaded = self._peer
        if version != loaded:
            metadata = self._known.get(version)
            if metadata is None:
                self._say("failed", number)
                return
            fresh = self._agent.load(metadata)
            if name and fresh != name:
                self._agent.forget(name)
            self._peer = (fresh, version)
        into = [(self._slabs[slab][1] + offset, size) for slab, offset, _, size in objects]
        source = [(address, size) for _, _, address, size in objects]
        handle = self._agent.read(self._peer[0], into, source)
        if handle is None:
            self._lost()
            self._say("failed", number)
        else:
            self._reads[number] = (handle, objects)

    def _lost(self) -> None:
        """Forget a peer that is gone; its metadata is loaded anew with the next read."""
        if self._peer[0]:
            self._agent.forget(self._peer[0])
            self._peer = ("", -1)

    def _look(self) -> bool:
        """See which reads have ended, oldest first."""
        ended = False
        for number, (handle, objects) in list(self._reads.items()):
            state = self._agent.state(handle)
            if state == "going":
                continue
            ended = True
            self._agent.release(handle)
            del self._reads[number]
            if state == "done":
                digests = [self._digest(slab, offset, size) for slab, offset, _, size in objects]
                self._say("landed", number, digests)
            else:
                self._say("failed", number)
                if not self._reads:
                    self._lost()
        return ended


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
