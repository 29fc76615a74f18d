"""Real daemons on three hosts, real Redis, real links: what one stored another loads, or misses.

`load` of the fixtures checks every byte it reads, in every test here: never a wrong one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench._fleet import PEER_PORT, Fleet, Host, wait_for
from kvd.peer.membership import host_key, hosts_key, member, pack
from tests.daemon_fixture import CHUNK_TOKENS, load, namespace, stamp, store, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import kvd_client

    Connect = Callable[..., kvd_client.Client]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CHUNKS = 16
MANY = 160
"""Chunks of 1 MiB: enough that a transfer is under way when something happens to it."""
BOUND_S = 25.0
"""Acquires wait 10 s at most (`promote_s`); the rest is the machine's."""
SOON_S = 40.0


def known(client: kvd_client.Client, hashes: list[bytes], chunks: int) -> None:
    """Wait until a host hears from the directory that others have a prefix."""
    wait_for(lambda: client.lookup(hashes).chunks == chunks, f"{chunks} chunks elsewhere", SOON_S)


def loads(client: kvd_client.Client, hashes: list[bytes], chunks: int) -> None:
    """Load a prefix of others; a host that has just come back may be left alone for a while."""
    wait_for(lambda: load(client, hashes) == chunks, f"{chunks} chunks loaded", 45)


def page(host: Host) -> dict[str, Any]:
    """Return a page of statistics that was written after this was called."""
    called_s = time.monotonic()

    def fresh() -> dict[str, Any]:
        asked_s = time.monotonic()
        found = host.stat()
        return found if asked_s - found["page"]["age_s"] > called_s else {}

    return dict(wait_for(fresh, f"{host.name} writes its page", 30))


def at_rest(host: Host) -> None:
    """Wait until no slot of a host is reserved, filled or in quarantine."""

    def quiet() -> bool:
        found = page(host)
        return not found["host"]["reserved_bytes"] and not found["host"]["quarantined_bytes"]

    wait_for(quiet, f"{host.name} gives slots back", 30)


def prefix(client: kvd_client.Client, seed: int, chunks: int = CHUNKS) -> list[bytes]:
    """Return the hashes of a prefix."""
    return client.chunk_hashes(tokens(chunks, seed))


def fetched(host: Host, other: str) -> int:
    """Return how many chunks a host has fetched from another by now."""
    return count(host, other, "chunks")


def count(host: Host, other: str, name: str) -> int:
    """Return what a host has counted of another by now."""
    return sum(peer[name] for peer in page(host)["peer"]["peers"] if peer["host"] == other)


def hits(host: Host, since: dict[str, int] | None = None) -> dict[str, int]:
    """Return the tokens hit by tier, since an earlier answer."""
    (tenant,) = page(host)["tenants"]
    found: dict[str, int] = tenant["hit_tokens"]
    if since is None:
        return found
    return {tier: n - since[tier] for tier, n in found.items() if n != since[tier]}


