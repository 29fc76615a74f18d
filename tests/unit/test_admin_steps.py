"""Pins, evictions and warmings over a real catalog: what they hold, give up and bring up."""

from __future__ import annotations

import asyncio
import random
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import pytest

from kvd.admin.evicting import STEP, Done, Eviction
from kvd.admin.pins import ENDED_A_TICK, PINS_MAX, Pin, PinBook
from kvd.admin.warming import Warming
from kvd.catalog import Catalog
from kvd.metrics import Counters
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.identity import Group, Layout
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.entry import Chunk, Space

TENANT: Final = Tenant("a")
ME: Final = OwnerId(1)
ROOT: Final = b"n" * 32
PAGE: Final = 4096
LAYOUT: Final = Layout(8, 8, "float16", (Group("full", 1, 1, 8, PAGE),))


def chain(name: str, length: int) -> list[bytes]:
    """Make the hashes of a chain."""
    return [blake2b(f"{name}/{at}".encode(), digest_size=32).digest() for at in range(length)]


class Host:
    """A catalog with room for so many chunks, and a space in it."""

    def __init__(self, places: int = 64, pinned: int = 1 << 40) -> None:
        """Make one slab of pages."""
        pool = SlabPool(places * PAGE, {TENANT: 1})
        pool.add_blank(SlabId(0))
        limits = dict.fromkeys(Resource, 1 << 40) | {Resource.PINNED_BYTES: pinned}
        self.catalog = Catalog(pool, Quota({TENANT: limits}), Counters())
        self.space: Space = self.catalog.enter(TENANT, ROOT, "label", LAYOUT)
        self.serial = 0

    def store(self, hashes: Sequence[bytes], parent: bytes = ROOT) -> list[Chunk]:
        """Reserve and publish what is not there."""
        records = self.catalog.reserve(
            self.space, ME, 0, parent=parent, hashes=hashes, groups=1, deadline_ns=10
        )
        granted = [Generation(record[6]) for record in records if record[6]]
        assert set(self.catalog.publish_all(ME, granted, 0)) <= {Status.OK}
        return [self.space.chunks[key] for key in hashes]

    def copy(self, chunk: Chunk) -> None:
        """Give it a copy on NVMe."""
        self.serial += 1
        self.catalog.set_cold(chunk, ((0, 0, PAGE, self.serial), 1, False))

    def cool(self, chunks: Sequence[Chunk]) -> None:
        """Leave nothing but copies on NVMe."""
        for chunk in reversed(chunks):
            self.copy(chunk)
            self.catalog.evict(chunk)

    def eviction(self, *, host_only: bool = False, dry: bool = False) -> Eviction:
        """Begin an eviction of all that is there."""

        async def forget(chunks: Sequence[Chunk]) -> int:
            for chunk in chunks:
                self.catalog.drop_cold(chunk, "operator")
            await asyncio.sleep(0)
            return 0

        return Eviction(
            self.catalog,
            self.space,
            old=lambda _: True,
            forget=forget,
            host_only=host_only,
            dry=dry,
        )


def run(eviction: Eviction) -> Done:
    """Carry an eviction out; return the sums."""

    async def all_of_it() -> Done:
        total = Done()
        while True:
            done = await eviction.step()
            total = Done(*map(sum, zip(total, done, strict=True)))
            if eviction.over:
                return total

    return asyncio.run(all_of_it())


def random_tree(host: Host, chance: random.Random) -> list[Chunk]:
    """Make a tree of up to 48 chunks: warm, copied, cold, leased, in all ways that may be."""
    made: list[Chunk] = []
    for index in range(chance.randrange(1, 48)):
        above = chance.choice([None, *made]) if made else None
        parent = ROOT if above is None else above.hash
        made += host.store([index.to_bytes(32, "big")], parent)
    for chunk in made:
        if chance.random() < 0.6:
            host.copy(chunk)
    for chunk in reversed(made):
        if chunk.cold is not None and chunk.evictable and chance.random() < 0.5:
            host.catalog.evict(chunk)
    for chunk in made:
        if chance.random() < 0.1:
            host.catalog.pin([chunk])
    return made


def below(chunk: Chunk) -> list[Chunk]:
    """Return a chunk and all that hangs from it."""
    found = [chunk]
    for each in found:
        found += each.children()
    return found


@pytest.mark.parametrize("seed", range(60))
def test_what_goes_is_exactly_what_nobody_needs(seed: int) -> None:
    """All but what is held and what is before it; a dry run says the same and changes nothing."""
    host, chance = Host(), random.Random(seed)
    made = random_tree(host, chance)
    stays = {chunk for chunk in made if any(each.pins for each in below(chunk))}
    dry = run(host.eviction(dry=True))
    assert set(host.space.chunks.values()) == set(made)
    done = run(host.eviction())
    host.catalog.check()
    assert set(host.space.chunks.values()) == stays
    assert done == dry
    assert (done.chunks, done.held) == (len(made) - len(stays), len(stays))
    assert all(chunk.mask or chunk.cold or chunk.pins or chunk.first_child for chunk in stays)


