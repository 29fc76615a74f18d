"""The daemon killed at every named point of `kvd/failpoints.py`, while a client works.

After each kill the next daemon starts on what is left. Then: what was known to be durable is there,
byte for byte; nothing else is served in its place; what the daemon counts adds up. A point that is
never reached fails its test.

KVD_POINT_KILLS says how many kills there are over all points.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lmdb
import pytest

import kvd
import kvd_client
from kvd import check as kvd_check
from kvd import statpage
from kvd.failpoints import POINTS, VARIABLE, Failpoint, maybe_fault
from kvd.tiers.rows import KEY_BYTES, Row, decode_row
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import OBJECT_BYTES, join, load, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

    MakeDaemon = Callable[..., DaemonProcess]

ROUNDS: Final = -(-int(os.environ.get("KVD_POINT_KILLS", "0")) // len(POINTS))
"""Kills a point; 0: two of those that are passed often, one of the others."""
START_S: Final = 60.0
LIMIT_S: Final = 60.0
"""How long a point may take to be reached."""
CHUNKS: Final = 8
"""Of each chain that is stored."""

CONFIG: Final = """
[nvme]
slow_s = 30
bytes = "{size}"
region_bytes = "1MiB"
form = "raw"
[limits]
drain_s = 1.0
"""
HOT: Final = ("reserve", "publish", "demote", "promote")
"""Points that are passed often: the kill comes at some later pass."""
AT_THE_END: Final = ("drain", "flush", "close")
TIGHT: Final = ("reclaim", "rewrite")
"""Points that need a tier below that is full."""


@dataclass
class Case:
    """One point's directory, and what is known of what lies there."""

    daemon: DaemonProcess
    directory: Path
    point: str
    chance: random.Random
    chains: list[list[bytes]] = field(default_factory=list)
    """All that were stored, or begun to be."""
    durable: dict[bytes, int] = field(default_factory=dict)
    """By the last hash of a chain: its chunks that must be there."""
    spoiled: set[bytes] = field(default_factory=set)
    """Chunks whose record was changed."""
    published: int = 0
    """Objects of this daemon's life that this client has published."""
    seed: int = 0

    @property
    def rounds(self) -> int:
        """How often the daemon is killed."""
        return ROUNDS or (2 if self.point.startswith(HOT) else 1)

    @property
    def tight(self) -> bool:
        """Whether the tier below is too small for all."""
        return self.point.startswith(TIGHT)

    # ---------------------------------------------------------------- the daemon

    def start(self, spec: str) -> bool:
        """Start a daemon, armed or not; False if it died on its way."""
        os.environ[VARIABLE] = spec
        try:
            seen = len(self.daemon.log.read_bytes()) if self.daemon.log.exists() else 0
            self.daemon.start(until=None)
        finally:
            del os.environ[VARIABLE]
        self.published = 0
        deadline = time.monotonic() + START_S
        while b"ready" not in self.daemon.log.read_bytes()[seen:]:
            if self.daemon.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.daemon.log.read_text()[-2000:]
            time.sleep(0.005)
        return True

    @property
    def alive(self) -> bool:
        """Whether the daemon runs."""
        return self.daemon.process.poll() is None

    def dies(self) -> bool:
        """Tell whether a miss came of the daemon's end."""
        with suppress(subprocess.TimeoutExpired):
            self.daemon.process.wait(10.0)
        return not self.alive

    def connect(self) -> kvd_client.Client | None:
        """Connect a client, if there is still somebody to connect to."""
        while self.alive:
            with suppress(kvd_client.DaemonUnavailable):
                return join(self.daemon, timeout_s=1.0)
        return None

    def stats(self) -> dict[str, Any]:
        """Read the statistics page."""
        return dict(statpage.read(stat_page_name(self.daemon.socket)).stats)

    # ---------------------------------------------------------------- work

    def store_chain(self, client: kvd_client.Client, chunks: int = CHUNKS) -> list[bytes]:
        """Store a new chain."""
        self.seed += 1
        chain = client.chunk_hashes(tokens(chunks, seed=self.seed))
        self.chains.append(chain)
        first = 0
        while first < chunks and self.alive:
            done = store(client, chain, first)
            first += done
            self.published += done
            if not done:
                time.sleep(0.01)
        return chain

    def wait_durable(self) -> None:
        """Wait until all that was published is durable, and remember that; or the daemon dies."""
        if self.tight:
            return
        deadline = time.monotonic() + LIMIT_S
        while self.alive:
            page = self.stats()
            stored = page["counters"]["objects_published"]
            if stored == self.published and not page["nvme"]["dirty_bytes"]:
                self.durable |= {chain[-1]: len(chain) for chain in self.chains[-1:]}
                return
            assert time.monotonic() < deadline, page
            time.sleep(0.01)

    def work(self) -> None:
        """Store and load until the daemon is killed, and end it when that is the point."""
        client = self.connect()
        deadline = time.monotonic() + LIMIT_S
        if client is None:
            return
        with client:
            self.verify(client)
            if self.alive:
                self.store_chain(client)
                self.wait_durable()
            if self.point.startswith(AT_THE_END) and self.alive:
                self.store_chain(client)
                self.daemon.process.terminate()
            while self.alive:
                assert time.monotonic() < deadline, f"{self.point} is never reached"
                self.step(client)
                if self.point.startswith(AT_THE_END):
                    time.sleep(0.01)

    def step(self, client: kvd_client.Client) -> None:
        """Do one thing: store, or use something old."""
        if self.point.startswith(AT_THE_END):
            return
        if self.chance.random() < 0.6:
            self.store_chain(client, self.chance.randrange(1, CHUNKS))
        else:
            load(client, self.chance.choice(self.chains[-16:]))

    # ---------------------------------------------------------------- what must hold

    def verify(self, client: kvd_client.Client, *, every: bool = False) -> None:
        """Read what must be there, and what may be; `load` compares every byte."""
        chains = self.chains if every else [*self.chains[: self.rounds], *self.chains[-6:]]
        for chain in chains:
            found = client.lookup(chain).chunks
            loaded = load(client, chain)
            wanted = self.durable.get(chain[-1], 0)
            if min(found, loaded) < wanted and self.dies():
                return
            assert found >= wanted, "what was durable is gone"
            assert loaded >= wanted or self.tight, "what is offered cannot be loaded"

    def learn(self) -> None:
        """Look at what a killed daemon left: every row names a whole record; learn which."""
        store_directory = self.directory / "state" / "nvme"
        if not (store_directory / "index.mdb").exists():
            assert not self.durable
            return
        finding = kvd_check.check(store_directory)
        assert finding.index == "whole", finding.problems
        assert not finding.entries_bad or self.point.startswith("forget"), finding.problems
        rows = rows_of(store_directory)
        for chain in self.chains:
            good = [key in rows and key not in self.spoiled for key in chain]
            here = good.index(False) if False in good else len(chain)
            assert here >= self.durable.get(chain[-1], 0), "what was durable is not in the index"
            if not self.tight:
                self.durable[chain[-1]] = here
            for key, above in zip(chain[1:here], chain, strict=False):
                assert rows[key].parent == above

    def spoil(self) -> None:
        """Change a byte of a durable chain's last chunk: it is not to be had from now on."""
        store_directory = self.directory / "state" / "nvme"
        rows = rows_of(store_directory)
        key = next(c[-1] for c in self.chains if self.durable.get(c[-1]) == len(c))
        self.durable[key] -= 1
        self.spoiled.add(key)
        path = store_directory / "regions" / f"{rows[key].region:08d}"
        with path.open("r+b") as file:
            file.seek(rows[key].offset_bytes + rows[key].length_bytes - OBJECT_BYTES // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    def add_up(self) -> None:
        """What the daemon says of itself adds up once everything has settled."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            page = self.stats()
            busy = page["nvme"]["dirty_bytes"] or page["host"]["pinned_bytes"]
            headless = page["nvme"]["live_count"] - page["chunks"]  # deleted soon after the start
            if not busy and not page["session_count"] and headless <= 0:
                break
            assert time.monotonic() < deadline, page
            time.sleep(0.02)
        host, below = page["host"], page["nvme"]
        assert host["reserved_bytes"] == host["quarantined_bytes"] == page["leases"] == 0
        assert host["used_bytes"] == host["published_bytes"] <= host["capacity_bytes"]
        assert host["used_bytes"] % OBJECT_BYTES == 0
        assert host["used_bytes"] == sum(t["published_bytes"] for t in page["tenants"])
        assert below["used_bytes"] == below["live_bytes"] + below["garbage_bytes"]
        assert below["used_bytes"] <= below["capacity_bytes"]
        assert below["live_bytes"] == below["live_count"] * (OBJECT_BYTES + 4096)
        assert below["regions_held"] + below["regions_free"] <= below["capacity_bytes"] >> 20
        assert page["counters"]["sessions_ended_badly"] == 0
        assert all(value >= 0 for value in page["counters"].values() if isinstance(value, int))


def rows_of(directory: Path) -> dict[bytes, Row]:
    """Read the index of a store that nobody uses, by chunk."""
    with lmdb.open(
        str(directory / "index.mdb"), subdir=False, readonly=True, lock=False, max_dbs=3
    ) as index:
        rows = index.open_db(b"rows", create=False)
        with index.begin(rows) as txn:
            found = [decode_row(key + value) for key, value in txn.cursor()]
    assert all(len(row.key) == KEY_BYTES for row in found)
    return {row.chunk: row for row in found}


@pytest.fixture
def make_case(make_daemon: MakeDaemon, tmp_path: Path) -> Iterator[Callable[[str], Case]]:
    """Make the case of a point."""

    def make(point: str) -> Case:
        tight = point.startswith(TIGHT)
        config = tmp_path / "kvd.toml"
        config.write_text(CONFIG.format(size="5MiB" if tight else "64MiB"))
        small = tight or point.startswith("promote")
        daemon = make_daemon(
            host_bytes=(2 if small else 8) << 20, arguments=["--config", str(config)]
        )
        return Case(daemon, daemon.directory, point, random.Random(point))

    yield make
    os.environ.pop(VARIABLE, None)


@pytest.mark.slow
@pytest.mark.timeout(180 + 30 * ROUNDS)
@pytest.mark.parametrize("point", POINTS)
def test_killed_at(point: str, make_case: Callable[[str], Case]) -> None:
    """Whatever the daemon was doing, what was durable is there after it, and nothing is torn."""
    case = make_case(point)
    if point.startswith(("open", "forget", "promote")):
        assert case.start("")  # something must be there before
        client = case.connect()
        assert client is not None
        with client:
            for _ in range(case.rounds if point.startswith("forget") else 1):
                case.store_chain(client)
                case.wait_durable()
        case.daemon.kill()
    for number in range(case.rounds):
        passes = case.chance.choice([1, 2, 3, 5, 9]) if point.startswith(HOT) else 1
        if point.startswith("forget"):
            case.spoil()
        if case.start(f"{point}:{passes}"):
            case.work()
        code = case.daemon.process.wait(LIMIT_S)
        assert code == -signal.SIGKILL, f"round {number}: {point}:{passes} was not reached"
        case.learn()
    assert case.start("")
    client = case.connect()
    assert client is not None
    with client:
        case.verify(client, every=True)
        chain = case.store_chain(client)
        assert load(client, chain) == CHUNKS
    case.add_up()
    assert case.daemon.stop() == 0
    case.learn()


@pytest.mark.parametrize("spec", ["nowhere", "demote.after_end:0", "demote.after_end:x", ":"])
def test_a_point_that_does_not_exist_is_no_point(spec: str) -> None:
    """A test that names a point wrongly fails at once, and not by never being killed."""
    with pytest.raises(ValueError, match=r"write NAME|invalid literal"):
        Failpoint(spec)


def test_points_are_named_once_and_used() -> None:
    """The list has every name once; every point in the code is on it and has its own name."""
    (package,) = kvd.__path__
    texts = [
        path.read_text() for path in Path(package).rglob("*.py") if path.name != "failpoints.py"
    ]
    found = [part.split('"')[0] for text in texts for part in text.split('maybe_fault("')[1:]]
    assert sorted(found) == sorted(POINTS)
    assert len(set(POINTS)) == len(POINTS)


def test_an_unarmed_point_does_nothing() -> None:
    """Without the variable, as here, a point is passed like nothing, whatever its name."""
    assert not os.environ.get(VARIABLE)
    for name in (*POINTS, "nowhere"):
        maybe_fault(name)
