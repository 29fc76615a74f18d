"""A naive model of catalog, leases and slots: dicts, lists and no cleverness.

It knows chunks by their path in a tree, objects by (session's world, path, column), and the bytes
of every place by the stamp that was last written there. It does not decide what is evicted: it is
told what is left and says whether that may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.types import Tenant
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from kvd.catalog import Catalog
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
    """Every chunk that may be evicted is a candidate with its present tick (P1)."""
    for space in catalog.spaces.values():
        orders = catalog.eviction._of(space)
        heaps = [*orders.clean._heap, *orders.dirty._heap]
        entries = {(tick, chunk.hash) for tick, _, chunk in heaps}
        for chunk in space.chunks.values():
            assert not chunk.evictable or (chunk.tick, chunk.hash) in entries, "V1"


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
class Model:
    """All of it."""

    published: dict[Key, Spot] = field(default_factory=dict)
    filling: dict[int, Filling] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)
    pins: dict[tuple[World, Path], list[int]] = field(default_factory=dict)
    """Chunk to (count, bytes charged at the first)."""
    contents: dict[tuple[int, int], object] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    """Generations that are over: stale for everyone."""

    # ---- the tree

    def size(self, world: World, path: Path) -> int:
        """Bytes published of a chunk."""
        return sum(s.size for k, s in self.published.items() if k[:2] == (world, path))

    def nodes(self, world: World) -> set[Path]:
        """Paths that must be in the tree: what has objects, writers or pins, and all above."""
        alive = {key.path for key in self.published if key.world == world}
        alive |= {
            f.key.path for f in self.filling.values() if f.key.world == world and not f.quarantined
        }
        alive |= {path for held, path in self.pins if held == world}
        return {path[:depth] for path in alive for depth in range(1, len(path) + 1)}

    def legal(self, world: World, path: Path) -> bool:
        """Tell whether all of a path may be read, from the words of the design."""
        has = self.published.keys()
        for depth in range(len(path)):
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
                self.size(world, path[: depth + 1])
                for depth in range(first, length)
                if (world, path[: depth + 1]) not in self.pins
            )
            if self.legal(world, path[:length]) and cost <= left:
                best = length
        return best

    # ---- pins

    def pin(self, world: World, paths: list[Path]) -> None:
        """Hold chunks; the first hold of each is charged."""
        for path in paths:
            entry = self.pins.setdefault((world, path), [0, self.size(world, path)])
            entry[0] += 1

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
        return sum(f.spot.size for f in self.filling.values() if f.key.world.tenant == tenant)

    # ---- slots

    def grant(self, owner: int, key: Key, spot: Spot, deadline: int) -> None:
        """Take in a reservation: its bytes are nobody else's and its generation is new."""
        others = [*self.published.values(), *(f.spot for f in self.filling.values())]
        assert key not in self.published, "a slot for what is there"
        assert not [other for other in others if other.overlaps(spot)], "a place in use"
        assert spot.generation > max([*self.ended, *self.filling, 0]), "a generation used before"
        assert spot.offset % PAGE == 0
        assert spot.offset + spot.size <= SLAB_BYTES
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
        filled = {(f.key.world, f.key.path) for f in self.filling.values() if not f.quarantined}
        for key in gone:
            assert key.world.tenant == tenant, "another tenant's object"
            assert (key.world, key.path) not in self.pins, "a pinned chunk"
            assert (key.world, key.path) not in filled, "a chunk that is being filled"
            del self.published[key]
        assert not {k[:2] for k in gone} & {k[:2] for k in self.published}, "half a chunk"
        for world, path, _ in gone:
            below = [p for p in self.nodes(world) if p[: len(path)] == path]
            assert not below, "a chunk went before what depends on it"

    def check_bytes(self) -> None:
        """Every findable object, and every place a reader was told, holds exactly its stamp."""
        for key, spot in self.published.items():
            assert self.contents[spot.slab, spot.offset] == key
        for hold in self.holds.values():
            for key, spot in hold.told:
                assert self.contents[spot.slab, spot.offset] == key, "bytes changed under a reader"
