"""What is told to the directory of a fleet and when it is asked: names, queue, pace, breaker. Pure.

The directory, a Redis or Valkey that all hosts share, has an entry a chunk: the set of the numbers
of those who hold it. Entries are hints. A host asks the one named, which may say no; an entry that
is missing costs a miss, one too many costs a question.

A chunk whose state has changed goes into an outbox, and from there to the directory at a limited
rate. Everything held is told anew from time to time (a sweep), so that nothing lost on the way
stays lost: what the outbox had no room for, a directory that came back empty, entries about to end.

    kvd:{TAG}DIGEST     set of numbers; DIGEST of realm and chunk, TAG of realm and group

A group is GROUP_CHUNKS chunks of a chain in a row. It has one slot of a Redis Cluster, so that a
look-up asks few servers, once each; different prompts have different groups.

Y1. The outbox holds at most `limit` chunks; what finds no room is counted, and the next sweep
    makes good for it.
Y2. What is told of a chunk is its state when it is told, not when it changed.
Y3. While the gate is shut nobody waits for the directory: one probe at a time goes there.
Y4. A rate is kept to in every second, whatever piles up.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvd.entry import Chunk

T = TypeVar("T")
S = 1_000_000_000
GROUP_CHUNKS = 32
DIGEST_BYTES, TAG_BYTES = 15, 3
"""15: of a billion entries, two are the same once in 10^18 fleets, and it is but a hint. 3: more
than there are slots."""
HOLDERS_ASKED = 4
"""Of an entry, as many holders as are asked for, picked by the directory at random."""
NUMBER_DIGITS_MAX = 19
PROBE_CHUNKS = 8
"""Asked first: where nobody has these, the rest is not asked for."""
OUTBOX_MAX = 1 << 16
HINTS_MAX = 1 << 14
HEADS_MAX = 1 << 14
FOUND_NS, NOBODY_NS = 2 * S, S
"""How long an answer is believed without asking again: engines ask for what waits every step."""
SLOW_MAX = 3
"""Late answers in a row that shut the gate."""
BACKOFF_S = (0.2, 5.0)
FLEET_PER_S = 40_000
"""Entries a second that all hosts together tell one server of the directory."""


# ------------------------------------------------------------------------------------- names


def realm_of(cluster: str, tenant: str, namespace: bytes, layout: bytes) -> bytes:
    """Name a space between hosts: who may share it, and how its bytes are read."""
    digest = blake2b(digest_size=32, person=b"kvd.peer.realm.1")
    for part in (cluster.encode(), tenant.encode(), namespace, layout):
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()


def entry_key(realm: bytes, head: bytes, chunk: bytes) -> bytes:
    """Return the key of a chunk's entry; `head` is the hash of the first chunk of its group."""
    tag = urlsafe_b64encode(blake2b(head, digest_size=TAG_BYTES, key=realm).digest())
    return b"kvd:{%b}%b" % (
        tag,
        urlsafe_b64encode(blake2b(chunk, digest_size=DIGEST_BYTES, key=realm).digest()),
    )


def tag_of(key: bytes) -> bytes:
    """Return what entries of one group have in common."""
    return key[: key.index(b"}") + 1]


class Heads:
    """Finds the group of chunks one by one, as a chain is stored: from what was found before."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: dict[Chunk, tuple[int, bytes]] = {}

    def head(self, chunk: Chunk) -> bytes:
        """Return the hash of the first chunk of a chunk's group."""
        known = self._known
        way = []
        node: Chunk | None = chunk
        while node is not None and node not in known:
            way.append(node)
            node = node.parent
        depth, head = known[node] if node is not None else (-1, b"")
        if len(known) + len(way) > HEADS_MAX:
            known.clear()
        for below in reversed(way):
            depth += 1
            if depth % GROUP_CHUNKS == 0:
                head = below.hash
            known[below] = depth, head
        return head


# ------------------------------------------------------------------------------------- telling


class Outbox(Generic[T]):
    """Things of which something new is to be told, each once."""

    def __init__(self, limit: int = OUTBOX_MAX) -> None:
        """Start empty."""
        self._limit = limit
        self._waiting: dict[T, None] = {}
        self.dropped = 0
        """What found no room."""
        self.missed = False
        """Something was dropped since the last sweep began."""

    def __len__(self) -> int:
        """Count what waits."""
        return len(self._waiting)

    def put(self, item: T) -> None:
        """Note that something has changed (Y1)."""
        if len(self._waiting) >= self._limit and item not in self._waiting:
            self.dropped += 1
            self.missed = True
        else:
            self._waiting[item] = None

    def take(self, count: int) -> list[T]:
        """Take out what has waited longest, `count` at most."""
        waiting = self._waiting
        taken = [item for item, _ in zip(waiting, range(count), strict=False)]
        for item in taken:
            del waiting[item]
        return taken


