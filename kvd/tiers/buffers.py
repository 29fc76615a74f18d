"""Aligned memory for bytes on their way between host slots and disk, used again while it is warm.

A fresh buffer costs a page fault for each of its pages and the zeroing of them, which is more than
everything else that the FP8 path does to a byte. So memory that comes back is kept, up to
`kept_bytes_max`, and given out again with whatever is in it.

Invariants:

B1. Memory is given out again only when no view of it is left anywhere: it comes back by the end of
    its last view, not by a call that could be made too early or twice.
B2. At most `kept_bytes_max` are kept, and nothing that was of no use for `KEEP_S`.

Ownership: who has a view has the memory. Any thread, but for `trim`: the loop, now and then.
"""

from __future__ import annotations

import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.tiers.disk import BLOCK, aligned_memory, page_memory

if TYPE_CHECKING:
    import mmap

KEPT_BYTES_MAX: Final = 256 << 20
"""Enough for what moves at once: 8 demotions and 16 promotions with objects of 20 MiB in FP8."""
LEAST_BYTES: Final = 64 << 10
"""Below, a fresh mapping costs no more than the book-keeping."""
STEPS: Final = 8
"""Sizes a power of two: objects of one layout compress to many lengths, and at most an eighth of a
buffer is unused, and never touched."""
KEEP_S: Final = 10.0


def rounded(size_bytes: int) -> int:
    """Return the size of the buffer that is given out for so many bytes."""
    step = max(BLOCK, (1 << (size_bytes - 1).bit_length()) // (2 * STEPS))
    return -(-size_bytes // step) * step


class Buffers:
    """Gives out aligned memory and keeps what comes back."""

    def __init__(self, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        """Begin with nothing."""
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        # The end of a view may come anywhere, also inside `take` on the same thread: this is the
        # one queue that says it can be filled from there.
        self._back: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._free: dict[int, list[mmap.mmap]] = {}
        self._used_at: dict[int, float] = {}
        self.kept_bytes = 0
        self.fresh = 0
        """Buffers that had to be made."""

    def take(self, size_bytes: int) -> memoryview:
        """Return page-aligned memory of at least `size_bytes`, whole blocks; rubbish is in it."""
        if size_bytes < LEAST_BYTES:
            return aligned_memory(size_bytes)
        size = rounded(size_bytes)
        with self._lock:
            self._gather()
            self._used_at[size] = time.monotonic()
            kept = self._free.get(size)
            memory = kept.pop() if kept else None
            self.kept_bytes -= size if memory is not None else 0
            self.fresh += memory is None
        if memory is None:
            memory = page_memory(size)
        lent = np.frombuffer(memory, np.uint8)
        weakref.finalize(lent, self._back.put, memory).atexit = False  # B1
        return lent.data

    def trim(self) -> None:
        """Let go of what nobody wanted for a while (B2)."""
        with self._lock:
            self._gather()
            oldest = time.monotonic() - KEEP_S
            for size in [size for size, used_at in self._used_at.items() if used_at < oldest]:
                self.kept_bytes -= size * len(self._free.pop(size, ()))
                del self._used_at[size]

    def _gather(self) -> None:
        """Take in what has come back, as far as there is room; under the lock."""
        while not self._back.empty():
            memory = self._back.get_nowait()
            size = len(memory)
            if self.kept_bytes + size <= self._kept_bytes_max:
                self._free.setdefault(size, []).append(memory)
                self._used_at.setdefault(size, time.monotonic())
                self.kept_bytes += size
