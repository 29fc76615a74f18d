"""Whether NIXL works on this host, over what, how fast, and what it takes while idle.

    python -m kvd.peer.selftest      with the environment of a mover; for `kvd doctor`

Two agents in one process read from each other; UCX says on stderr which lanes it chose
(`UCX_PROTO_INFO=y`). Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
import time
from typing import Final

from kvd.peer.nixl_agent import Agent

BYTES: Final = 32 << 20
ROUNDS: Final = 4
LIMIT_S: Final = 10.0
IDLE_S: Final = 0.5


def main() -> None:
    """Measure and print."""
    agents = [Agent("kvd-selftest-a"), Agent("kvd-selftest-b")]
    maps = [mmap.mmap(-1, BYTES) for _ in agents]
    bases = [ctypes.addressof(ctypes.c_char.from_buffer(found)) for found in maps]
    ctypes.memset(bases[0], 7, BYTES)
    for agent, base in zip(agents, bases, strict=True):
        agent.register(base, BYTES)
    peer = agents[1].load(agents[0].metadata())
    best, end = 0.0, time.monotonic() + LIMIT_S
    for _ in range(ROUNDS):
        begun = time.monotonic()
        handle = agents[1].read(peer, [(bases[1], BYTES)], [(bases[0], BYTES)])
        while agents[1].state(handle) == "going":
            if time.monotonic() > end:
                raise SystemExit("a read of 32 MiB did not end")
            time.sleep(0.0005)
        best = max(best, BYTES / (time.monotonic() - begun))
    right = maps[1][:].count(7) == BYTES
    cpu, begun = time.process_time(), time.monotonic()
    time.sleep(IDLE_S)
    idle = (time.process_time() - cpu) / (time.monotonic() - begun) / len(agents)
    json.dump({"right": right, "gbps": best / 1e9, "idle_cpu": idle}, sys.stdout)


if __name__ == "__main__":
    main()
