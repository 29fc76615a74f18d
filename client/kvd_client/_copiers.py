"""Ways to copy a list of equal pages between two lists of addresses.

All of them leave the GIL while they copy, and none calls Python per page while it can be helped:
with another Python thread busy, each return to the GIL can cost a switch interval (5 ms), so a
copy's price is set by the number of calls, not by its bytes (docs/adr/0006-host-copies.md).

    numba     one call per 64 MiB, several threads, stores that stream past the caches
    syscall   one `process_vm_readv` of this very process per 1024 pages: no compiler needed
    memmove   one call a page: when nothing else is allowed here

Imports nothing heavy; numpy and numba are imported when a copier is built.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    import numpy as np
    import numpy.typing as npt

    Addresses = npt.NDArray[np.int64]

KernelName = Literal["numba", "syscall", "memmove"]
KERNEL_NAMES: Final[tuple[KernelName, ...]] = ("numba", "syscall", "memmove")

CALL_BYTES_MAX: Final = 64 << 20  # some 5 ms without the GIL, then Python gets its say
CLAIM_BYTES: Final = 1 << 20  # what a thread takes at a time from what is left of a call
HELPED_BYTES_MIN: Final = 4 << 20  # below this, waking a helper costs more than it saves
SPINS_MAX: Final = 100_000  # some 1-2 ms; a claim takes 0.1 ms
IOVECS_MAX: Final = 1024  # Linux IOV_MAX
LINE_BYTES: Final = 64


class Copier(Protocol):
    """Copies pages; any thread may call it, several at once."""

    name: KernelName

    def copy(self, target: Addresses, source: Addresses, page_bytes: int) -> None:
        """Copy `page_bytes` from each source address to the target address at its place.

        Args:
            target: (pages,) int64, C-contiguous; memory the caller may write and keeps mapped.
            source: (pages,) int64, C-contiguous; memory the caller keeps mapped and unchanged.
            page_bytes: bytes of each page; pages must not overlap between the two lists.

        Raises:
            OSError: the kernel refused; some pages may have been copied.

        """


class NumbaCopier:
    """The compiled kernel, on the calling thread and up to `threads - 1` helpers.

    Pages are claimed inside the kernel, without the GIL: when the helpers are late (they need the
    GIL to start), the caller does their share and does not wait for them.
    """

    name: KernelName = "numba"

    def __init__(self, threads: int) -> None:
        """Compile or load the kernel; helpers start with the first large copy."""
        import numpy as np

        from kvd_client import _pagecopy

        self._zeros = np.zeros
        self._int64 = np.int64
        self._kernel: Any = _pagecopy.copy_pages
        self._page_multiple_bytes: int = _pagecopy.PAGE_MULTIPLE_BYTES
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0
        self._pool_lock = threading.Lock()

    def copy(self, target: Addresses, source: Addresses, page_bytes: int) -> None:
        """See `Copier.copy`."""
        streamed = (
            page_bytes % self._page_multiple_bytes == 0 and not (target & (LINE_BYTES - 1)).any()
        )
        step = max(1, CALL_BYTES_MAX // page_bytes)
        for start in range(0, len(target), step):
            part = slice(start, start + step)
            self._copy_part(target[part], source[part], page_bytes, streamed=int(streamed))

    def _copy_part(
        self,
        target: Addresses,
        source: Addresses,
        page_bytes: int,
        *,
        streamed: int,
    ) -> None:
        """Copy one bounded part, with helpers if it is large enough for them."""
        size = len(target) * page_bytes
        helpers = min(self._threads - 1, size // HELPED_BYTES_MIN)
        shared = self._zeros(2, dtype=self._int64)
        claim = max(1, min(CLAIM_BYTES, size // (helpers + 1)) // page_bytes)
        started: list[Future[Any]] = []
        done = 0
        try:
            if helpers:
                pool = self._helpers()
                share = partial(self._kernel, target, source, page_bytes, claim, streamed, shared)
                started.extend(pool.submit(share, 0) for _ in range(helpers))
            spins_max = SPINS_MAX if helpers else 0
            done = self._kernel(target, source, page_bytes, claim, streamed, shared, spins_max)
        finally:
            # A helper that has claimed must end before the caller may unmap or reuse the memory.
            # One that has not started will find nothing to claim and needs no waiting for.
            if done < len(target):
                for helper in started:
                    if not helper.cancel():
                        helper.result()
        assert shared[1] == len(target)  # _pagecopy P1, P2

    def _helpers(self) -> ThreadPoolExecutor:
        """Give the helper threads; a fork has none, so it gets its own."""
        from concurrent.futures import ThreadPoolExecutor

        with self._pool_lock:
            if self._pool is None or self._pool_pid != os.getpid():
                self._pool = ThreadPoolExecutor(self._threads - 1, "kvd-copy")
                self._pool_pid = os.getpid()
            return self._pool


class SyscallCopier:
    """The operating system's copy between processes, from this process to itself.

    About half of memcpy's speed, but one call for up to 1024 pages and nothing to install.
    Runs on the calling thread only.
    """

    name: KernelName = "syscall"

    def __init__(self) -> None:
        """Find the call.

        Raises:
            AttributeError: this libc has no `process_vm_readv`.

        """
        import numpy as np

        self._empty = np.empty
        self._int64 = np.int64
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        word, pointer = ctypes.c_ulong, ctypes.c_void_p
        self._readv.argtypes = [ctypes.c_int, pointer, word, pointer, word, word]
        self._readv.restype = ctypes.c_ssize_t

    def copy(self, target: Addresses, source: Addresses, page_bytes: int) -> None:
        """See `Copier.copy`."""
        step = max(1, min(IOVECS_MAX, CALL_BYTES_MAX // page_bytes))
        for start in range(0, len(target), step):
            part = slice(start, start + step)
            local = self._iovecs(target[part], page_bytes)
            remote = self._iovecs(source[part], page_bytes)
            count = len(local)
            moved = self._readv(os.getpid(), local.ctypes.data, count, remote.ctypes.data, count, 0)
            if moved != count * page_bytes:
                raise OSError(ctypes.get_errno(), "process_vm_readv copied too little")

    def _iovecs(self, addresses: Addresses, page_bytes: int) -> Addresses:
        """Give a (pages, 2) array that reads as `struct iovec[pages]`."""
        iovecs: Addresses = self._empty((len(addresses), 2), dtype=self._int64)
        iovecs[:, 0] = addresses
        iovecs[:, 1] = page_bytes
        return iovecs


class MemmoveCopier:
    """libc's memmove, a call a page. Slow beside a busy Python thread, but always there."""

    name: KernelName = "memmove"

    def copy(self, target: Addresses, source: Addresses, page_bytes: int) -> None:
        """See `Copier.copy`."""
        for to, from_ in zip(target.tolist(), source.tolist(), strict=True):
            ctypes.memmove(to, from_, page_bytes)


