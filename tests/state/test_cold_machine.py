"""The catalog with a tier below: moves that begin, end and fail at any time, and restarts.

What the mover does, the machine does here in single steps and in any order: so everything else can
happen between the beginning and the end of a move.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from kvd.catalog import DAEMON
from kvd.policies import POLICIES
from kvd.prefix import warm_length
from kvd.quota import Resource
from kvd.trees import found_copy, plant
from kvd.types import Generation, OwnerId, Tenant
from kvd_client.wire import Status
from tests.state.catalog_model import (
    LAYOUTS,
    NAMESPACE,
    SHARES,
    Below,
    Key,
    Member,
    Move,
    Path,
    Spot,
    World,
    hash_of,
    hashes_of,
    path_of,
)
from tests.state.test_catalog_machine import DEPTH, CatalogMachine, paths, picks, times

if TYPE_CHECKING:
    from kvd.entry import Chunk, Slot

Node = tuple[World, Path]

tenants = st.sampled_from(sorted(SHARES))
layouts = st.sampled_from(sorted(LAYOUTS))
mostly = st.sampled_from([True, True, False])


@dataclass
class Waiting:
    """An acquire that holds its chunks, and waits until they are up."""

    owner: int
    member: Member
    chunks: tuple[Chunk, ...]
    first: int
    reading: bool
    ttl: int


class ColdMachine(CatalogMachine):
    """Sessions, as in the other machine, and a mover."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Waiting]
        self.slots: dict[int, list[Slot]]
        """Of a move under way, by the identity of its record in the model."""
        self.places = 0

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        """Begin with a tier below that takes in and is read."""
        super().start(policy)
        self.waiting, self.slots = [], {}
        self.health(demoting=True, readable=True)

    # ---------------------------------------------------------------- down

    def begin_down(self, chunk: Chunk) -> None:
        """Begin a demotion, as the mover does."""
        world = self.world_of(chunk)
        path = path_of(chunk)
        slots = self.catalog.begin_demotion(chunk)
        spots = {
            Key(world, path, s.column): Spot(s.slab, s.offset_bytes, s.size_bytes, s.generation)
            for s in slots
        }
        published = {key: s for key, s in self.model.published.items() if key[:2] == (world, path)}
        assert spots == published, "a chunk moves with all it has, and nothing else (K1)"
        lossy = any(key in self.model.lossy for key in spots)
        move = Move((world, path), spots, lossy, up=False)
        self.model.moves.append(move)

    def world_of(self, chunk: Chunk) -> World:
        """Return the world of a chunk."""
        (name,) = [n for n, layout in LAYOUTS.items() if layout == chunk.space.layout]
        return World(chunk.space.tenant, name)

    @precondition(lambda self: self.model.demoting)
    @rule(tenant=tenants)
    def demote(self, tenant: Tenant) -> None:
        """The order names a chunk exactly if there is one to be written; it begins to move."""
        chunk = self.catalog.eviction.demotable(tenant)
        still = {move.node for move in self.model.moves} | {k[:2] for k in self.model.busy()}
        dirty = [
            node
            for node in {key[:2] for key in self.model.published if key.world.tenant == tenant}
            if not self.model.clean(*node) and node not in still
        ]
        assert (chunk is not None) == bool(dirty), "what is dirty is written sooner or later"
        if chunk is not None:
            assert (self.world_of(chunk), path_of(chunk)) in dirty
            self.begin_down(chunk)

    @precondition(lambda self: any(not move.up for move in self.model.moves))
    @rule(pick=picks, good=mostly, lossy=st.booleans())
    def end_demotion(self, pick: int, good: bool, lossy: bool) -> None:  # noqa: FBT001 - drawn
        """The copy counts from now on; or it failed, and the chunk is as it was (C6)."""
        moves = [move for move in self.model.moves if not move.up]
        self.end_down(moves[pick % len(moves)], good=good, lossy=lossy)

    def end_down(self, move: Move, *, good: bool, lossy: bool) -> None:
        """End a demotion."""
        chunk = self.chunk(*move.node)
        assert chunk is not None, "a chunk that is moved stays"
        self.model.moves.remove(move)
        before = (chunk.mask, chunk.cold, chunk.size_bytes, chunk.lossy_mask)
        if not good:
            self.catalog.end_demotion(chunk, None)
            assert before == (chunk.mask, chunk.cold, chunk.size_bytes, chunk.lossy_mask)
            return
        old = self.model.below.get(move.node)
        kept = old.columns if old else frozenset()
        columns = kept | {key.column for key in move.spots}
        lossy = lossy or move.lossy or bool(old and old.lossy and kept)
        below = Below(self.place(), columns, lossy)
        self.model.below[move.node] = below
        self.catalog.end_demotion(chunk, (below.place, below.mask, below.lossy))

    def place(self) -> tuple[int, int, int, int]:
        """Return a place below that was never used."""
        self.places += 1
        return (0, self.places, 1, self.places)

    @precondition(lambda self: self.model.published)
    @rule(pick=picks)
    def reject(self, pick: int) -> None:
        """A chunk is not wanted below: it goes like a clean one, until it is used."""
        nodes = sorted({key[:2] for key in self.model.published})
        node = nodes[pick % len(nodes)]
        chunk = self.chunk(*node)
        assert chunk is not None
        self.catalog.reject(chunk)
        self.model.unwanted.add(node)

    @precondition(lambda self: self.model.below)
    @rule(pick=picks, rejected=st.booleans())
    def reclaim(self, pick: int, rejected: bool) -> None:  # noqa: FBT001 - drawn
        """A copy below is given up, whatever is under way with its chunk."""
        node = sorted(self.model.below)[pick % len(self.model.below)]
        chunk = self.chunk(*node)
        assert chunk is not None
        if rejected and chunk.mask:
            self.catalog.reject(chunk)
            self.model.unwanted.add(node)
        del self.model.below[node]
        self.catalog.drop_cold(chunk)

    # ---------------------------------------------------------------- up

    def risable(self) -> list[Node]:
        """Chunks of which only the tier below has something, and that nobody brings up yet."""
        rising = {move.node for move in self.model.moves if move.up}
        return [
            node
            for node, below in sorted(self.model.below.items())
            if not below.columns <= self.model.columns(*node) and node not in rising
        ]

    @precondition(lambda self: self.risable())
    @rule(pick=picks)
    def begin_promotion(self, pick: int) -> None:
        """Slots are taken for what is missing up here, or for nothing when there is no room."""
        nodes = self.risable()
        self.begin_up(nodes[pick % len(nodes)])

    def begin_up(self, node: Node) -> bool:
        """Begin a promotion; tell whether there was room."""
        model, below = self.model, self.model.below[node]
        chunk = self.chunk(*node)
        assert chunk is not None
        wanted = {Key(*node, column) for column in below.columns - model.columns(*node)}
        wanted -= model.busy()
        charged = model.filling_bytes(node[0].tenant)
        slots = self.catalog.begin_promotion(chunk)
        held = Move(node, {}, below.lossy, up=True)
        model.moves.append(held)  # so that the chunk itself is known to stay
        model.forget(self.left(), node[0].tenant)
        model.moves.remove(held)
        if slots is None:
            return False
        spots = {
            Key(*node, s.column): Spot(s.slab, s.offset_bytes, s.size_bytes, s.generation)
            for s in slots
        }
        assert spots.keys() == wanted
        assert charged + sum(s.size for s in spots.values()) <= self.quota_of_filling()
        for key, spot in spots.items():
            model.take(key, spot)
            model.contents[spot.slab, spot.offset] = ("half", spot.generation)
        move = Move(node, spots, below.lossy, up=True)
        model.moves.append(move)
        self.slots[id(move)] = slots
        return True

    def quota_of_filling(self) -> int:
        """Return the limit on what may be filled."""
        quota = self.quota
        tenant = next(iter(SHARES))
        return quota.left(tenant, Resource.FILLING_BYTES) + quota.used(
            tenant, Resource.FILLING_BYTES
        )

    @precondition(lambda self: any(move.up for move in self.model.moves))
    @rule(pick=picks, read=mostly)
    def end_promotion(self, pick: int, read: bool) -> None:  # noqa: FBT001 - drawn
        """What was read is findable with its bytes; what was not gives its slots back."""
        moves = [move for move in self.model.moves if move.up]
        self.end_up(moves[pick % len(moves)], read=read)

    def end_up(self, move: Move, *, read: bool) -> None:
        """End a promotion."""
        chunk = self.chunk(*move.node)
        assert chunk is not None, "a chunk that is moved stays"
        self.model.moves.remove(move)
        for key, spot in move.spots.items():
            if read:
                self.model.contents[spot.slab, spot.offset] = key
                self.model.published[key] = spot
                self.model.lossy |= {key} if move.lossy else set()
            self.model.ended.append(spot.generation)
        self.catalog.end_promotion(chunk, self.slots.pop(id(move)), read=read)

    @precondition(lambda self: any(move.up for move in self.model.moves))
    @rule(pick=picks)
    def meddle(self, pick: int) -> None:
        """A session cannot end what the daemon fills."""
        owner, _ = self.member(pick)
        for move in self.model.moves:
            for spot in move.spots.values() if move.up else ():
                generation = Generation(spot.generation)
                assert self.catalog.publish(OwnerId(owner), generation, 0) == Status.STALE
                assert self.catalog.abort(OwnerId(owner), generation) == Status.STALE
        assert self.catalog.fillings.count(DAEMON) == sum(
            len(move.spots) for move in self.model.moves if move.up
        )

    def acquire_by(
        self, owner: int, member: Member, path: Path, first: int, ttl: int, *, reading: bool
    ) -> None:
        """Hold a chain; what is not up begins to come up, and the answer may wait for it."""
        room = self.quota.left(member.world.tenant, Resource.PINNED_BYTES)
        stop = self.model.holdable(member.world, path, first, room)
        chunks = self.catalog.hold(member.space, hashes_of(path), first)
        held = [path[: depth + 1] for depth in range(first, stop)]
        assert [path_of(chunk) for chunk in chunks] == held
        if not chunks:
            return
        self.model.pin(member.world, held)
        wait = Waiting(owner, member, chunks, first, reading, ttl)
        if all(chunk.ready for chunk in chunks):
            self.grant(wait)
            return
        self.waiting.append(wait)
        for node in [(member.world, part) for part in held]:
            if node in self.risable() and not self.begin_up(node):
                break

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, up=mostly)
    def answer(self, pick: int, up: bool) -> None:  # noqa: FBT001 - drawn
        """An acquire is answered, all up or not: with a legal prefix of what is in host slots."""
        wait = self.waiting.pop(pick % len(self.waiting))
        if up:
            nodes = [(wait.member.world, path_of(chunk)) for chunk in wait.chunks]
            for move in [move for move in self.model.moves if move.up and move.node in nodes]:
                self.end_up(move, read=True)
        self.grant(wait)

    def grant(self, wait: Waiting) -> None:
        """Make the lease, over as much as there is."""
        world = wait.member.world
        held = [path_of(chunk) for chunk in wait.chunks]
        count = warm_length(wait.member.space, wait.chunks, wait.first)
        legal = self.model.legal
        whole = held[-1]
        assert count == max(
            n
            for n in range(len(held) + 1)
            if not n or legal(world, whole[: wait.first + n], first=wait.first, warm=True)
        )
        self.catalog.unpin(wait.chunks[count:])
        self.model.unpin(world, held[count:])
        if count:
            self.model.unpin(world, held[:count])  # `add` pins what it is given,
            unwanted = set(self.model.unwanted)  # which is no use: that was when it was asked for
            of, reading, deadline = wait.member, wait.reading, self.now + wait.ttl
            chunks = wait.chunks[:count]
            self.add(wait.owner, of, chunks, wait.first, reading=reading, deadline=deadline)
            self.model.unwanted = unwanted

    def end(self, owner: int, *, dead: bool) -> None:
        """A session that has gone waits no more (W1)."""
        for wait in [wait for wait in self.waiting if wait.owner == owner]:
            self.waiting.remove(wait)
            self.catalog.unpin(wait.chunks)
            self.model.unpin(wait.member.world, [path_of(chunk) for chunk in wait.chunks])
        super().end(owner, dead=dead)

    # ---------------------------------------------------------------- more of it

    @rule(tenant=tenants, name=layouts, path=paths, lossy=st.booleans(), rejected=st.booleans())
    def chill(self, tenant: Tenant, name: str, path: Path, lossy: bool, rejected: bool) -> None:  # noqa: FBT001
        """A chain is stored, goes down, and leaves its host slots, tail first; and comes again."""
        world = World(tenant, name)
        self.store_all(tenant, name, path)
        self.settle(tenant, lossy=lossy)
        for depth in range(len(path), 0, -1):
            chunk = self.chunk(world, path[:depth])
            if chunk is None or not chunk.evictable:
                return
            if rejected and depth < len(path):
                self.catalog.reject(chunk)
            self.catalog.evict(chunk)
            gone = {key for key in self.model.published if key[:2] == (world, path[:depth])}
            self.model.remove(gone)
        if rejected:
            self.store_all(tenant, name, path)

    @rule(tenant=tenants, path=paths, rank=st.integers(0, 1), up=mostly)
    def chill_part(self, tenant: Tenant, path: Path, rank: int, up: bool) -> None:  # noqa: FBT001
        """One rank of two stores its part, and it goes down; with `up`, it stays up as well."""
        world = World(tenant, "hybrid")
        for depth in range(len(path)):
            for generation in self.fill(world, path[: depth + 1], rank):
                self.finish(generation)
        self.settle(tenant)
        chunk = self.chunk(world, path)
        if not up and chunk is not None and chunk.evictable:
            self.catalog.evict(chunk)
            self.model.remove({key for key in self.model.published if key[:2] == (world, path)})

    def fill(self, world: World, path: Path, rank: int) -> list[int]:
        """Reserve a rank's objects of a chunk, as a new session."""
        self.join(world.tenant, world.layout, rank)
        owner, member = list(self.members.items())[-1]
        return self.store(owner, member, path, len(path) - 1, 3, deadline=self.now + 9)

    def settle(self, tenant: Tenant, *, lossy: bool = False) -> None:
        """Write down what can be written down, at the second try."""
        eviction = self.catalog.eviction
        while self.model.demoting and (chunk := eviction.demotable(tenant)) is not None:
            self.begin_down(chunk)
            self.end_down(self.model.moves[-1], good=False, lossy=False)
            assert eviction.demotable(tenant) is chunk, "a failure changes no order"
            self.begin_down(chunk)
            self.end_down(self.model.moves[-1], good=True, lossy=lossy)

    @rule(tenant=tenants, name=layouts, path=paths, good=mostly, rank=st.integers(0, 1))
    def crowd(self, tenant: Tenant, name: str, path: Path, good: bool, rank: int) -> None:  # noqa: FBT001
        """Stores press, in a slot or two of the chunks that are on their way up and down."""
        chunk = self.catalog.eviction.demotable(tenant)
        if chunk is not None:
            self.begin_down(chunk)
        for node in [node for node in self.risable() if node[0].tenant == tenant][:2]:
            if rank and node[1][:-1] in {(), *self.model.nodes(node[0])}:
                self.fill(*node, rank % LAYOUTS[node[0].layout].ranks)
            if node in self.risable():
                self.begin_up(node)
        self.store_all(tenant, name, path)
        for move in [move for move in self.model.moves if move.node[0].tenant == tenant]:
            if move.up:
                self.end_up(move, read=good)
            else:
                self.end_down(move, good=good, lossy=False)

    @precondition(lambda self: self.model.below)
    @rule(pick=picks, first=st.integers(0, 1), ttl=times, reading=st.booleans())
    def acquire_below(self, pick: int, first: int, ttl: int, reading: bool) -> None:  # noqa: FBT001
        """Somebody asks for what the tier below has."""
        world, path = sorted(self.model.below)[pick % len(self.model.below)]
        self.join(world.tenant, world.layout, pick)
        owner, member = list(self.members.items())[-1]
        self.acquire_by(owner, member, path, first, ttl, reading=reading)

    # ---------------------------------------------------------------- health

    @rule(demoting=mostly, readable=mostly)
    def health(self, demoting: bool, readable: bool) -> None:  # noqa: FBT001 - drawn
        """The tier below takes in, or does not; may be read, or not."""
        self.catalog.cold_readable = self.model.readable = readable
        if demoting and not self.model.demoting:
            chunks = [c for space in self.catalog.spaces.values() for c in space.chunks.values()]
            self.catalog.eviction.begin_demoting(chunks)
        self.catalog.eviction.demoting = self.model.demoting = demoting

    @rule(tenant=tenants, name=layouts, path=paths)
    def store_newest(self, tenant: Tenant, name: str, path: Path) -> None:
        """The newest gets in once all that is dirty is clean: full is no refusal then either."""
        if any(move.node[0].tenant == tenant for move in self.model.moves):
            return
        self.settle(tenant)
        if self.model.demoting and not any(k.world.tenant == tenant for k in self.model.busy()):
            assert self.model.dirty_bytes(tenant) == 0
        super().store_newest(tenant, name, path)

    # ---------------------------------------------------------------- restart

    @precondition(lambda self: len(self.model.below) > 3)
    @rule(seed=picks, lost=st.integers(0, 2), late=st.booleans())
    def restart(self, seed: int, lost: int, late: bool) -> None:  # noqa: FBT001 - drawn
        """All that is durable is back, but for chains without their head; all else is gone."""
        chance = random.Random(seed)
        durable = dict(self.model.below)
        for move in self.model.moves:
            if late and not move.up:  # it was durable, and the daemon did not live to see it
                old = durable.get(move.node)
                columns = frozenset(key.column for key in move.spots)
                columns |= old.columns if old else frozenset()
                durable[move.node] = Below(self.place(), columns, move.lossy)
        for node in chance.sample(sorted(durable), min(lost, len(durable))):
            del durable[node]
        self.start(self.policy)
        for tenant in SHARES:
            for name, layout in LAYOUTS.items():
                world = World(tenant, name)
                rows = [
                    found_copy(
                        hash_of(p),
                        hash_of(p[:-1]) if p[:-1] else NAMESPACE,
                        (b.place, b.mask, b.lossy),
                    )
                    for (where, p), b in durable.items()
                    if where == world
                ]
                chance.shuffle(rows)
                space = self.catalog.enter(tenant, NAMESPACE, name, layout)
                broken = plant(space, rows, self.catalog.changes)
                self.catalog.leave(space)
                whole = {
                    node: below
                    for node, below in durable.items()
                    if node[0] == world
                    and all((world, node[1][:d]) in durable for d in range(1, len(node[1])))
                }
                assert len(broken) + len(whole) == len(rows)
                assert {chunk.hash for chunk in broken}.isdisjoint(space.chunks)
                self.model.below |= whole

    # ---------------------------------------------------------------- always

    @invariant()
    def agrees_below(self) -> None:
        """Copies below, what is lossy and what is wanted are the model's."""
        if not hasattr(self, "catalog"):
            return
        copies, lossy = {}, set()
        for space in self.catalog.spaces.values():
            for chunk in space.chunks.values():
                node = (self.world_of(chunk), path_of(chunk))
                if chunk.cold is not None:
                    copies[node] = (chunk.cold, chunk.cold_mask, chunk.cold_lossy)
                columns = range(chunk.lossy_mask.bit_length())
                lossy |= {Key(*node, c) for c in columns if chunk.lossy_mask >> c & 1}
                assert not chunk.mask or chunk.unwanted == (node in self.model.unwanted)
        below = self.model.below
        assert copies == {node: (b.place, b.mask, b.lossy) for node, b in below.items()}
        assert lossy == self.model.lossy

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, depth=st.integers(1, DEPTH), ttl=times)
    def use_while_waiting(self, pick: int, depth: int, ttl: int) -> None:
        """Others ask for the same chain while it comes up."""
        wait = self.waiting[pick % len(self.waiting)]
        path = path_of(wait.chunks[-1])[:depth]
        self.join(wait.member.world.tenant, wait.member.world.layout, pick)
        owner, member = list(self.members.items())[-1]
        self.acquire_by(owner, member, path, 0, ttl, reading=bool(pick % 2))


@pytest.mark.timeout(300)
def test_catalog_and_the_tier_below() -> None:
    """Whatever moves, fails or restarts in between, catalog and model agree."""
    run_state_machine_as_test(
        ColdMachine, settings=settings(suppress_health_check=list(HealthCheck))
    )
