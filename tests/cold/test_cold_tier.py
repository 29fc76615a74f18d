"""The tier below host memory, through a real daemon on a real file system."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvd import statpage
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import join, load, namespace, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import kvd_client
    from bench._daemon import DaemonProcess

    MakeDaemon = Callable[..., DaemonProcess]

LIMIT_S = 30.0
CONFIG = """
[nvme]
slow_s = 30
bytes = "{size}"
region_bytes = "4MiB"
form = "{form}"
"""


def stats(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the daemon's statistics page."""
    return dict(statpage.read(stat_page_name(daemon.socket)).stats)


def wait_for(daemon: DaemonProcess, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the statistics say so, on a page that is written from now on."""
    since, deadline = time.monotonic(), time.monotonic() + LIMIT_S
    while True:
        page = statpage.read(stat_page_name(daemon.socket))
        if page.age_s < time.monotonic() - since and holds(dict(page.stats)):
            return
        assert time.monotonic() < deadline, page
        time.sleep(0.05)


def durable(stats: dict[str, Any]) -> bool:
    """Tell whether something was stored, and nothing is the only copy."""
    return bool(stats["counters"]["objects_published"] and not stats["nvme"]["dirty_bytes"])


@pytest.fixture
def cold_daemon(make_daemon: MakeDaemon, tmp_path: Path) -> Callable[..., DaemonProcess]:
    """Make daemons with a host tier of 16 MiB and an NVMe tier."""

    def make(form: str = "raw", size: str = "256MiB") -> DaemonProcess:
        config = tmp_path / "kvd.toml"
        config.write_text(CONFIG.format(form=form, size=size))
        daemon = make_daemon(host_bytes=16 << 20, arguments=["--config", str(config)])
        daemon.start()
        return daemon

    return make


@pytest.fixture
def connect_to() -> Iterator[Callable[..., kvd_client.Client]]:
    """Connect clients; all are closed at the end."""
    made: list[kvd_client.Client] = []

    def make(daemon: DaemonProcess, **fields: Any) -> kvd_client.Client:
        made.append(join(daemon, namespace=namespace(**fields)))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("form", ["raw", "lossless", "fp8"])
def test_what_left_host_memory_comes_back_exactly(
    cold_daemon: Callable[..., DaemonProcess],
    connect_to: Callable[..., kvd_client.Client],
    form: str,
) -> None:
    """Four times the host tier goes in, and all of it comes out byte for byte (exact namespace)."""
    daemon = cold_daemon(form)
    client = connect_to(daemon)
    chains = [client.chunk_hashes(tokens(64, seed=seed)) for seed in range(1, 17)]
    for chain in chains:
        first = 0
        deadline = time.monotonic() + LIMIT_S
        while first < 64:
            first += store(client, chain, first)
            assert time.monotonic() < deadline
    wait_for(daemon, durable)
    for chain in chains:
        assert client.lookup(chain).chunks == 64
        assert load(client, chain) == 64
    wait_for(daemon, lambda s: s["counters"]["promotions"] > 300)
    evictions = stats(daemon)["counters"]["evictions"]
    assert evictions.get("capacity", 0) == 0, "nothing was dropped"


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restart_keeps_what_is_durable(
    cold_daemon: Callable[..., DaemonProcess],
    connect_to: Callable[..., kvd_client.Client],
    how: str,
) -> None:
    """After a stop, or a kill once all was written down, a new daemon serves every byte."""
    daemon = cold_daemon()
    client = connect_to(daemon)
    hashes = client.chunk_hashes(tokens(100))
    assert store(client, hashes) == 100
    if how == "kill":
        wait_for(daemon, durable)
        daemon.kill()
    else:
        assert daemon.stop() == 0
    daemon.start()
    again = connect_to(daemon)
    assert again.lookup(hashes).chunks == 100, daemon.log.read_text()
    assert load(again, hashes) == 100


def test_fp8_is_for_namespaces_that_allow_it(
    cold_daemon: Callable[..., DaemonProcess], connect_to: Callable[..., kvd_client.Client]
) -> None:
    """A lossy namespace is told that it got a lossy copy; an exact one never gets one."""
    daemon = cold_daemon("fp8")
    lossy, exact = connect_to(daemon, lossy=True), connect_to(daemon)
    for client in (lossy, exact):
        hashes = client.chunk_hashes(tokens(20))
        store(client, hashes)
        with client.acquire(hashes) as lease:
            assert not lease.lossy, "it is still what was stored"
    wait_for(daemon, durable)
    daemon.stop()
    daemon.start()
    for fields, is_lossy in (({"lossy": True}, True), ({}, False)):
        client = connect_to(daemon, **fields)
        hashes = client.chunk_hashes(tokens(20))
        with client.acquire(hashes) as lease:
            assert lease.chunks == 20
            assert lease.lossy == is_lossy


def test_the_capacity_holds_and_the_newest_stay(
    cold_daemon: Callable[..., DaemonProcess], connect_to: Callable[..., kvd_client.Client]
) -> None:
    """Far more than both tiers goes in: the disk keeps within its size, the newest are there."""
    daemon = cold_daemon(size="32MiB")
    client = connect_to(daemon)
    chains = [client.chunk_hashes(tokens(64, seed=seed)) for seed in range(1, 31)]
    for chain in chains:  # 120 MiB
        first = 0
        deadline = time.monotonic() + LIMIT_S
        while first < 64:
            first += store(client, chain, first)
            assert time.monotonic() < deadline, stats(daemon)
    wait_for(daemon, durable)
    page = stats(daemon)
    assert page["nvme"]["used_bytes"] <= 32 << 20
    assert page["nvme"]["counters"]["reclaims"] > 0
    assert load(client, chains[-1]) == 64
    shed = page["counters"]["evictions"].get("capacity", 0)  # a reclaim took over two seconds
    assert shed or load(client, chains[-4]) == 64
    assert client.lookup(chains[0]).chunks == 0


def test_a_slow_acquire_does_not_stop_the_rest(
    cold_daemon: Callable[..., DaemonProcess], connect_to: Callable[..., kvd_client.Client]
) -> None:
    """An acquire that outlasts its wait is a miss; look-ups go on at once, and it is given back."""
    daemon = cold_daemon()
    client = connect_to(daemon)
    hashes = client.chunk_hashes(tokens(100))
    store(client, hashes)
    daemon.stop()
    daemon.start()
    client = connect_to(daemon)
    daemon.process.send_signal(signal.SIGSTOP)  # else it might be the quicker one
    try:
        assert not client.wait(client.begin_acquire(hashes), wait_s=0.0)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert client.ping()
    assert client.lookup(hashes).chunks == 100
    deadline = time.monotonic() + LIMIT_S
    while (page := stats(daemon))["host"]["pinned_bytes"] or not page["counters"]["promotions"]:
        assert client.ping(), "the late lease is given back by whoever looks next"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_readers_wait_for_one_promotion(
    cold_daemon: Callable[..., DaemonProcess], connect_to: Callable[..., kvd_client.Client]
) -> None:
    """Many acquires of a cold prefix at once read it once; one that leaves takes only itself."""
    daemon = cold_daemon()
    client = connect_to(daemon)
    hashes = client.chunk_hashes(tokens(100))
    store(client, hashes)
    daemon.stop()
    daemon.start()
    readers = [connect_to(daemon) for _ in range(4)]
    tickets = [reader.begin_acquire(hashes) for reader in readers]
    readers[0].close()
    for reader, ticket in list(zip(readers, tickets, strict=True))[1:]:
        with reader.wait(ticket) as lease:
            assert lease.chunks == 100
    assert stats(daemon)["counters"]["promotions"] <= 100
    wait_for(daemon, lambda s: s["host"]["pinned_bytes"] == 0)
    assert stats(daemon)["counters"]["promotions"] == 100


def test_the_gate_says_what_is_worth_loading(
    cold_daemon: Callable[..., DaemonProcess], connect_to: Callable[..., kvd_client.Client]
) -> None:
    """An engine faster than the disk is offered nothing cold; a slow one all."""
    daemon = cold_daemon()
    client = connect_to(daemon)
    hashes = client.chunk_hashes(tokens(100))
    other = client.chunk_hashes(tokens(100, seed=5))
    store(client, hashes)
    store(client, other)
    daemon.stop()
    daemon.start()
    client = connect_to(daemon)
    assert load(client, other) == 100, "so that the disk's rate is known"
    assert client.lookup(hashes)[0::2] == (100, 100), "without a report all is worth loading"
    client.report_prefill(10_000_000, 0.001)
    assert client.ping()
    assert client.lookup(hashes)[0::2] == (100, 0)
    for _ in range(40):
        client.report_prefill(100, 10.0)
    assert client.ping()
    assert client.lookup(hashes)[0::2] == (100, 100)
    assert client.lookup(other).worth == 100, "what is in host memory always is"
    client.report_prefill(10_000_000, 0.001)
    assert client.ping()
    daemon.stop()
    daemon.start()
    client = connect_to(daemon)
    wait_for(daemon, lambda s: s["spaces"][0]["prefill_tokens_s"] > 1_000)


def test_a_stopped_reader_does_not_hold_up_the_mover(
    cold_daemon: Callable[..., DaemonProcess], connect_to: Callable[..., kvd_client.Client]
) -> None:
    """A daemon killed in the middle of demotions starts again and serves nothing wrong."""
    daemon = cold_daemon()
    client = connect_to(daemon)
    for seed in range(1, 6):
        store(client, client.chunk_hashes(tokens(50, seed=seed)))
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
        daemon.start()
        client = connect_to(daemon)
        for earlier in range(1, seed + 1):
            hashes = client.chunk_hashes(tokens(50, seed=earlier))
            assert load(client, hashes) <= 50


def test_second_touch_writes_what_was_asked_for_twice(
    make_daemon: MakeDaemon, tmp_path: Path, connect_to: Callable[..., kvd_client.Client]
) -> None:
    """A chain asked for once is never written; one asked for again is, and outlives a restart."""
    config = tmp_path / "kvd.toml"
    config.write_text(CONFIG.format(size="256MiB", form="raw") + 'admission = "second-touch"\n')
    daemon = make_daemon(host_bytes=16 << 20, arguments=["--config", str(config)])
    daemon.start()
    client = connect_to(daemon)
    once, twice = (client.chunk_hashes(tokens(20, seed=seed)) for seed in (1, 2))
    for hashes in (once, twice):
        client.lookup(hashes)
        assert store(client, hashes) == 20
    client.lookup(twice[:1])
    client.lookup(twice)
    assert load(client, twice) == 20
    daemon.stop()
    daemon.start()
    client = connect_to(daemon)
    assert client.lookup(twice).chunks == 20
    assert client.lookup(once).chunks == 0
