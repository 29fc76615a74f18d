"""What engines were measured to compute comes back with the daemon."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING

import pytest

from kvd.catalog import Catalog
from kvd.metrics import Counters
from kvd.prefills import NAME, SPACES_MAX, Prefills
from kvd.quota import Quota
from kvd.tiers.slab import SlabPool
from kvd.types import Tenant
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.entry import Space

A = Tenant("a")
LAYOUT = Layout(8, 8, "float16", (Group("full", 1, 1, 8, 4096),))


class Host:
    """A catalog and what is remembered for it."""

    def __init__(self, directory: Path) -> None:
        self.catalog = Catalog(SlabPool(4096, {A: 1}), Quota({A: {}}), Counters())
        self.prefills = Prefills(str(directory), self.catalog)

    def enter(self, number: int = 0) -> Space:
        """Begin a session."""
        space = self.catalog.enter(A, number.to_bytes(32, "big"), "label", LAYOUT)
        self.prefills.recall(space)
        return space


def test_a_rate_comes_back_and_is_only_a_beginning(tmp_path: Path) -> None:
    """The next report moves it, and what a space knows already is not replaced."""
    host = Host(tmp_path)
    host.enter().gate.prefill.observe(3000, 2.0)
    host.enter(1)
    host.prefills.close()
    host = Host(tmp_path)
    assert not host.enter(1).gate.prefill.samples, "nobody had reported"
    gate = host.enter().gate
    assert gate.prefill.per_s == 1500
    gate.prefill.observe(500, 1.0)
    assert 500 < gate.prefill.per_s < 1500
    assert host.enter().gate.prefill.samples == 2


def test_it_is_stored_while_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is killed has lost a minute of it at most."""
    monkeypatch.setattr("kvd.prefills.SAVE_S", 0.01)
    host = Host(tmp_path)
    host.enter().gate.prefill.observe(3000, 2.0)

    async def run() -> None:
        task = asyncio.create_task(host.prefills.run())
        while not (tmp_path / NAME).exists():  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.005)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))
    assert Host(tmp_path).enter().gate.prefill.per_s == 1500


def test_a_small_change_is_not_worth_a_write(tmp_path: Path) -> None:
    """Every report differs a little."""
    host = Host(tmp_path)
    space = host.enter()
    space.gate.prefill.observe(1000, 1.0)
    host.prefills.close()
    before = (tmp_path / NAME).stat().st_mtime_ns
    space.gate.prefill.observe(1050, 1.0)
    host.prefills.close()
    assert (tmp_path / NAME).stat().st_mtime_ns == before


def test_a_disk_that_hangs_does_not_hold_the_end_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain's own bounds are for what matters."""
    go = threading.Event()
    monkeypatch.setattr("kvd.prefills.CLOSE_S", 0.05)
    monkeypatch.setattr("kvd.prefills.replace_json", lambda *_: go.wait(30))
    host = Host(tmp_path)
    host.enter().gate.prefill.observe(3000, 2.0)
    ending = threading.Thread(target=host.prefills.close)
    ending.start()
    ending.join(20)
    held_up = ending.is_alive()
    go.set()
    assert not held_up


def test_the_table_is_bounded(tmp_path: Path) -> None:
    """Of many, the latest are kept, and the file can be read whole."""
    host = Host(tmp_path)
    for number in range(SPACES_MAX + 3):
        host.enter(number).gate.prefill.observe(1000, 1.0)
    host.prefills.close()
    host = Host(tmp_path)
    assert not host.enter(2).gate.prefill.samples
    assert host.enter(3).gate.prefill.samples
    assert host.enter(SPACES_MAX + 2).gate.prefill.samples


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff" * 100,
        b"[" * 100_000,
        json.dumps({"version": 2, "tokens_s": {"a": 1.0}}).encode(),
        json.dumps({"version": 1, "tokens_s": [1.0]}).encode(),
        json.dumps({"version": 1, "tokens_s": {"a": "x", "b": -1, "c": 1e300}}).encode(),
    ],
)
def test_a_file_that_makes_no_sense_counts_as_none(tmp_path: Path, content: bytes) -> None:
    """The daemon starts, and stores what it learns in its place."""
    (tmp_path / NAME).write_bytes(content)
    host = Host(tmp_path)
    host.enter().gate.prefill.observe(3000, 2.0)
    host.prefills.close()
    assert Host(tmp_path).enter().gate.prefill.per_s == 1500


def test_a_directory_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    """The daemon goes on without."""
    (tmp_path / "file").touch()
    host = Host(tmp_path / "file")
    host.enter().gate.prefill.observe(3000, 2.0)
    host.prefills.close()
