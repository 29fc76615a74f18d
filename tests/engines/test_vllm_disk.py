"""The vLLM engine goes on whatever happens to kvd's disk, and to all that kvd has."""

from __future__ import annotations

import errno
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.vllm_kit import (
    CHUNK,
    llama,
    needs_vllm,
    prompt,
    reset,
    settled,
    start_engine,
    stats,
)
from tests.faults.faulty_disk import FaultyDisk, faulty

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench._daemon import DaemonProcess

__all__ = ["faulty", "llama", "start_engine"]
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = """
[nvme]
directory = "{directory}"
bytes = "128MiB"
region_bytes = "2MiB"
form = "raw"
"""
CHUNKS = 10
LENGTH = CHUNKS * CHUNK + 1
BYTES = CHUNKS * CHUNK * 2048
"""Of a prompt's KV in kvd."""
ANSWER = 6


class Rig:
    """An engine, and a daemon with a disk, which is started anew under it."""

    def __init__(
        self,
        make_daemon: Callable[..., DaemonProcess],
        start_engine: Callable[..., Any],
        model: Path,
        folder: Path,
    ) -> None:
        config = folder / "kvd.toml"
        config.write_text(CONFIG.format(directory=folder / "nvme"))
        self.directory = folder / "nvme"
        self.daemon = make_daemon(host_bytes=16 << 20, arguments=["--config", str(config)])
        self.daemon.start()
        self.engine = start_engine(
            model,
            self.daemon.socket,
            dtype="float32",
            extra={"load_wait_s": 10},
            environment={"LD_PRELOAD": ""},  # the daemon's disk fails, not the engine's
        )
        self._made = 0

    def new(self) -> tuple[list[int], list[int]]:
        """Have a new prompt computed; return it with its answer."""
        self._made += 1
        ids = prompt(LENGTH, seed=self._made)
        before = settled(self.daemon)["host"]["published_bytes"]
        answer = self.engine.generate([ids], ANSWER)
        assert answer["cached"] == [0]
        settled(self.daemon, published=min(before + BYTES, 12 << 20))
        return ids, answer["tokens"][0]

    def ask(self, ids: list[int], want: list[int], cached: int | None = CHUNKS * CHUNK) -> int:
        """Have it answered anew: as before, and nothing is lost in engine or kvd."""
        reset(self.engine)
        answer = self.engine.generate([ids], ANSWER)
        assert answer["tokens"] == [want]
        assert answer["finish"] == ["length"]
        assert cached is None or answer["cached"] == [cached]
        settled(self.daemon)
        reset(self.engine)
        return int(answer["cached"][0])

    def wait(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the daemon's statistics say so."""
        until = time.monotonic() + 30
        while not holds(page := stats(self.daemon)):
            assert time.monotonic() < until, page
            time.sleep(0.05)
        return page

    def restart(self, *, wiped: bool = False) -> None:
        """Have a new daemon, whose memory is empty; the engine finds it by itself."""
        if wiped:
            self.daemon.kill()
            shutil.rmtree(self.directory)
            shutil.rmtree(self.daemon.directory / "state", ignore_errors=True)
        else:
            self.wait(lambda page: page["nvme"]["dirty_bytes"] == 0)
            assert self.daemon.stop(40) == 0
        self.daemon.start()
        until = time.monotonic() + 30
        while len(stats(self.daemon)["sessions"]) < 2:
            assert time.monotonic() < until, "the engine does not find the new daemon"
            self._made += 1  # a worker comes back when it has something to save
            self.engine.generate([prompt(CHUNK + 1, seed=self._made)], 1)
            time.sleep(0.2)
        settled(self.daemon)

    def damage(self) -> None:
        """Change a byte in each block of each record there is."""
        for path in (self.directory / "regions").iterdir():
            with path.open("r+b", buffering=0) as file:
                for at in range(4096, path.stat().st_size, 4096):
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 0x10]))


def test_the_engine_outlives_the_disk(
    make_daemon: Callable[..., DaemonProcess],
    llama: Path,
    tmp_path: Path,
    start_engine: Callable[..., Any],
    faulty: FaultyDisk,
) -> None:
    """Damaged, unreadable, full, failing, wiped: each answer is as it was when computed first."""
    rig = Rig(make_daemon, start_engine, llama, tmp_path)
    first, second = rig.new(), rig.new()
    rig.restart()
    rig.ask(*first)  # from the disk

    rig.restart()
    rig.damage()
    assert rig.ask(*second, cached=None) < CHUNKS * CHUNK
    rig.wait(lambda page: page["nvme"]["counters"]["corrupt"] > 0)
    rig.ask(*second)  # it was saved again, from where the damage begins

    third = rig.new()
    rig.restart()
    faulty.set(read=errno.EIO)
    rig.ask(*third, cached=0)
    rig.wait(lambda page: page["counters"]["promotions_failed"] > 0)
    faulty.set()
    rig.wait(lambda _: rig.ask(*third, cached=None) == CHUNKS * CHUNK)

    for fault in ({"write": errno.EIO}, {"write": errno.ENOSPC}, {"sync": errno.EIO}):
        faulty.set(**fault)
        fourth = rig.new()
        rig.wait(lambda page: page["nvme"]["state"].startswith("closed"))
        rig.ask(*fourth)  # in memory
        faulty.set()
        rig.wait(lambda page: page["nvme"]["state"] == "open")

    rig.restart(wiped=True)
    rig.ask(*third, cached=0)
    settled(rig.daemon, published=BYTES)
    rig.ask(*third)
