"""A cold tier over a store and memory of the test's own: what moves, the test has asked for."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack

from kvd.catalog import Catalog
from kvd.cold import ColdTier
from kvd.config_nvme import NvmeKnobs
from kvd.entry import PLACE
from kvd.metrics import Counters
from kvd.quota import Quota, Resource
from kvd.tiers.buffers import Buffers
from kvd.tiers.disk import Corrupt
from kvd.tiers.nvme_types import LiveKey, NvmeConfig, Opened, Victim
from kvd.tiers.recover import Report
from kvd.tiers.region import FORM_RAW, Bundle, Part, Ref
from kvd.tiers.region import Space as StoredSpace
from kvd.tiers.slab import SlabPool
from kvd.tiers.threads import Inflight, Workers
from kvd.tiers.transfer import Loaded
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd.verifier import Verifier
from kvd_client.identity import Group, Layout
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence

    from kvd.entry import Chunk, Space
    from kvd.tiers.disk import TierError
    from kvd.tiers.host import HostTier
    from kvd.tiers.nvme import NvmeStore
    from kvd.tiers.nvme_types import Entry

    Scene = Callable[["World"], Coroutine[Any, Any, None]]

PAGE: Final = 4096
PLACES: Final = 8
TENANT: Final = Tenant("a")
ME: Final = OwnerId(1)
ROOT: Final = b"n" * 32
PLAIN: Final = Layout(4, 4, "float16", (Group("full", 1, 1, 8, PAGE),))
TWO_RANKS: Final = PLAIN._replace(tp=2)


def chain(name: str, length: int) -> list[bytes]:
    """Make the hashes of a chain."""
    return [blake2b(f"{name}/{at}".encode(), digest_size=32).digest() for at in range(length)]


def stamp(key: bytes, column: int, size_bytes: int) -> bytes:
    """Return the bytes of an object."""
    seed = blake2b(key + bytes([column]), digest_size=32).digest()
    return (seed * (size_bytes // 32 + 1))[:size_bytes]


async def until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - a test
            await asyncio.sleep(0.001)


async def turns(count: int = 20) -> None:
    """Let the loop run a little."""
    for _ in range(count):
        await asyncio.sleep(0)


class Memory:
    """Stands for the host tier."""

    def __init__(self, slabs: int) -> None:
        """Make the slabs."""
        self.slabs = [bytearray(PLACES * PAGE) for _ in range(slabs)]

    def view(self, slab: int, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return part of a slab."""
        return memoryview(self.slabs[slab])[offset_bytes : offset_bytes + size_bytes]