@pytest.mark.parametrize("seed", range(60))
def test_freeing_memory_loses_nothing(seed: int) -> None:
    """With host_only every chunk is still there, and what is not on NVMe is still in memory."""
    host, chance = Host(), random.Random(seed)
    made = random_tree(host, chance)

    def stays(chunk: Chunk) -> bool:
        every = [each for each in below(chunk) if each.mask]
        return any(each.pins or not each.clean for each in every)

    warm = {chunk for chunk in made if chunk.mask}
    kept = {chunk for chunk in warm if stays(chunk)}
    dry = run(host.eviction(host_only=True, dry=True))
    done = run(host.eviction(host_only=True))
    host.catalog.check()
    assert set(host.space.chunks.values()) == set(made)
    assert {chunk for chunk in made if chunk.mask} == kept
    assert (done.chunks, done.host_bytes) == (len(warm - kept), len(warm - kept) * PAGE)
    assert (done.nvme_bytes, dry.chunks) == (0, done.chunks)


def test_a_large_eviction_goes_in_steps_and_lets_others_in() -> None:
    """No step takes more than its bound; a chunk that is leased meanwhile stays."""
    host = Host(places=3 * STEP)
    chunks = host.store(chain("a", 3 * STEP))
    eviction = host.eviction()

    async def scene() -> None:
        done = await eviction.step()
        assert (done.chunks, eviction.over) == (STEP, False)
        host.catalog.pin([chunks[STEP]])
        held = 0
        while not eviction.over:
            held += (await eviction.step()).held
        assert held == STEP + 1

    asyncio.run(scene())
    assert len(host.space.chunks) == STEP + 1
    host.catalog.check()


# ------------------------------------------------------------------------------------------ pins


def make_pin(book: PinBook, host: Host, *, tip: bytes = b"", **changes: int) -> Pin:
    """Make a pin."""
    fields = {"budget_bytes": 1 << 40, "expires_ns": 100} | changes
    pin = book.make(host.space, tip=tip, owner=0, operator=True, note="", **fields)
    assert pin is not None
    return pin


def test_a_pin_holds_the_beginning_of_chains_up_to_its_budget() -> None:
    """What is pinned is closed under prefixes and is not evicted, however short memory is."""
    host = Host(places=16)
    book = PinBook(host.catalog)
    chunks = host.store(chain("a", 10))
    pin = make_pin(book, host, budget_bytes=4 * PAGE + 1)
    assert book.take(pin, chunks) == 4
    assert set(pin.chunks) == set(chunks[:4])
    host.store(chain("b", 12))
    book.check()
    host.catalog.check()
    assert host.catalog.usable(host.space, chain("a", 10)) == 4
    book.end(pin)
    book.tick(1)
    assert not any(chunk.pins for chunk in chunks[:4])
    host.catalog.check()


def test_pins_leave_half_of_the_leases_quota() -> None:
    """All of a tenant's pins together take half at most, beside leases less."""
    host = Host(pinned=8 * PAGE)
    book = PinBook(host.catalog)
    chunks = host.store(chain("a", 20))
    first, second = make_pin(book, host), make_pin(book, host)
    assert book.take(first, chunks[:3]) == 3
    assert book.take(second, chunks) == 1  # held by the other already, and counted for this one
    book.end(second)
    book.tick(1)
    leased = host.catalog.hold(host.space, chain("a", 20), 0)
    assert len(leased) == 8
    assert book.take(first, chunks) == 0
    host.catalog.unpin(leased)
    assert book.take(first, chunks) == 1
    book.check()
    host.catalog.check()


def test_a_namespaces_pin_takes_in_what_comes_later() -> None:
    """Chunks stored after it are held from the next tick on, if what is before them is."""
    host = Host()
    book = PinBook(host.catalog)
    pin = make_pin(book, host, budget_bytes=3 * PAGE)
    chunks = host.store(chain("a", 5))
    assert not pin.chunks
    book.tick(1)
    assert set(pin.chunks) == set(chunks[:3])
    other = make_pin(book, host, tip=chunks[0].hash)
    assert book.take(other, chunks[:1]) == 1
    host.store(chain("b", 1))
    book.tick(2)
    assert set(other.chunks) == {chunks[0]}
    book.check()


def test_a_pin_ends_by_time_and_lets_go_bit_by_bit() -> None:
    """At its end nothing new comes in; a tick lets go of a bounded number, the last in first."""
    count = ENDED_A_TICK + 10
    host = Host(places=count)
    book = PinBook(host.catalog)
    pin = make_pin(book, host, expires_ns=100)
    chunks = host.store(chain("a", count))
    book.take(pin, chunks)
    book.tick(99)
    assert len(pin.chunks) == count
    book.tick(100)
    assert pin.id not in book.pins
    assert set(pin.chunks) == set(chunks[:10])
    book.check()
    assert book.held_bytes(TENANT) == 10 * PAGE
    book.tick(101)
    assert host.catalog.quota.used(TENANT, Resource.PINNED_BYTES) == 0
    host.catalog.check()


