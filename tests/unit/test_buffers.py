"""Warm buffers: given out again, never twice at once, never for long."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from kvd.tiers import buffers
from kvd.tiers.buffers import LEAST_BYTES, Buffers, rounded
from kvd.tiers.disk import BLOCK, is_aligned

SIZE = 3 << 20


def address(view: memoryview) -> int:
    """Say where memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@pytest.mark.parametrize("size", [1, BLOCK, LEAST_BYTES, LEAST_BYTES + 1, SIZE, SIZE + 12345])
def test_whole_aligned_blocks(size: int) -> None:
    """What is given out is aligned, whole blocks, long enough and not by more than an eighth."""
    view = Buffers().take(size)
    assert is_aligned(view)
    assert len(view) % BLOCK == 0
    assert size <= len(view) <= size + max(size // 8, BLOCK - 1)


def test_comes_back_and_goes_out_again() -> None:
    """The memory of a view that is gone is given out to the next who wants that size."""
    pool = Buffers()
    first = pool.take(SIZE)
    where = address(first)
    del first
    assert address(pool.take(SIZE)) == where
    assert pool.fresh == 1


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[:100],
        lambda view: np.frombuffer(view[4096:8192], np.uint8)[7:9],
        lambda view: np.frombuffer(view, np.uint16).data.cast("B")[5:],
        lambda view: np.frombuffer(view, np.uint8).view(np.int16).reshape(2, -1)[1:],
    ],
)
def test_any_view_keeps_it(derive: object) -> None:
    """B1: as long as any view of it is left, however it was derived, nobody else gets it."""
    pool = Buffers()
    view = pool.take(SIZE)
    where, kept = address(view), derive(view)  # type: ignore[operator]
    del view
    other = pool.take(SIZE)
    assert address(other) != where
    del kept
    assert address(pool.take(SIZE)) == where


def test_keeps_only_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: no more than the bound is kept, and after a while unused nothing."""
    size = rounded(SIZE)
    pool = Buffers(kept_bytes_max=2 * size)
    views = [pool.take(SIZE) for _ in range(5)]
    views.clear()
    pool.trim()
    assert pool.kept_bytes == 2 * size
    monkeypatch.setattr(buffers, "KEEP_S", -1.0)
    pool.trim()
    assert pool.kept_bytes == 0
    assert len(pool.take(SIZE)) == size


def test_threads_never_share() -> None:
    """B1: buffers that threads hold at the same time are different ones."""
    pool = Buffers()
    wrong: list[int] = []

    def work(mark: int) -> None:
        for turn in range(200):
            view = pool.take(LEAST_BYTES + mark % 2 * BLOCK)
            array = np.frombuffer(view, np.uint8)
            array[:] = mark
            if not (array == mark).all():
                wrong.append(turn)
            del view, array

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.fresh <= 2 * len(threads)
