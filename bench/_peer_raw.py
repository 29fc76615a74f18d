"""What bench.peer compares with: a plain socket and NIXL alone, each end in a namespace of its own.

    python -m bench._peer_raw tcp-source IP | tcp-sink IP | nixl-source | nixl-sink

Lines of JSON on stdin and stdout. All move OBJECTS objects of OBJECT_BYTES a round.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import sys
import time
from typing import Any

OBJECT_BYTES = 32 << 20
OBJECTS = 32
TOTAL_BYTES = OBJECTS * OBJECT_BYTES
PORT = 7700
IN_FLIGHT = 3
"""Reads posted at a time, as kvd does."""


def say(**fields: object) -> None:
    """Print one line for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def memory(fill: int) -> mmap.mmap:
    """Return faulted-in memory."""
    made = mmap.mmap(-1, TOTAL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(address(made), fill, TOTAL_BYTES)
    return made


def address(made: mmap.mmap) -> int:
    """Return where memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(made))


def tcp_source(ip: str) -> None:
    """Send a round for each byte that comes."""
    view = memoryview(memory(1))
    with socket.create_server((ip, PORT)) as server:
        say(ready=1)
        connection, _ = server.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        while connection.recv(1):
            for index in range(OBJECTS):
                connection.sendall(view[index * OBJECT_BYTES : (index + 1) * OBJECT_BYTES])


def tcp_sink(ip: str) -> None:
    """Receive a round for each line."""
    view = memoryview(memory(0))
    connection = socket.create_connection((ip, PORT))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    say(ready=1)
    for _ in sys.stdin:
        begun = time.perf_counter()
        connection.send(b"g")
        got = 0
        while got < TOTAL_BYTES:
            count = connection.recv_into(view[got:])
            if not count:
                raise SystemExit("the source has ended")
            got += count
        say(seconds=time.perf_counter() - begun)


def nixl_source() -> None:
    """Let others read until stdin closes."""
    from kvd.peer.nixl_agent import Agent

    agent, made = Agent("bench-source"), memory(1)
    agent.register(address(made), TOTAL_BYTES)
    say(base=address(made), metadata=agent.metadata().hex())
    sys.stdin.read()


def nixl_sink() -> None:
    """Read a round for each line; the first line says where."""
    from kvd.peer.nixl_agent import Agent

    agent, made = Agent("bench-sink"), memory(0)
    agent.register(address(made), TOTAL_BYTES)
    say(ready=1)
    where: dict[str, Any] = json.loads(sys.stdin.readline())
    peer = agent.load(bytes.fromhex(where["metadata"]))
    for _ in sys.stdin:
        begun = time.perf_counter()
        left = list(range(OBJECTS))
        going: list[object] = []
        while left or going:
            while left and len(going) < IN_FLIGHT:
                at = left.pop(0) * OBJECT_BYTES
                into, source = (
                    (address(made) + at, OBJECT_BYTES),
                    (where["base"] + at, OBJECT_BYTES),
                )
                going.append(agent.read(peer, [into], [source]))
            for handle in list(going):
                if agent.state(handle) == "done":
                    agent.release(handle)
                    going.remove(handle)
            time.sleep(0.0002)
        say(seconds=time.perf_counter() - begun)


if __name__ == "__main__":
    role = sys.argv[1]
    if role == "tcp-source":
        tcp_source(sys.argv[2])
    elif role == "tcp-sink":
        tcp_sink(sys.argv[2])
    elif role == "nixl-source":
        nixl_source()
    else:
        nixl_sink()
