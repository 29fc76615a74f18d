"""KV events over ZeroMQ, read as vLLM's own subscribers read them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import zmq

from kvd import config, statpage
from kvd.catalog import Catalog
from kvd.changes import tiers_of
from kvd.config_events import EventsKnobs
from kvd.errors import ConfigError, StartError
from kvd.events import journal as journal_module
from kvd.events.journal import Journal
from kvd.events.publisher import Publisher
from kvd.metrics import Counters
from kvd.quota import Quota, Resource
from kvd.tiers.slab import SlabPool
from kvd.types import Generation, OwnerId, SlabId, Tenant
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import CHUNK_TOKENS, join, small_layout, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import kvd_client
    from bench._daemon import DaemonProcess

LIMIT_S: Final = 30.0
Hash = int | bytes


class KVCacheEvent(msgspec.Struct, array_like=False, omit_defaults=True, gc=False, tag=True):
    """As vLLM declares it."""


class BlockStored(KVCacheEvent):
    """As vLLM declares it; the fields after lora_name have defaults there."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    """As vLLM declares it."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """As vLLM declares it."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM declares it."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVEventBatch(EventBatch):
    """As vLLM declares it."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DECODER: Final = msgspec.msgpack.Decoder(type=KVEventBatch)


class Router:
    """A cache-aware router's view: which hashes are where, from events alone."""

    def __init__(self) -> None:
        self.held: dict[str, set[Hash]] = {}
        self.events: list[Any] = []
        self.parents: dict[Hash, Hash | None] = {}
        self.heard = -1
        """The number of the last batch."""

    def follow(self, subscriber: zmq.Socket[bytes], what: Callable[[], bool]) -> None:
        """Take in what a subscriber hears until something holds."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline
            if not subscriber.poll(100):
                continue
            topic, sequence, payload = subscriber.recv_multipart()
            assert topic == b"kv@test"
            if (number := int.from_bytes(sequence, "big")) > self.heard:
                assert number == self.heard + 1
                self.take(payload)
                self.heard = number

    def take(self, payload: bytes) -> None:
        """Take in a batch."""
        for event in DECODER.decode(payload).events:
            self.events.append(event)
            match event:
                case AllBlocksCleared():
                    self.held.clear()
                case BlockStored():
                    assert event.medium is not None
                    above = event.parent_block_hash
                    for each in event.block_hashes:
                        self.parents[each], above = above, each
                    self.held.setdefault(event.medium, set()).update(event.block_hashes)
                case BlockRemoved():
                    assert event.medium is not None
                    held = self.held.setdefault(event.medium, set())
                    held -= set(event.block_hashes)  # not all need be known: it may be forgetting


def low_64(key: bytes) -> int:
    """A hash as vLLM sends it by default."""
    return int.from_bytes(key, "big") & ((1 << 64) - 1)


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    """Addresses of this test's own."""
    return f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"


@pytest.fixture
def zeromq() -> Iterator[zmq.Context[Any]]:
    """A context; its sockets end with the test."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(context: zmq.Context[Any], endpoint: str, topic: str = "") -> zmq.Socket[bytes]:
    """Subscribe as vLLM's examples do."""
    made: zmq.Socket[bytes] = context.socket(zmq.SUB)
    made.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1e3))
    made.setsockopt_string(zmq.SUBSCRIBE, topic)
    made.connect(endpoint)
    return made


def subscribed(subscriber: zmq.Socket[bytes], client: kvd_client.Client) -> set[Hash]:
    """Store until a subscription is known to the daemon; return what was stored."""
    hashes: list[bytes] = []
    while not subscriber.poll(200):
        assert len(hashes) < LIMIT_S / 0.2
        hashes += client.chunk_hashes(tokens(1, seed=1000 + len(hashes)))
        assert store(client, hashes[-1:]) == 1
    return {low_64(key) for key in hashes}


