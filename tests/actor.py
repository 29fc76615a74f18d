"""A client process for the crash tests, to be killed or stopped at a known point.

    python -m tests.actor SOCKET POINT [DEADLINE_S]

It goes to POINT, prints one JSON line, waits for a line on stdin, goes on and prints another.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kvd_client
from tests.daemon_fixture import PATIENCE_S, namespace, small_layout, stamp, store, tokens

CHUNKS = 8
SEED = 4242


def say(**fields: Any) -> None:
    """Print one line for the parent."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def fill(reservation: kvd_client.Reservation, hashes: list[bytes], share: float) -> None:
    """Write the given share of every slot."""
    for slot in reservation.placed:
        assert slot.buffer is not None
        part = int(len(slot.buffer) * share)
        slot.buffer[:part] = stamp(hashes[slot.chunk], part)


def main() -> None:
    """Act."""
    socket, point = sys.argv[1:3]
    deadline_s = float(sys.argv[3]) if len(sys.argv) > 3 else 30.0
    client = kvd_client.connect(
        socket,
        namespace=namespace(),
        layout=small_layout(),
        required=True,
        timeout_s=PATIENCE_S,
        wait_s=PATIENCE_S,
    )
    hashes = client.chunk_hashes(tokens(CHUNKS, seed=SEED))
    if point == "lease":
        store(client, hashes)
        lease = client.acquire(hashes)
        say(chunks=lease.chunks)
        sys.stdin.readline()
        return
    reservation = client.reserve(hashes, deadline_s=deadline_s)
    if point == "midfill":
        fill(reservation, hashes, 0.5)
    if point == "filled":
        fill(reservation, hashes, 1.0)
    say(placed=len(reservation.placed), generations=[s.generation for s in reservation.placed])
    sys.stdin.readline()
    fill(reservation, hashes, 1.0)  # late, into memory that must still be its own
    statuses = client.publish(reservation)
    say(statuses=[int(status) for status in statuses], found=client.lookup(hashes).chunks)


if __name__ == "__main__":
    main()
