"""Real daemons: the order chunks come in, what a holder does not give, copies, full quarantine."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from bench._fleet import wait_for
from kvd.peer.messages import CHUNKS_MAX
from tests.daemon_fixture import CHUNK_TOKENS, load, store
from tests.peer.conftest import PEER
from tests.peer.test_fleet import (
    CHUNKS,
    MANY,
    Loading,
    at_rest,
    fetched,
    known,
    loads,
    page,
    prefix,
)

if TYPE_CHECKING:
    from bench._fleet import Fleet
    from tests.peer.test_fleet import Connect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Acquiring(Loading):
    """An acquire under way: what it gave is not looked at."""

    def run(self) -> None:
        """Acquire."""
        begun = time.monotonic()
        with self.client.acquire(self.hashes) as lease:
            self.chunks = lease.chunks
        self.seconds = time.monotonic() - begun


def test_the_first_chunks_are_usable_before_the_last_have_come(
    fleet: Fleet, client: Connect, seed: int
) -> None:
    """A request for the head of a prefix that is on its way has it while the rest cannot come.

    As many chunks as one ask is for: what is asked for by itself comes by itself anyway.
    """
    a, b, other = (client(fleet.hosts[name]) for name in "abb")
    source = fleet.hosts["a"].stat()["peer"]["source_pid"]
    for attempt in range(6):
        hashes = prefix(a, seed + attempt, CHUNKS_MAX)
        assert store(a, hashes) == CHUNKS_MAX
        known(b, hashes, CHUNKS_MAX)
        os.kill(source, signal.SIGSTOP)
        try:
            whole = Acquiring(b, hashes)
            time.sleep(0.3)  # it has asked: the head alone is asked for by nobody
            head = Loading(other, hashes[:1])
            time.sleep(0.3)
            os.kill(source, signal.SIGCONT)
            assert head.result() == 1
            os.kill(source, signal.SIGSTOP)
            whole.join(0.5)
            early = whole.is_alive()
            assert load(other, hashes[:1]) == 1, "again, and at once"
        finally:
            os.kill(source, signal.SIGCONT)
        assert whole.result() == CHUNKS_MAX
        assert load(b, hashes) == CHUNKS_MAX
        if early:
            return
    pytest.fail("the head came when all of it had come, each time")


def test_a_holder_gives_nothing_that_its_own_gate_would_not_load(
    fleet: Fleet, client: Connect, seed: int
) -> None:
    """A copy on NVMe that the holder would rather compute is not brought up for another."""
    nvme = {"bytes": "256MiB", "region_bytes": "16MiB", "form": "raw"}
    holder = fleet.host("d", host_bytes=256 << 20, tables={"nvme": nvme})
    try:
        holder.start()
        d, b = client(holder), client(fleet.hosts["b"])
        hashes, other = prefix(d, seed), prefix(d, seed + 1)
        assert store(d, hashes) == store(d, other) == CHUNKS
        d.close()
        assert holder.process is not None
        holder.process.terminate()
        holder.process.wait(30)
        holder.start()
        fleet.hosts["b"].wait_for_peer("d")
        d = client(holder)
        assert load(d, other) == CHUNKS  # it knows how fast its disk is
        before = page(holder)["counters"]["promotions"]
        d.report_prefill(10**9 * CHUNK_TOKENS, 1.0)  # it computes faster than any disk reads
        known(b, hashes, CHUNKS)
        assert load(b, hashes) == 0
        assert page(holder)["counters"]["promotions"] == before
        for _ in range(100):
            d.report_prefill(CHUNK_TOKENS, 10.0)
        known(b, hashes, CHUNKS)
        loads(b, hashes, CHUNKS)
        wait_for(lambda: holder.stat()["counters"]["promotions"] > before, "promoted", 30)
    finally:
        fleet.drop(holder)


def test_a_copy_of_what_two_domains_hold_is_spare(fleet: Fleet, client: Connect, seed: int) -> None:
    """The second host keeps what it fetched like its own; the third knows that it need not."""
    a, b, c = (client(fleet.hosts[name]) for name in "abc")
    hashes = prefix(a, seed)
    assert store(a, hashes) == CHUNKS

    def spare(name: str) -> int:
        return sum(peer["spare"] for peer in page(fleet.hosts[name])["peer"]["peers"])

    known(b, hashes, CHUNKS)
    before = spare("b"), spare("c")
    loads(b, hashes, CHUNKS)
    told = "b has told the directory"
    wait_for(lambda: not page(fleet.hosts["b"])["directory"]["waiting"], told, 30)
    time.sleep(2.5)  # what C knows of who holds them is believed for 2 s
    known(c, hashes, CHUNKS)
    loads(c, hashes, CHUNKS)
    wait_for(lambda: spare("c") == before[1] + CHUNKS, "spare at C", 30)
    assert spare("b") == before[0]
    assert fetched(fleet.hosts["b"], "a") >= CHUNKS


def test_a_full_quarantine_is_fenced_at_once(fleet: Fleet, client: Connect, seed: int) -> None:
    """Reads that hang fill the budget: the mover is killed for that, and slots come back."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    hashes = prefix(a, seed, MANY)
    assert store(a, hashes) == MANY
    known(b, hashes, MANY)
    loads(b, hashes, MANY)  # A has summed them
    asker = fleet.host("d", host_bytes=256 << 20, peer={**PEER, "quarantine_bytes": 4 << 20})
    source = fleet.hosts["a"].stat()["peer"]["source_pid"]
    try:
        asker.start()
        wait_for(lambda: asker.peer("a").get("mover") == "up", "mover", 30)
        fleet.hosts["b"].kill()
        d = client(asker)
        known(d, hashes, MANY)
        before = asker.peer("a")
        os.kill(source, signal.SIGSTOP)
        assert Loading(d, hashes).result() < MANY
        wait_for(lambda: asker.peer("a")["fenced"], "fence", 60)
        assert b"quarantine=full" in asker.log.read_bytes()
        at_rest(asker)
        wait_for(lambda: asker.peer("a")["mover_pid"] != before["mover_pid"], "another mover", 30)
        os.kill(source, signal.SIGCONT)
        wait_for(lambda: load(d, hashes) == MANY, "it works again", 60)
    finally:
        os.kill(source, signal.SIGCONT)
        fleet.drop(asker)
