"""A naive model of catalog, leases and slots: dicts, lists and no cleverness.

It knows chunks by their path in a tree, objects by (session's world, path, column), and the bytes
of every place by the stamp that was last written there. It does not decide what is evicted: it is
told what is left and says whether that may be. Of the tier below it knows what is durable there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.changes import tiers_of
from kvd.types import Tenant
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from kvd.catalog import Catalog
    from kvd.changes import Tier
    from kvd.entry import Chunk, Space

PAGE: Final = 4096
SLAB_BYTES: Final = 8 * PAGE
SHARES: Final = {Tenant("a"): 3, Tenant("b"): 2}
NAMESPACE: Final = b"n" * 32
CHUNK: Final = 4

PLAIN: Final = Layout(CHUNK, CHUNK, "float16", (Group("full", 1, 1, 8, PAGE + 900),))
HYBRID: Final = Layout(
    CHUNK,
    CHUNK,
    "float16",
    (Group("full", 1, 1, 8, PAGE), Group("sliding", 1, 1, 8, 2 * PAGE - 1, CHUNK + 2)),
    tp=2,
)
LAYOUTS: Final = {"plain": PLAIN, "hybrid": HYBRID}
WINDOW_CHUNKS: Final = 2
"""A window of six tokens reaches five back: two chunks of four."""
FULL_COLUMNS: Final = {"plain": (0,), "hybrid": (0, 1)}
SLIDING_COLUMNS: Final = {"plain": (), "hybrid": (2, 3)}

Path = tuple[int, ...]


class World(NamedTuple):
    """What one space is to the model."""

    tenant: Tenant
    layout: str


class Key(NamedTuple):
    """One object."""

    world: World
    path: Path
    column: int


class Spot(NamedTuple):
    """One place in a slab, and one use of it."""

    slab: int
    offset: int
    size: int
    generation: int

    def overlaps(self, other: Spot) -> bool:
        """Tell whether two places share a byte."""
        return self.slab == other.slab and (
            self.offset < other.offset + other.size and other.offset < self.offset + self.size
        )


def hash_of(path: Path) -> bytes:
    """Return the chunk hash of a path: the same in every world."""
    return blake2b(bytes(path), digest_size=32).digest()


def hashes_of(path: Path) -> list[bytes]:
    """Return the chain of hashes down to a path."""
    return [hash_of(path[:depth]) for depth in range(1, len(path) + 1)]


def path_of(chunk: Chunk) -> Path:
    """Find the path of a chunk by trying; trees here are small."""
    depth = 1
    node = chunk
    while node.parent is not None:
        node, depth = node.parent, depth + 1
    candidates: list[Path] = [()]
    for _ in range(depth):
        candidates = [(*path, step) for path in candidates for step in (0, 1)]
    return next(path for path in candidates if hash_of(path) == chunk.hash)


def check_candidates(catalog: Catalog) -> None:
    """Every chunk that may be evicted, or demoted, is a candidate with its present tick (P1)."""
    for space in catalog.spaces.values():
        orders = catalog.eviction._of(space)
        for chunk in space.chunks.values():
            still = chunk.filling or chunk.moves or chunk.clean or chunk.unwanted
            if catalog.eviction.demoting and chunk.mask and not still:
                found = {(tick, each.hash) for tick, _, each in orders.demotable._heap}
                assert (chunk.tick, chunk.hash) in found, "V1"


class Ear:
    """An observer: what it was told of, as (world, path, tier)."""

    def __init__(self) -> None:
        """Know nothing."""
        self.told: set[tuple[World, Path, Tier]] = set()

    @staticmethod
    def _name(space: Space, chunk: Chunk, tier: Tier) -> tuple[World, Path, Tier]:
        assert chunk.space is space
        (name,) = [name for name, layout in LAYOUTS.items() if layout == space.layout]
        return World(space.tenant, name), path_of(chunk), tier

    def stored(self, space: Space, chunk: Chunk, tier: Tier) -> None:
        """Take in a chunk that was not there."""
        one = self._name(space, chunk, tier)
        assert one not in self.told, "told twice"
        self.told.add(one)

    def removed(self, space: Space, chunk: Chunk, tier: Tier, reason: str) -> None:
        """Forget a chunk that was there."""
        assert reason
        self.told.remove(self._name(space, chunk, tier))


@dataclass
class Filling:
    """A reserved or quarantined slot."""

    owner: int
    key: Key
    spot: Spot
    deadline: int
    quarantined: bool = False


@dataclass
class Hold:
    """A lease: the chunks it pins and the places its reader was told."""

    owner: int
    world: World
    paths: list[Path]
    first: int
    reading: bool
    deadline: int
    token: bytes
    active: bool = True
    told: list[tuple[Key, Spot]] = field(default_factory=list)


@dataclass
class Member:
    """A session, or what is left of one."""

    world: World
    rank: int
    space: Space
    gone: bool = False


@dataclass
class Below:
    """A chunk's copy in the tier below."""

    place: tuple[int, int, int, int]
    columns: frozenset[int]
    lossy: bool

    @property
    def mask(self) -> int:
        """Its columns as the catalog has them."""
        return sum(1 << column for column in self.columns)


