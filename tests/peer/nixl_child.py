"""A process with a NIXL agent, for the test of what a release does not stop.

    python -m tests.peer.nixl_child source | reader

Lines of JSON on stdin and stdout. The reader does what a program does that believes in `release`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import time

from kvd.peer.nixl_agent import Agent

BLOCK_BYTES = 4 << 20
BLOCKS = 48
SENT, REUSED = 0xAB, 0x55


def say(**fields: object) -> None:
    """Print one line for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve the parent until it closes stdin."""
    agent = Agent(f"test-{sys.argv[1]}-{time.monotonic_ns()}")
    memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(base, SENT if sys.argv[1] == "source" else 0, len(memory))
    agent.register(base, len(memory))
    say(base=base, metadata=agent.metadata().hex())
    blocks = [(base + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(BLOCKS)]
    for line in sys.stdin:
        ask = json.loads(line)
        source = [(ask["base"] + i * BLOCK_BYTES, BLOCK_BYTES) for i in range(BLOCKS)]
        if ask["do"] == "first":  # wire-up, and proof that it works
            peer = agent.load(bytes.fromhex(ask["metadata"]))
            handle = agent.read(peer, blocks[:1], source[:1])
            while agent.state(handle) == "going":
                time.sleep(0.001)
            say(first=memory[0])
        elif ask["do"] == "read and release":
            peer = agent.load(bytes.fromhex(ask["metadata"]))
            handle = agent.read(peer, blocks, source)
            going = agent.state(handle)
            agent.release(handle)
            ctypes.memset(base, REUSED, len(memory))  # "free again": somebody else's now
            say(state=going)
        else:
            whole = [memory[i : i + BLOCK_BYTES].count(REUSED) == BLOCK_BYTES for _, i in _ends()]
            say(overwritten=whole.count(False))


def _ends() -> list[tuple[int, int]]:
    return [(i, i * BLOCK_BYTES) for i in range(BLOCKS)]


if __name__ == "__main__":
    main()
