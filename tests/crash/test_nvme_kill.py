"""SIGKILL of a process that writes, with real files and LMDB: what it acknowledged is there.

Also damage on disk: bits flipped in regions and in the index. No read returns other bytes than were
written, and no process but the index's copier may be ended by a signal.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd import check as kvd_check
from kvd.errors import StartError
from kvd.tiers.disk import TierError
from kvd.tiers.nvme import NvmeStore
from kvd.tiers.region import BLOCK
from tests.nvme_kit import REGION_BYTES, SPACES, Key, bundle, config, held, version_of

if TYPE_CHECKING:
    from kvd.tiers.nvme import Ref

KILLS = int(os.environ.get("KVD_KILLS", "60"))
REGION_FLIPS = 9_800
INDEX_FLIPS = int(os.environ.get("KVD_INDEX_FLIPS", "200"))
ROOT = Path(__file__).resolve().parents[2]


def open_store(directory: Path, **options: object) -> NvmeStore:
    """Return a store of eight regions, not yet open."""
    options |= {"index_bytes": 16 << 20, "regions": 8}
    return NvmeStore(config(directory, **options), asyncio.get_running_loop())  # type: ignore[arg-type]


def smash(directory: Path, region: int, offset: int, content: bytes) -> None:
    """Write over part of a region file."""
    with (directory / "regions" / f"{region:08d}").open("r+b") as file:
        file.seek(offset)
        file.write(content)


async def scribble(directory: Path, seed: int) -> None:
    """Write, delete and reclaim until killed; say on stdout what begins and what is done."""
    chance = random.Random(seed)
    store = open_store(directory)
    known = held(store.open())
    version = 1 + max((place[1] for place in known.values()), default=0)
    say = sys.stdout.write
    say("ready\n")
    while True:
        sys.stdout.flush()
        version += 8
        chosen = [
            Key(chance.randrange(2), chance.randrange(12)) for _ in range(chance.choice([1, 4]))
        ]
        if chance.random() < 0.1:
            key = chosen[0]
            say(f"begin {key.space} {key.chunk} 0\n")
            sys.stdout.flush()
            await store.delete([(SPACES[key.space].key, key.chunk_hash, 0)])
            say(f"done {key.space} {key.chunk} 0\n")
            continue

        async def one(key: Key, number: int) -> None:
            say(f"begin {key.space} {key.chunk} {number}\n")
            sys.stdout.flush()
            await store.write(bundle(key, number))
            say(f"done {key.space} {key.chunk} {number}\n")

        try:
            async with asyncio.TaskGroup() as group:
                for number, key in enumerate(dict.fromkeys(chosen)):
                    group.create_task(one(key, version + number))
        except* TierError:
            victim = store.reclaim_candidates()[0]
            for item in await store.live_keys(victim.region):
                space = [s.key for s in SPACES].index(item.space_key)
                say(f"begin {space} {int.from_bytes(item.chunk[:4], 'big')} 0\n")
            sys.stdout.flush()
            await store.reclaim(victim.region)


def play(lines: list[str], may: dict[Key, set[int]]) -> None:
    """Learn from what a killed process said which versions each key may have; 0: none."""
    for line in lines:
        word, *numbers = line.split()
        if word == "ready" or len(numbers) != 3:
            continue
        key, version = Key(int(numbers[0]), int(numbers[1])), int(numbers[2])
        before = may.get(key, {0})
        may[key] = {version} if word == "done" else before | {version}


async def inspect(directory: Path, may: dict[Key, set[int]]) -> None:
    """Open what a killed process left; everything is as it said."""
    store = open_store(directory)
    opened = store.open()
    assert opened.report.how in {"copied", "fresh", "clean"}
    assert opened.report.dropped == 0
    found = held(opened)
    for key, (ref, version) in found.items():
        assert await version_of(store, key, ref, version) == version, "a named record is torn"
    for key, versions in may.items():
        version = found[key][1] if key in found else 0
        assert version in versions, f"{key}: {version}, not one of {versions}"
    for key in found:
        may[key] = {found[key][1]}
    store.extents.check()
    await store.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    """After SIGKILL at any time every acknowledged write is there, and every delete holds."""
    may: dict[Key, set[int]] = {}
    chance = random.Random(1)
    done = 0
    for number in range(KILLS):
        code = (
            "import asyncio, sys; from pathlib import Path;"
            "from tests.crash.test_nvme_kill import scribble;"
            f"asyncio.run(scribble(Path(sys.argv[1]), {number}))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        if chance.random() < 0.9:  # else while it starts
            lines += [process.stdout.readline() for _ in range(chance.randrange(60))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait(60) == -signal.SIGKILL
        process.stdout.close()
        if lines[-1:] and not lines[-1].endswith("\n"):
            lines.pop()
        play(lines, may)
        done += sum(line.startswith("done") for line in lines)
        asyncio.run(inspect(tmp_path, may))
    assert done > KILLS * 5, "the processes did not get to work"


# -------------------------------------------------------------------------------- damage


async def filled(directory: Path) -> dict[Key, tuple[Ref, int]]:
    """Make a store with some twenty bundles, stopped cleanly."""
    store = open_store(directory)
    store.open()
    refs = {}
    for number in range(20):
        key = Key(number % 2, number)
        refs[key] = (await store.write(bundle(key, number)), number)
    await store.close()
    return refs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flipped_bits_in_regions(tmp_path: Path) -> None:
    """While the store runs, a flipped bit anywhere in a record is a miss, or does not matter."""

    async def main() -> None:
        chance = random.Random(2)
        await filled(tmp_path)
        store = open_store(tmp_path, direct=False)
        places = list(held(store.open()).items())
        files = {
            region.id: os.open(tmp_path / "regions" / f"{region.id:08d}", os.O_RDWR)
            for region in store.extents.held()
        }
        missed = 0
        for _ in range(REGION_FLIPS):
            key, (ref, version) = chance.choice(places)
            at = ref.offset_bytes + chance.randrange(ref.length_bytes)
            file = files[ref.region]
            byte = os.pread(file, 1, at)
            os.pwrite(file, bytes([byte[0] ^ 1 << chance.randrange(8)]), at)
            missed += await version_of(store, key, ref, version) is None
            os.pwrite(file, byte, at)
        assert missed > REGION_FLIPS // 2  # the rest hit padding
        for key, (ref, version) in places:
            assert await version_of(store, key, ref, version) == version
        for file in files.values():
            os.close(file)
        await store.close()

    asyncio.run(main())


async def survive(directory: Path, wanted: dict[Key, tuple[Ref, int]]) -> tuple[str, int]:
    """Open a damaged store, read everything; return how it opened and how many could be read."""
    store = open_store(directory)
    opened = store.open()
    good = 0
    for key, (ref, version) in held(opened).items():
        if await version_of(store, key, ref, version) is not None:
            assert wanted[key][1] == version, "a bundle that was never written"
            good += 1
    await store.write(bundle(Key(0, 50), 1))
    store.extents.check()
    await store.close()
    return opened.report.how, good


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mark", ["clean", "killed"])
def test_flipped_bits_in_the_index(tmp_path: Path, mark: str) -> None:
    """Whatever is flipped in the index, the store opens, by copy or by scan; reads are right."""
    chance = random.Random(3)
    refs = asyncio.run(filled(tmp_path / "good"))
    if mark == "killed":
        (tmp_path / "good" / "clean").unlink()
    how: dict[str, int] = {}
    worst = 99
    for _ in range(INDEX_FLIPS // 2):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        path = tmp_path / "bad" / "index.mdb"
        broken = bytearray(path.read_bytes())
        for _ in range(chance.choice([1, 1, 1, 8])):
            at = chance.choice([chance.randrange(len(broken)), chance.randrange(2 * BLOCK)])
            at = at // BLOCK * BLOCK + chance.choice(
                [chance.randrange(BLOCK), chance.randrange(160)]
            )
            broken[min(at, len(broken) - 1)] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        opened, good = asyncio.run(survive(tmp_path / "bad", refs))
        how[opened] = how.get(opened, 0) + 1
        worst = min(worst, good)
    assert how.get("clean", 0) == 0, "a changed file passed for the one that was closed"
    assert how.get("copied", 0) > 0
    assert how.get("rebuilt", 0) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_index_is_rebuilt(tmp_path: Path) -> None:
    """Without an index every bundle is found again by scanning, also behind holes and garbage."""
    refs = asyncio.run(filled(tmp_path))
    chance = random.Random(4)
    victims = chance.sample(sorted(refs), 4)
    for key in victims:  # a record that is not one any more, in the middle of others
        garbage = chance.choice([bytes(BLOCK), os.urandom(BLOCK)])
        smash(tmp_path, refs[key][0].region, refs[key][0].offset_bytes, garbage)
    for index in ("missing", "noise"):
        path = tmp_path / "index.mdb"
        path.unlink() if index == "missing" else path.write_bytes(os.urandom(50_000))

        async def main() -> None:
            store = open_store(tmp_path)
            opened = store.open()
            assert opened.report.how == "rebuilt"
            assert opened.spaces.keys() == {space.key for space in SPACES}
            assert set(opened.spaces.values()) == set(SPACES)
            found = held(opened)
            assert found == {key: refs[key] for key in refs if key not in victims}
            for key, (ref, version) in found.items():
                assert await version_of(store, key, ref, version) == version
            await store.close()

        asyncio.run(main())


def test_a_rebuild_prefers_the_youngest_whole_record(tmp_path: Path) -> None:
    """Of two records of a key the younger counts, unless it is torn (R5)."""

    async def main() -> None:
        store = open_store(tmp_path)
        store.open()
        keys = [Key(0, 1), Key(0, 2)]
        first = {key: await store.write(bundle(key, 1)) for key in keys}
        second = {key: await store.write(bundle(key, 2)) for key in keys}
        await store.close()
        torn = second[keys[1]]
        smash(tmp_path, torn.region, torn.offset_bytes + BLOCK + 5, b"\xff" * 64)
        (tmp_path / "index.mdb").unlink()
        store = open_store(tmp_path)
        found = held(store.open())
        assert found == {keys[0]: (second[keys[0]], 2), keys[1]: (first[keys[1]], 1)}
        await store.write(bundle(keys[1], 3))
        assert store._life > second[keys[0]].generation >> 32
        await store.close()

    asyncio.run(main())


def test_a_region_with_a_bad_header_keeps_its_bundles(tmp_path: Path) -> None:
    """The index knows where they are, and each record proves itself; nothing is appended there."""
    refs = asyncio.run(filled(tmp_path))
    region = next(iter(refs.values()))[0].region
    smash(tmp_path, region, 0, bytes(64))
    (tmp_path / "regions" / "00000007").write_bytes(bytes(REGION_BYTES // 2))

    async def main() -> None:
        store = open_store(tmp_path)
        opened = store.open()
        assert opened.report.regions_bad == 2
        found = held(opened)
        assert found == refs
        for key, (ref, version) in found.items():
            assert await version_of(store, key, ref, version) == version
        for number in range(3):
            assert (await store.write(bundle(Key(0, 30 + number), 1))).region != region
        await store.close()

    asyncio.run(main())


def test_check_finds_and_mends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvd check` sees every damaged bundle, changes nothing by itself, and mends when told to."""
    import argparse

    refs = asyncio.run(filled(tmp_path))
    parser = argparse.ArgumentParser()
    kvd_check.add_arguments(parser)
    assert kvd_check.run(parser.parse_args([str(tmp_path)])) == 0
    assert "whole" in capsys.readouterr().out
    finding = kvd_check.check(tmp_path)
    assert (finding.entries, finding.entries_bad, finding.unnamed) == (20, 0, 0)
    assert finding.clean
    key = next(iter(refs))
    ref = refs[key][0]
    smash(tmp_path, ref.region, ref.offset_bytes + ref.length_bytes - BLOCK, b"\xff\x00" * 10)
    assert kvd_check.run(parser.parse_args([str(tmp_path), "--json"])) == 1
    assert kvd_check.check(tmp_path).entries_bad == 1
    assert kvd_check.run(parser.parse_args([str(tmp_path), "--repair"])) == 0
    finding = kvd_check.check(tmp_path)
    assert finding.good
    assert finding.entries == 19
    path = tmp_path / "index.mdb"
    path.write_bytes(path.read_bytes()[: 3 * BLOCK] + os.urandom(BLOCK) + bytes(BLOCK))
    assert kvd_check.check(tmp_path).index == "damaged"
    finding = kvd_check.check(tmp_path, repair=True)
    assert "rebuilt" in finding.repaired
    assert kvd_check.check(tmp_path).good
    with pytest.raises(StartError, match="no NVMe store"):
        kvd_check.check(tmp_path / "other")
