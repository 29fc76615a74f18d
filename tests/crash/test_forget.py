"""Power cuts on a file system that forgets: the real store and LMDB keep what they acknowledged.

test_power_cut.py has a simulated disk and a stand-in for LMDB, and thousands of cuts; here all is
real but the file system (tests/forgetfs.py), which loses whatever was not synced. A child process
works on the store and says what begins and what is done; the power goes at some change or sync of
its files. Then the file system is mounted anew, and other processes start the store on what is
left, some of them cut short as well.

Needs /dev/fuse, fuse3 and mfusepy; skipped without.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd import statpage
from kvd.errors import StartError
from kvd.tiers.disk import NoSpace, TierError
from kvd.tiers.nvme import NvmeStore
from kvd_client.paths import stat_page_name
from tests.crash.test_nvme_kill import play
from tests.daemon_fixture import join, load, store, tokens
from tests.forget_kit import CannotMountError, Jobs, Mount, say, serve_jobs
from tests.forgetfs import NEVER
from tests.nvme_kit import SPACES, Key, bundle, config, held, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import kvd_client
    from bench._daemon import DaemonProcess

    MakeDaemon = Callable[..., DaemonProcess]

CUTS = int(os.environ.get("KVD_FORGET_CUTS", "40"))
"""Rounds of work, each ended by a cut; those of starts come on top."""
MUTANT_CUTS = 300
CONFIG = """
[nvme]
slow_s = 30
bytes = "64MiB"
region_bytes = "1MiB"
form = "raw"
directory = "{directory}"
"""
ROUNDS = 6
"""Cuts of one store, before the next begins in an empty directory."""
MUTANTS = [
    "/",  # the store's directory, synced by `identify`
    "/store/",  # the small files and the index, by `_swap`
    "/store/regions/",  # by `prepare_region`
    "/store/store.new",
    "/store/index.new",  # LMDB, by the copier
    "/store/index.mdb",  # LMDB
    "/store/regions/0*",
]
"""Whose syncs test_without_a_sync_the_loss_is_seen leaves out, one at a time."""
SEEN = "is lost|torn record|was not there|something else|damaged file|no file `store`"
"""What it then hears."""
KEYS = [Key(space, chunk) for space in range(2) for chunk in range(8)]


# -------------------------------------------------------------------------------- in the children


def open_store(directory: Path) -> NvmeStore:
    """Return a store of five small regions, not yet open."""
    return NvmeStore(config(directory, index_bytes=16 << 20), asyncio.get_running_loop())


@dataclass
class Worker:
    """Works on a store by chance; says what begins and what is done."""

    store: NvmeStore
    version: int

    async def write(self, key: Key, *, rewrite: bool = False) -> None:
        """Write the next version of a key."""
        self.version += 1
        version = self.version
        say("begin", *key, version)
        try:
            await self.store.write(bundle(key, version), rewrite=rewrite)
        except NoSpace:
            return
        say("done", *key, version)

    async def delete(self, key: Key) -> None:
        """Delete a key."""
        say("begin", *key, 0)
        await self.store.delete([(SPACES[key.space].key, key.chunk_hash, 0)])
        say("done", *key, 0)

    async def reclaim(self, *, save: bool) -> None:
        """Reclaim the cheapest region, perhaps rewriting what lives there."""
        keys = {(SPACES[key.space].key, key.chunk_hash): key for key in KEYS}
        for victim in self.store.reclaim_candidates()[:1]:
            live = [keys[i.space_key, i.chunk] for i in await self.store.live_keys(victim.region)]
            for key in live[:2] if save else []:
                await self.write(key, rewrite=True)
            for key in live:
                say("begin", *key, 0)
            for item in await self.store.reclaim(victim.region):
                say("done", *keys[item.space_key, item.chunk], 0)

    async def step(self, chance: random.Random) -> None:
        """Do one thing."""
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                await self.write(chance.choice(KEYS))
            case 4 | 5:
                async with asyncio.TaskGroup() as group:
                    for key in chance.sample(KEYS, 4):
                        group.create_task(self.write(key))
            case 6:
                await self.delete(chance.choice(KEYS))
            case 7 | 8:
                await self.reclaim(save=chance.random() < 0.5)
            case _:
                directory = self.store.config.directory
                await self.store.close()
                self.store = open_store(directory)
                self.store.open()
        self.store.extents.check()


def work(directory: str, seed: str, version: str, steps: str) -> None:
    """Work until the power goes, or for some steps; then perhaps close."""

    async def main() -> None:
        chance = random.Random(int(seed))
        worker = Worker(open_store(Path(directory)), int(version))
        try:
            worker.store.open()
            for _ in range(int(steps)):
                await worker.step(chance)
            if chance.random() < 0.5:
                await worker.store.close()
        except* (TierError, StartError) as group:
            say("failed", *map(str, group.exceptions))
        os._exit(0)  # a closed store that probes a dead disk would hold the loop

    asyncio.run(main())


def look(directory: str) -> None:
    """Start on what a cut left, read all that is there, stop."""

    async def main() -> None:
        store = open_store(Path(directory))
        try:
            opened = store.open()
        except StartError as error:
            say("failed", error)
            return
        for key, (ref, version) in held(opened).items():
            try:
                whole = await version_of(store, key, ref, version) is not None
            except TierError as error:
                say("failed", error)
                os._exit(0)
            say("found" if whole else "torn", *key, version)
        store.extents.check()
        await store.close()
        report = opened.report
        say("report", report.how, report.dropped, report.direct, store.health.index_broken)

    asyncio.run(main())


def jobs() -> None:
    """Serve the tests below."""
    serve_jobs({"work": work, "look": look})


# -------------------------------------------------------------------------------- the tests


@dataclass
class Bench:
    """A mount and the processes that work there."""

    mount: Mount
    jobs: Jobs
    cuts: int = 0
    buses: int = 0
    how: dict[str, int] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self.mount.path / "store"

    def run(self, *words: object) -> tuple[list[str], bool]:
        """Run a job; return what it said, and whether it was cut short.

        It may fail only if so, and then only as the store says; or by SIGBUS, when LMDB reads a
        page of its map that the kernel does not have yet.
        """
        said, status = self.jobs.run(*words)
        cut = self.mount.is_cut
        failed = any(line.startswith("failed") for line in said)
        assert cut or not failed, f"with the power on: {said[-3:]}"
        assert status == 0 or (cut and status == -signal.SIGBUS), f"exit status {status}: jobs.log"
        self.buses += status != 0
        return said, cut

    def cut(self, chance: random.Random) -> None:
        """Cut the power, if it is not, and turn it on again."""
        if not self.mount.is_cut:
            self.mount.tell("cut", chance.getrandbits(32), keep(chance))
        self.mount.tell("restore")
        self.cuts += 1

    def cut_later(self, steps: int, chance: random.Random) -> None:
        """Cut the power at a later change or sync."""
        self.mount.tell("cut_after", steps, chance.getrandbits(32), keep(chance))


def keep(chance: random.Random) -> float:
    """Return how much of what is pending survives a cut."""
    return chance.choice([0, 0.1, 0.5, 0.9, 1])


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a file system that forgets."""
    try:
        mounted = Mount(tmp_path)
    except CannotMountError as error:
        pytest.skip(f"no file system that forgets: {error}")
    try:
        yield mounted
    finally:
        mounted.close()
    told = (tmp_path / "forgetfs.log").read_text().splitlines()
    # libfuse says so of a session that had to be ended: its mount was gone already
    assert not [line for line in told if "failed to unmount" not in line], "the file system failed"