def test_pins_have_a_bound_and_numbers_of_their_own() -> None:
    """One too many is refused; a number is not used again."""
    host = Host()
    book = PinBook(host.catalog)
    pins = [make_pin(book, host) for _ in range(PINS_MAX)]
    assert len({pin.id for pin in pins}) == PINS_MAX
    refused = book.make(
        host.space, tip=b"", owner=0, operator=True, note="", budget_bytes=1, expires_ns=1
    )
    assert refused is None
    book.end(pins[0])
    book.tick(1)
    assert make_pin(book, host).id == pins[-1].id + 1


def test_only_what_is_in_memory_is_pinned() -> None:
    """Chunks on NVMe only, and what follows them, are left out."""
    host = Host()
    book = PinBook(host.catalog)
    chunks = host.store(chain("a", 4))
    host.cool(chunks[2:])
    pin = make_pin(book, host)
    assert book.take(pin, chunks) == 2
    host.catalog.check()


# ------------------------------------------------------------------------------------------ warm


class Lift:
    """Brings chunks up after a turn of the loop, unless told to fail or never to end."""

    def __init__(self, host: Host, *, fails: bool = False, hangs: bool = False) -> None:
        """Note what is asked for."""
        self.host = host
        self.fails = fails
        self.hangs = hangs
        self.asked: list[Chunk] = []
        self.left: list[Chunk] = []

    def promote(self, chunk: Chunk, done: Callable[[bool], None]) -> bool:
        """Begin."""
        assert chunk.pins, "M1"
        self.asked.append(chunk)
        if self.hangs:
            return True
        slots = self.host.catalog.begin_promotion(chunk)
        if slots is None:
            return False

        def end() -> None:
            self.host.catalog.end_promotion(chunk, slots, read=not self.fails)
            done(not self.fails)

        asyncio.get_running_loop().call_soon(end)
        return True

    def leave(self, chunk: Chunk, _: Callable[[bool], None]) -> None:
        """Note who left."""
        self.left.append(chunk)


def warm(host: Host, lift: Lift, budget: int = 1 << 40, limit_s: float = 5.0) -> list[int]:
    """Warm to the end; return chunks, bytes, failures, whether it was full, steps."""

    async def all_of_it() -> list[int]:
        warming = Warming(host.catalog, lift, host.space, limit_s)
        total, left = [0, 0, 0, 0, 0], budget
        while not warming.over:
            done = await warming.step(left)
            left -= done.host_bytes
            total = [a + int(b) for a, b in zip(total, [*done, 1], strict=True)]
        return total

    found = asyncio.run(all_of_it())
    host.catalog.check()
    assert not any(chunk.pins for chunk in host.space.chunks.values())
    return found


def test_the_latest_used_come_first_each_after_its_chain() -> None:
    """With room for half, the chain used last is whole, and its beginning came before its end."""
    host = Host(places=64)
    old, new = host.store(chain("old", 20)), host.store(chain("new", 20))
    host.cool(old)
    host.cool(new)
    lift = Lift(host)
    chunks, size, failed, full, steps = warm(host, lift, budget=20 * PAGE)
    assert (chunks, size, failed, full, steps) == (20, 20 * PAGE, 0, 1, 2)
    assert lift.asked == new
    assert host.catalog.usable(host.space, chain("new", 20)) == 20


@pytest.mark.parametrize("seed", range(20))
def test_warming_all_leaves_everything_usable(seed: int) -> None:
    """Whatever the order of use, with room enough all comes up, parents first."""
    host, chance = Host(), random.Random(seed)
    made = random_tree(host, chance)
    for chunk in made:
        if chunk.pins:
            host.catalog.unpin([chunk])
    cold = [chunk for chunk in made if not chunk.ready]
    lift = Lift(host)
    chunks, _, failed, full, _ = warm(host, lift)
    assert (chunks, failed, full) == (len(cold), 0, 0)
    assert sorted(map(id, lift.asked)) == sorted(map(id, cold))
    for at, chunk in enumerate(lift.asked):
        assert chunk.parent is None or chunk.parent not in lift.asked[at:]


def test_nothing_warm_goes_for_it() -> None:
    """Only free room is used: what is in memory stays, even if NVMe has it as well."""
    host = Host(places=12)
    cold = host.store(chain("cold", 8))
    host.cool(cold)
    warm_ones = host.store(chain("warm", 8))
    for chunk in warm_ones:
        host.copy(chunk)
    chunks, _, _, full, _ = warm(host, Lift(host))
    assert (chunks, full) == (4, 1)
    assert all(chunk.mask for chunk in warm_ones)


def test_a_disk_that_fails_ends_it() -> None:
    """When nothing of a step came up the rest is not tried, and no pin is left."""
    host = Host()
    host.cool(host.store(chain("a", 40)))
    lift = Lift(host, fails=True)
    assert warm(host, lift) == [0, 0, 16, 0, 1]
    assert len(lift.asked) == 16


def test_a_disk_that_hangs_is_left() -> None:
    """After its time a step lets go of what it waited for."""
    host = Host()
    host.cool(host.store(chain("a", 3)))
    lift = Lift(host, hangs=True)
    assert warm(host, lift, limit_s=0.05) == [0, 0, 3, 0, 1]
    assert lift.left == lift.asked