class Pace:
    """How many entries may be told now."""

    def __init__(self, per_s: float) -> None:
        """Start with nothing allowed."""
        self.per_s = per_s
        self._level = 0.0
        self._at_ns = 0

    def allowed(self, now_ns: int) -> int:
        """Return how many may be told now; a tenth of a second's worth may be saved up (Y4)."""
        if self._at_ns:
            self._level += max(0, now_ns - self._at_ns) / S * self.per_s
        self._at_ns = max(self._at_ns, now_ns)
        self._level = min(self._level, max(1.0, self.per_s / 10))
        return int(self._level)

    def spend(self, count: int) -> None:
        """Note that so many were told."""
        self._level -= count


def rate_of(per_s: int, hosts: int, servers: int = 1) -> float:
    """Return the rate at which one host of a fleet tells entries: its own limit, or its part."""
    return max(1.0, min(float(per_s), FLEET_PER_S * servers / max(1, hosts)))


# ------------------------------------------------------------------------------------- asking


class Gate:
    """Whether the directory is asked: shut after failures, until a probe comes back in time.

    open --failed | SLOW_MAX late in a row--> shut --probe in time--> open
                                              ^   |
                                              +---+ probe failed: twice the pause
    """

    def __init__(self, random: Callable[[], float]) -> None:
        """Start shut, with a probe due: nothing was heard of it yet."""
        self._random = random
        self._late = 0
        self._pause_s = BACKOFF_S[0]
        self._until_ns = 0
        self.open = False
        self.why = "not reached yet"
        self.trips = 0

    def answered(self) -> None:
        """Hear of an answer in time."""
        self._late = 0

    def late(self, now_ns: int) -> None:
        """Hear that an answer did not come in time."""
        self._late += 1
        if self._late >= SLOW_MAX:
            self.failed(now_ns, "slow")

    def failed(self, now_ns: int, why: str) -> None:
        """Hear of a failure: from now on nobody waits (Y3)."""
        if self.open:
            self.open, self.why = False, why
            self.trips += 1
            self._pause_s = BACKOFF_S[0]
            self._wait(now_ns)

    def probe_due(self, now_ns: int) -> bool:
        """Tell whether the directory is to be tried again."""
        return not self.open and now_ns >= self._until_ns

    def probed(self, now_ns: int, why: str = "") -> None:
        """Hear what came of a probe; `why` it failed, or nothing."""
        self.why = why
        if not why:
            self.open, self._late = True, 0
        else:
            self._pause_s = min(2 * self._pause_s, BACKOFF_S[1])
            self._wait(now_ns)

    def wait_s(self, now_ns: int) -> float:
        """Return how long it is until the next probe."""
        return max(0.0, (self._until_ns - now_ns) / S)

    def _wait(self, now_ns: int) -> None:
        self._until_ns = now_ns + int(self._pause_s * (0.5 + self._random()) * S)


Name = tuple[bytes, bytes]
"""Realm and hash of a chunk."""


class Hints:
    """Answers of the last seconds."""

    def __init__(self, limit: int = HINTS_MAX) -> None:
        """Start empty."""
        self._limit = limit
        self._known: OrderedDict[Name, tuple[tuple[int, ...], int]] = OrderedDict()

    def __len__(self) -> int:
        """Count them."""
        return len(self._known)

    def get(self, name: Name, now_ns: int) -> tuple[int, ...] | None:
        """Return the numbers of an entry; None if it has to be asked for."""
        found = self._known.get(name)
        return found[0] if found is not None and now_ns < found[1] else None

    def put(self, name: Name, numbers: tuple[int, ...], now_ns: int) -> None:
        """Take in an answer; the oldest goes where there is no room."""
        self._known.pop(name, None)
        self._known[name] = (numbers, now_ns + (FOUND_NS if numbers else NOBODY_NS))
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def forget(self, name: Name, number: int) -> None:
        """Take in that one of the holders has it no more."""
        found = self._known.get(name)
        if found is not None:
            self._known[name] = (tuple(n for n in found[0] if n != number), found[1])


def parts_to_ask(indexes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Cut what is to be asked into the probe and the rest; a little rest is not worth a trip."""
    if len(indexes) <= 2 * PROBE_CHUNKS:
        return indexes, ()
    return indexes[:PROBE_CHUNKS], indexes[PROBE_CHUNKS:]


def to_ask(answers: Iterable[tuple[int, ...] | None]) -> list[int]:
    """Return which chunks of a chain to ask for: those not known, up to one that nobody has."""
    indexes = []
    for index, numbers in enumerate(answers):
        if numbers is None:
            indexes.append(index)
        elif not numbers:
            break
    return indexes


def numbers_of(reply: object) -> tuple[int, ...] | None:
    """Check the members of an entry that was read; None for what is no entry of ours."""
    if not isinstance(reply, list) or len(reply) > HOLDERS_ASKED:
        return None
    numbers = []
    for item in reply:
        if not isinstance(item, bytes) or not item.isdigit() or len(item) > NUMBER_DIGITS_MAX:
            return None
        numbers.append(int(item))
    return tuple(numbers)