@pytest.fixture
def bench(tmp_path: Path, mount: Mount) -> Iterator[Bench]:
    """Mount a file system that forgets, and start a process for jobs there."""
    processes = Jobs("tests.crash.test_forget", tmp_path / "jobs.log")
    yield Bench(mount, processes)
    processes.close()


class Story:
    """One store from its beginning, through several cuts."""

    def __init__(self, bench: Bench, seed: int) -> None:
        """Begin with an empty file system."""
        self.bench = bench
        self.chance = random.Random(seed)
        self.may: dict[Key, set[int]] = {}
        self.version = 0
        bench.mount.tell("empty")
        bench.mount.tell("restore")

    def round(self) -> None:
        """Work, cut; start, cut that as well, perhaps; start, cut, and start again: the same."""
        bench, chance = self.bench, self.chance
        self.version += 1000
        bench.cut_later(int(chance.triangular(1, 400, 60)), chance)
        said, _ = bench.run("work", bench.store, chance.getrandbits(32), self.version, 25)
        play([line for line in said if line.startswith(("begin", "done"))], self.may)
        bench.cut(chance)
        for _ in range(chance.randrange(1, 4)):
            bench.cut_later(chance.randrange(1, 40), chance)
            self.look()
            if bench.mount.is_cut:
                bench.cut(chance)
        bench.cut_later(NEVER, chance)
        first = self.look()
        bench.cut(chance)
        assert self.look() == first, "a second start found something else"

    def look(self) -> dict[Key, int] | None:
        """Start on what a cut left and judge it; None if that was cut short."""
        said, cut = self.bench.run("look", self.bench.store)
        torn = [line for line in said if line.startswith("torn")]
        assert not torn or cut, f"the index named a torn record: {torn}"
        if not said[-1:] or not said[-1].startswith("report"):
            assert cut
            return None
        _, how, dropped, direct, broken = said[-1].split()
        assert how in {"fresh", "clean", "copied"}, "the index is lost"
        assert (dropped, broken) == ("0", "False"), "the index named what was not there"
        assert direct == "True"
        self.bench.how[how] = self.bench.how.get(how, 0) + 1
        found: dict[Key, int] = {}
        for line in said[:-1]:
            space, chunk, version = map(int, line.split()[1:])
            found[Key(space, chunk)] = version
        for key in KEYS:
            may, version = self.may.get(key, {0}), found.get(key, 0)
            assert version in may, f"an acknowledged change is lost: {key} is {version}, not {may}"
            self.may[key] = {version}
        return found


