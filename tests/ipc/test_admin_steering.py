"""`kvd pin`, `unpin`, `evict` and `warm` against a real daemon with both tiers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd import cli, statpage
from kvd.admin import names
from kvd.admin.client import Admin, Denied
from kvd_client import wire
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import OBJECT_BYTES, join, load, namespace, store, tokens
from tests.ipc.test_admin import AS_ROOT, NOBODY, as_nobody, configured

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench._daemon import DaemonProcess

    MakeDaemon = Callable[..., DaemonProcess]

NVME = '[nvme]\nslow_s = 30\nbytes = "192MiB"\nregion_bytes = "4MiB"\nform = "raw"\n'


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    """Run a daemon with an NVMe tier."""
    return configured(make_daemon, NVME)


@pytest.fixture
def kvd(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run a command with --json; return its code and what it printed."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = cli.main([*arguments, "--socket", daemon.socket, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {"error": err}

    return run


def session(daemon: DaemonProcess, **fields: object) -> kvd_client.Client:
    """Connect."""
    return join(daemon, namespace=namespace(**fields))


def stats(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the page."""
    return statpage.read(stat_page_name(daemon.socket)).stats


def until_pinned(daemon: DaemonProcess, size_bytes: int) -> None:
    """Wait for a page that says so."""
    deadline = time.monotonic() + 15
    while (found := stats(daemon)["host"]["pinned_bytes"]) != size_bytes:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def until_clean(daemon: DaemonProcess) -> None:
    """Wait until all that was stored is on NVMe."""
    with Admin(daemon.socket) as admin:
        while any(row.nvme_chunks < row.chunks for row in names.spaces(admin)):
            time.sleep(0.02)


def test_memory_is_freed_and_warmed_again(daemon: DaemonProcess, kvd: Any) -> None:
    """Evict --tier host loses nothing; warm brings the same bytes back."""
    with session(daemon) as client:
        hashes = client.chunk_hashes(tokens(40))
        store(client, hashes)
        until_clean(daemon)
        code, done = kvd("evict", "model@1", "--tier", "host", "--dry-run")
        assert (code, done["chunks"]) == (0, 40)
        code, done = kvd("evict", "model@1", "--tier", "host")
        assert (code, done["chunks"], done["host_bytes"]) == (0, 40, 40 * OBJECT_BYTES)
        ((row,),) = [kvd("ls")[1]["spaces"]]
        assert (row["host_chunks"], row["nvme_chunks"]) == (0, 40)
        code, done = kvd("warm", "model@1", "--bytes", "1MiB")
        assert (code, done["chunks"], done["full"]) == (0, 16, True)
        code, done = kvd("warm", "model@1")
        assert (code, done["chunks"], done["failed"], done["full"]) == (0, 24, 0, False)
        ((row,),) = [kvd("ls")[1]["spaces"]]
        assert row["host_chunks"] == 40
        assert load(client, hashes) == 40


def test_what_was_evicted_is_gone_after_a_restart_too(daemon: DaemonProcess, kvd: Any) -> None:
    """The answer comes after the deletion is durable: a kill brings nothing back."""
    with session(daemon) as client, session(daemon, model="other") as other:
        store(client, client.chunk_hashes(tokens(30)))
        store(other, other.chunk_hashes(tokens(5)))
        until_clean(daemon)
        code, done = kvd("evict", "model@1")
        assert (code, done["chunks"], done["held"], done["undeleted"]) == (0, 30, 0, 0)
        assert done["nvme_bytes"] > 30 * OBJECT_BYTES
        assert client.lookup(client.chunk_hashes(tokens(30))).chunks == 0
    daemon.kill()
    daemon.start()
    ((row,),) = [kvd("ls")[1]["spaces"]]
    assert (row["label"], row["chunks"]) == ("other@1", 5)


def test_leased_chunks_stay_until_they_are_let_go(daemon: DaemonProcess, kvd: Any) -> None:
    """Held ones are counted and code 3 says so; --wait sees them go."""
    with session(daemon) as client:
        hashes = client.chunk_hashes(tokens(10))
        store(client, hashes)
        until_clean(daemon)  # what is on its way down is held as well
        lease = client.acquire(hashes[:4])
        code, done = kvd("evict", "model@1", "--wait", "0.1s")
        assert (code, done["chunks"], done["held"]) == (3, 6, 4)
        assert lease.view(3)[:32] == hashes[3]
        lease.release()
        code, done = kvd("evict", "model@1", "--wait", "10s")
        assert (code, done["chunks"], done["held"]) == (0, 4, 0)
        assert client.lookup(hashes).chunks == 0