class FakeStore:
    """Stands for the NVMe store: a dictionary, with gates and faults.

    Bytes are taken and given at the end of a call, when its gate is open: a slot that was freed
    meanwhile shows.
    """

    def __init__(self) -> None:
        """Start empty and willing."""
        self.config = NvmeConfig(Path("nowhere"), 64 << 20, 4 << 20)
        self.reading, self.writing, self.buffers = Inflight(), Inflight(), Buffers()
        self.workers: dict[str, Workers] = {}
        self.state = "open"
        self.writable = True
        self.free_regions = 9
        self.region = 0
        self.index: dict[tuple[bytes, bytes], Ref] = {}
        self.records: dict[int, Bundle] = {}
        self.spaces: dict[bytes, StoredSpace] = {}
        self.read_gate, self.write_gate, self.reclaim_gate = (asyncio.Event() for _ in range(3))
        for gate in (self.read_gate, self.write_gate, self.reclaim_gate):
            gate.set()
        self.read_fault: TierError | None = None
        self.write_fault: TierError | None = None
        self.delete_fault: TierError | None = None
        self.reads = self.writes = self.closed = 0
        self.written: list[bytes] = []
        self.deleted: list[tuple[bytes, bytes, int]] = []

    def open(self) -> Opened:
        """Return what is in the index."""
        found: dict[bytes, list[Entry]] = {}
        for (space, key), ref in sorted(self.index.items(), key=lambda item: item[1].generation):
            record = self.records[ref.generation]
            mask = sum(1 << part.column for part in record.parts).to_bytes(32, "little")
            place = PLACE.pack(ref.region, ref.offset_bytes, ref.generation)
            row = (key, record.parent, mask, place, ref.length_bytes, record.hint)
            found.setdefault(space, []).append(row)
        rows = ((space, iter(part)) for space, part in found.items())
        return Opened(dict(self.spaces), rows, Report())

    async def write(self, bundle: Bundle, *, rewrite: bool = False) -> Ref:
        """Keep a bundle, once the gate is open."""
        assert rewrite in {True, False}
        self.writes += 1
        await self.write_gate.wait()
        if self.write_fault is not None:
            raise self.write_fault
        if sum(part.raw_bytes for part in bundle.parts) > self.config.region_bytes:
            raise ValueError("larger than a region")
        parts = [Part(p.column, p.form, p.raw_bytes, bytes(p.stored)) for p in bundle.parts]
        return self.put(bundle._replace(parts=parts))

    def put(self, bundle: Bundle) -> Ref:
        """Keep a bundle."""
        generation = len(self.records) + 1
        self.records[generation] = bundle
        ref = Ref(self.region, generation * PAGE, len(bundle.parts) * PAGE, generation)
        self.index[bundle.space.key, bundle.chunk] = ref
        self.spaces[bundle.space.key] = bundle.space
        self.written.append(bundle.chunk)
        return ref

    async def read(
        self,
        ref: Ref,
        space: StoredSpace,
        chunk: bytes,
        parent: bytes,
        into: Mapping[int, memoryview | None],
    ) -> dict[int, Loaded]:
        """Give a bundle's objects, once the gate is open."""
        self.reads += 1
        await self.read_gate.wait()
        if self.read_fault is not None:
            raise self.read_fault
        bundle = self.records[ref.generation]
        assert (bundle.space.key, bundle.chunk, bundle.parent) == (space.key, chunk, parent)
        parts = {part.column: part for part in bundle.parts}
        if not into.keys() <= parts.keys():
            raise Corrupt("lacks a column")
        loaded = {}
        for column, buffer in into.items():
            part = parts[column]
            view = memoryview(bytes(part.stored))
            if buffer is not None and part.form == FORM_RAW:
                buffer[: part.raw_bytes] = view
                view = buffer
            loaded[column] = Loaded(part.form, part.raw_bytes, view)
        return loaded

    async def delete(self, keys: Iterable[tuple[bytes, bytes, int]]) -> int:
        """Delete keys of a generation."""
        await asyncio.sleep(0)
        if self.delete_fault is not None:
            raise self.delete_fault
        count = 0
        for space, chunk, generation in keys:
            self.deleted.append((space, chunk, generation))
            found = self.index.get((space, chunk))
            if found is not None and generation in {0, found.generation}:
                del self.index[space, chunk]
                count += 1
        return count

    def reclaim_candidates(self) -> list[Victim]:
        """Name the regions in use."""
        regions = sorted({ref.region for ref in self.index.values()} - {self.region})
        return [Victim(region, 0, 0, 0) for region in regions]

    async def live_keys(self, region: int) -> list[LiveKey]:
        """Name what is in a region, once the gate is open."""
        await self.reclaim_gate.wait()
        return [LiveKey(*key, ref) for key, ref in self.index.items() if ref.region == region]

    async def reclaim(self, region: int) -> list[LiveKey]:
        """Forget what is in a region, once the gate is open."""
        gone = await self.live_keys(region)
        for key in gone:
            del self.index[key.space_key, key.chunk]
        self.free_regions += 1
        return gone

    def tick(self) -> None:
        """Let time pass."""

    async def close(self) -> None:
        """Count."""
        self.closed += 1