def tell_stories(bench: Bench, rounds: int, each: int = ROUNDS) -> None:
    """Cut that many rounds; a failure leaves the durable image and says where it is."""
    for seed in range(-(-rounds // each)):
        story = Story(bench, seed)
        for number in range(min(each, rounds - seed * each)):
            try:
                story.round()
            except AssertionError as error:
                bench.mount.tell("save")
                error.add_note(f"story {seed}, round {number}; durable: {bench.mount.image}")
                raise


@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * CUTS)
def test_cuts_lose_nothing_acknowledged(bench: Bench) -> None:
    """After a cut every acknowledged write and delete holds; all that is found is whole."""
    tell_stories(bench, CUTS)
    assert bench.cuts >= 2 * CUTS
    assert bench.how.get("copied", 0) >= CUTS, bench.how


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("files", MUTANTS)
def test_without_a_sync_the_loss_is_seen(bench: Bench, files: str) -> None:
    """A test of the test: where these syncs do nothing, cuts do harm, and are seen to."""
    bench.mount.tell("ignore", files)
    with pytest.raises(AssertionError, match=SEEN):
        tell_stories(bench, MUTANT_CUTS, each=2)


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(handle)
    os.close(handle)


def test_it_forgets_what_was_not_synced_and_only_that(mount: Mount) -> None:
    """Bytes, lengths and names: each is there after a cut if its own sync was, and else is not."""
    top = mount.path / "top"
    top.mkdir()
    files = {}
    for name, flags in (("synced", 0), ("through", os.O_DSYNC), ("direct", os.O_DIRECT)):
        files[name] = os.open(top / name, os.O_RDWR | os.O_CREAT | flags)
    block = mmap.mmap(-1, 8192)
    block[:] = b"d" * 8192
    assert os.pwrite(files["direct"], block, 0) == 8192
    os.write(files["synced"], b"1" * 10_000)
    os.fdatasync(files["synced"])
    os.pwrite(files["synced"], b"2" * 10_000, 5_000)
    os.pwrite(files["through"], b"3" * 100, 0)
    os.posix_fallocate(files["direct"], 0, 1 << 20)
    sync_dir(top)
    sync_dir(mount.path)
    (top / "late").write_bytes(b"late")
    (top / "synced").rename(top / "renamed")
    with mmap.mmap(files["synced"], 15_000, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        assert seen[:] == b"1" * 5_000 + b"2" * 10_000
    mount.tell("cut", 1, 0)
    with pytest.raises(OSError, match="Input/output"):
        os.pwrite(files["synced"], b"4", 0)
    for handle in files.values():
        with suppress(OSError):
            os.close(handle)
    mount.tell("restore")
    left = {path.name: path.read_bytes() for path in top.iterdir()}
    assert left == {"synced": b"1" * 10_000, "through": b"3" * 100, "direct": b""}


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_chance_decides_about_what_was_not_synced(mount: Mount, share: float) -> None:
    """Each page is old or new; the last one that arrived may be torn, at 512 bytes only."""
    torn = 0
    for seed in range(40):
        mount.tell("empty")
        mount.tell("restore")
        path = mount.path / "file"
        with path.open("wb") as file:
            file.write(b"-" * (4 * 4096))
            file.flush()
            os.fsync(file.fileno())
            sync_dir(mount.path)
            file.seek(0)
            file.write(b"+" * (4 * 4096))
            file.flush()
            mount.tell("cut", seed, share)
            with suppress(OSError):
                file.close()
        mount.tell("restore")
        content = path.read_bytes()
        assert len(content) == 4 * 4096
        assert all(len(set(content[at : at + 512])) == 1 for at in range(0, len(content), 512))
        mixed = [page for page in range(4) if len(set(content[page * 4096 :][:4096])) == 2]
        assert len(mixed) <= 1
        torn += len(mixed)
    assert 5 < torn < 35


# -------------------------------------------------------------------------------- the daemon


@dataclass
class Host:
    """A daemon whose NVMe directory is on the mount, and what is durable there."""

    daemon: DaemonProcess
    mount: Mount
    durable: list[list[bytes]] = field(default_factory=list)
    seed: int = 0
    published: int = 0

    def store(self, client: kvd_client.Client) -> list[bytes]:
        """Store a new chain."""
        self.seed += 1
        chain = client.chunk_hashes(tokens(4, seed=self.seed))
        done = 0
        while done < len(chain):
            done += store(client, chain, done)
        self.published += done
        return chain

    def settled(self) -> bool:
        """Whether all that was published is on NVMe."""
        page = statpage.read(stat_page_name(self.daemon.socket)).stats
        written = page["counters"]["demotions"] >= self.published
        return bool(written and page["nvme"]["dirty_bytes"] == 0)

    def live(self, chance: random.Random, number: int) -> None:
        """Start, find what is durable, store more, lose the power, die."""
        self.daemon.start()
        self.published = 0
        with join(self.daemon) as client:
            for chain in self.durable:
                assert client.lookup(chain).chunks == len(chain), "what was durable is gone"
            for chain in chance.sample(self.durable, min(4, len(self.durable))):
                assert load(client, chain) == len(chain), "what was durable cannot be read"
            self.mount.tell("cut_after", chance.randrange(1, 60), number, keep(chance))
            deadline = time.monotonic() + 60
            while not self.mount.is_cut:
                chain = self.store(client)
                while not self.settled() and not self.mount.is_cut:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                if self.settled():
                    self.durable.append(chain)
            assert load(client, chain) == len(chain), "the daemon works on without its disk"
        self.daemon.kill()
        self.mount.tell("restore")


@pytest.mark.slow
@pytest.mark.timeout(180 + 5 * CUTS)
def test_cuts_under_a_whole_daemon(make_daemon: MakeDaemon, mount: Mount, tmp_path: Path) -> None:
    """What a daemon says is on NVMe is there for the next one; without the disk it serves on."""
    config_file = tmp_path / "kvd.toml"
    config_file.write_text(CONFIG.format(directory=mount.path / "nvme"))
    host = Host(make_daemon(arguments=["--config", str(config_file)]), mount)
    chance = random.Random(5)
    try:
        for number in range(max(4, CUTS // 10)):
            host.live(chance, number)
    finally:
        host.daemon.clean_up()
    assert host.durable