def best_copier(threads: int) -> Copier:
    """Build the fastest copier that works here; `threads` is for those that can use them."""
    for name in KERNEL_NAMES:
        try:
            copier = build_copier(name, threads)
            _prove(copier)
        except Exception:  # noqa: BLE001, S112 - numba and llvmlite may fail in any way
            continue
        return copier
    message = "no way to copy memory works here"
    raise RuntimeError(message)


def build_copier(name: KernelName, threads: int) -> Copier:
    """Build the named copier, or raise what keeps it from working here."""
    if name == "numba":
        return NumbaCopier(threads)
    if name == "syscall":
        return SyscallCopier()
    return MemmoveCopier()


def _prove(copier: Copier) -> None:
    """Copy three pages in another order and compare; raise if a byte is wrong."""
    import numpy as np

    page_bytes = 4096
    order = np.array([2, 0, 1])
    source = np.arange(3 * page_bytes // 2, dtype=np.uint16).view(np.uint8).reshape(3, page_bytes)
    backing = np.zeros(3 * page_bytes + LINE_BYTES, dtype=np.uint8)
    start = -backing.ctypes.data % LINE_BYTES
    target = backing[start : start + 3 * page_bytes].reshape(3, page_bytes)
    places = np.arange(3) * page_bytes
    copier.copy(target.ctypes.data + places, source.ctypes.data + places[order], page_bytes)
    if not np.array_equal(target, source[order]):
        message = f"the {copier.name} copy gave other bytes"
        raise RuntimeError(message)
