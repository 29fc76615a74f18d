"""The life of an object through a real daemon: store, find, hold, evict."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

import pytest

import kvd_client
from kvd import statpage
from kvd.policies import POLICIES
from kvd_client import Status
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import (
    CHUNK_TOKENS,
    PATIENCE_S,
    join,
    load,
    namespace,
    small_layout,
    stamp,
    store,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench._daemon import DaemonProcess


def test_what_one_client_publishes_another_reads(connect: Callable[..., kvd_client.Client]) -> None:
    """Published bytes come back exactly, to another session, for the whole prefix."""
    writer, reader = connect(), connect()
    hashes = writer.chunk_hashes(tokens(20))
    assert reader.lookup(hashes) == (0, 0, 0)
    assert store(writer, hashes) == 20
    assert reader.lookup(hashes) == (20, 20 * CHUNK_TOKENS, 20)
    assert load(reader, hashes) == 20


def test_unpublished_bytes_are_never_found(connect: Callable[..., kvd_client.Client]) -> None:
    """A reserved, filled object is invisible until it is published, and after an abort."""
    writer, reader = connect(), connect()
    hashes = writer.chunk_hashes(tokens(3))
    reservation = writer.reserve(hashes)
    assert [slot.status for slot in reservation.slots] == [Status.OK] * 3
    assert reader.lookup(hashes).chunks == 0
    writer.publish(reservation, reservation.slots[1:])
    assert reader.lookup(hashes).chunks == 0, "a prefix has no hole"
    writer.publish(reservation, reservation.slots[:1])
    assert reader.lookup(hashes).chunks == 3
    second = writer.reserve(writer.chunk_hashes(tokens(2, seed=9)))
    writer.abort(second)
    assert reader.lookup(writer.chunk_hashes(tokens(2, seed=9))).chunks == 0


def test_first_writer_wins(connect: Callable[..., kvd_client.Client]) -> None:
    """A key being filled is BUSY for others, and EXISTS once published."""
    one, other = connect(), connect()
    hashes = one.chunk_hashes(tokens(2))
    first = one.reserve(hashes)
    assert {slot.status for slot in other.reserve(hashes).slots} == {Status.BUSY}
    one.publish(first)
    assert {slot.status for slot in other.reserve(hashes).slots} == {Status.EXISTS}


def test_a_chunk_without_its_parent_is_refused(connect: Callable[..., kvd_client.Client]) -> None:
    """What could never be used is not stored."""
    client = connect()
    hashes = client.chunk_hashes(tokens(4))
    assert [slot.status for slot in client.reserve(hashes, first=2).slots] == [Status.ORPHAN] * 2


def test_a_full_tier_keeps_the_newest_prefixes(connect: Callable[..., kvd_client.Client]) -> None:
    """Prefix after prefix gets in; the oldest go, leaves first, and what is left is usable."""
    client = connect()
    chains = [client.chunk_hashes(tokens(100, seed=seed)) for seed in range(1, 31)]
    for chain in chains:  # 3,000 objects of 64 KiB into 64 MiB: 1,024 places
        assert store(client, chain) == 100
    assert load(client, chains[-1]) == 100
    assert load(client, chains[-9]) == 100
    assert client.lookup(chains[0]).chunks == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_tier_keeps_the_newest_prefix_of_every_rank(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, policy: str
) -> None:
    """Where two ranks store each chain one after the other, the newest is whole all the same."""
    config = tmp_path / "kvd.toml"
    config.write_text(f'[host]\npolicy = "{policy}"\n')
    daemon = make_daemon(host_bytes=64 << 20, arguments=["--config", str(config)])
    daemon.start()

    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(join(daemon, layout=small_layout(tp=2), rank=rank))
            for rank in range(2)
        ]
        for seed in range(1, 16):  # 3,000 objects into 1,024 places
            chain = ranks[0].chunk_hashes(tokens(100, seed=seed))
            ranks[0].lookup(chain)  # as an engine does before it computes
            load(ranks[0], ranks[0].chunk_hashes(tokens(100, seed=max(1, seed - 2))))
            for rank in ranks:
                assert store(rank, chain) == 100
            assert ranks[0].lookup(chain).chunks == 100


def test_a_chain_longer_than_the_tier_is_refused_in_part(
    connect: Callable[..., kvd_client.Client],
) -> None:
    """The head of a too long chain gets in and is usable; the rest is refused at once."""
    client = connect()
    hashes = client.chunk_hashes(tokens(1200))
    stored = sum(store(client, hashes[: first + 100], first) for first in range(0, 1200, 100))
    assert stored == 1024
    assert client.lookup(hashes).chunks == 1024
    assert load(client, hashes) == 896, "seven eighths: the most a tenant may pin at once"
    assert client.reserve(hashes, first=1100).slots[0].status is Status.ORPHAN


def test_a_leased_prefix_is_never_evicted(
    daemon: DaemonProcess, connect: Callable[..., kvd_client.Client]
) -> None:
    """Bytes under lease stay as they are while the tier is turned over twice."""
    client = connect()
    held = client.chunk_hashes(tokens(50, seed=77))
    store(client, held)
    with client.acquire(held) as lease:
        for seed in range(1, 31):
            store(client, client.chunk_hashes(tokens(80, seed=seed)))
        for chunk in range(50):
            assert bytes(lease.view(chunk)) == stamp(held[chunk], len(lease.view(chunk)))
    deadline = time.monotonic() + 15
    while statpage.read(stat_page_name(daemon.socket)).stats["host"]["pinned_bytes"]:
        assert time.monotonic() < deadline, "something holds it afterwards"
        time.sleep(0.05)


def test_a_worker_attaches_to_the_schedulers_lease(
    connect: Callable[..., kvd_client.Client],
) -> None:
    """A lease that does not read tells no places; its token lets each rank read its shard."""
    layout = small_layout(tp=2)
    ranks = [connect(layout=layout, rank=rank) for rank in range(2)]
    hashes = ranks[0].chunk_hashes(tokens(4))
    store(ranks[0], hashes)
    scheduler = connect(layout=layout)
    assert scheduler.lookup(hashes).chunks == 0, "one missing rank object ends the prefix"
    store(ranks[1], hashes)
    lease = scheduler.acquire(hashes, read=False)
    assert lease.chunks == 4
    assert not lease.has(0)
    for rank in ranks:
        with rank.attach(lease.token) as mine:
            assert (mine.first, mine.chunks) == (0, 4)
            assert bytes(mine.view(3)) == stamp(hashes[3], len(mine.view(3)))
    lease.release()
    assert scheduler.ping()  # a release is not waited for; its session's order says that it is in
    assert not ranks[0].attach(lease.token), "the token ends with its lease"
    assert not ranks[0].attach(os.urandom(16))


def test_a_lease_that_does_not_read_ends_by_time(
    connect: Callable[..., kvd_client.Client],
) -> None:
    """A forgotten hold frees its chunks after its time, and its token is void."""
    client = connect()
    hashes = client.chunk_hashes(tokens(2))
    store(client, hashes)
    lease = client.acquire(hashes, read=False, ttl_s=0.05)
    assert lease
    deadline = time.monotonic() + 15  # and not the half minute of a usual lease
    while True:
        with client.attach(lease.token) as attached:
            if not attached:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "2"},
        {"dtype": "bfloat16"},
        {"adapter": "digest"},
        {"rope": "factor 2"},
        {"salt": b"0123456789abcdef"},
        {"extra": "int8 weights"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_same_tokens_under_another_identity_never_hit(
    connect: Callable[..., kvd_client.Client], change: dict[str, object]
) -> None:
    """Any field of the namespace keeps two caches apart, even for hashes given by hand."""
    one, other = connect(), connect(namespace=namespace(**change))
    hashes = one.chunk_hashes(tokens(3))
    store(one, hashes)
    assert other.lookup(other.chunk_hashes(tokens(3))).chunks == 0
    assert other.lookup(hashes).chunks == 0
    assert not other.acquire(hashes)


def test_another_layout_never_hits(connect: Callable[..., kvd_client.Client]) -> None:
    """The same namespace in another layout is another cache."""
    one, other = connect(), connect(layout=small_layout(128 << 10))
    hashes = one.chunk_hashes(tokens(3))
    store(one, hashes)
    assert other.lookup(hashes).chunks == 0


def test_a_second_model_gets_its_place_in_a_full_tier(
    connect: Callable[..., kvd_client.Client],
) -> None:
    """Objects of another size take over whole slabs from what was used longest ago."""
    one, other = connect(), connect(layout=small_layout(300 << 10), namespace=namespace(model="b"))
    for seed in range(1, 12):
        store(one, one.chunk_hashes(tokens(100, seed=seed)))
    hashes = other.chunk_hashes(tokens(30))
    assert store(other, hashes) == 30
    assert load(other, hashes) == 30
    assert load(one, one.chunk_hashes(tokens(100, seed=11))) == 100


def test_tickets_work_with_an_engines_own_loop(
    connect: Callable[..., kvd_client.Client],
) -> None:
    """A request begun is answered by `poll` once the client's fd is readable."""
    client = connect()
    hashes = client.chunk_hashes(tokens(2))
    store(client, hashes)
    ticket = client.begin_lookup(hashes)
    done = []
    while ticket not in done:
        assert select.select([client.fileno()], [], [], PATIENCE_S)[0]
        done += client.poll()
    assert ticket.result.chunks == 2


