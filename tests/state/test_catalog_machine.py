"""Catalog, leases and quarantine against a naive model, under pressure in a tiny pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.catalog import Catalog
from kvd.lease import Lease, LeaseBook
from kvd.metrics import Counters
from kvd.places import places_of
from kvd.policies import POLICIES
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, LeaseId, OwnerId, SlabId, Tenant
from kvd_client.wire import Status
from tests.state.catalog_model import (
    LAYOUTS,
    NAMESPACE,
    SHARES,
    SLAB_BYTES,
    Hold,
    Key,
    Member,
    Model,
    Path,
    Spot,
    World,
    check_candidates,
    hash_of,
    hashes_of,
    path_of,
)

if TYPE_CHECKING:
    from kvd.entry import Chunk

DEPTH: Final = 4
FITS: Final = {"plain": 4, "hybrid": 2}
"""Chunks of a chain that always fit in an idle tenant's share, wherever its slots fall."""
LIMITS: Final = {
    Resource.SESSIONS: 99,
    Resource.LEASES: 99,
    Resource.PINNED_BYTES: 11 * 4096,
    Resource.FILLING_BYTES: 9 * 4096,
}

paths = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)
picks = st.integers(0, 2**16)
times = st.integers(0, 4)
leases = st.integers(0, 12)