def replay(context: zmq.Context[Any], endpoint: str, start: int) -> list[tuple[int, bytes]]:
    """Ask for a replay, and read what vLLM's publisher answers in the same way."""
    with context.socket(zmq.DEALER) as asker:
        asker.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1e3))
        asker.connect(endpoint)
        asker.send_multipart([b"", start.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            empty, topic, sequence, payload = asker.recv_multipart()
            assert empty == b""
            number = int.from_bytes(sequence, "big", signed=True)
            if number == -1:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((number, payload))


@pytest.fixture
def daemon(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, endpoints: tuple[str, str]
) -> DaemonProcess:
    """Run a daemon with an NVMe tier, 8 MiB of host memory and events."""
    file = tmp_path / "kvd.toml"
    file.write_text(
        '[nvme]\nslow_s = 30\nbytes = "64MiB"\nregion_bytes = "8MiB"\nform = "raw"\n'
        f'[events]\nendpoint = "{endpoints[0]}"\nreplay_endpoint = "{endpoints[1]}"\n'
        'topic = "kv@test"\n'
    )
    made = make_daemon(host_bytes=8 << 20, arguments=["--config", str(file)])
    made.start()
    return made


def connect(daemon: DaemonProcess) -> kvd_client.Client:
    """Connect a client."""
    return join(daemon)


def stats_of(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the page."""
    return dict(statpage.read(stat_page_name(daemon.socket)).stats)


def test_a_router_learns_what_is_where(
    daemon: DaemonProcess, endpoints: tuple[str, str], zeromq: zmq.Context[Any]
) -> None:
    """From the events alone, decoded by vLLM's own declarations, a router knows each tier's
    chunks, with their parents; a replay gives another the same.
    """
    subscriber = subscribe(zeromq, endpoints[0], "kv@")
    client = connect(daemon)
    every = subscribed(subscriber, client)
    live = Router()
    for number, payload in replay(zeromq, endpoints[1], 0):  # what came before it could listen
        live.take(payload)
        live.heard = number
    chains = [client.chunk_hashes(tokens(32, seed=seed)) for seed in range(8)]
    for chain in chains:
        first = 0
        deadline = time.monotonic() + LIMIT_S
        while first < 32:
            first += store(client, chain, first)
            assert time.monotonic() < deadline
    every |= {low_64(key) for chain in chains for key in chain}
    live.follow(subscriber, lambda: live.held.get("STORAGE") == every)

    def settled() -> bool:
        page = stats_of(daemon)
        events, host_bytes = page["events"], page["host"]["published_bytes"]
        told = events["waiting"] == 0 and events["batches"] == live.heard + 1
        return bool(told and host_bytes == len(live.held["CPU"]) << 16)

    live.follow(subscriber, settled)
    client.close()
    subscriber.close()
    for chain in chains:
        parents = [live.parents[low_64(key)] for key in chain]
        assert parents == [None, *map(low_64, chain[:-1])]
    stored = [event for event in live.events if isinstance(event, BlockStored)]
    assert {event.block_size for event in stored} == {CHUNK_TOKENS}
    assert all(event.token_ids == [] and event.extra_keys is None for event in stored)
    late = Router()
    numbered = replay(zeromq, endpoints[1], 0)
    assert [number for number, _ in numbered] == list(range(len(numbered)))
    for _, payload in numbered:
        late.take(payload)
    assert late.held == live.held
    assert isinstance(late.events[0], AllBlocksCleared)
    assert replay(zeromq, endpoints[1], 1) == numbered[1:]
    assert replay(zeromq, endpoints[1], 10**6) == []


def test_a_restart_begins_with_what_the_disk_kept(
    daemon: DaemonProcess, endpoints: tuple[str, str], zeromq: zmq.Context[Any]
) -> None:
    """After a restart a router is told to forget everything, and then of what is on NVMe."""
    client = connect(daemon)
    chain = client.chunk_hashes(tokens(8))
    store(client, chain)
    client.close()
    assert daemon.stop() == 0
    daemon.start()
    router = Router()
    deadline = time.monotonic() + LIMIT_S
    while not (kept := replay(zeromq, endpoints[1], 0)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _, payload in kept:
        router.take(payload)
    assert isinstance(router.events[0], AllBlocksCleared)
    assert router.held == {"STORAGE": {low_64(key) for key in chain}}


def test_nonsense_asked_of_it_does_nothing(
    daemon: DaemonProcess, endpoints: tuple[str, str], zeromq: zmq.Context[Any]
) -> None:
    """Requests of the wrong form are dropped, and others are answered as before."""
    rng = random.Random(7)
    with closing(zeromq.socket(zmq.DEALER)) as rude:
        rude.connect(endpoints[1])
        for _ in range(200):
            rude.send_multipart(
                [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 5))]
            )
        with closing(zeromq.socket(zmq.DEALER)) as huge:
            huge.connect(endpoints[1])
            huge.send_multipart([b"", b"x" * 100_000])
        assert replay(zeromq, endpoints[1], 0)
    assert stats_of(daemon)["state"] == "serving"


def kvd(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `kvd events`."""
    return subprocess.run(
        [sys.executable, "-m", "kvd", "events", "--socket", daemon.socket, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.timeout(180)
def test_the_command_shows_them(daemon: DaemonProcess) -> None:
    """`kvd events` finds the daemon's endpoints by itself, and prints what is kept."""
    client = connect(daemon)
    chain = client.chunk_hashes(tokens(5))
    store(client, chain)
    deadline = time.monotonic() + LIMIT_S
    while stats_of(daemon)["events"]["events"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.close()
    shown = kvd(daemon, "--replay", "--no-follow", "--json")
    assert shown.returncode == 0, shown.stderr
    events = [json.loads(line) for line in shown.stdout.splitlines()]
    assert events[0] == {"type": "AllBlocksCleared", "sequence": 0}
    hashes = [h for e in events[1:] if e["medium"] == "CPU" for h in e["block_hashes"]]
    assert hashes == [f"{low_64(key):016x}" for key in chain]
    words = kvd(daemon, "--replay", "--count", "2").stdout.splitlines()
    assert len(words) == 2
    assert "BlockStored" in words[1]
    assert "CPU" in words[1]
    wrong = kvd(daemon, "--no-follow")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_a_daemon_without_events_says_how(make_daemon: Callable[..., DaemonProcess]) -> None:
    """Without the table the command says what to configure, and ends with 1."""
    quiet = make_daemon(host_bytes=16 << 20)
    quiet.start(until="ready")
    assert stats_of(quiet)["events"] is None
    told = kvd(quiet)
    assert told.returncode == 1
    assert "[events] endpoint" in told.stderr


def test_a_taken_endpoint_is_told_at_the_start(endpoints: tuple[str, str]) -> None:
    """An endpoint that cannot be had is an error of the start that names its key."""
    with pytest.raises(StartError, match=r"\[events\] endpoint"):
        Publisher(EventsKnobs(endpoint="ipc:///nowhere/at/all"))
    with pytest.raises(StartError, match=r"\[events\] replay_endpoint"):
        Publisher(EventsKnobs(endpoint=endpoints[0], replay_endpoint="ipc:///nowhere/at/all"))


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ('endpoint = "5557"', "write an address"),
        ('endpoint = "tcp://*:5557"', "write an address"),
        ('endpoint = "tcp://0.0.0.0:5557"', "name the address"),
        ('endpoint = "tcp://[::]:5557"', "name the address"),
        ('replay_endpoint = "tcp://127.0.0.1:1"', "nothing to replay"),
        ('endpoint = "ipc:///a"\nreplay_endpoint = "ipc:///a"', "another port"),
        ('endpoint = "ipc:///a"\nhashes = "hex"', "bytes"),
        ('topic = "a\\nb"', "printable"),
    ],
)
def test_what_cannot_be_configured(tmp_path: Path, text: str, mend: str) -> None:
    """A wrong endpoint is refused with what to write; one on every interface, too."""
    file = tmp_path / "kvd.toml"
    file.write_text(f"[events]\n{text}\n")
    with pytest.raises(ConfigError, match=mend):
        config.load(str(file), {"socket": str(tmp_path / "s"), "host.bytes": "1MiB"})


# ---------------------------------------------------------------- the journal alone

TENANT: Final = Tenant("t")
NEVER_NS: Final = 1 << 60


class World:
    """A catalog whose changes a router follows through a journal."""

    def __init__(self, slabs: int = 4) -> None:
        pool = SlabPool(1 << 20, {TENANT: slabs})
        for number in range(slabs):
            pool.add_blank(SlabId(number))
        self.catalog = Catalog(pool, Quota({TENANT: dict.fromkeys(Resource, 1 << 40)}), Counters())
        self.space = self.catalog.enter(TENANT, bytes(32), "m", small_layout())
        self.router = Router()

    def publish(self, seed: int, count: int) -> None:
        """Store a chain."""
        keys = [seed.to_bytes(16, "big") + n.to_bytes(16, "big") for n in range(count)]
        owner = OwnerId(1)
        places = self.catalog.reserve(
            self.space,
            owner,
            0,
            parent=bytes(32),
            hashes=keys,
            groups=1,
            deadline_ns=NEVER_NS,
        )
        generations = [Generation(place[6]) for place in places if place[2] == 0]
        self.catalog.publish_all(owner, generations, 0)

    def heard(self, journal: Journal, most: int = 100) -> None:
        """Let the router take in what waits."""
        self.router.take(msgspec.msgpack.encode([0.0, journal.take(most), 0]))

    def true(self) -> dict[str, set[Hash]]:
        """What is whole where."""
        held: dict[str, set[Hash]] = {}
        for chunk in self.space.chunks.values():
            for tier in tiers_of(chunk):
                held.setdefault(journal_module.MEDIUM[tier], set()).add(chunk.hash)
        return held


@pytest.mark.parametrize("bound", [1 << 16, 40])
@pytest.mark.parametrize("seed", range(5))
def test_a_router_s_view_is_the_catalog(
    seed: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is stored and evicted between two batches, and also when more waits than may, the
    router's view is the catalog's once the journal has nothing left to tell.
    """
    monkeypatch.setattr(journal_module, "WAITING_MAX", bound)
    rng = random.Random(seed)
    world = World()
    world.publish(999, 5)
    journal = Journal(world.catalog, "bytes")
    for step in range(60):
        world.publish(step, rng.randrange(1, 16))  # 64 places: older chains go
        if rng.random() < 0.3:
            world.heard(journal, rng.randrange(1, 30))
        assert journal.waiting <= bound
    while journal.waiting or journal.retelling:
        world.heard(journal, rng.randrange(1, 30))
    assert world.router.held == world.true()
    assert world.catalog.counters.evictions, "nothing was evicted"
    assert (journal.retellings > 1) == (bound == 40)


def test_a_long_chain_is_told_in_pieces_that_join() -> None:
    """A piece holds so many hashes at most, and the next names the last of it as its parent."""
    world = World(slabs=32)
    journal = Journal(world.catalog, "bytes")
    world.heard(journal)
    world.publish(1, 400)
    first, second = journal.take(10)
    assert [len(event["block_hashes"]) for event in (first, second)] == [256, 144]
    assert first["parent_block_hash"] is None
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert journal.take(10) == []
