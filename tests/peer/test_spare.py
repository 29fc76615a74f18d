"""Copies that other failure domains hold well enough go first, until they prove their use."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvd.eviction import GRACE_S
from kvd.peer.landing import Landings
from kvd.peer.messages import Piece
from kvd.types import Generation, OwnerId
from kvd_client.wire import Status
from tests.peer.test_landing import KEYS, PAGE, PLACES, ROOT, TENANT
from tests.peer.test_landing import Host as Empty

if TYPE_CHECKING:
    from kvd.entry import Chunk

ENGINE = OwnerId(1)


class Host(Empty):
    """A host whose tier below takes in, with chunks that were fetched and chunks that were not."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.catalog.eviction.demoting = True
        self.place = 0

    def fetch(self, at: int, *, spare: bool = True, key: bytes = b"") -> Chunk | None:
        """Take in a chunk of the chain, or one without a parent, of another host."""
        parent = KEYS[at - 1] if at and not key else ROOT
        key = key or KEYS[at]
        landings = Landings(self.catalog, OwnerId(-2))
        pieces = [Piece(0, 0, PAGE, 1, 0, b"")]
        if landings.take(1, self.space, parent, key, pieces, spare=spare) is None:
            return None
        assert bool(landings.publish(1, 0).spare) == spare
        self.catalog.check()
        return self.space.chunks[key]

    def use(self, *hashes: bytes) -> None:
        """Read a chain, as a request does."""
        self.catalog.unpin(self.catalog.hold(self.space, hashes, 0))
        self.catalog.check()

    def put(self, key: bytes, parent: bytes = ROOT) -> Chunk | None:
        """Store a chunk; None where there is no room."""
        ((*_, status, generation),) = (
            (record[2], record[6])
            for record in self.catalog.reserve(
                self.space, ENGINE, 0, parent=parent, hashes=[key], groups=1, deadline_ns=9
            )
        )
        if status != Status.OK:
            return None
        assert self.catalog.publish(ENGINE, Generation(generation), 0) is Status.OK
        self.catalog.check()
        return self.space.chunks[key]

    def save(self, chunk: Chunk) -> None:
        """Write a chunk down."""
        self.place += 1
        self.catalog.begin_demotion(chunk)
        self.catalog.end_demotion(chunk, ((0, self.place, 1, self.place), chunk.mask, False))
        self.catalog.check()


def other(number: int) -> bytes:
    """Return a chunk's key that is not of the chain."""
    return bytes([99, number]) * 16


def full(host: Host) -> list[Chunk]:
    """Fill a host with what was stored there, written down, older than what comes."""
    stored = [host.put(other(n)) for n in range(PLACES - 2)]
    found = [chunk for chunk in stored if chunk is not None]
    for chunk in found:
        host.save(chunk)
    host.catalog.eviction.now_ns += int(GRACE_S * 1e9)  # none of them is young any more
    return found


def test_a_spare_copy_goes_before_older_ones_of_this_host() -> None:
    """It is not written down first, and counted by a name of its own."""
    host = Host()
    stored = full(host)
    spare, needed = host.fetch(0), host.fetch(0, spare=False, key=other(50))
    assert spare is not None
    assert needed is not None
    host.use(KEYS[0])
    host.use(other(50))
    assert host.catalog.eviction.demotable(TENANT) is needed, "a copy that adds safety is kept"
    assert host.put(other(60)) is not None
    assert not spare.mask
    assert all(chunk.mask for chunk in [*stored, needed])
    assert host.catalog.counters.evictions == {"spare": 1}


def test_before_its_request_has_read_it_a_spare_copy_is_not_the_first_to_go() -> None:
    """What a request is waiting for does not go because of the next store."""
    host = Host()
    oldest = full(host)[0]
    spare = host.fetch(0)
    assert host.put(other(60)) is not None
    assert host.put(other(61)) is not None
    assert spare is not None
    assert spare.mask
    assert not oldest.mask


def test_a_second_use_makes_it_this_hosts_own() -> None:
    """What is asked for here again is worth its place: kept, and written down."""
    host = Host()
    oldest = full(host)[0]
    spare = host.fetch(0)
    assert spare is not None
    host.put(other(59))
    host.use(KEYS[0])
    host.use(KEYS[0])
    assert not spare.unwanted
    assert host.put(other(60)) is not None
    assert spare.mask
    assert not oldest.mask


def test_two_who_read_it_together_are_one_use() -> None:
    """The ranks of one request, each with a lease, say nothing of a second request."""
    host = Host()
    spare = host.fetch(0)
    assert spare is not None
    first, second = (host.catalog.hold(host.space, KEYS[:1], 0) for _ in range(2))
    host.catalog.unpin(first)
    host.catalog.unpin(second)
    assert spare.spare
    host.catalog.check()


def test_what_was_written_down_keeps_what_it_depends_on() -> None:
    """After a restart a suffix without its prefix is left out: so the prefix is written too."""
    host = Host()
    spare = host.fetch(0)
    assert spare is not None
    host.use(KEYS[0])
    below = host.put(KEYS[1], KEYS[0])
    assert below is not None
    assert host.catalog.eviction.demotable(TENANT) is below
    host.save(below)
    assert not spare.spare
    assert host.catalog.eviction.demotable(TENANT) is spare


def test_a_part_that_was_stored_here_makes_the_chunk_this_hosts_own() -> None:
    """Neither a chunk with a cold copy nor one with an engine's object becomes spare."""
    host = Host()
    chunk = host.put(KEYS[0])
    assert chunk is not None
    host.save(chunk)
    host.catalog.evict(chunk)
    landings = Landings(host.catalog, OwnerId(-2))
    assert landings.take(1, host.space, ROOT, KEYS[0], [Piece(0, 0, PAGE, 1, 0, b"")], spare=True)
    assert landings.publish(1, 0) is chunk
    assert not chunk.spare
    host.catalog.check()


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_the_accounts_are_right(seed: int) -> None:
    """Fetches, stores, uses and writes by chance: V1 to V3 hold after each (`check`)."""
    host, chance = Host(), random.Random(seed)
    for number in range(200):
        known = list(host.space.chunks)
        match chance.choice(["fetch", "put", "below", "save", "use", "evict"]):
            case "fetch":
                host.fetch(0, key=other(number))
            case "put":
                host.put(other(number))
            case "below" if known:
                host.put(other(number), chance.choice(known))
            case "save":
                chunk = host.catalog.eviction.demotable(TENANT)
                if chunk is not None:
                    host.save(chunk)
            case "use" if known:
                host.use(chance.choice(known))
            case "evict":
                leaves = [c for c in host.space.chunks.values() if c.evictable]
                if leaves:
                    host.catalog.evict(chance.choice(leaves))
        host.catalog.check()
