"""A disk that forgets: everything not synced may be lost, torn or reordered when the power goes.

`SimDisk` stands behind `kvd.tiers.disk.Disk`. It keeps, for each file, the durable bytes and the
writes since the last sync, and for each directory the durable names and the changes since. At a
cut, `after_cut` lets chance decide about each 512-byte sector of each pending write (old, or any of
the versions written since), each pending length and each pending name.

`SimPlace` is an index whose commits are durable when they return, as LMDB promises, in a file whose
name obeys the same rules as any other. It passes the same tests as LMDB's (test_index.py).

`LazyExecutor` runs calls one at a time on the loop, in an order of chance: with one seed, one run.
"""

from __future__ import annotations

import errno
import sys
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.tiers.index import Changes, IndexBroken
from kvd.tiers.region import BadRecord
from kvd.tiers.rows import KEY_BYTES, Row, decode_row

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from _typeshed import ReadableBuffer

SECTOR = 512


class PowerCut(Exception):
    """The machine is off: nothing works from here on."""


@dataclass
class Inode:
    """A file: what is durable, what is seen, and what lies between."""

    durable: bytearray = field(default_factory=bytearray)
    current: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    rows: dict[str, dict[bytes, bytes]] | None = None

    def sync(self) -> None:
        """Forget that anything was ever not durable."""
        self.durable = bytearray(self.current)
        self.writes.clear()

    def versions(self, sector: int, size: int) -> list[bytes]:
        """Every content that part of the file may have after a cut, the durable one first."""
        start, end = sector * size, (sector + 1) * size
        found = [bytes(self.durable[start:end]).ljust(size, b"\0")]
        for offset, content in self.writes:
            low, high = max(start, offset), min(end, offset + len(content))
            if low < high:
                piece = bytearray(found[-1])
                piece[low - start : high - start] = content[low - offset : high - offset]
                found.append(bytes(piece))
        return found


Name = tuple[str, Inode | None]
"""A name's change: what it now stands for, None for nothing."""


