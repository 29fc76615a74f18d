"""A disk that fails, stalls or moves too little as it is told to, and stores upon it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import TYPE_CHECKING

from kvd.tiers.disk import RealDisk
from kvd.tiers.nvme import (
    NvmeStore,
)
from tests.nvme_kit import Key, bundle, config, version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer

    from kvd.tiers.nvme import Ref

KEYS = [Key(0, n) for n in range(6)]


class FaultyDisk(RealDisk):
    """Real files, and calls that fail as they are told to."""

    def __init__(self) -> None:
        self.kind = ""
        self.code = errno.EIO
        self.after = 0
        self.lasting = False
        self.failed = 0
        self.short = 0
        self.gate: threading.Event | None = None
        self.at_gate = threading.Event()
        """Set once a call waits at the gate."""
        self._guard = threading.Lock()

    def fail(self, kind: str, after: int = 0, code: int = errno.EIO, *, lasting: bool) -> None:
        """Fail the call of a kind that comes after so many, and with `lasting` all later ones."""
        self.kind, self.after, self.code, self.lasting = kind, after, code, lasting
        self.failed = 0

    def _pass(self, kind: str) -> None:
        with self._guard:
            if kind != self.kind:
                return
            if self.after:
                self.after -= 1
                return
            if self.failed and not self.lasting:
                return
            self.failed += 1
        raise OSError(self.code, os.strerror(self.code))

    def _wait_at_gate(self) -> None:
        if self.gate is not None:
            self.at_gate.set()
            self.gate.wait(30)

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        self._pass("open")
        return super().open(path, create=create, direct=direct)

    def allocate(self, handle: int, size_bytes: int) -> None:
        self._pass("allocate")
        super().allocate(handle, size_bytes)

    def pwritev(self, handle: int, buffers: Sequence[ReadableBuffer], offset_bytes: int) -> int:
        self._pass("pwritev")
        self._wait_at_gate()
        if self.short:
            buffers = [memoryview(buffers[0])[: self.short]]
        return super().pwritev(handle, buffers, offset_bytes)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        self._pass("preadv")
        self._wait_at_gate()
        if self.short:
            buffers = [buffers[0][: self.short]]
        return super().preadv(handle, buffers, offset_bytes)

    def fdatasync(self, handle: int) -> None:
        self._pass("fdatasync")
        super().fdatasync(handle)

    def fsync_dir(self, path: Path) -> None:
        self._pass("fsync_dir")
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._pass("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._pass("unlink")
        super().unlink(path)


def store_on(disk: RealDisk, directory: Path, **options: object) -> NvmeStore:
    """Return a store that probes at once."""
    options.setdefault("probe_s", 0.0)
    options.setdefault("index_bytes", 16 << 20)
    return NvmeStore(
        config(directory, **options),  # type: ignore[arg-type]
        asyncio.get_running_loop(),
        disk=disk,
    )


async def until(condition: Callable[[], bool], store: NvmeStore, limit_s: float = 30.0) -> None:
    """Let the store's time pass until something holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            store.tick()
            await asyncio.sleep(0.01)


async def all_good(store: NvmeStore, acknowledged: dict[Key, tuple[Ref, int]]) -> None:
    """Read everything that was acknowledged."""
    for key, (ref, version) in acknowledged.items():
        assert await version_of(store, key, ref, version) == version
    store.extents.check()


async def fill(store: NvmeStore, refs: dict[Key, tuple[Ref, int]] | None = None) -> None:
    """Write until the store takes no more."""
    refs = {} if refs is None else refs
    for number in range(100):
        key = Key(1, number)
        refs[key] = (await store.write(bundle(key, 0)), 0)