@dataclass
class Move:
    """A chunk on its way: down with what its slots hold, or up into slots of its own."""

    node: tuple[World, Path]
    spots: dict[Key, Spot]
    lossy: bool
    up: bool


@dataclass
class Model:
    """All of it."""

    published: dict[Key, Spot] = field(default_factory=dict)
    filling: dict[int, Filling] = field(default_factory=dict)
    below: dict[tuple[World, Path], Below] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    lossy: set[Key] = field(default_factory=set)
    unwanted: set[tuple[World, Path]] = field(default_factory=set)
    readable: bool = False
    demoting: bool = False
    holds: dict[int, Hold] = field(default_factory=dict)
    pins: dict[tuple[World, Path], list[int]] = field(default_factory=dict)
    """Chunk to (count, bytes charged at the first)."""
    contents: dict[tuple[int, int], object] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    """Generations that are over: stale for everyone."""
    damaged: list[tuple[Tenant, Spot]] = field(default_factory=list)
    """Places that nobody uses again."""
    ear: Ear = field(default_factory=Ear)

    @classmethod
    def beside(cls, catalog: Catalog) -> Model:
        """Start with an empty catalog, and listen to it."""
        model = cls()
        catalog.changes.watch(model.ear)
        return model

    # ---- the tree

    def size(self, world: World, path: Path) -> int:
        """Bytes published of a chunk."""
        return sum(s.size for k, s in self.published.items() if k[:2] == (world, path))

    def weight(self, world: World, path: Path) -> int:
        """Bytes of a chunk in host slots once all of it is there."""
        layout = LAYOUTS[world.layout]
        missing = {key.column for key in self.known(world, path)} - self.columns(world, path)
        sizes = [layout.groups[layout.group_of(column)].object_bytes for column in missing]
        return self.size(world, path) + sum(sizes)

    def columns(self, world: World, path: Path) -> set[int]:
        """Columns of a chunk in host slots."""
        return {key.column for key in self.published if key[:2] == (world, path)}

    def known(self, world: World, path: Path) -> set[Key]:
        """Objects of a chunk in either tier."""
        below = self.below.get((world, path))
        columns = self.columns(world, path) | set(below.columns if below else ())
        return {Key(world, path, column) for column in columns}

    def clean(self, world: World, path: Path) -> bool:
        """Whether nothing is lost, or nothing that is wanted, when a chunk's host slots go."""
        below = self.below.get((world, path))
        covered = self.columns(world, path) <= (below.columns if below else frozenset())
        return covered or (world, path) in self.unwanted

    def dirty_bytes(self, tenant: Tenant) -> int:
        """Bytes of a tenant that are the only copy, and wanted below."""
        nodes = {key[:2] for key in self.published if key.world.tenant == tenant}
        return sum(self.size(*node) for node in nodes if not self.clean(*node))

    def busy(self) -> set[Key]:
        """Objects that are being filled, by a session or from below."""
        rising = {key for move in self.moves if move.up for key in move.spots}
        return rising | {f.key for f in self.filling.values() if not f.quarantined}

    def still(self) -> set[tuple[World, Path]]:
        """Chunks that stay where they are: held, filled or moved."""
        moved = {move.node for move in self.moves}
        return moved | self.pins.keys() | {key[:2] for key in self.busy()}

    def warm(self, world: World) -> set[Path]:
        """Paths of chunks with something in host slots."""
        return {key.path for key in self.published.keys() | self.busy() if key.world == world}

    def nodes(self, world: World) -> set[Path]:
        """Paths that must be in the tree: what has objects, writers or pins, and all above."""
        alive = self.warm(world)
        alive |= {path for held, path in [*self.still(), *self.below] if held == world}
        return {path[:depth] for path in alive for depth in range(1, len(path) + 1)}

    def legal(self, world: World, path: Path, *, first: int = 0, warm: bool = False) -> bool:
        """Tell whether all of a path may be read, from the words of the design.

        Args:
            world: Where.
            path: Which.
            first: Chunks at its head that the reader has.
            warm: Only what is in host slots counts.
        """
        has = set(self.published)
        if self.readable and not warm:
            has = {
                key for depth in range(len(path)) for key in self.known(world, path[: depth + 1])
            }
        for depth in range(first, len(path)):
            columns = list(FULL_COLUMNS[world.layout])
            if depth >= len(path) - WINDOW_CHUNKS:
                columns += SLIDING_COLUMNS[world.layout]
            if any(Key(world, path[: depth + 1], column) not in has for column in columns):
                return False
        return True

    def usable(self, world: World, path: Path) -> int:
        """Chunks of the longest legal prefix."""
        return max(n for n in range(len(path) + 1) if self.legal(world, path[:n]))

    def holdable(self, world: World, path: Path, first: int, left: int) -> int:
        """Chunks of the longest legal prefix whose part from `first` the quota allows to pin."""
        best = 0
        for length in range(len(path) + 1):
            cost = sum(
                self.weight(world, path[: depth + 1])
                for depth in range(first, length)
                if (world, path[: depth + 1]) not in self.pins
            )
            if self.legal(world, path[:length]) and cost <= left:
                best = length
        return best

    def whole(self) -> set[tuple[World, Path, Tier]]:
        """Chunks that a tier has with all their objects."""
        everything = {name: set(range(layout.columns)) for name, layout in LAYOUTS.items()}
        nodes = {key[:2] for key in self.published}
        warm = {n for n in nodes if self.columns(*n) == everything[n[0].layout]}
        cold = {n for n, copy in self.below.items() if copy.columns == everything[n[0].layout]}
        found: set[tuple[World, Path, Tier]] = {(*node, "host") for node in warm}
        return found | {(*node, "nvme") for node in cold}

    # ---- pins

    def pin(self, world: World, paths: list[Path]) -> None:
        """Hold chunks; the first hold of each is charged."""
        for path in paths:
            entry = self.pins.setdefault((world, path), [0, self.weight(world, path)])
            entry[0] += 1
            self.unwanted.discard((world, path))

    def unpin(self, world: World, paths: list[Path]) -> None:
        """Let chunks go."""
        for path in paths:
            entry = self.pins[world, path]
            entry[0] -= 1
            if not entry[0]:
                del self.pins[world, path]

    def drop(self, number: int) -> None:
        """A lease ends."""
        hold = self.holds.pop(number)
        self.unpin(hold.world, hold.paths)

    def pinned_bytes(self, tenant: Tenant) -> int:
        """Bytes a tenant is charged for what it holds."""
        return sum(charge for (world, _), (_, charge) in self.pins.items() if world[0] == tenant)

    def filling_bytes(self, tenant: Tenant) -> int:
        """Bytes a tenant is charged for what it fills, or may still be writing."""
        spots = [(f.key, f.spot) for f in self.filling.values()]
        spots += [item for move in self.moves if move.up for item in move.spots.items()]
        return sum(spot.size for key, spot in spots if key.world.tenant == tenant)

    # ---- slots

    def take(self, key: Key, spot: Spot) -> None:
        """A slot is given out: its bytes are nobody else's and its generation is new."""
        others = [*self.published.values(), *(f.spot for f in self.filling.values())]
        others += [other for move in self.moves for other in move.spots.values()]
        others += [other for _, other in self.damaged]
        assert key not in self.published, "a slot for what is there"
        assert not [other for other in others if other.overlaps(spot)], "a place in use"
        assert spot.generation > max([*self.ended, *self.filling, 0]), "a generation used before"
        assert spot.offset % PAGE == 0
        assert spot.offset + spot.size <= SLAB_BYTES

    def grant(self, owner: int, key: Key, spot: Spot, deadline: int) -> None:
        """Take in a reservation."""
        self.take(key, spot)
        self.filling[spot.generation] = Filling(owner, key, spot, deadline)

    def write(self, generation: int, *, right: bool) -> None:
        """The writer of a slot writes the object, or half of it."""
        filling = self.filling[generation]
        stamp = filling.key if right else ("half", generation)
        self.contents[filling.spot.slab, filling.spot.offset] = stamp

    def finish(self, generation: int) -> Filling:
        """A reservation is over, published or not."""
        self.ended.append(generation)
        return self.filling.pop(generation)

    def forget(self, left: set[Key], tenant: Tenant) -> None:
        """Take in what is left after making room for a tenant; whole unpinned chunks may go."""
        gone = self.published.keys() - left
        assert left <= self.published.keys(), "an object that nobody published"
        still = self.still()
        for node in {key[:2] for key in gone}:
            assert node[0].tenant == tenant, "another tenant's object"
            assert node not in still, "a chunk that is held, filled or moved"
            assert self.clean(*node) or not self.demoting, "a dirty chunk, and it could be saved"
        self.remove(gone)
        assert not {k[:2] for k in gone} & {k[:2] for k in self.published}, "half a chunk"
        for world, path, _ in gone:
            after = [p for p in self.warm(world) if p[: len(path)] == path]
            assert not after, "a chunk went before what depends on it"

    def remove(self, gone: set[Key]) -> None:
        """Objects leave their host slots."""
        self.lossy -= gone
        self.unwanted -= {key[:2] for key in gone}
        for key in gone:
            del self.published[key]

    def check(self, catalog: Catalog) -> None:
        """Bytes are what they must be, and the observer was told what the catalog has (H1)."""
        self.check_bytes()
        assert self.ear.told == self.whole(), "H1"
        spaces = catalog.spaces.values()
        tiers = [tiers_of(chunk) for space in spaces for chunk in space.chunks.values()]
        assert sum(map(len, tiers)) == len(self.ear.told), "H1"

    def check_bytes(self) -> None:
        """Every findable object, and every place a reader was told, holds exactly its stamp."""
        for key, spot in self.published.items():
            assert self.contents[spot.slab, spot.offset] == key
        for hold in self.holds.values():
            for key, spot in hold.told:
                assert self.contents[spot.slab, spot.offset] == key, "bytes changed under a reader"
        for move in self.moves:
            for key, spot in move.spots.items():
                assert move.up or self.contents[spot.slab, spot.offset] == key, "under a demotion"