class SimDisk:
    """A disk behind the seam."""

    def __init__(self, cut_after: int = 1 << 60, ignore: str = "") -> None:
        """Begin empty.

        Args:
            cut_after: The power goes at this operation.
            ignore: The kind of sync that does nothing, by its label.
        """
        self.names_now: dict[str, Inode] = {}
        self.names_durable: dict[str, Inode] = {}
        self.folders: set[str] = set()
        self.folders_durable: set[str] = set()
        self.pending: list[tuple[str, list[Name]]] = []
        self.handles: dict[int, tuple[str, Inode]] = {}
        self.cut_after = cut_after
        self.ignore = ignore
        self.operations = 0
        self.dead = False
        self.labels: set[str] = set()
        self.direct = True
        self.full = False
        self._next = 3

    # ------------------------------------------------------------------ the cut

    def step(self) -> None:
        """Count an operation; the power may go instead of it."""
        if self.dead or self.operations >= self.cut_after:
            self.dead = True
            raise PowerCut
        self.operations += 1

    def _counts(self, kind: str, what: str) -> bool:
        label = f"{kind} {what}"
        self.labels.add(label)
        return label != self.ignore

    def after_cut(self, choose: Callable[[int], int]) -> SimDisk:
        """Return what a next start finds; `choose(n)` picks one of n outcomes."""
        found = SimDisk(ignore=self.ignore)
        names = dict(self.names_durable)
        folders = set(self.folders_durable)
        order = list(self.pending)
        while order:
            folder, changes = order.pop(choose(len(order)))
            if choose(2):
                for name, inode in changes:
                    if inode is None:
                        names.pop(name, None)
                    else:
                        names[name] = inode
        for folder in self.folders - self.folders_durable:
            if choose(2):
                folders.add(folder)
        found.folders = set(folders)
        found.folders_durable = set(folders)
        for name, inode in names.items():
            if str(Path(name).parent) in folders:
                found.names_now[name] = found.names_durable[name] = _settled(inode, choose)
        return found

    # ------------------------------------------------------------------ Disk

    def make_dir(self, path: Path) -> None:
        if str(path) not in self.folders:
            self.step()
            self.folders.add(str(path))
            if len(self.folders) == 1:
                self.folders_durable.add(str(path))  # the first stands for what was there before

    def names(self, path: Path) -> list[str]:
        self._alive()
        return sorted(Path(name).name for name in self.names_now if Path(name).parent == path)

    def _alive(self) -> None:
        if self.dead:
            raise PowerCut

    def _change(self, folder: Path, *changes: Name) -> None:
        self.step()
        for name, inode in changes:
            if inode is None:
                self.names_now.pop(name, None)
            else:
                self.names_now[name] = inode
        self.pending.append((str(folder), list(changes)))

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        self._alive()
        if direct and not self.direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        if create:
            if str(path) in self.names_now:
                raise FileExistsError(errno.EEXIST, "there")
            self._change(path.parent, (str(path), Inode()))
        if str(path) not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, "not there")
        self._next += 1
        self.handles[self._next] = (str(path), self.names_now[str(path)])
        return self._next

    def close(self, handle: int) -> None:
        self.handles.pop(handle)

    def size(self, handle: int) -> int:
        self._alive()
        return len(self.handles[handle][1].current)

    def allocate(self, handle: int, size_bytes: int) -> None:
        self.step()
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        inode = self.handles[handle][1]
        inode.current.extend(bytes(size_bytes - len(inode.current)))

    def pwritev(self, handle: int, buffers: Sequence[ReadableBuffer], offset_bytes: int) -> int:
        self.step()
        inode = self.handles[handle][1]
        content = b"".join(memoryview(buffer).tobytes() for buffer in buffers)
        end = offset_bytes + len(content)
        inode.current.extend(bytes(max(0, end - len(inode.current))))
        inode.current[offset_bytes:end] = content
        inode.writes.append((offset_bytes, content))
        return len(content)

    def preadv(self, handle: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        self._alive()
        current = self.handles[handle][1].current
        total = 0
        for buffer in buffers:
            piece = current[offset_bytes + total : offset_bytes + total + buffer.nbytes]
            buffer[: len(piece)] = piece
            total += len(piece)
        return total

    def fdatasync(self, handle: int) -> None:
        self.step()
        name, inode = self.handles[handle]
        parent = Path(name).parent.name
        if self._counts("fdatasync", "a region" if parent == "regions" else Path(name).name):
            inode.sync()

    def fsync_dir(self, path: Path) -> None:
        self.step()
        caller = sys._getframe(1).f_code.co_name
        if not self._counts("fsync_dir", f"in {caller}"):
            return
        keep = []
        for folder, changes in self.pending:
            if folder != str(path):
                keep.append((folder, changes))
                continue
            for name, inode in changes:
                if inode is None:
                    self.names_durable.pop(name, None)
                else:
                    self.names_durable[name] = inode
        self.pending = keep
        self.folders_durable |= {f for f in self.folders if Path(f).parent == path}

    def rename(self, source: Path, target: Path) -> None:
        inode = self.names_now[str(source)]
        self._change(target.parent, (str(source), None), (str(target), inode))

    def unlink(self, path: Path) -> None:
        self._alive()
        if str(path) in self.names_now:
            self._change(path.parent, (str(path), None))

    def lock(self, path: Path) -> int:
        self._alive()
        self._next += 1
        self.handles[self._next] = (str(path), Inode())
        return self._next


def _settled(inode: Inode, choose: Callable[[int], int]) -> Inode:
    """Let chance decide what of a file's pending writes and length is left."""
    long = max(len(inode.current), len(inode.durable))
    size = len(inode.durable)
    if len(inode.current) != size and choose(2):
        size = len(inode.current)
    touched = {
        sector
        for offset, piece in inode.writes
        for sector in range(offset // SECTOR, -(-(offset + len(piece)) // SECTOR))
    }
    content = bytearray(inode.durable).ljust(long, b"\0")
    fate = choose(4) if touched else 0  # 0: all lost, 1: all kept, else sector by sector
    for sector in sorted(touched):
        versions = inode.versions(sector, SECTOR)
        pick = 0 if fate == 0 else len(versions) - 1 if fate == 1 else choose(len(versions))
        content[sector * SECTOR : (sector + 1) * SECTOR] = versions[pick]
    content = content[:size]
    rows = None if inode.rows is None else {name: dict(db) for name, db in inode.rows.items()}
    return Inode(bytearray(content), bytearray(content), [], rows)


# -------------------------------------------------------------------------------- index


class SimIndex:
    """`Index` with durable commits in an inode."""

    def __init__(self, disk: SimDisk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode
        if inode.rows is None:
            inode.rows = {"rows": {}, "spaces": {}, "meta": {}}

    def _db(self, name: str) -> dict[bytes, bytes]:
        if self._disk.dead:
            raise PowerCut
        assert self._inode.rows is not None
        return self._inode.rows[name]

    def batches(self) -> Iterator[bytes]:
        yield b"".join(key + value for key, value in sorted(self._db("rows").items()))

    def spaces(self) -> dict[bytes, bytes]:
        return dict(self._db("spaces"))

    def meta(self) -> dict[bytes, bytes]:
        return dict(self._db("meta"))

    def get(self, keys: Sequence[bytes]) -> list[Row | None]:
        return [_row(key, self._db("rows").get(key)) for key in keys]

    def commit(self, changes: Changes) -> list[Row | None]:
        self._disk.step()
        self._db("meta").update(changes.meta)
        for space, blob in changes.spaces.items():
            if blob is None:
                self._db("spaces").pop(space, None)
            else:
                self._db("spaces")[space] = blob
        olds: list[Row | None] = []
        rows = self._db("rows")
        for change in changes.rows:
            old = _row(change.key, rows.get(change.key))
            if change.value is not None:
                rows[change.key] = change.value
            elif not change.generation or old is None or old.generation == change.generation:
                rows.pop(change.key, None)
            else:
                old = None
            olds.append(old)
        self._disk.step()  # a cut here: committed, and nobody was told
        return olds

    def close(self) -> bytes:
        return b"sim"


def _row(key: bytes, value: bytes | None) -> Row | None:
    try:
        return None if value is None else decode_row(key + value)
    except BadRecord:
        return None


class SimPlace:
    """`IndexPlace` on a SimDisk."""

    def __init__(self, disk: SimDisk, directory: Path) -> None:
        self._disk = disk
        self._path = directory / "index.mdb"
        self._fresh = directory / "index.new"
        self.copied = False

    def open(self, mark: bytes) -> SimIndex | None:
        inode = self._disk.names_now.get(str(self._path))
        if inode is None:
            return None
        if inode.rows is None:
            raise IndexBroken("empty")
        if not mark:
            rows = {name: dict(db) for name, db in inode.rows.items()}
            inode = self._make(rows)
            self.copied = True
        return SimIndex(self._disk, inode)

    def _make(self, rows: dict[str, dict[bytes, bytes]] | None) -> Inode:
        self._disk.unlink(self._fresh)
        self._disk.close(self._disk.open(self._fresh, create=True))
        inode = self._disk.names_now[str(self._fresh)]
        inode.rows = rows
        return inode if rows is None else self._swap(inode)

    def _swap(self, inode: Inode) -> Inode:
        self._disk.rename(self._fresh, self._path)
        self._disk.fsync_dir(self._path.parent)
        return inode

    def build(self, fill: Iterable[Changes]) -> SimIndex:
        index = SimIndex(self._disk, self._make(None))
        for changes in fill:
            index.commit(changes)
        self._swap(index._inode)
        return index


# -------------------------------------------------------------------------------- threads


class LazyExecutor(Executor):
    """Runs what is submitted on the loop, one at a time, in an order of chance."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random_: random.Random) -> None:
        self._loop = loop
        self._random = random_
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        self._loop.call_soon(self._turn)
        return future

    def _turn(self) -> None:
        future, call = self._waiting.pop(self._random.randrange(len(self._waiting)))
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - as any executor
            future.set_exception(error)
        else:
            future.set_result(result)


__all__ = ["KEY_BYTES", "LazyExecutor", "PowerCut", "SimDisk", "SimIndex", "SimPlace"]