class World:
    """A catalog of one tenant with a cold tier."""

    def __init__(
        self, slabs: int = 2, store: FakeStore | None = None, verify: int = 0, **knobs: Any
    ) -> None:
        """Make it over a store that may hold something already; verify one of so many objects."""
        pool = SlabPool(PLACES * PAGE, {TENANT: slabs})
        for slab in range(slabs):
            pool.add_blank(SlabId(slab))
        self.pinned_max = 1 << 40
        limits = dict.fromkeys(Resource, 1 << 40)
        self.catalog = Catalog(pool, Quota({TENANT: limits}), Counters())
        self.limits = limits
        self.memory = Memory(slabs)
        self.store = store or FakeStore()
        fields: dict[str, Any] = {
            "size_bytes": 64 << 20,
            "directory": "nowhere",
            "form": "raw",
        } | knobs
        host, below = cast("HostTier", self.memory), cast("NvmeStore", self.store)
        loop = asyncio.get_running_loop() if verify else None
        self.verifier = Verifier(self.catalog, host, verify, loop) if loop is not None else None
        sure = self.verifier.sure if self.verifier is not None else None
        self.cold = ColdTier(self.catalog, host, below, NvmeKnobs(**fields), sure=sure)
        self.cold.open()
        self.broken: list[bytes] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the mover; the world is checked at the end."""
        async with asyncio.TaskGroup() as group:
            mover = group.create_task(self.cold.run(group))
            await turns(2)
            yield
            mover.cancel()
        self.catalog.check()
        await self.cold.close()
        if self.verifier is not None:
            self.verifier.close()

    def enter(self, layout: Layout = PLAIN, *, lossy: bool = False) -> Space:
        """Begin a session."""
        return self.catalog.enter(TENANT, ROOT, "label", layout, lossy=lossy)

    def put(self, space: Space, hashes: Sequence[bytes], rank: int = 0, first: int = 0) -> int:
        """Store a rank's objects of a chain with their stamps; return how many got in."""
        records = self.catalog.reserve(
            space,
            ME,
            rank,
            parent=hashes[first - 1] if first else ROOT,
            hashes=hashes[first:],
            groups=1,
            deadline_ns=10,
        )
        granted = [record for record in records if record[2] == Status.OK]
        for index, _, _, slab, offset, size, generation in reversed(granted):
            view = self.memory.view(slab, offset, size)
            view[:] = stamp(hashes[first + index], rank, size)
            assert self.catalog.publish(ME, Generation(generation), 0) is Status.OK
        self.catalog.check()
        return len(granted)

    def put_cold(
        self,
        hashes: Sequence[bytes],
        layout: Layout = PLAIN,
        *,
        hint: int = 0,
    ) -> list[Ref]:
        """Put a chain into the store itself, as an earlier daemon did; for the next world."""
        fields = msgpack.packb(layout.fields(), use_bin_type=True)
        space = StoredSpace(TENANT, ROOT, layout.id, "label", fields)
        refs, parent = [], ROOT
        for key in hashes:
            parts = [Part(c, FORM_RAW, PAGE, stamp(key, c, PAGE)) for c in range(layout.columns)]
            refs.append(self.store.put(Bundle(space, key, parent, parts, hint)))
            parent = key
        return refs

    def right(self, chunk: Chunk) -> bool:
        """Tell whether every published object of a chunk has its bytes."""
        return all(
            self.memory.view(slot.slab, slot.offset_bytes, slot.size_bytes)
            == stamp(chunk.hash, column, slot.size_bytes)
            for column, slot in chunk.slots.items()
            if chunk.mask >> column & 1
        )

    @property
    def dirty_bytes(self) -> int:
        """Bytes that are the only copy."""
        return self.catalog.eviction.dirty_bytes[TENANT]

    @property
    def filling_bytes(self) -> int:
        """Bytes of slots that are being filled."""
        return self.catalog.quota.used(TENANT, Resource.FILLING_BYTES)


NAMES: Final = chain("a", 4)


def play(scene: Scene, **options: Any) -> None:
    """Run a scene in a world with a mover."""

    async def main() -> None:
        world = World(**options)
        async with world.running():
            await scene(world)

    asyncio.run(main())


def play_again(scene: Scene, hashes: list[bytes] = NAMES, hint: int = 0, **options: Any) -> None:
    """Run a scene in a world that finds a chain in its store."""

    async def main() -> None:
        before = World()
        before.put_cold(hashes, options.pop("layout", PLAIN), hint=hint)
        world = World(store=before.store, **options)
        async with world.running():
            await scene(world)

    asyncio.run(main())


class Waiter:
    """Waits for a promotion, with the pin that this takes."""

    def __init__(self, world: World, chunk: Chunk) -> None:
        self.world, self.chunk = world, chunk
        self.heard: list[bool] = []
        world.catalog.pin([chunk])
        self.begun = world.cold.promote(chunk, self.hear)

    def hear(self, read: bool) -> None:  # noqa: FBT001 - as the tier calls it
        self.heard.append(read)

    def leave(self) -> None:
        """Stop waiting."""
        self.world.cold.leave(self.chunk, self.hear)
        self.world.catalog.unpin([self.chunk])


def only_space(world: World) -> Space:
    """Return the one space there is."""
    (space,) = world.catalog.spaces.values()
    return space


def chunks_of(world: World, hashes: list[bytes] = NAMES) -> list[Chunk]:
    """Return a chain's chunks."""
    space = only_space(world)
    return [space.chunks[key] for key in hashes]
