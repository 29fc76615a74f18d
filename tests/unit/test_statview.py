"""What `kvd stat` shows of a page."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import statpage, statview
from kvd.statpage import Snapshot, StatPage
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
STATS: dict[str, Any] = {
    "version": "0.1.0",
    "epoch": 17,
    "uptime_s": 7384.0,
    "state": "serving",
    "socket": "/run/kvd/kvd.sock",
    "loop_lag_ms": 0.3,
    "sessions": [
        {
            "id": 3,
            "tenant": "default",
            "name": "engine",
            "pid": 4711,
            "label": "model@main",
            "rank": 1,
            "leases": 2,
            "filling": 0,
        }
    ],
    "session_count": 1,
    "orphans": 0,
    "host": {
        "capacity_bytes": 1024 * MIB,
        "ready_bytes": 1024 * MIB,
        "slab_bytes": 64 * MIB,
        "slabs_blank": 12,
        "slabs_held": 4,
        "used_bytes": 256 * MIB,
        "published_bytes": 200 * MIB,
        "reserved_bytes": 50 * MIB,
        "quarantined_bytes": 6 * MIB,
        "pinned_bytes": 10 * MIB,
        "locked_bytes": 1024 * MIB,
        "huge_bytes": 0,
        "notes": ["no huge pages: set vm.nr_hugepages"],
    },
    "tenants": [
        {
            "name": "default",
            "share_bytes": 1024 * MIB,
            "held_bytes": 256 * MIB,
            "published_bytes": 200 * MIB,
            "pinned_bytes": 10 * MIB,
            "filling_bytes": 56 * MIB,
            "sessions": 1,
        }
    ],
    "spaces": [
        {
            "tenant": "default",
            "label": "model@main",
            "layout": "32x8x128",
            "chunks": 99,
            "sessions": 1,
            "prefill_tokens_s": 5120,
            "gate": "2048 tokens: compute 400.0 ms, load 31.5 ms",
        }
    ],
    "nvme": None,
    "chunks": 99,
    "leases": 2,
    "leases_overdue": 0,
    "counters": {
        "lookups": 1234,
        "lookup_chunks_asked": 8000,
        "lookup_chunks_found": 7000,
        "lookup_chunks_worth": 6500,
        "evictions": {"clean": 12, "quota": 3},
        "bytes_evicted": 30 * MIB,
        "messages": 56789,
    },
}


NVME: dict[str, Any] = {
    "state": "open",
    "capacity_bytes": 2048 * MIB,
    "used_bytes": 512 * MIB,
    "live_bytes": 500 * MIB,
    "garbage_bytes": 12 * MIB,
    "live_count": 777,
    "regions_held": 2,
    "regions_free": 6,
    "direct": True,
    "reads_queued": 3,
    "writes_queued": 2,
    "index_queued": 1,
    "read_bytes_per_s": 900 * MIB,
    "write_bytes_per_s": 40 * MIB,
    "index_commits": 5,
    "index_jobs": 9,
    "counters": {"writes": 777},
    "dirty_bytes": 7 * MIB,
    "demoting": True,
    "form": "fp8",
    "note": "",
}
MOVES: dict[str, Any] = {
    "demotions": 800,
    "demotions_failed": 4,
    "chunks_not_admitted": 2,
    "bytes_demoted": 1024 * MIB,
    "bytes_written": 500 * MIB,
    "bytes_rewritten": 100 * MIB,
    "promotions": 90,
    "promotions_failed": 6,
    "bytes_promoted": 800 * MIB,
    "bytes_read": 400 * MIB,
    "cold_drops": 8,
    "bytes_cold_dropped": 9 * MIB,
}


def with_nvme(**changes: Any) -> dict[str, Any]:
    """The page of a daemon that has an NVMe tier."""
    counters = {**STATS["counters"], **MOVES}
    return {**STATS, "counters": counters, "nvme": {**NVME, **changes}}


def snapshot(stats: dict[str, Any], **changes: Any) -> Snapshot:
    """A fresh page of a daemon in good health, but for `changes`."""
    plain = {"stats": stats, "age_s": 0.2, "pid": 99, "alive": True, "stopped": False}
    return Snapshot(**{**plain, **changes})


def read(text: str) -> str:
    """A screen as one line with single spaces: how wide things are is another matter."""
    return " ".join(text.split())


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[str]:
    """A socket path whose page is free afterwards."""
    path = str(tmp_path / "kvd.sock")
    yield path
    assert not Path(f"/dev/shm{stat_page_name(path)}").exists()


def test_shows_what_matters() -> None:
    """State, fill, hit rate, evictions with reasons, tenants, sessions and notes are there."""
    text = statview.render(snapshot(STATS))
    for part in (
        "kvd 0.1.0 serving pid 99 up 2 h 3 min page 0.2 s old /run/kvd/kvd.sock",
        "[#####...............] 25 %, 256 MiB of 1.00 GiB; 4 of 16 slabs of 64.0 MiB held",
        "1,234; chunks found 7,000 (87.5 %) of 8,000",
        "30.0 MiB in objects; 12 clean (still on NVMe), 3 quota",
        "note: no huge pages: set vm.nr_hugepages",
        "default 1 1.00 GiB",
        "4711",
        "32x8x128",
    ):
        assert part in read(text)
    assert 20 <= text.count("\n") + 1 <= 40
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "so far" not in text.split("sessions")[0]


def test_shows_the_nvme_tier() -> None:
    """Fill, form, queues, rates, moves, what they cost the flash, and the gate are there."""
    text = statview.render(snapshot(with_nvme()))
    for part in (
        "nvme [#####...............] 25 %, 512 MiB of 2.00 GiB; open, form fp8, direct I/O",
        "live 500 MiB in 777 chunks, garbage 12.0 MiB; still to write 7.00 MiB",
        "queued 3 reads, 2 writes, 1 commits; reading 900 MiB/s, writing 40.0 MiB/s",
        "; 6,500 worth loading",
        "demoted 1.00 GiB in 800 chunks, as 500 MiB on disk; 4 failed, 2 not admitted",
        "promoted 800 MiB in 90 chunks, from 400 MiB on disk; 6 failed",
        "wear 1.50 bytes written for each one read; 100 MiB rewritten, 9.00 MiB given up",
        "model@main 32x8x128 default 99 1 5,120 tok/s",
        "model@main 2048 tokens: compute 400.0 ms, load 31.5 ms",
    ):
        assert part in read(text)
    assert "note: NVMe" not in text
    assert text.count("\n") + 1 <= 55
    assert max(map(len, text.splitlines())) <= 80
    plain = statview.render(snapshot(STATS))
    for word in ("nvme", "demoted", "promoted", "worth", "LOAD OR COMPUTE"):  # no tier, no line
        assert word not in plain


def test_shows_who_got_what_from_where() -> None:
    """Tokens and bytes by tier; shares of what was asked for, a tenant and a namespace each."""
    usage = {
        "asked_tokens": 20_000_000,
        "hit_tokens": {"gpu": 0, "host": 10_000_000, "nvme": 5_000_000, "peer": 1_000_000},
        "hit_bytes": {"gpu": 0, "host": 50 * MIB, "nvme": 20 * MIB, "peer": 4 * MIB},
        "stored_bytes": 3 * MIB,
    }
    stats = with_nvme()
    stats["tenants"] = [{**stats["tenants"][0], **usage}]
    stats["spaces"] = [{**stats["spaces"][0], **usage}]
    text = statview.render(snapshot(stats))
    for part in (
        "host ready 256 MiB 768 MiB 10.0 MiB 6.00 MiB 10 M 50.0 MiB",
        "nvme open 512 MiB 1.50 GiB - - 5,000,000 20.0 MiB",
        "TENANT ASKED HIT HOST NVME LOADED STORED",
        "default 20 M 80.0 % 50.0 % 25.0 % 74.0 MiB 3.00 MiB",
        "model@main 20 M 80.0 % 50.0 % 25.0 % 74.0 MiB 3.00 MiB",
    ):
        assert part in read(text)
    stats["peer"] = {"source": "up", "quarantined_bytes": MIB, "peers": []}
    text = statview.render(snapshot(stats))
    assert "peer up - - - 1.00 MiB 1,000,000 4.00 MiB" in read(text)
    assert "default 20 M 80.0 % 50.0 % 25.0 % 5.0 % 74.0 MiB 3.00 MiB" in read(text)


def test_eighty_columns_hold_long_names() -> None:
    """Names as long as clients may choose are cut; a wider terminal shows more of them."""
    stats = with_nvme(state="closed: No space left on device")
    long = "meta-llama/Llama-3.3-70B-Instruct@rev-6f6073b423013f6a"
    stats["tenants"] = [{**stats["tenants"][0], "name": long, "asked_tokens": 10**15}]
    stats["spaces"] = [{**stats["spaces"][0], "label": long, "asked_tokens": 10**15}]
    stats["sessions"] = [{**stats["sessions"][0], "label": long, "name": long, "tenant": long}]
    stats["host"] = {**stats["host"], "notes": [long * 5]}
    lines = statview.render(snapshot(stats)).splitlines()
    assert max(map(len, lines)) <= 80
    wide = statview.render(snapshot(stats), columns=140)
    assert 80 < max(map(len, wide.splitlines())) <= 140


def test_shows_the_gpu_tier() -> None:
    """How full it is, what it is doing, and why it failed; nothing without one."""
    gpu = {
        "state": "failed",
        "note": "the device went away",
        "capacity_bytes": 4 << 30,
        "used_bytes": 1 << 30,
        "objects": 32,
        "lost": 2,
        "bytes_up": 1 << 20,
        "bytes_down": 1 << 30,
    }
    text = statview.render(snapshot({**STATS, "gpu": gpu}))
    for part in (
        "25 %, 1.00 GiB of 4.00 GiB; failed, 32 objects",
        "1.00 GiB down, 1.00 MiB up, 2 stores lost",
        "the device went away",
    ):
        assert part in text
    assert "stores lost" not in statview.render(snapshot({**STATS, "gpu": None}))


def test_says_when_the_nvme_tier_is_not_well() -> None:
    """A slow or closed tier, or one that cannot write its form, is noted above the figures."""
    for state in ("slow", "closed: No space left on device"):
        text = statview.render(snapshot(with_nvme(state=state)))
        assert f"note: NVMe takes nothing in: it is {state}" in text.split("[#")[0]
    text = statview.render(snapshot(with_nvme(note="form fp8 needs numba: writing raw")))
    assert "note: form fp8 needs numba: writing raw" in text.split("[#")[0]
    assert "through the page cache" in statview.render(snapshot(with_nvme(direct=False)))


def test_filling_is_one_thing() -> None:
    """The host's "filling" and a tenant's are the same sum: reserved and quarantined."""
    text = statview.render(snapshot(STATS))
    assert "filling 56.0 MiB (6.00 MiB of it quarantined)" in text
    line = next(line for line in text.splitlines() if line.startswith("default"))
    assert line.endswith("56.0 MiB")


def test_colours_change_nothing_else() -> None:
    """Without its colours the coloured text is the plain one."""
    coloured = statview.render(snapshot(STATS), colours=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == statview.render(snapshot(STATS))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"age_s": 2.5}, "daemon does not answer: page is 2 s old; process 99 is alive"),
        ({"age_s": 90.0, "stopped": True}, "daemon is stopped: page is 1 min 30 s old"),
        ({"age_s": 0.1, "alive": False}, "no daemon: process 99 is gone"),
    ],
)
def test_says_when_the_daemon_is_not_well(changes: dict[str, Any], expected: str) -> None:
    """An old page, a stopped and a dead daemon are told apart, above the figures."""
    assert expected in statview.render(snapshot(STATS, **changes)).splitlines()[1]
    assert "daemon" not in statview.render(snapshot(STATS, age_s=1.9)).split("[#")[0]


def test_tier_still_getting_ready() -> None:
    """While memory is being made ready, it says how much is."""
    host = {**STATS["host"], "ready_bytes": 512 * MIB}
    assert "512 MiB ready so far" in statview.render(snapshot({**STATS, "host": host}))


def test_long_tables_are_cut() -> None:
    """Many sessions are shown as a few and a count."""
    text = statview.render(snapshot({**STATS, "sessions": STATS["sessions"] * 20}))
    assert text.count("4711") == 8
    assert "and 12 more; --json shows them" in text


def test_a_client_cannot_steer_the_terminal() -> None:
    """Control characters in a client's name are not printed."""
    session = {**STATS["sessions"][0], "name": "\x1b[2Jx\ny", "label": "\x9b1m"}
    text = statview.render(snapshot({**STATS, "sessions": [session]}))
    assert "?[2Jx?y" in text
    assert not {"\x1b", "\x9b"}.intersection(text)


