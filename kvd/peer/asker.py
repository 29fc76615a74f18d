"""Fetching from one host: what to ask, what to read, what to believe, what to quarantine. Pure.

    fetch:  ASKED --offer--> LANDING --last chunk | stop | deadline--> ENDED
    read:   begun --done, verified--> published
                  --done, not believed | failed--> given back
                  --its deadline--> quarantined --done | failed | mover reaped--> given back
    mover:  none --fetch--> starting --up--> up --budget or age of the quarantine--> killed --> none

See `protocol.py` for the invariants.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kvd.cost import Rate
from kvd.peer.breaker import Breaker
from kvd.peer.messages import (
    Agent,
    Ask,
    Have,
    Message,
    Offer,
    Piece,
    Release,
    Stop,
    seal,
)
from kvd.peer.protocol import (
    MS,
    AskerAction,
    Ended,
    GiveBack,
    KillMover,
    Knobs,
    Land,
    Learn,
    Publish,
    Quarantine,
    Send,
    StartMover,
    Want,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Mover(Enum):
    """Where the mover of this peer is in its life."""

    NONE = "none"
    STARTING = "starting"
    UP = "up"
    DYING = "dying"


class Fetch:
    """One ask and what has come of it."""

    def __init__(self, number: int, want: Want, epoch: int, now_ns: int, lease_ns: int) -> None:
        """Count the lease from the request."""
        self.number = number
        self.want = want
        self.epoch = epoch
        self.lease_end_ns = now_ns + lease_ns
        self.heard_ns = now_ns
        self.stop = len(want.chunks)
        self.offers: dict[int, Offer] = {}
        self.settled: set[int] = set()
        self.reading: set[int] = set()
        self.published = 0
        self.over = False

    def whole(self) -> bool:
        """Tell whether nothing more is to come."""
        if self.offers or self.reading:
            return False
        return sum(index < self.stop for index in self.settled) >= self.stop


class Read:
    """A chunk that is on its way into slots."""

    __slots__ = ("begun_ns", "deadline_ns", "fetch", "index", "life", "offer", "quarantined_ns")

    def __init__(self, fetch: Fetch, offer: Offer, life: int, now_ns: int) -> None:
        """Begin."""
        self.fetch = fetch
        self.offer = offer
        self.index = offer.at
        self.life = life
        self.begun_ns = now_ns
        self.deadline_ns = 0
        self.quarantined_ns = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its objects."""
        return sum(piece.size_bytes for piece in self.offer.pieces)


