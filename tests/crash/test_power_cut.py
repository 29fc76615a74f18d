"""Power cuts: whatever was acknowledged is there, whatever is there is whole.

The store runs on a simulated disk (tests/simdisk.py). LMDB does its own I/O and is not behind the
seam: its stand-in promises what LMDB does, durable commits. That LMDB keeps that promise when the
process is killed is tested in test_nvme_kill.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd.tiers.disk import TierError
from kvd.tiers.extents import RegionState
from tests.nvme_kit import SPACES, Key, bundle, held, sim_store, version_of
from tests.simdisk import PowerCut, SimDisk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from kvd.tiers.nvme import NvmeStore, Ref

DIRECTORY = Path("/disk/store")
CUTS = int(os.environ.get("KVD_POWER_CUTS", "600"))
"""Random cuts a run."""
KEYS = [Key(space, chunk) for space in range(2) for chunk in range(8)]
SYNCS = {
    "fdatasync a region",
    "fdatasync store.new",
    "fsync_dir in prepare_region",
    "fsync_dir in _swap",
    "fsync_dir in identify",
}
"""Every sync of the store; test_every_sync_is_needed leaves out one at a time."""


class History:
    """What may be read of each key: the last acknowledged outcome, or any begun since."""

    def __init__(self) -> None:
        self.may: dict[Key, set[int | None]] = defaultdict(lambda: {None})
        self.refs: dict[Key, Ref] = {}
        self.version = 0

    async def write(self, store: NvmeStore, key: Key, *, rewrite: bool = False) -> None:
        """Write the next version of a key."""
        self.version += 1
        version = self.version
        self.may[key] = self.may[key] | {version}
        try:
            ref = await store.write(bundle(key, version), rewrite=rewrite)
        except TierError:
            return
        self.may[key] = {version}
        self.refs[key] = ref

    async def delete(self, store: NvmeStore, key: Key) -> None:
        """Delete a key."""
        self.may[key] = self.may[key] | {None}
        await store.delete([(SPACES[key.space].key, key.chunk_hash, 0)])
        self.may[key] = {None}
        self.refs.pop(key, None)

    async def reclaim(self, store: NvmeStore, *, save: bool) -> None:
        """Reclaim the cheapest region, perhaps rewriting what lives there."""
        for victim in store.reclaim_candidates()[:1]:
            keys = {(SPACES[k.space].key, k.chunk_hash): k for k in KEYS}
            live = [keys[key.space_key, key.chunk] for key in await store.live_keys(victim.region)]
            if save:
                for key in live[:2]:
                    await self.write(store, key, rewrite=True)
            for key in live:
                self.may[key] = self.may[key] | {None}
            gone = await store.reclaim(victim.region)
            for key in (keys[item.space_key, item.chunk] for item in gone):
                self.may[key] = {None}
                self.refs.pop(key, None)


async def work(disk: SimDisk, history: History, seed: int, steps: int = 25) -> None:
    """Do things by chance until the power goes."""
    chance = random.Random(seed)
    loop = asyncio.get_running_loop()
    store = sim_store(disk, DIRECTORY, loop, seed)
    store.open()
    for _ in range(steps):
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                await history.write(store, chance.choice(KEYS))
            case 4 | 5:
                chosen = chance.sample(KEYS, 4)
                results = await asyncio.gather(
                    *(history.write(store, key) for key in chosen), return_exceptions=True
                )
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
            case 6:
                await history.delete(store, chance.choice(KEYS))
            case 7 | 8:
                await history.reclaim(store, save=chance.random() < 0.5)
            case _:
                await store.close()
                store = sim_store(disk, DIRECTORY, loop, seed + 1)
                store.open()
        store.extents.check()
    await store.close()


async def look(disk: SimDisk, history: History, seed: int) -> dict[Key, int]:
    """Start on what a cut left; check everything that is there, and that nothing is missing."""
    store = sim_store(disk, DIRECTORY, asyncio.get_running_loop(), seed)
    opened = store.open()
    assert opened.report.dropped == 0, "the index named what was not there"
    assert opened.report.how != "rebuilt" or not history.refs
    found = {}
    for key, (ref, version) in held(opened).items():
        seen = await version_of(store, key, ref, version)
        assert seen is not None, "the index named a torn record"
        found[key] = seen
    store.extents.check()
    for key in KEYS:
        assert found.get(key) in history.may[key], "an acknowledged change is lost"
    await store.close()
    return found


def run_once(seed: int, ignore: str = "") -> SimDisk:
    """Work, cut, start; cut the start, start again, and once more: always the same."""
    chance = random.Random(seed)
    disk = SimDisk(cut_after=int(chance.triangular(0, 260, 20)), ignore=ignore)
    disk.make_dir(DIRECTORY.parent)
    history = History()
    try:
        asyncio.run(work(disk, history, seed))
    except PowerCut:
        pass
    else:
        disk.dead = True
    labels = disk.labels
    disk = disk.after_cut(chance.randrange)
    disk.cut_after = chance.randrange(14)
    try:
        asyncio.run(look(disk, history, seed))
    except PowerCut:
        labels |= disk.labels
        disk = disk.after_cut(chance.randrange)
    disk.cut_after = 1 << 60
    first = asyncio.run(look(disk, history, seed))
    disk = disk.after_cut(chance.randrange)
    assert asyncio.run(look(disk, history, seed)) == first, "a second start found something else"
    disk.labels |= labels
    return disk


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_cuts() -> None:
    """After any cut every acknowledged bundle is readable, and nothing else than what was begun."""
    labels: set[str] = set()
    for seed in range(CUTS):
        try:
            labels |= run_once(seed).labels
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert labels == SYNCS, "a sync that no test leaves out, or one that is gone"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sync", sorted(SYNCS))
def test_every_sync_is_needed(sync: str) -> None:
    """A test of the test: without any one of the syncs, cuts do harm, and are seen to."""
    for seed in range(600):
        try:
            run_once(seed, ignore=sync)
        except Exception:  # noqa: BLE001 - whichever check sees it first; none does with all syncs
            return
    pytest.fail("nothing was lost without this sync: it is not needed, or the test is blind")


# -------------------------------------------------------------------------------- exhaustive


def outcomes(disk: SimDisk) -> Iterator[SimDisk]:
    """Yield every state that a cut may leave, by whole blocks and names.

    Writes may arrive in any order, so each block is as it was, or as any of the writes since made
    it; each pending name has changed or not; each pending length too.
    """
    taken: list[int] = []
    counts: list[int] = []

    def choose(count: int) -> int:
        """Follow `taken` as far as it goes, then take the first of each."""
        if len(counts) == len(taken):
            taken.append(0)
        counts.append(count)
        return taken[len(counts) - 1]

    while True:
        counts.clear()
        yield disk.after_cut(choose)
        while taken and taken[-1] + 1 >= counts[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1


async def prepared(disk: SimDisk, history: History) -> NvmeStore:
    """Fill a store until its next write of one block opens a region that was used before."""
    store = sim_store(disk, DIRECTORY, asyncio.get_running_loop(), 0)
    store.open()
    for key in KEYS[:8]:
        await history.write(store, key)
    return store


async def one_write(store: NvmeStore, history: History) -> None:
    """Replace a bundle."""
    await history.write(store, KEYS[0])


async def one_reclaim(store: NvmeStore, history: History) -> None:
    """Reclaim a region, saving two of its bundles, and write into its next use."""
    await history.reclaim(store, save=True)
    for region in store.extents.regions.values():
        if region.state is RegionState.BLANK:
            region.state = RegionState.DRAINING  # so that the next one is the reclaimed one
            region.users = 1
    store.extents.spare = 0
    store.extents.seal(store.extents.current[False])
    await history.write(store, KEYS[9])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("act", [one_write, one_reclaim])
def test_every_reordering(
    act: Callable[[NvmeStore, History], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of a write and of a reclaim, every order of what is pending leaves it good."""
    monkeypatch.setattr("tests.simdisk.SECTOR", 4096)
    tried = steps = 0
    for cut in itertools.count():
        disk, history = SimDisk(), History()
        disk.make_dir(DIRECTORY.parent)

        async def scene(disk: SimDisk = disk, history: History = history, cut: int = cut) -> bool:
            store = await prepared(disk, history)
            disk.cut_after = disk.operations + cut
            try:
                await act(store, history)
            except PowerCut:
                return True
            return False

        if not asyncio.run(scene()):
            break
        steps += 1
        for state in outcomes(disk):
            tried += 1
            asyncio.run(look(state, history, 0))
    assert steps >= 4
    assert tried > 100, tried