def test_a_view_cannot_be_used_after_its_lease(connect: Callable[..., kvd_client.Client]) -> None:
    """Views end with their lease, and a lease that has ended says so."""
    client = connect()
    hashes = client.chunk_hashes(tokens(1))
    store(client, hashes)
    lease = client.acquire(hashes)
    view = lease.view(0)
    with pytest.raises(TypeError):
        view[0] = 1
    lease.release()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with pytest.raises(kvd_client.HandleClosed):
        lease.view(0)


def test_sigterm_drains_and_exits_zero(
    daemon: DaemonProcess, connect: Callable[..., kvd_client.Client]
) -> None:
    """A told daemon lets a reader finish, exits 0 and leaves nothing behind."""
    client = connect()
    hashes = client.chunk_hashes(tokens(2))
    store(client, hashes)
    lease = client.acquire(hashes)
    daemon.process.terminate()
    deadline = time.monotonic() + 15
    while True:
        late = client.reserve(client.chunk_hashes(tokens(1, seed=5)))
        if [slot.status for slot in late.slots] == [Status.DRAINING]:
            break
        client.abort(late)
        assert time.monotonic() < deadline, "it takes no notice"
        time.sleep(0.02)
    select.select([], [], [], 0.3)
    assert daemon.process.poll() is None, "it waits for the reader"
    assert bytes(lease.view(1)) == stamp(hashes[1], len(lease.view(1)))
    lease.release()
    assert daemon.process.wait(15) == 0
    assert not os.path.exists(daemon.socket)  # noqa: PTH110
    assert client.lookup(hashes).chunks == 0