@pytest.mark.parametrize("odd", [-1e300, -1, 1e300, float("inf"), float("nan")])
def test_odd_numbers(odd: float) -> None:
    """Numbers that no daemon means are shown as 0, and cost neither time nor memory."""
    host = dict.fromkeys(STATS["host"], odd)
    text = statview.render(snapshot({"host": host, "uptime_s": odd, "loop_lag_ms": odd}))
    assert "[....................] 0 %, 0 B of 0 B" in text


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 1 << 63)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.data())
def test_any_field_may_be_missing_or_odd(data: st.DataObject) -> None:
    """A page of an older or newer daemon, with fields gone or of another type, is still shown."""
    stats = json.loads(json.dumps(with_nvme()))
    places = [stats, stats["host"], stats["counters"], stats["sessions"][0], stats["tenants"][0]]
    places += [stats["nvme"], stats["spaces"][0]]
    for place in places:
        for key in data.draw(st.lists(st.sampled_from(sorted(place)), max_size=3, unique=True)):
            if data.draw(st.booleans()):
                del place[key]
            else:
                place[key] = data.draw(_ANY)
    text = statview.render(snapshot(stats))
    assert "lookups" in text
    assert all(char.isprintable() or char == "\n" for char in text)
    assert statview.render(snapshot({}))