def test_age_and_tenant_choose(daemon: DaemonProcess, kvd: Any) -> None:
    """What is younger stays; another tenant's name is told; nothing named is refused."""
    with session(daemon) as client:
        store(client, client.chunk_hashes(tokens(4)))
        until_clean(daemon)
        assert kvd("evict", "--older-than", "1h")[1]["chunks"] == 0
        assert (
            kvd("evict", "--tenant", "default", "--older-than", "0", "--dry-run")[1]["chunks"] == 4
        )
        code, said = kvd("evict", "--tenant", "nobody")
        assert (code, "there are: default" in said["error"]) == (2, True)
        code, said = kvd("evict")
        assert (code, "--dry-run" in said["error"]) == (2, True)


def test_a_pin_outlives_pressure_and_ends(daemon: DaemonProcess, kvd: Any) -> None:
    """What is pinned is still in memory after twice the tier was stored; unpinned, it goes."""
    with session(daemon) as client, session(daemon, model="flood") as flood:
        hashes = client.chunk_hashes(tokens(20))
        store(client, hashes)
        code, said = kvd("pin", "model@1", "--budget", "1MiB", "--for", "1h", "--note", "why")
        (pin,) = said["pins"]
        assert (code, pin["chunks"], pin["held_bytes"], pin["note"]) == (0, 16, 1 << 20, "why")
        assert 3500 < pin["left_s"] <= 3600
        for seed in range(14):
            store(flood, flood.chunk_hashes(tokens(100, seed=seed)))
            until_clean(daemon)
        tiers = [chunk["tiers"] for chunk in kvd("ls", "model@1")[1]["chunks"]]
        assert all("host" in each for each in tiers[:16])
        assert not all("host" in each for each in tiers)
        until_pinned(daemon, 1 << 20)
        assert kvd("pin")[1]["pins"][0]["pin"] == pin["pin"]
        assert kvd("unpin", str(pin["pin"]))[0] == 0
        assert kvd("pin")[1] == {"pins": []}
        until_pinned(daemon, 0)
        code, said = kvd("unpin", str(pin["pin"]))
        assert (code, "no pin" in said["error"]) == (2, True)


def test_a_chain_is_pinned_by_its_last_chunk(daemon: DaemonProcess, kvd: Any) -> None:
    """The chunk with all before it; a chain that is not in memory is refused, or warmed first."""
    with session(daemon) as client:
        hashes = client.chunk_hashes(tokens(12))
        store(client, hashes)
        until_clean(daemon)
        kvd("evict", "model@1", "--tier", "host")
        tip = hashes[7].hex()
        code, said = kvd("pin", "model@1", "--chunk", tip[:12])
        assert (code, "kvd warm" in said["error"]) == (2, True)
        code, said = kvd("pin", "model@1", "--chunk", tip[:12], "--warm")
        assert (code, said["pins"][0]["chunks"], said["pins"][0]["chunk"]) == (0, 8, tip)
        code, said = kvd("evict", "model@1")
        assert (code, said["chunks"], said["held"]) == (3, 4, 8)
        for word, text in (("zz", "hex digits"), ("00000000", "no chunk")):
            code, said = kvd("pin", "model@1", "--chunk", word)
            assert (code, text in said["error"]) == (2, True)


def test_a_killed_command_leaves_nothing_held(daemon: DaemonProcess) -> None:
    """A connection that ends in the middle of a step takes its pins along."""
    with session(daemon) as client:
        hashes = client.chunk_hashes(tokens(64))
        store(client, hashes)
        until_clean(daemon)
        for _ in range(5):
            with Admin(daemon.socket) as admin:
                (space,) = names.spaces(admin)
                for _ in admin.pages(wire.Evict, space.space, 0, 1, 0):
                    pass
                ask = wire.Warm(99, space.space, 1 << 40, 0)
                admin._socket.send(wire.encode(ask))
        until_pinned(daemon, 0)
        assert load(client, hashes) == 64