class CatalogMachine(RuleBasedStateMachine):
    """What a daemon's sessions do, in any order."""

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        """Begin with blank slabs and one session of each kind."""
        self.policy = policy
        self.pool = SlabPool(SLAB_BYTES, SHARES)
        for slab in range(sum(SHARES.values())):
            self.pool.add_blank(SlabId(slab))
        self.quota = Quota(dict.fromkeys(SHARES, LIMITS))
        self.catalog = Catalog(self.pool, self.quota, Counters(), policy)
        self.book = LeaseBook()
        self.model = Model.beside(self.catalog)
        self.members: dict[int, Member] = {}
        self.now, self.serial = 1, 0
        for tenant in SHARES:
            self.join(tenant, "plain", 0)
            self.join(tenant, "hybrid", 0)
            self.join(tenant, "hybrid", 1)

    # ---------------------------------------------------------------- helpers

    def number(self) -> int:
        """Return a number not used before."""
        self.serial += 1
        return self.serial

    def member(self, pick: int, *, gone: bool = False) -> tuple[int, Member]:
        """Pick a session that is there, or one that has left without being dead."""
        found = [item for item in self.members.items() if item[1].gone == gone]
        return found[pick % len(found)]

    def left(self) -> set[Key]:
        """Read which objects the catalog has."""
        return {
            Key(World(space.tenant, name), path_of(chunk), column)
            for space in self.catalog.spaces.values()
            for name, layout in LAYOUTS.items()
            if layout == space.layout
            for chunk in space.chunks.values()
            for column in range(layout.columns)
            if chunk.mask >> column & 1
        }

    def chunk(self, world: World, path: Path) -> Chunk | None:
        """Find a chunk in the catalog."""
        space = self.catalog.spaces.get((world.tenant, NAMESPACE, LAYOUTS[world.layout].id))
        return space.chunks.get(hash_of(path)) if space else None

    def tell(self, hold: Hold, member: Member, chunks: tuple[Chunk, ...]) -> None:
        """Read the places of a lease as its rank and check each against the model."""
        layout = LAYOUTS[member.world.layout]
        records = places_of(member.space.layout, chunks, hold.first, member.rank)
        seen = set()
        for index, group, status, *spot in records:
            column = layout.column(group, member.rank)
            key = Key(member.world, hold.paths[index - hold.first], column)
            assert status == Status.OK
            assert self.model.published[key] == Spot(*spot)
            hold.told.append((key, Spot(*spot)))
            seen.add(key)
        columns = {layout.column(g, member.rank) for g in range(len(layout.groups))}
        assert seen == {
            key
            for key in self.model.published
            if key.world == member.world and key.path in hold.paths and key.column in columns
        }

    # ---------------------------------------------------------------- sessions

    @rule(tenant=st.sampled_from(sorted(SHARES)), layout=st.sampled_from(sorted(LAYOUTS)), r=picks)
    def join(self, tenant: Tenant, layout: str, r: int) -> None:
        """A session begins; what was stored before it is there for it."""
        space = self.catalog.enter(tenant, NAMESPACE, layout, LAYOUTS[layout])
        member = Member(World(tenant, layout), r % LAYOUTS[layout].ranks, space)
        self.members[self.number()] = member

    @precondition(lambda self: sum(not m.gone for m in self.members.values()) > 1)
    @rule(pick=picks, dead=st.booleans())
    def leave(self, pick: int, dead: bool) -> None:  # noqa: FBT001 - drawn
        """A session ends; unless its process is dead, what it may still touch stays its own."""
        owner, member = self.member(pick)
        member.gone = True
        self.end(owner, dead=dead)
        self.catalog.leave(member.space)

    @precondition(lambda self: any(m.gone for m in self.members.values()))
    @rule(pick=picks)
    def die(self, pick: int) -> None:
        """The process of a session that had left is dead at last."""
        owner, _ = self.member(pick, gone=True)
        self.end(owner, dead=True)

    def end(self, owner: int, *, dead: bool) -> None:
        """Take back what an owner had, in the catalog and in the model."""
        for lease in self.book.leave(OwnerId(owner), dead=dead):
            self.catalog.unpin(lease.chunks)
        self.catalog.abandon(OwnerId(owner), dead=dead)
        for number, hold in list(self.model.holds.items()):
            if hold.owner == owner:
                hold.active = False
                if dead or not hold.reading:
                    self.model.drop(number)
        for generation, filling in list(self.model.filling.items()):
            if filling.owner == owner:
                filling.quarantined = True
                if dead:
                    self.model.finish(generation)
        if dead:
            del self.members[owner]
            assert not self.catalog.fillings.count(OwnerId(owner))
            assert not self.book.count(OwnerId(owner))

    # ---------------------------------------------------------------- storing

    @rule(pick=picks, path=paths, depth=st.integers(0, DEPTH), groups=st.integers(0, 7), ttl=times)
    def reserve(self, pick: int, path: Path, depth: int, groups: int, ttl: int) -> None:
        """Slots are granted, or refused for a reason the model knows."""
        owner, member = self.member(pick)
        self.store(owner, member, path, min(depth, len(path)), groups, deadline=self.now + ttl)

    @rule(pick=picks, path=paths, groups=st.integers(1, 3), ttl=leases)
    def reserve_next(self, pick: int, path: Path, groups: int, ttl: int) -> None:
        """The same for the part of a chain that is not there yet, or its last chunk."""
        owner, member = self.member(pick)
        nodes = self.model.nodes(member.world)
        depth = next(d for d in range(len(path) - 1, -1, -1) if not d or path[:d] in nodes)
        self.store(owner, member, path, depth, groups, deadline=self.now + ttl)

    def store(
        self, owner: int, member: Member, path: Path, depth: int, groups: int, *, deadline: int
    ) -> list[int]:
        """Reserve the chunks of a path below `depth`; return what was granted."""
        model, world, layout = self.model, member.world, LAYOUTS[member.world.layout]
        nodes = model.nodes(world)
        records = self.catalog.reserve(
            member.space,
            OwnerId(owner),
            member.rank,
            parent=hash_of(path[:depth]) if depth else NAMESPACE,
            hashes=hashes_of(path)[depth:],
            groups=groups,
            deadline_ns=deadline,
        )
        wanted = [
            (index, group)
            for index in range(len(path) - depth)
            for group in range(len(layout.groups))
            if groups >> group & 1
        ]
        assert [record[:2] for record in records] == wanted
        granted: list[tuple[Key, Spot]] = []
        limit = Status.ORPHAN if depth and path[:depth] not in nodes else Status.OK
        busy = model.busy()
        exists = set()
        charged = model.filling_bytes(world.tenant)
        for index, group, status, *spot in records:
            column = layout.column(group, member.rank)
            key = Key(world, path[: depth + index + 1], column)
            assert (status == Status.OK) == bool(spot[3])
            if limit is not Status.OK:
                assert status == limit, "what comes after a refused object is refused alike"
            elif status in {Status.NO_SPACE, Status.OVER_QUOTA}:
                limit = Status(status)
                charge = charged + layout.groups[group].object_bytes
                assert (status == Status.OVER_QUOTA) == (charge > LIMITS[Resource.FILLING_BYTES])
            elif key in busy:
                assert status == Status.BUSY
            elif status == Status.EXISTS:
                exists.add(key)
            else:
                assert status == Status.OK
                granted.append((key, Spot(*spot)))
                charged += granted[-1][1].size
        model.forget(self.left(), world.tenant)  # before the places it freed are compared
        for key, place in granted:
            model.grant(owner, key, place, deadline)
        assert exists <= model.published.keys()
        return [place.generation for _, place in granted]

    @precondition(lambda self: self.model.filling)
    @rule(pick=picks, right=st.booleans())
    def write(self, pick: int, right: bool) -> None:  # noqa: FBT001 - drawn
        """A writer writes into its slot, also long after its deadline or its session's end."""
        generations = list(self.model.filling)
        self.model.write(generations[pick % len(generations)], right=right)

    @rule(tenant=st.sampled_from(sorted(SHARES)), name=st.sampled_from(sorted(LAYOUTS)), path=paths)
    def store_all(self, tenant: Tenant, name: str, path: Path) -> None:
        """All ranks store a chain, as far as what others hold leaves room."""
        self.store_chain(World(tenant, name), path)

    def store_chain(self, world: World, path: Path) -> None:
        """Store a chain as new sessions do, one chunk at a time: the filling quota is small."""
        for rank in range(LAYOUTS[world.layout].ranks):
            self.join(world.tenant, world.layout, rank)
            owner, member = list(self.members.items())[-1]
            for depth in range(len(path)):
                part = path[: depth + 1]
                for generation in self.store(owner, member, part, depth, 3, deadline=self.now):
                    self.finish(generation)

    def pick_filling(self, pick: int) -> int:
        """Pick a slot that is being filled, by a session that is there if possible."""
        there = [g for g, f in self.model.filling.items() if not self.members[f.owner].gone]
        found = there or list(self.model.filling)
        return found[pick % len(found)]

    @precondition(lambda self: self.model.filling)
    @rule(pick=picks, some=st.booleans())
    def publish(self, pick: int, some: bool) -> None:  # noqa: FBT001 - drawn
        """Slots filled in time are findable from now on; late ones are free, never findable."""
        first = self.pick_filling(pick)
        owner = self.model.filling[first].owner
        owned = [g for g, filling in self.model.filling.items() if filling.owner == owner]
        for generation in [first] if some else owned:
            self.finish(generation)

    def finish(self, generation: int) -> None:
        """Write and publish one slot."""
        filling = self.model.filling[generation]
        self.model.write(generation, right=True)
        status = self.catalog.publish(OwnerId(filling.owner), Generation(generation), self.now)
        late = filling.quarantined or self.now > filling.deadline
        assert status == (Status.EXPIRED if late else Status.OK)
        self.model.finish(generation)
        if not late:
            assert filling.key not in self.model.published
            self.model.published[filling.key] = filling.spot

    @precondition(lambda self: self.model.filling)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        """A slot given back is free, whether in time or from quarantine."""
        generation = self.pick_filling(pick)
        filling = self.model.finish(generation)
        status = self.catalog.abort(OwnerId(filling.owner), Generation(generation))
        assert status == (Status.EXPIRED if filling.quarantined else Status.OK)

    @rule(pick=picks, which=picks)
    def use_a_stale_handle(self, pick: int, which: int) -> None:
        """A generation that is over, never was, or is another's, is STALE and changes nothing."""
        owner, _ = self.member(pick)
        others = [g for g, f in self.model.filling.items() if f.owner != owner]
        stale = [0, 2**63, *self.model.ended, *others]
        generation = Generation(stale[which % len(stale)])
        assert self.catalog.publish(OwnerId(owner), generation, self.now) == Status.STALE
        assert self.catalog.abort(OwnerId(owner), generation) == Status.STALE

    # ---------------------------------------------------------------- time

    @rule(by=leases, swept=st.booleans())
    def advance(self, by: int, swept: bool) -> None:  # noqa: FBT001 - drawn
        """Time passes; the sweep, now or later, quarantines and ends what is over."""
        self.now += by
        if not swept:
            return
        self.catalog.sweep(self.now)
        for lease in self.book.sweep(self.now):
            self.catalog.unpin(lease.chunks)
        for filling in self.model.filling.values():
            filling.quarantined |= self.now > filling.deadline
        for number, hold in list(self.model.holds.items()):
            if self.now >= hold.deadline:
                hold.active = False
                if not hold.reading:
                    self.model.drop(number)

    # ---------------------------------------------------------------- reading

    @rule(pick=picks, path=paths)
    def lookup(self, pick: int, path: Path) -> None:
        """The usable prefix is the model's."""
        _, member = self.member(pick)
        expected = self.model.usable(member.world, path)
        assert self.catalog.usable(member.space, hashes_of(path)) == expected

    @rule(pick=picks, path=paths, first=st.integers(0, 2), ttl=leases, reading=st.booleans())
    def acquire(self, pick: int, path: Path, first: int, ttl: int, reading: bool) -> None:  # noqa: FBT001
        """What is usable and within the quota is pinned, and places are told with its bytes."""
        self.acquire_by(*self.member(pick), path, first, ttl, reading=reading)

    @precondition(lambda self: self.model.published)
    @rule(which=picks, first=st.integers(0, 1), ttl=leases, reading=st.booleans())
    def acquire_known(self, which: int, first: int, ttl: int, reading: bool) -> None:  # noqa: FBT001
        """The same for a chain of which there is something."""
        known = sorted({key[:2] for key in self.model.published})
        world, path = known[which % len(known)]
        self.join(world.tenant, world.layout, which)
        self.acquire_by(*list(self.members.items())[-1], path, first, ttl, reading=reading)

    def acquire_by(
        self, owner: int, member: Member, path: Path, first: int, ttl: int, *, reading: bool
    ) -> None:
        """Hold a chain and make its lease; what is held is what the model allows."""
        room = self.quota.left(member.world.tenant, Resource.PINNED_BYTES)
        stop = self.model.holdable(member.world, path, first, room)
        chunks = self.catalog.hold(member.space, hashes_of(path), first)
        expected = [path[: depth + 1] for depth in range(first, stop)]
        assert [path_of(chunk) for chunk in chunks] == expected
        if chunks:
            self.add(owner, member, chunks, first, reading=reading, deadline=self.now + ttl)

    def add(
        self,
        owner: int,
        member: Member,
        chunks: tuple[Chunk, ...],
        first: int,
        *,
        reading: bool,
        deadline: int,
    ) -> None:
        """Make a lease of pinned chunks, in the book and in the model."""
        number = self.number()
        token = number.to_bytes(16, "big")
        self.book.add(
            Lease(
                LeaseId(number),
                token,
                owner=OwnerId(owner),
                tenant=member.world.tenant,
                chunks=chunks,
                first=first,
                reading=reading,
                deadline_ns=deadline,
            )
        )
        held = [path_of(chunk) for chunk in chunks]
        hold = Hold(owner, member.world, held, first, reading, deadline, token)
        self.model.pin(member.world, held)
        self.model.holds[number] = hold
        if reading:
            self.tell(hold, member, chunks)

    @precondition(lambda self: self.model.holds)
    @rule(pick=picks, which=picks, ttl=leases)
    def attach(self, pick: int, which: int, ttl: int) -> None:
        """A token gives a pin of one's own while its lease is active, and to its tenant only."""
        holds = list(self.model.holds.items())
        number, hold = holds[which % len(holds)]
        if pick % 4:
            self.join(hold.world.tenant, hold.world.layout, pick)
            pick = -1
        present = [item for item in self.members.items() if not item[1].gone]
        owner, member = present[pick % len(present)]
        lease = self.book.by_token(hold.token, member.world.tenant)
        if not hold.active or member.world.tenant != hold.world.tenant:
            assert lease is None
            return
        assert lease is not None
        assert lease.id == number
        if member.world == hold.world:
            self.catalog.pin(lease.chunks)
            deadline = self.now + ttl
            self.add(owner, member, lease.chunks, lease.first, reading=True, deadline=deadline)

    @precondition(lambda self: self.model.holds)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """A lease ends for its owner, overdue or not, and for nobody else."""
        number = list(self.model.holds)[pick % len(self.model.holds)]
        owner = self.model.holds[number].owner
        assert self.book.of(LeaseId(number), OwnerId(-1)) is None
        lease = self.book.of(LeaseId(number), OwnerId(owner))
        assert lease is not None
        self.book.end(lease)
        self.catalog.unpin(lease.chunks)
        self.model.drop(number)
        assert self.book.of(LeaseId(number), OwnerId(owner)) is None

    # ---------------------------------------------------------------- pressure

    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        """An operator drops a chunk that nobody holds or fills, wherever it is in the tree."""
        found = sorted({key[:2] for key in self.model.published})
        idle = [one for one in found if one not in self.model.still()]
        if not idle:
            return
        world, path = idle[pick % len(idle)]
        chunk = self.chunk(world, path)
        assert chunk is not None
        self.catalog.evict(chunk, "operator")
        self.model.remove({key for key in self.model.published if key[:2] == (world, path)})

    @rule(tenant=st.sampled_from(sorted(SHARES)), name=st.sampled_from(sorted(LAYOUTS)), path=paths)
    def store_newest(self, tenant: Tenant, name: str, path: Path) -> None:
        """A chain that fits gets in whole when its tenant holds nothing: full is no refusal."""
        held = [world for world, _ in self.model.pins if world.tenant == tenant]
        if held or self.model.filling_bytes(tenant) or self.model.damaged:
            return
        refused = self.catalog.counters.reserves_refused
        world, path = World(tenant, name), path[: FITS[name]]
        self.store_chain(world, path)
        assert self.catalog.counters.reserves_refused == refused
        if self.policy == "lru":  # another may think more of what is old
            assert self.model.legal(world, path)

    # ---------------------------------------------------------------- always

    @invariant()
    def agrees(self) -> None:
        """Objects, tree, charges, leases and bytes are the model's; `check` finds nothing."""
        if not hasattr(self, "catalog"):
            return
        self.catalog.check()
        check_candidates(self.catalog)
        model = self.model
        assert self.left() == model.published.keys()
        for tenant in SHARES:
            for name in LAYOUTS:
                self.same_tree(World(tenant, name))
            used = self.quota.used
            assert used(tenant, Resource.PINNED_BYTES) == model.pinned_bytes(tenant)
            assert used(tenant, Resource.FILLING_BYTES) == model.filling_bytes(tenant)
            assert self.catalog.eviction.dirty_bytes[tenant] == model.dirty_bytes(tenant)
        assert {lease.id for lease in self.book.all()} == model.holds.keys()
        assert self.book.overdue_count() == sum(not h.active for h in model.holds.values())
        model.check(self.catalog)

    def same_tree(self, world: World) -> None:
        """The nodes of a world are the model's; an idle world is forgotten."""
        key = (world.tenant, NAMESPACE, LAYOUTS[world.layout].id)
        space = self.catalog.spaces.get(key)
        nodes = self.model.nodes(world)
        assert {path_of(chunk) for chunk in space.chunks.values()} == nodes if space else not nodes
        sessions = sum(m.world == world and not m.gone for m in self.members.values())
        assert (space is not None) == bool(nodes or sessions)
        assert (space.sessions if space else 0) == sessions


@pytest.mark.timeout(300)
def test_catalog() -> None:
    """Whatever sessions do, catalog and leases agree with the model; bytes stay what they are."""
    run_state_machine_as_test(CatalogMachine)