class Loading(threading.Thread):
    """A load under way, in a thread: what it gave, and how long it took."""

    def __init__(self, client: kvd_client.Client, hashes: list[bytes]) -> None:
        """Begin."""
        super().__init__(daemon=True)
        self.client, self.hashes = client, hashes
        self.chunks = -1
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Load, and check every byte."""
        begun = time.monotonic()
        try:
            self.chunks = load(self.client, self.hashes)
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.error = error
        self.seconds = time.monotonic() - begun

    def result(self) -> int:
        """Wait for its end, within its bound; return the chunks it gave."""
        self.join(BOUND_S + 30)
        if self.error is not None:
            raise self.error
        assert self.chunks >= 0, "still waiting"
        assert self.seconds < BOUND_S
        return self.chunks


# -------------------------------------------------------------------- sharing


def test_a_prefix_stored_on_one_host_loads_on_another(
    fleet: Fleet, client: Connect, seed: int
) -> None:
    """B loads what A stored, byte for byte, once; C has it from B when A is dead."""
    a, b, c = (client(fleet.hosts[name]) for name in "abc")
    hashes = prefix(a, seed)
    assert store(a, hashes) == CHUNKS
    known(b, hashes, CHUNKS)
    at_rest(fleet.hosts["b"])
    before, had = fetched(fleet.hosts["b"], "a"), hits(fleet.hosts["b"])
    loads(b, hashes, CHUNKS)
    wait_for(lambda: fetched(fleet.hosts["b"], "a") == before + CHUNKS, "counted", SOON_S)
    first = hits(fleet.hosts["b"], had)
    assert first["peer"] == CHUNKS * CHUNK_TOKENS
    assert load(b, hashes) == CHUNKS
    time.sleep(0.5)
    both = {**first, "host": first.get("host", 0) + CHUNKS * CHUNK_TOKENS}
    assert hits(fleet.hosts["b"], had) == both, "the second time it lay here"
    assert fetched(fleet.hosts["b"], "a") == before + CHUNKS, "fetched twice"
    fleet.hosts["a"].kill()
    known(c, hashes, CHUNKS)
    loads(c, hashes, CHUNKS)
    wait_for(lambda: fetched(fleet.hosts["c"], "b") >= CHUNKS, "C has it from B", SOON_S)


def test_ls_says_who_holds_a_chunk(fleet: Fleet, client: Connect, seed: int) -> None:
    """`kvd ls --where` names both hosts that have a chunk, and says so of an unknown one."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    hashes = prefix(a, seed)
    store(a, hashes)
    known(b, hashes, CHUNKS)
    loads(b, hashes, CHUNKS)

    def where(text: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvd", "ls", "--where", text]
        command += ["--socket", fleet.hosts["b"].socket]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    text = hashes[3].hex()[:12]
    wait_for(lambda: "a, b" in where(text).stdout, "both are named", SOON_S)
    assert where(text).returncode == 0
    assert "ask on a host that holds it" in where("0123456789abcdef").stderr


def test_a_longer_prefix_of_two_hosts(fleet: Fleet, client: Connect, seed: int) -> None:
    """A prefix that is partly here and partly elsewhere loads as one."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    hashes = prefix(a, seed)
    assert store(a, hashes) == CHUNKS
    assert store(b, hashes[:5]) == 5
    known(b, hashes, CHUNKS)
    loads(b, hashes, CHUNKS)


def test_a_copy_on_nvme_is_brought_up_for_another(fleet: Fleet, client: Connect, seed: int) -> None:
    """What a restarted holder has on NVMe only, it promotes and gives."""
    nvme = {"bytes": "256MiB", "region_bytes": "16MiB", "form": "raw", "slow_s": 30}
    holder = fleet.host("d", host_bytes=256 << 20, tables={"nvme": nvme})
    try:
        holder.start()
        d, b = client(holder), client(fleet.hosts["b"])
        hashes = prefix(d, seed)
        assert store(d, hashes) == CHUNKS
        d.close()
        assert holder.process is not None
        holder.process.terminate()
        holder.process.wait(30)
        holder.start()
        fleet.hosts["b"].wait_for_peer("d")
        known(b, hashes, CHUNKS)
        loads(b, hashes, CHUNKS)
        wait_for(lambda: page(holder)["counters"]["promotions"] >= CHUNKS, "promoted", SOON_S)
        wait_for(lambda: fetched(fleet.hosts["b"], "d") == CHUNKS, "fetched", SOON_S)
    finally:
        fleet.drop(holder)


def test_two_who_ask_at_once_fetch_once(fleet: Fleet, client: Connect, seed: int) -> None:
    """A second request for chunks that are under way waits for them; nothing is fetched twice."""
    a = client(fleet.hosts["a"])
    clients = [client(fleet.hosts["b"]) for _ in range(4)]
    first = prefix(a, seed + 1)
    store(a, first)
    known(clients[0], first, CHUNKS)
    loads(clients[0], first, CHUNKS)  # A is asked at all
    hashes = prefix(a, seed, MANY)
    assert store(a, hashes) == MANY
    known(clients[0], hashes, MANY)
    at_rest(fleet.hosts["b"])
    before = fetched(fleet.hosts["b"], "a")
    for under_way in [Loading(one, hashes) for one in clients]:
        under_way.result()
    for one in clients:
        loads(one, hashes, MANY)  # a slow machine may need more than one acquire waits for
    wait_for(lambda: fetched(fleet.hosts["b"], "a") == before + MANY, "fetched once", SOON_S)


def test_another_namespace_is_another_world(fleet: Fleet, client: Connect, seed: int) -> None:
    """The same tokens of another model are a miss, whoever holds the first."""
    a = client(fleet.hosts["a"])
    other = client(fleet.hosts["b"], namespace=namespace(model="other"))
    assert store(a, prefix(a, seed)) == CHUNKS
    time.sleep(1)
    assert other.lookup(prefix(other, seed)).chunks == 0
    assert load(other, prefix(other, seed)) == 0


# -------------------------------------------------------------------- what breaks on the way


def break_transfer(
    fleet: Fleet, client: Connect, seed: int, do: Callable[[Host], Any]
) -> tuple[Loading, list[bytes], kvd_client.Client]:
    """Let B load from A, and do something to A while bytes are landing."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    for attempt in range(6):
        hashes = prefix(a, seed + attempt, MANY)
        assert store(a, hashes) >= MANY // 2
        known(b, hashes, a.lookup(hashes).chunks)
        loading = Loading(b, hashes)
        time.sleep(0.03 * (1 + attempt % 3))
        if loading.is_alive():
            do(fleet.hosts["a"])
            return loading, hashes, b
        loading.result()
    pytest.fail("every transfer was over before it could be broken")


def test_a_link_cut_in_the_middle(fleet: Fleet, client: Connect, seed: int) -> None:
    """The load ends in its bound with a right prefix; slots come back; mended, it goes on."""
    loading, hashes, b = break_transfer(fleet, client, seed, Host.cut)
    loading.result()
    at_rest(fleet.hosts["b"])
    fleet.hosts["a"].mend()
    fleet.hosts["b"].wait_for_peer("a")
    wait_for(lambda: load(b, hashes), "found again", SOON_S)


def test_a_holder_killed_in_the_middle(fleet: Fleet, client: Connect, seed: int) -> None:
    """What has landed is right, the rest is a miss, and every slot comes back."""
    loading, hashes, b = break_transfer(fleet, client, seed, Host.kill)
    loading.result()
    at_rest(fleet.hosts["b"])
    fleet.hosts["a"].start()
    load(b, hashes)


def test_a_holder_stopped_past_its_lease(fleet: Fleet, client: Connect, seed: int) -> None:
    """What a stopped host sends once it goes on lands in no memory that others use by then."""
    loading, _, b = break_transfer(fleet, client, seed, lambda a: a.signal(signal.SIGSTOP))
    loading.result()
    at_rest(fleet.hosts["b"])  # by the fence: the holder is still stopped
    mine = prefix(b, seed + 9, 300)
    stored = store(b, mine)
    time.sleep(PAST_LEASE_S)
    fleet.hosts["a"].signal(signal.SIGCONT)
    fleet.hosts["b"].wait_for_peer("a")
    time.sleep(1)
    assert load(b, mine) == stored, "what B stored meanwhile"


PAST_LEASE_S = 3.0
"""Above what the reads and the fence took, the rest of a lease of 5 s."""


def summed(fleet: Fleet, client: Connect, seed: int, chunks: int = CHUNKS) -> list[bytes]:
    """Have A hold a prefix whose objects it has summed, and B know nothing of it any more."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    hashes = prefix(a, seed, chunks)
    assert store(a, hashes) == chunks
    known(b, hashes, chunks)
    loads(b, hashes, chunks)
    b.close()
    fleet.hosts["b"].kill()
    fleet.hosts["b"].start()
    wait_for(lambda: fleet.hosts["b"].peer("a").get("mover") == "up", "mover")
    fleet.hosts["b"].wait_for_peer("a")
    return hashes


def test_a_source_that_hangs_is_fenced(fleet: Fleet, client: Connect, seed: int) -> None:
    """Only the holder's source hangs: reads are quarantined, the mover killed, slots freed.

    The holder notices as well, kills its source and starts another.
    """
    host = fleet.hosts["b"]
    hashes = summed(fleet, client, seed, MANY)
    source = page(fleet.hosts["a"])["peer"]["source_pid"]
    before = count(host, "a", "mover_pid")
    b = client(host)
    known(b, hashes, MANY)
    os.kill(source, signal.SIGSTOP)
    assert Loading(b, hashes).result() < MANY
    wait_for(lambda: count(host, "a", "fenced"), "fence", SOON_S)
    assert count(host, "a", "quarantined") > 0
    at_rest(host)
    wait_for(lambda: count(host, "a", "mover_pid") != before, "another mover", SOON_S)

    def another() -> bool:
        peer = fleet.hosts["a"].stat()["peer"]
        return bool(peer["source"] == "up" and peer["source_pid"] != source)

    wait_for(another, "another source", 60)
    wait_for(lambda: load(b, hashes) == MANY, "it works again", 60)


def test_a_holder_restarted_between_look_up_and_load(
    fleet: Fleet, client: Connect, seed: int
) -> None:
    """Its old entries mean nobody: the load is a miss, at once, and never somebody else's bytes."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    hashes = prefix(a, seed)
    store(a, hashes)
    known(b, hashes, CHUNKS)
    fleet.hosts["a"].kill()
    fleet.hosts["a"].start()
    begun = time.monotonic()
    assert load(b, hashes) == 0
    assert time.monotonic() - begun < BOUND_S
    at_rest(fleet.hosts["b"])


def test_without_redis_there_is_what_is_here(fleet: Fleet, client: Connect, seed: int) -> None:
    """Redis killed: look-ups answer from this host alone and at once; back, all is shared again."""
    a, b = client(fleet.hosts["a"]), client(fleet.hosts["b"])
    hashes, other = prefix(a, seed), prefix(a, seed + 1)
    store(a, hashes)
    store(b, other)
    known(b, hashes, CHUNKS)
    fleet.kill_redis()
    assert load(b, other) == CHUNKS
    wait_for(lambda: "shut" in fleet.hosts["b"].stat()["directory"]["state"], "noticed", SOON_S)
    took = []
    for _ in range(50):
        begun = time.monotonic()
        assert b.lookup(prefix(b, seed + 2)).chunks == 0
        took.append(time.monotonic() - begun)
    assert sorted(took)[25] < 0.1, "who waits for the directory waits 0.2 s"
    fleet.start_redis()
    known(b, hashes, CHUNKS)
    loads(b, hashes, CHUNKS)


def test_a_forged_host_is_not_asked(fleet: Fleet) -> None:
    """Whoever writes to the directory makes no host: one that cannot prove its name has no link."""
    there = fleet.hosts["c"]
    record = pack(member("test", "ghost", 7, f"{there.ip}:{PEER_PORT}", "rack"))
    redis = ["ip", "netns", "exec", f"{fleet.tag}-redis", "redis-cli", "-h", fleet.redis_ip]
    key = host_key("test", "ghost")
    try:
        subprocess.run([*redis, "-x", "SET", key], input=record, check=True, capture_output=True)
        names = [*redis, "SADD", hosts_key("test"), "ghost"]
        subprocess.run(names, check=True, capture_output=True)
        wait_for(
            lambda: "certificate" in fleet.hosts["b"].peer("ghost").get("state", ""),
            "refused",
            SOON_S,
        )
        fleet.hosts["b"].wait_for_peer("c")
    finally:
        subprocess.run([*redis, "DEL", key], check=True, capture_output=True)
    wait_for(lambda: not fleet.hosts["b"].peer("ghost"), "forgotten", SOON_S)


def test_corrupted_bytes_are_not_believed(fleet: Fleet, client: Connect, seed: int) -> None:
    """Bytes that change at the holder after they were summed are refused, counted, and a miss."""
    hashes = summed(fleet, client, seed)
    b = client(fleet.hosts["b"])
    spoil(fleet.hosts["a"], stamp(hashes[3], 64))
    before = count(fleet.hosts["b"], "a", "corrupt")
    known(b, hashes, CHUNKS)
    loads(b, hashes, 3)
    wait_for(lambda: count(fleet.hosts["b"], "a", "corrupt") > before, "counted", SOON_S)
    at_rest(fleet.hosts["b"])


def test_what_a_holder_finds_to_differ_is_not_offered(
    fleet: Fleet, client: Connect, seed: int
) -> None:
    """A host that verifies its memory sees before others do that an object has changed: it offers
    the rest, and they have nothing to hold against it.
    """
    b, c = (client(fleet.hosts[name]) for name in "bc")
    hashes = prefix(c, seed)
    assert store(c, hashes) == CHUNKS
    known(b, hashes, CHUNKS)
    wait_for(lambda: not page(fleet.hosts["c"])["host"]["verifying"], "all is summed", SOON_S)
    before = count(fleet.hosts["b"], "c", "corrupt")
    differed = page(fleet.hosts["c"])["host"]["differed"]
    spoil(fleet.hosts["c"], stamp(hashes[3], 64))
    loads(b, hashes, 3)
    found = page(fleet.hosts["c"])
    assert found["host"]["differed"] == differed + 1
    assert found["counters"]["evictions"]["damaged"] == differed + 1
    assert count(fleet.hosts["b"], "c", "corrupt") == before
    at_rest(fleet.hosts["b"])


def spoil(host: Host, content: bytes) -> None:
    """Change a byte of an object in a host's memory, behind its daemon's back."""
    assert host.process is not None
    pids = subprocess.run(
        ["pgrep", "-g", str(host.process.pid)], check=True, capture_output=True, text=True
    ).stdout.split()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if "kvd-slab" not in str(path.readlink()):
                    continue
            except FileNotFoundError:  # closed meanwhile
                continue
            with path.open("r+b", buffering=0) as slab:
                for offset in range(0, os.fstat(slab.fileno()).st_size, 1 << 20):
                    if os.pread(slab.fileno(), len(content), offset) == content:
                        os.pwrite(slab.fileno(), b"\x00", offset + 5000)
                        return
    pytest.fail("the object is nowhere")