def test_steps_do_not_begin_in_the_middle(daemon: DaemonProcess) -> None:
    """A later step without its first, or of something else, is denied; the daemon goes on."""
    with session(daemon) as client, Admin(daemon.socket) as admin:
        store(client, client.chunk_hashes(tokens(2)))
        (space,) = names.spaces(admin)
        for ask in ((wire.Evict, space.space, 0, 0, 1, 7), (wire.Warm, space.space, 1, 7)):
            with pytest.raises(Denied, match="begin again"):
                admin.ask(*ask)
        with pytest.raises(Denied, match="is gone"):
            admin.ask(wire.Evict, bytes(32), 0, 0, 0, 0)
        with pytest.raises(Denied, match="no pin 5"):
            admin.ask(wire.Unpin, 5)


@AS_ROOT
def test_a_tenant_steers_its_own_only(make_daemon: MakeDaemon) -> None:
    """It can neither evict, warm nor pin another's, nor end or see an operator's pin of another."""
    tenants = f"[tenants.a]\nuids = [{os.geteuid()}]\n[tenants.b]\nuids = [{NOBODY}]\n"
    daemon = configured(make_daemon, NVME + tenants)
    with session(daemon) as client, Admin(daemon.socket) as admin:
        store(client, client.chunk_hashes(tokens(3)))
        (mine,) = names.spaces(admin)
        admin.ask(wire.Pin, mine.space, bytes(32), 0, 60, "")

        def theirs() -> list[object]:
            said: list[object] = []
            with Admin(daemon.socket) as other:
                for ask in (
                    (wire.Evict, mine.space, 0, 0, 0, 0),
                    (wire.Warm, mine.space, 1, 0),
                    (wire.Pin, mine.space, bytes(32), 0, 60, ""),
                    (wire.Unpin, 1),
                ):
                    try:
                        other.ask(*ask)
                        said.append("done")
                    except Denied:
                        said.append("denied")
                said.append(other.ask(wire.ListPins, 0)[1])
            return said

        assert as_nobody(theirs) == ["denied"] * 4 + [[]]
        assert client.lookup(client.chunk_hashes(tokens(3))).chunks == 3


def test_without_nvme_there_is_nothing_to_warm(
    make_daemon: MakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mend is named; evicting works all the same."""
    daemon = make_daemon("plain")
    daemon.start()
    with session(daemon) as client:
        store(client, client.chunk_hashes(tokens(2)))
        assert cli.main(["warm", "model@1", "--socket", daemon.socket]) == 2
        assert "[nvme] bytes" in capsys.readouterr().err
        assert cli.main(["evict", "model@1", "--socket", daemon.socket]) == 0
        assert "gave up 2 chunks" in capsys.readouterr().out


def test_a_trace_is_recorded_and_replayed(
    daemon: DaemonProcess, kvd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a client asks for meanwhile is in the file, once a request, and `replay` reads it."""
    trace = tmp_path / "trace.jsonl.gz"
    command = [sys.executable, "-m", "kvd", "record", str(trace), "--json"]
    command += ["--requests", "20", "--socket", daemon.socket]
    with (
        session(daemon) as client,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recording,
    ):
        while "recording" not in daemon.log.read_text():
            time.sleep(0.02)
        code, said = kvd("record", str(tmp_path / "second"), "--for", "1s")
        assert (code, "another recording" in said["error"]) == (2, True)
        for seed in range(20):
            hashes = client.chunk_hashes(tokens(3 + seed % 2, seed=seed % 5))
            client.lookup(hashes)
            client.acquire(hashes).release()
            store(client, hashes)
        out, _ = recording.communicate(timeout=40)
    told = json.loads(out)
    assert (told["requests"], told["blocks"], told["lost"]) == (20, 5 * 4, 0)
    code = cli.main(["replay", str(trace), "--block-tokens", "16", "--capacity", "100"])
    assert code == 0
    assert "lifetable" in capsys.readouterr().out
    code, said = kvd("record", str(tmp_path / "third"), "--for", "0.1s")
    assert (code, said["requests"]) == (0, 0)
    assert kvd("record", "/nowhere/x", "--for", "1s")[0] == 2
