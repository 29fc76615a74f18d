"""The host tier's memory: sealed, faulted in, locked where allowed, huge where reserved."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvd import memory
from kvd.config import HostConfig
from kvd.tiers.host import HostTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.types import SlabId

SLAB = 2 << 20
SLABS = 4
HUGE = Path("/proc/sys/vm/nr_hugepages")


class Made:
    """A tier, what it said, and a way to wait for it."""

    def __init__(self, **wishes: str) -> None:
        """Make the tier and wait until each slab is ready or refused."""
        self.ready: list[SlabId] = []
        self.notes: list[str] = []
        self._all = threading.Event()
        self._noted = threading.Event()
        config = HostConfig(SLABS * SLAB, SLAB, **wishes)  # type: ignore[arg-type]
        self.tier = HostTier(config, on_ready=self._on_ready, on_note=self._on_note)
        self.tier.start()

    def _on_ready(self, slab: SlabId) -> None:
        self.ready.append(slab)
        if len(self.ready) == SLABS:
            self._all.set()

    def _on_note(self, text: str) -> None:
        self.notes.append(text)
        self._noted.set()

    def wait(self) -> None:
        """Wait for all slabs."""
        assert self._all.wait(45), self.notes

    def wait_note(self) -> None:
        """Wait for the first line to the operator: closing sooner cancels what is not begun."""
        assert self._noted.wait(45), "the tier said nothing"


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Reserve huge pages for a tier, and give them back."""
    before = HUGE.read_text() if HUGE.exists() else "0"
    try:
        HUGE.write_text(str(int(before) + SLABS + 2))
    except OSError:
        pytest.skip("only root may reserve huge pages, where there are any")
    if memory.huge_pages_free() < SLABS:
        HUGE.write_text(before)
        pytest.skip("this host has no memory left for huge pages")
    yield
    HUGE.write_text(before)


def test_slabs_are_sealed_and_writable() -> None:
    """Every slab is whole, zero, writable, and cannot be cut short or sealed by a client."""
    made = Made(huge_pages="off", lock="off")
    made.wait()
    assert sorted(made.ready) == list(range(SLABS))
    assert made.tier.ready_bytes == SLABS * SLAB
    for slab in made.ready:
        fd = made.tier.fd(slab)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, SLAB // 2)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, 1033, 0x8)  # F_ADD_SEALS, F_SEAL_WRITE
        view = made.tier.view(slab, SLAB - 4096, 4096)
        assert bytes(view) == bytes(4096)
        view[:4] = b"mine"
        assert os.pread(fd, 4, SLAB - 4096) == b"mine"
        view.release()
    made.tier.close()


def test_memory_is_there_before_it_is_used() -> None:
    """A ready slab's pages are resident: nobody pays for them at first use."""
    made = Made(huge_pages="off", lock="off")
    made.wait()
    blocks = sum(os.fstat(made.tier.fd(slab)).st_blocks for slab in made.ready)
    assert blocks * 512 == SLABS * SLAB
    made.tier.close()


def test_a_refused_lock_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory may not be locked the tier works, and says once what to raise."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(memory, "lock", refuse)
    made = Made(huge_pages="off", lock="auto")
    made.wait()
    assert made.tier.locked_bytes == 0
    assert len(made.notes) == 1
    assert "LimitMEMLOCK" in made.notes[0]
    assert str(SLABS * SLAB) in made.notes[0]
    made.tier.close()


def test_a_required_lock_that_is_refused_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locking is required and refused, no slab is handed out."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(memory, "lock", refuse)
    made = Made(huge_pages="off", lock="require")
    made.wait_note()
    made.tier.close()
    assert made.ready == []
    assert made.tier.failed
    assert any("LimitMEMLOCK" in note for note in made.notes)


def test_huge_pages_are_used_when_they_are_reserved(huge_pages: None) -> None:
    """With pages reserved, every slab is made of them."""
    made = Made(huge_pages="require", lock="off")
    made.wait()
    assert made.tier.huge_bytes == SLABS * SLAB
    made.tier.close()


def test_required_huge_pages_that_are_not_there_name_the_mend() -> None:
    """Without reserved pages a tier that requires them is refused, saying how many to reserve."""
    if memory.huge_pages_free():
        pytest.skip("this host has huge pages reserved")
    made = Made(huge_pages="require", lock="off")
    made.wait_note()
    made.tier.close()
    assert made.ready == []
    assert any("vm.nr_hugepages=4" in note for note in made.notes)


def test_close_in_the_middle_leaves_no_descriptor() -> None:
    """A tier closed while it is being made gives everything back."""
    gc.collect()  # what other tests have left does not go meanwhile
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        Made(huge_pages="off", lock="off").tier.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
