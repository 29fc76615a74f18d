"""What the two sides of a transfer may be told to do, and how long they wait. Pure.

    asker                                    holder
      | Ask: keys, lease from now               |
      |---------------------------------------->| rights, epoch, room?
      |                       Offer: one chunk  | Take: pin, promote, sum
      |<----------------------------------------|
      | Land: reserve slots, read (mover)       |
      | ... verify: lease, epoch, size, seal    |
      | Publish                           Have  |
      |---------------------------------------->| Drop: unpin
      |                                   Stop  |
      |<----------------------------------------|
      | Ended                          Release  |
      |---------------------------------------->|

`asker.py` and `holder.py` decide; both take events with the time and return actions, which the
daemon (`service.py`) or a simulation carries out. Nothing here waits, and nothing trusts a message
beyond its form.

P1. What is published was verified: the lease had not ended by the asker's own clock, counted
    from the request; epoch, size and columns were as asked; the seal fits the bytes in the slot.
P2. A slot that a read may still write is given back to nobody: until the read has completed or
    failed, or the mover that posted it was reaped, it stays reserved or in quarantine.
P3. Every fetch ends by its deadline, whatever happens to messages, hosts and movers.
P4. One transfer a key and peer: who asks twice joins the first.
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.peer.messages import Message, Piece  # noqa: TC001 - the fields' types

S = 1_000_000_000
MS = 1_000_000


class Knobs(NamedTuple):
    """Bounds of both sides.

    Attributes:
        lease_ms: What the asker asks for; the holder may shorten nothing, only refuse.
        lease_share: Of the lease, what the asker uses: clocks may differ in rate.
        answer_ms: Without a word for so long, the holder is taken for silent; long enough for it
            to bring a chunk up from a slow disk.
        read_ms: What one read gets, plus its bytes at a tenth of the learnt rate.
        floor_bytes_s: The rate taken before one was learnt.
        window_bytes: Asked of the mover at once, per peer; more than it reads at once, so that it
            goes on by itself.
        reads_max: Reads in flight, per peer.
        asks_max: Asks in flight, per peer; both sides.
        ahead_bytes: What the holder keeps pinned for one ask beyond what was handed back, to within
            a chunk; more than `window_bytes`, or the asker would wait for it.
        ahead_max: The same, in chunks.
        ahead_first: The same before the holder has seen how large the ask's chunks are.
        quarantine_bytes: Per peer; beyond it the mover is killed at once.
        quarantine_ms: No slot stays longer in quarantine than this before the mover is killed.
        serve_max: Asks a holder serves at once, over all peers.
    """

    lease_ms: int = 30_000
    lease_share: float = 0.9
    answer_ms: int = 5_000
    read_ms: int = 2_000
    floor_bytes_s: float = 50e6
    window_bytes: int = 160 << 20
    reads_max: int = 32
    asks_max: int = 4
    ahead_bytes: int = 192 << 20
    ahead_max: int = 32
    ahead_first: int = 4
    quarantine_bytes: int = 256 << 20
    quarantine_ms: int = 3_000
    serve_max: int = 64


class Want(NamedTuple):
    """What to fetch.

    Attributes:
        tag: Whose, see `messages.tag_of`.
        namespace: Its id.
        layout: Its id.
        sizes: Bytes of an object, by column.
        chunks: Hash and mask of the columns wanted, in prefix order.
        deadline_ns: When its caller stops waiting.
    """

    tag: bytes
    namespace: bytes
    layout: bytes
    sizes: tuple[int, ...]
    chunks: tuple[tuple[bytes, int], ...]
    deadline_ns: int


# -------------------------------------------------------------------- actions of both


class Send(NamedTuple):
    """Send a message to the host; it may get lost."""

    host: str
    message: Message


# -------------------------------------------------------------------- actions of the asker


class Land(NamedTuple):
    """Reserve slots for a chunk and read into them, through the mover of this life.

    Answered by one of `landed`, `failed`, `no_room`, or by `mover_gone`.
    """

    read: int
    life: int
    fetch: int
    at: int
    agent: int
    pieces: tuple[Piece, ...]


class Publish(NamedTuple):
    """Make a read's slots findable (P1)."""

    read: int


class GiveBack(NamedTuple):
    """Free a read's slots: nothing can land in them any more (P2)."""

    read: int


class Quarantine(NamedTuple):
    """Let nobody use a read's slots: something may still land in them (P2)."""

    read: int


class StartMover(NamedTuple):
    """Start the mover of this life; answered by `mover_up` or `mover_gone`."""

    life: int


class KillMover(NamedTuple):
    """Kill the mover and wait for its end; answered by `mover_gone`.

    Attributes:
        life: Which.
        why: Its quarantine is "full", or "old".
    """

    life: int
    why: str


class Learn(NamedTuple):
    """Remember how the holder's source is reached."""

    version: int
    metadata: bytes


class Ended(NamedTuple):
    """A fetch has ended for its caller.

    Attributes:
        fetch: Which.
        published: Chunks that came.
        why: "done", or what cut it short.
    """

    fetch: int
    published: int
    why: str


AskerAction = Send | Land | Publish | GiveBack | Quarantine | StartMover | KillMover | Learn | Ended


# -------------------------------------------------------------------- actions of the holder


class Take(NamedTuple):
    """Pin a chunk, bring it up where that pays, sum its objects; answered by `taken`."""

    ticket: int
    host: str
    tag: bytes
    namespace: bytes
    layout: bytes
    key: bytes
    mask: int


class Drop(NamedTuple):
    """Let go of what a Take holds, or of what it is still doing."""

    ticket: int


HolderAction = Send | Take | Drop


class Held(NamedTuple):
    """One object that a Take holds in place.

    Attributes:
        column: Which.
        address: In the source process.
        size_bytes: Its length.
        generation: Of its slot.
        lossy: Whether it went through a lossy form.
        digest: xxh3-128 of its bytes.
    """

    column: int
    address: int
    size_bytes: int
    generation: int
    lossy: int
    digest: bytes