class Asker:
    """All that is fetched from one host."""

    def __init__(self, host: str, knobs: Knobs, random: Callable[[], float]) -> None:
        """Start without a link and without a mover."""
        self.host = host
        self.knobs = knobs
        self.epoch = 0
        self.linked = False
        self.eager = False
        """Start the mover with the link, not with the first fetch."""
        self.breaker = Breaker(knobs.asks_max, random)
        self.rate = Rate()
        self.fetches: dict[int, Fetch] = {}
        self.reads: dict[int, Read] = {}
        self.mover = Mover.NONE
        self.life = 0
        self.quarantined_bytes = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self._next_fetch = 0
        self._next_read = 0
        self._landed_ns = 0

    # ---------------------------------------------------------------- asking

    def refusal(self, now_ns: int) -> str:
        """Return why nothing can be fetched from this host now, or nothing."""
        if not self.linked:
            return "no link"
        if self.breaker.open(now_ns):
            return "backing off"
        if self.mover is Mover.DYING:
            return "fencing"
        if len(self.fetches) >= self.breaker.allowed:
            return "enough asked"
        if self.quarantined_bytes >= self.knobs.quarantine_bytes:
            return "quarantine full"
        return ""

    def queued_bytes(self) -> int:
        """Return the bytes that are asked for and have not come."""
        return sum(
            sum(fetch.want.sizes) * max(0, fetch.stop - len(fetch.settled))
            for fetch in self.fetches.values()
        )

    def fetch(self, now_ns: int, want: Want) -> tuple[int, list[AskerAction]]:
        """Ask for chunks; `refusal` said that it may be."""
        assert not self.refusal(now_ns)
        assert want.chunks
        knobs = self.knobs
        self._next_fetch += 1
        number = self._next_fetch
        lease_ns = int(knobs.lease_ms * MS * knobs.lease_share)
        self.fetches[number] = Fetch(number, want, self.epoch, now_ns, lease_ns)
        self.counts["asked"] += 1
        ask = Ask(
            number,
            self.epoch,
            want.tag,
            want.namespace,
            want.layout,
            knobs.lease_ms,
            want.chunks,
        )
        return number, [Send(self.host, ask), *self._start()]

    # ---------------------------------------------------------------- the link

    def link_up(self, now_ns: int, epoch: int) -> list[AskerAction]:
        """Hear that the host is reached, in this life of it."""
        actions = self.link_down(now_ns) if self.linked else []
        self.linked, self.epoch = True, epoch
        return actions + self._start() if self.eager else actions

    def _start(self) -> list[AskerAction]:
        """Have a mover."""
        if self.mover is not Mover.NONE:
            return []
        self.life += 1
        self.mover = Mover.STARTING
        return [StartMover(self.life)]

    def link_down(self, now_ns: int) -> list[AskerAction]:
        """Hear that it is not reached any more: nothing asked for will come."""
        self.linked = False
        actions: list[AskerAction] = []
        for fetch in list(self.fetches.values()):
            fetch.offers.clear()
            fetch.stop = 0
            actions += self._end(now_ns, fetch, "link lost")
        return actions

    def heard(self, now_ns: int, message: Message) -> list[AskerAction]:
        """Take in what the host says; what does not fit is dropped."""
        if isinstance(message, Agent):
            return [Learn(message.version, message.metadata)]
        if not isinstance(message, Offer | Stop):
            return []
        if message.epoch != self.epoch:
            self.counts["stale"] += 1
            return []
        fetch = self.fetches.get(message.ask)
        if fetch is None or message.epoch != fetch.epoch:
            return []  # it has ended, and what was said crossed with our saying so
        fetch.heard_ns = max(fetch.heard_ns, now_ns)
        if isinstance(message, Stop):
            return self._stopped(now_ns, fetch, message)
        return self._offered(now_ns, fetch, message)

    def _offered(self, now_ns: int, fetch: Fetch, message: Offer) -> list[AskerAction]:
        index = message.at
        if index >= len(fetch.want.chunks) or index in fetch.settled or index in fetch.offers:
            return []
        if index in {self.reads[read].index for read in fetch.reading}:
            return []
        if not self._fits(fetch.want, message):
            self.counts["refused"] += 1
            self.breaker.struck(now_ns)
            return [*self._settle(now_ns, fetch, index, came=False), *self._go(now_ns)]
        fetch.offers[index] = message
        return self._go(now_ns)

    def _stopped(self, now_ns: int, fetch: Fetch, stop: Stop) -> list[AskerAction]:
        fetch.stop = min(fetch.stop, stop.at)
        if stop.why == "busy":
            self.breaker.busy(now_ns, stop.retry_ms)
        if stop.why not in {"end", "miss"}:
            self.counts["turned_down"] += 1
        return self._end(now_ns, fetch, stop.why) if fetch.whole() else []

    @staticmethod
    def _fits(want: Want, offer: Offer) -> bool:
        """Tell whether an offer is of what was asked for: columns and sizes."""
        mask = want.chunks[offer.at][1]
        seen = 0
        for piece in offer.pieces:
            bit = 1 << piece.column
            if not mask & bit or seen & bit or piece.size_bytes != want.sizes[piece.column]:
                return False
            seen |= bit
        return True

    # ---------------------------------------------------------------- reading

    def mover_up(self, now_ns: int, life: int) -> list[AskerAction]:
        """Hear that the mover takes reads."""
        if life != self.life or self.mover is not Mover.STARTING:
            return []
        self.mover = Mover.UP
        return self._go(now_ns)

    def mover_gone(self, now_ns: int, life: int) -> list[AskerAction]:
        """Hear that a mover has been reaped: nothing it posted can land any more (P2)."""
        actions: list[AskerAction] = []
        fenced = self.mover is Mover.DYING
        if life == self.life and self.mover is not Mover.NONE:
            if not fenced:
                self.breaker.failed(now_ns)
            self.mover = Mover.NONE
        for number, read in list(self.reads.items()):
            if read.life == life:
                actions += self._over(now_ns, number, came=False)
        if self.mover is Mover.NONE:
            for fetch in list(self.fetches.values()):
                fetch.offers.clear()
                fetch.stop = 0
                actions += self._end(now_ns, fetch, "mover gone")
            if self.eager and self.linked and fenced:
                actions += self._start()
        return actions

    def _go(self, now_ns: int) -> list[AskerAction]:
        """Begin reads as far as the window goes, in prefix order within a fetch."""
        actions: list[AskerAction] = []
        if self.mover is not Mover.UP:
            return actions
        knobs = self.knobs
        landing = sum(read.size_bytes for read in self.reads.values())
        for fetch in self.fetches.values():
            while fetch.offers and len(self.reads) < knobs.reads_max:
                index = min(fetch.offers)
                offer = fetch.offers[index]
                size_bytes = sum(piece.size_bytes for piece in offer.pieces)
                if landing and landing + size_bytes > knobs.window_bytes:
                    return actions
                del fetch.offers[index]
                landing += size_bytes
                actions.append(self._begin(now_ns, fetch, offer, landing))
        return actions

    def _begin(self, now_ns: int, fetch: Fetch, offer: Offer, landing: int) -> Land:
        self._next_read += 1
        read = Read(fetch, offer, self.life, now_ns)
        rate = max(self.rate.per_s / 10, self.knobs.floor_bytes_s / 10)
        wait_ns = int(self.knobs.read_ms * MS + landing / rate * 1e9)
        read.deadline_ns = min(now_ns + wait_ns, fetch.lease_end_ns)
        self.reads[self._next_read] = read
        fetch.reading.add(self._next_read)
        return Land(self._next_read, self.life, fetch.number, offer.at, offer.agent, offer.pieces)

    def landed(self, now_ns: int, number: int, digests: Sequence[bytes]) -> list[AskerAction]:
        """Hear that a read has completed, and what its bytes sum to, one digest a piece."""
        read = self.reads.get(number)
        if read is None:
            return []  # reaped with its mover meanwhile
        if read.quarantined_ns:
            self.counts["late"] += 1
            return self._over(now_ns, number, came=False)
        fetch, index = read.fetch, read.index
        if now_ns >= fetch.lease_end_ns or fetch.number not in self.fetches:
            self.counts["late"] += 1  # the holder keeps nothing in place any more
            return self._over(now_ns, number, came=False)
        if not self._believes(fetch.want, index, read.offer.pieces, digests):
            self.counts["corrupt"] += 1
            self.breaker.struck(now_ns)
            return self._over(now_ns, number, came=False)
        since_ns = max(read.begun_ns, self._landed_ns)  # the link was busy with this one alone
        self.rate.observe(read.size_bytes, max(1_000, now_ns - since_ns) / 1e9)
        self._landed_ns = now_ns
        self.counts["chunks"] += 1
        self.counts["bytes"] += read.size_bytes
        return self._over(now_ns, number, came=True)

    @staticmethod
    def _believes(
        want: Want, index: int, pieces: Sequence[Piece], digests: Sequence[bytes]
    ) -> bool:
        """Tell whether the bytes in the slots are what the seals promise (P1)."""
        key = want.chunks[index][0]
        return len(digests) == len(pieces) and all(
            seal(
                want.namespace,
                want.layout,
                key,
                (piece.column, piece.size_bytes, piece.generation, piece.lossy),
                digest,
            )
            == piece.seal
            for piece, digest in zip(pieces, digests, strict=True)
        )

    def failed(self, now_ns: int, number: int) -> list[AskerAction]:
        """Hear that a read has ended in a disconnect error: nothing of it lands any more."""
        if number not in self.reads:
            return []
        self.counts["failed"] += 1
        self.breaker.failed(now_ns)
        return self._over(now_ns, number, came=False)

    def no_room(self, now_ns: int, number: int) -> list[AskerAction]:
        """Hear that there were no slots, or that they are being filled: nothing was begun."""
        self.counts["no_room"] += 1
        read = self.reads.pop(number)
        read.fetch.reading.discard(number)
        return [*self._settle(now_ns, read.fetch, read.index, came=False), *self._go(now_ns)]

    def _over(self, now_ns: int, number: int, *, came: bool) -> list[AskerAction]:
        """A read's end is proven: publish or free its slots, and go on."""
        read = self.reads.pop(number)
        read.fetch.reading.discard(number)
        if read.quarantined_ns:
            assert not came
            self.quarantined_bytes -= read.size_bytes
            return [GiveBack(number)]
        actions: list[AskerAction] = [Publish(number) if came else GiveBack(number)]
        actions += self._settle(now_ns, read.fetch, read.index, came=came)
        return actions + self._go(now_ns)

    def _settle(self, now_ns: int, fetch: Fetch, index: int, *, came: bool) -> list[AskerAction]:
        """Note what became of a chunk; after one that did not come, later ones are of no use."""
        actions: list[AskerAction] = []
        if fetch.number not in self.fetches:
            return actions
        fetch.settled.add(index)
        if self.linked and fetch.epoch == self.epoch:
            actions.append(Send(self.host, Have(fetch.number, index)))
        if came:
            fetch.published += 1
        else:
            fetch.stop = min(fetch.stop, index)
            fetch.offers.clear()
        if fetch.whole():
            actions += self._end(now_ns, fetch, "done" if came else "cut short")
        return actions

    # ---------------------------------------------------------------- time

    def tick(self, now_ns: int) -> list[AskerAction]:
        """Let time pass: silent holders, reads past their deadline, quarantine past its bounds."""
        actions: list[AskerAction] = []
        for fetch in list(self.fetches.values()):
            waits = not fetch.reading and not fetch.offers
            if now_ns >= fetch.lease_end_ns:
                actions += self._end(now_ns, fetch, "lease ended")
            elif waits and now_ns - fetch.heard_ns > self.knobs.answer_ms * MS:
                self.counts["silent"] += 1
                self.breaker.failed(now_ns)
                actions += self._end(now_ns, fetch, "silent")
            elif now_ns >= fetch.want.deadline_ns and not fetch.over:
                fetch.over = True
                actions.append(Ended(fetch.number, fetch.published, "deadline"))
        late = [n for n, r in self.reads.items() if not r.quarantined_ns and now_ns > r.deadline_ns]
        for number in late:
            actions += self._quarantine(now_ns, number)
        return actions + self._fence(now_ns)

    def _quarantine(self, now_ns: int, number: int) -> list[AskerAction]:
        """Give a read up; its slots stay out of use (P2)."""
        read = self.reads[number]
        read.quarantined_ns = now_ns
        read.fetch.reading.discard(number)
        self.quarantined_bytes += read.size_bytes
        self.counts["quarantined"] += 1
        self.breaker.failed(now_ns)
        actions: list[AskerAction] = [Quarantine(number)]
        return actions + self._settle(now_ns, read.fetch, read.index, came=False)

    def _fence(self, now_ns: int) -> list[AskerAction]:
        """Kill the mover when its quarantine is too large or too old."""
        if self.mover is not Mover.UP or not self.quarantined_bytes:
            return []
        oldest = min(r.quarantined_ns for r in self.reads.values() if r.quarantined_ns)
        full = self.quarantined_bytes >= self.knobs.quarantine_bytes
        if not full and now_ns - oldest < self.knobs.quarantine_ms * MS:
            return []
        self.counts["fenced"] += 1
        self.mover = Mover.DYING
        return [KillMover(self.life, "full" if full else "old")]

    def _end(self, now_ns: int, fetch: Fetch, why: str) -> list[AskerAction]:
        """Forget a fetch; reads of it that are under way end by themselves, unpublished or not."""
        del now_ns
        del self.fetches[fetch.number]
        fetch.offers.clear()
        fetch.stop = 0
        actions: list[AskerAction] = []
        if self.linked and fetch.epoch == self.epoch:
            actions.append(Send(self.host, Release(fetch.number)))
        if fetch.published and why in {"done", "end", "miss"}:
            self.breaker.succeeded()
        if not fetch.over:
            fetch.over = True
            actions.append(Ended(fetch.number, fetch.published, why))
        return actions

    def check(self) -> None:
        """Recount; raises AssertionError."""
        quarantined = [read for read in self.reads.values() if read.quarantined_ns]
        assert self.quarantined_bytes == sum(read.size_bytes for read in quarantined), "P2"
        for number, read in self.reads.items():
            assert (number in read.fetch.reading) == (not read.quarantined_ns), "P2"
        for fetch in self.fetches.values():
            assert fetch.reading <= self.reads.keys(), "P2"


COUNTS = (
    "asked",
    "chunks",
    "bytes",
    "stale",
    "refused",
    "turned_down",
    "corrupt",
    "failed",
    "late",
    "silent",
    "no_room",
    "quarantined",
    "fenced",
)
"""What an asker counts; docs/peers.md says what each means."""