# ------------------------------------------------------------------------------------- exit codes


def test_exit_codes(
    socket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 fresh, 1 no daemon, 3 silent; the text for people is on the right stream."""
    assert statview.run(socket, as_json=False, watch_s=None) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvd: {socket}: no daemon here")
    page = StatPage.create(stat_page_name(socket))
    page.write(STATS, time.monotonic_ns() + 60 * 10**9)
    assert statview.run(socket, as_json=False, watch_s=None) == 0
    assert "(87.5 %)" in capsys.readouterr().out
    page.write(STATS, time.monotonic_ns() - 9 * 10**9)
    assert statview.run(socket, as_json=False, watch_s=None) == 3
    assert "does not answer" in capsys.readouterr().out
    mapped = statpage._map
    monkeypatch.setattr(statpage, "_map", lambda name: (mapped(name)[0], False))  # not locked
    assert statview.run(socket, as_json=False, watch_s=None) == 1
    assert "is gone" in capsys.readouterr().out
    page.close()


def test_json_is_complete(socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--json is one line with everything the daemon wrote, and about the page itself."""
    page = StatPage.create(stat_page_name(socket))
    page.write(STATS, time.monotonic_ns() + 60 * 10**9)
    assert statview.run(socket, as_json=True, watch_s=None) == 0
    out = capsys.readouterr().out
    shown = json.loads(out)
    about = shown.pop("page")
    assert shown == STATS
    assert about["pid"] == os.getpid()
    assert about["alive"] is True
    assert 0 <= about["age_s"] < 5
    assert out.count("\n") == 1
    page.close()


def test_watch_survives_a_restart(
    socket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--watch goes on without a daemon, finds the next one, and ends quietly with Ctrl-C."""
    pages: list[StatPage] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)  # a thread that another test has left
            return
        assert seconds == 0.5
        if not pages:
            pages.append(StatPage.create(stat_page_name(socket)))
            pages[0].write(STATS, time.monotonic_ns())
            return
        pages[0].close()
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    assert statview.run(socket, as_json=False, watch_s=0.5) == 0
    out, err = capsys.readouterr()
    assert "no daemon here" in err
    assert "chunks found" in out
