"""The host tier's memory: slabs of sealed memfd, faulted in ahead by several threads.

Threads make, fault in and lock slabs, nothing else; each finished slab is told to the loop, which
gives it to the pool. Ownership: the tier owns every slab's fd and map until `close`; clients have
descriptors and maps of their own, which the kernel keeps as long as they like.
"""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import xxhash

from kvd import memory
from kvd.types import SlabId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.config import HostConfig
    from kvd.keeping import KeptSlab

    OnKept = Callable[[SlabId, set[int] | None], None]


class HostTier:
    """Memory behind a slab pool."""

    def __init__(
        self,
        config: HostConfig,
        *,
        on_ready: Callable[[SlabId], None],
        on_note: Callable[[str], None],
    ) -> None:
        """Plan the slabs; `start` makes them.

        Args:
            config: Sizes and wishes.
            on_ready: Called from a worker thread for each slab that is ready.
            on_note: Called from a worker thread with a line for the operator.
        """
        self._config = config
        self._on_ready = on_ready
        self._on_note = on_note
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._slabs: dict[SlabId, tuple[int, mmap.mmap]] = {}
        self._noted: set[str] = set()
        self._pool = ThreadPoolExecutor(
            config.fault_threads or min(8, os.cpu_count() or 1), thread_name_prefix="fault"
        )
        self._on_kept: OnKept = lambda *_: None
        self.ready_bytes = 0
        self.locked_bytes = 0
        self.huge_bytes = 0
        self.failed = False

    def start(
        self,
        kept: Mapping[SlabId, KeptSlab] | None = None,
        on_kept: OnKept = lambda *_: None,
    ) -> None:
        """Begin to make the slabs; returns at once.

        Args:
            kept: Slabs of an earlier life, to be taken up; their descriptors are the tier's now.
            on_kept: Called from a worker thread for each of them, with the places whose objects are
                as they were; or None, and then one is made anew and told to `on_ready`.
        """
        self._on_kept = on_kept
        for number in sorted(range(self._config.slab_count), key=lambda n: n not in (kept or {})):
            slab = SlabId(number)
            if kept and slab in kept:
                self._pool.submit(self._take_up, slab, kept[slab])
            else:
                self._pool.submit(self._make_or_note, slab)

    def _take_up(self, slab: SlabId, kept: KeptSlab) -> None:
        """Map a slab of an earlier life and verify what is in it."""
        size, good = self._config.slab_bytes, set[int]()
        try:
            view = mmap.mmap(kept.fd, size)
            huge = os.fstat(kept.fd).st_blksize == memory.HUGE_BYTES
            locked = self._lock(view, size)
            for place, offset, length, digest in kept.objects:
                if self._stop.is_set():
                    break
                if xxhash.xxh3_128_digest(memoryview(view)[offset : offset + length]) == digest:
                    good.add(place)
        except (OSError, ValueError, MemoryError) as error:
            os.close(kept.fd)
            self._on_kept(slab, None)
            self._note(f"a slab of the life before cannot be used: {error}")
            self._make_or_note(slab)
            return
        self._keep(slab, kept.fd, view, locked=locked, huge=huge)
        self._on_kept(slab, good)

    def _make_or_note(self, slab: SlabId) -> None:
        if self._stop.is_set():
            return
        try:
            self._make(slab)
        except OSError as error:
            self.failed = True
            self._note(
                f"host tier is smaller than configured: {error.strerror or error}; "
                "free memory or set a smaller [host] bytes"
            )

    def _note(self, text: str) -> None:
        with self._guard:
            if text in self._noted:
                return
            self._noted.add(text)
        self._on_note(text)

    def _make(self, slab: SlabId) -> None:
        """Make one slab and tell of it; raises OSError with nothing left behind."""
        size = self._config.slab_bytes
        fd, huge = self._memfd(size)
        try:
            view = mmap.mmap(fd, size)
            for offset in range(0, size, memory.PIECE_BYTES):
                piece = min(memory.PIECE_BYTES, size - offset)
                if self._stop.is_set():
                    view.close()
                    os.close(fd)
                    return
                memory.populate(view, offset, piece)
            locked = self._lock(view, size)
        except OSError:
            os.close(fd)
            raise
        self._keep(slab, fd, view, locked=locked, huge=huge)
        self._on_ready(slab)

    def _keep(self, slab: SlabId, fd: int, view: mmap.mmap, *, locked: bool, huge: bool) -> None:
        size = self._config.slab_bytes
        with self._guard:
            self._slabs[slab] = (fd, view)
            self.ready_bytes += size
            self.locked_bytes += size if locked else 0
            self.huge_bytes += size if huge else 0

    def _memfd(self, size: int) -> tuple[int, bool]:
        wish = self._config.huge_pages
        if wish != "off" and size % memory.HUGE_BYTES == 0:
            with self._guard:  # one at a time: the count of free pages is no reservation
                if memory.huge_pages_free() * memory.HUGE_BYTES >= size:
                    try:
                        return memory.make_memfd("kvd-slab", size, huge=True), True
                    except OSError as error:
                        if wish == "require":
                            raise OSError(error.errno, f"huge pages: {error.strerror}") from error
        if wish == "require":
            pages = self._config.size_bytes // memory.HUGE_BYTES
            msg = (
                f'huge_pages = "require" but too few are free: '
                f"sysctl vm.nr_hugepages={pages} or more"
            )
            raise OSError(msg)
        return memory.make_memfd("kvd-slab", size), False

    def _lock(self, view: mmap.mmap, size: int) -> bool:
        wish = self._config.lock
        if wish == "off":
            return False
        try:
            memory.lock(view, 0, size)
        except OSError as error:
            mend = f"raise LimitMEMLOCK= (ulimit -l) to {self._config.size_bytes} bytes or more"
            if wish == "require":
                raise OSError(error.errno, f'lock = "require": {error.strerror}; {mend}') from error
            self._note(f"host tier is not locked in memory ({error.strerror}): {mend}")
            return False
        return True

    def fd(self, slab: SlabId) -> int:
        """Return a slab's descriptor, still owned by the tier."""
        return self._slabs[slab][0]

    def view(self, slab: SlabId, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a writable view of part of a slab, good until `close`."""
        return memoryview(self._slabs[slab][1])[offset_bytes : offset_bytes + size_bytes]

    def close(self) -> None:
        """Stop the threads and let go of the memory; waits for one piece at most."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for fd, view in self._slabs.values():
            with suppress(BufferError):  # somebody still looks at it: it goes with the process
                view.close()
            os.close(fd)
        self._slabs.clear()
