"""Small stores and bundles for the tests of the NVMe tier."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from kvd.entry import PLACE
from kvd.tiers.nvme import Bundle, Corrupt, NvmeConfig, NvmeStore, Part, Ref, Space
from tests.simdisk import LazyExecutor, SimDisk, SimPlace

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from kvd.tiers.nvme import Opened

REGION_BYTES = 64 << 10
SPACES = (
    Space("alice", b"n" * 32, b"l" * 32, "model@1", b"fields"),
    Space("bob", b"n" * 32, b"l" * 32, "model@1", b"fields"),
)


class Key(NamedTuple):
    """Which bundle: a space of SPACES and a chunk's number."""

    space: int
    chunk: int

    @property
    def chunk_hash(self) -> bytes:
        """The chunk's hash."""
        return self.chunk.to_bytes(4, "big") * 8

    @property
    def parent(self) -> bytes:
        """Its parent's."""
        return (self.chunk - 1).to_bytes(4, "big") * 8 if self.chunk else b"n" * 32


def content(key: Key, version: int, column: int) -> bytes:
    """Return the bytes of one object: one to three blocks, different for every argument."""
    seed = random.Random(repr((key, version, column)))
    return seed.randbytes(seed.choice([100, 4096, 5000, 8192]))


def bundle(key: Key, version: int, columns: int = 2) -> Bundle:
    """Return a bundle whose hint is its version; the last object is of another form."""
    parts = []
    for column in range(columns):
        stored = content(key, version, column)
        form = 0 if column < columns - 1 else 3
        parts.append(Part(column, form, len(stored) * (1 if form == 0 else 2), stored))
    return Bundle(SPACES[key.space], key.chunk_hash, key.parent, parts, version)


def config(directory: Path, *, regions: int = 5, **options: object) -> NvmeConfig:
    """Return the configuration of a small store."""
    options.setdefault("region_bytes", REGION_BYTES)
    return NvmeConfig(directory, regions * REGION_BYTES, **options)  # type: ignore[arg-type]


def sim_store(
    disk: SimDisk, directory: Path, loop: asyncio.AbstractEventLoop, seed: int
) -> NvmeStore:
    """Return a store on a simulated disk that does the same again for the same seed."""
    chance = random.Random(seed)
    pools = (LazyExecutor(loop, chance), LazyExecutor(loop, chance))
    place = SimPlace(disk, directory)
    return NvmeStore(config(directory), loop, disk=disk, place=place, pools=pools)


def held(opened: Opened) -> dict[Key, tuple[Ref, int]]:
    """Return what a start found, by key: where, and which version."""
    spaces = {space.key: number for number, space in enumerate(SPACES)}
    assert set(opened.spaces) <= set(spaces)
    found = {}
    for space_key, rows in opened.entries:
        newest = 0
        for chunk, parent, _, place, length, hint in rows:
            key = Key(spaces[space_key], int.from_bytes(chunk[:4], "big"))
            assert (key.chunk_hash, key.parent) == (chunk, parent)
            region, offset, generation = PLACE.unpack(place)
            assert key not in found
            assert generation > newest, "the oldest comes first"
            newest = generation
            found[key] = (Ref(region, offset, length, generation), hint)
    return found


async def version_of(store: NvmeStore, key: Key, ref: Ref, version: int) -> int | None:
    """Read a bundle; return its version, None if the store refuses it. Wrong bytes fail."""
    into: dict[int, bytearray | None] = {0: None, 1: None}
    try:
        loaded = await store.read(ref, SPACES[key.space], key.chunk_hash, key.parent, into)
    except Corrupt:
        return None
    for column, item in loaded.items():
        assert bytes(item.stored) == content(key, version, column), "a wrong hit"
        assert item.form == (0 if column == 0 else 3)
    return version
