"""The index of the NVMe tier: which bundle lies where. LMDB, one file, one thread.

The index is a cache of the regions: every row can be had again by scanning them. Three databases:
`rows` (space key and chunk to the rest of a `region.Row`), `spaces` (space key to its description),
`meta` (store uuid, format version, life).

Invariants:

X1. One thread uses an open environment: the caller's until `open` has ended, then that of
    `group_commit.py`. It begins, fills and commits each transaction itself. Hence no LMDB lock
    file; the store's own lock keeps other processes away.
X2. Synchronous commits only, no writemap, a map size fixed at start.
X3. What a commit names was durable before the commit began (the caller syncs first). After a commit
    that raised, nothing of it is visible to this process.
X4. This process opens only a file that it made itself, or whose checksum is that of the clean mark;
    all else goes through a child process (`_index_copy.py`).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import lmdb
import xxhash

from kvd.tiers.disk import BLOCK, Disk, aligned_memory
from kvd.tiers.region import BadRecord
from kvd.tiers.rows import KEY_BYTES, ROW_BYTES, decode_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.tiers.rows import Row


BATCH_ROWS: Final = 65_536
COPY_S: Final = 60.0
"""How long the child that copies an unvouched index may take."""
_DATABASES: Final = ("rows", "spaces", "meta")


class IndexFull(Exception):
    """The map or the file system has no room; nothing was changed, deletes may still work."""


class IndexFailed(Exception):
    """A transaction failed; nothing of it is visible. The environment may be used again."""


class IndexBroken(Exception):
    """The environment cannot be used any more: close it, reopen it, or rebuild it."""


class Change(NamedTuple):
    """One key to be put (`value`) or deleted (None).

    A delete with a generation other than 0 leaves a row of another generation alone.
    """

    key: bytes
    value: bytes | None
    generation: int = 0


@dataclass(slots=True)
class Changes:
    """What one transaction does: meta, spaces (None: forget it), rows in their order."""

    rows: list[Change] = field(default_factory=list)
    spaces: dict[bytes, bytes | None] = field(default_factory=dict)
    meta: dict[bytes, bytes] = field(default_factory=dict)


class Index(Protocol):
    """An open index. One thread at a time (X1)."""

    def batches(self) -> Iterator[bytes]:
        """Yield all rows, packed end to end, many at a time, by key; before the first commit."""
        ...

    def spaces(self) -> dict[bytes, bytes]:
        """Return all descriptions by space key."""
        ...

    def meta(self) -> dict[bytes, bytes]:
        """Return all of meta."""
        ...

    def get(self, keys: Sequence[bytes]) -> list[Row | None]:
        """Return rows; None for one that is absent, or is damaged; raises as `commit` does."""
        ...

    def commit(self, changes: Changes) -> list[Row | None]:
        """Apply everything durably, or nothing; return the rows replaced or deleted.

        Raises:
            IndexFull: No room.
            IndexFailed: Once more may work.
            IndexBroken: Nothing will, in this environment.
        """
        ...

    def close(self) -> bytes:
        """Close it; return what vouches for the file as it is now, empty if nothing does."""
        ...


class IndexPlace(Protocol):
    """Where an index is kept.

    Attributes:
        copied: Whether what is open was copied, because nothing vouched for it.
    """

    copied: bool

    def open(self, mark: bytes) -> Index | None:
        """Open the index that is there, None if none is.

        Args:
            mark: What `close` returned when it was last used, empty if it was not closed.

        Raises:
            IndexBroken: It cannot be used; the text says why. Rebuild it.
        """
        ...

    def build(self, fill: Iterable[Changes]) -> Index:
        """Make a new index from these changes and put it in the place of what is there.

        When this returns, it is durable and the name is. If it raises, the old one is there still.
        """
        ...


# -------------------------------------------------------------------------------- LMDB


def file_mark(disk: Disk, path: Path) -> bytes:
    """Return length and XXH3-128 of a file: what the clean mark says of the index."""
    handle = disk.open(path)
    try:
        size = disk.size(handle)
        digest = xxhash.xxh3_128()
        piece = aligned_memory(4 << 20)
        for offset in range(0, size, piece.nbytes):
            view = piece[: min(piece.nbytes, size - offset)]
            got = disk.preadv(handle, [view], offset)
            digest.update(view[:got])
        return size.to_bytes(8, "little") + digest.digest()
    finally:
        disk.close(handle)


def lmdb_error(error: lmdb.Error) -> Exception:
    """Say what an LMDB error means for us."""
    if isinstance(error, lmdb.MapFullError):
        return IndexFull(
            "the index has no room left: raise [nvme] bytes, which sizes it at the next start"
        )
    if isinstance(error, lmdb.DiskError) or type(error) is lmdb.Error:  # an errno: EIO, ENOSPC
        return IndexFailed(f"index: {error}")
    return IndexBroken(f"index: {error}")


class LmdbIndex:
    """`Index` over an open environment."""

    def __init__(self, disk: Disk, path: Path, map_bytes: int) -> None:
        """Open a file that may be trusted (X4), or make one; raises lmdb.Error."""
        self._disk = disk
        self._path = path
        self._env = lmdb.open(
            str(path),
            map_size=map_bytes,
            subdir=False,
            lock=False,
            max_dbs=len(_DATABASES),
            mode=0o600,
            readahead=False,
            meminit=True,
        )
        try:
            self._rows, self._spaces, self._meta = (
                self._env.open_db(name.encode()) for name in _DATABASES
            )
        except lmdb.Error:
            self._env.close()
            raise

    def batches(self) -> Iterator[bytes]:
        with self._env.begin(self._rows) as txn:
            parts: list[bytes] = []
            for pair in txn.cursor().iternext():
                parts += pair
                if len(parts) >= 2 * BATCH_ROWS:
                    yield b"".join(parts)
                    parts = []
            yield b"".join(parts)

    def spaces(self) -> dict[bytes, bytes]:
        with self._env.begin(self._spaces) as txn:
            return dict(txn.cursor().iternext())

    def meta(self) -> dict[bytes, bytes]:
        with self._env.begin(self._meta) as txn:
            return dict(txn.cursor().iternext())

    def get(self, keys: Sequence[bytes]) -> list[Row | None]:
        try:
            with self._env.begin(self._rows) as txn:
                return [_row(key, txn.get(key)) for key in keys]
        except lmdb.Error as error:
            raise lmdb_error(error) from error

    def commit(self, changes: Changes) -> list[Row | None]:
        olds: list[Row | None] = []
        try:
            with self._env.begin(write=True) as txn:
                for key, value in changes.meta.items():
                    txn.put(key, value, db=self._meta)
                for key, blob in changes.spaces.items():
                    if blob is None:
                        txn.delete(key, db=self._spaces)
                    else:
                        txn.put(key, blob, db=self._spaces)
                for change in changes.rows:
                    old = _row(change.key, txn.get(change.key, db=self._rows))
                    if change.value is not None:
                        txn.put(change.key, change.value, db=self._rows)
                    elif (
                        not change.generation or old is None or old.generation == change.generation
                    ):
                        txn.delete(change.key, db=self._rows)
                    else:
                        old = None
                    olds.append(old)
        except lmdb.Error as error:
            raise lmdb_error(error) from error
        return olds

    def close(self) -> bytes:
        self._env.close()
        try:
            return file_mark(self._disk, self._path)
        except OSError:
            return b""


def _row(key: bytes, value: bytes | None) -> Row | None:
    if value is None:
        return None
    try:
        return decode_row(key + value)
    except BadRecord:
        return None


class LmdbPlace:
    """`IndexPlace` in a directory of the store: `index.mdb`, and `index.new` while it is made."""

    def __init__(self, disk: Disk, directory: Path, map_bytes: int) -> None:
        """Plan; nothing is touched."""
        self._disk = disk
        self._path = directory / "index.mdb"
        self._fresh = directory / "index.new"
        self._map_bytes = map_bytes
        self.copied = False

    def open(self, mark: bytes) -> Index | None:
        if self._path.name not in self._disk.names(self._path.parent):
            return None
        try:
            if not mark or mark != file_mark(self._disk, self._path):
                self._copy()
            return LmdbIndex(self._disk, self._path, self._map_bytes)
        except (lmdb.Error, OSError) as error:
            raise IndexBroken(f"index: {error}") from error

    def _copy(self) -> None:
        """Put a copy made by a child process in the place of the file (X4); IndexBroken if not."""
        self._disk.unlink(self._fresh)
        script = str(Path(__file__).with_name("_index_copy.py"))
        files = [str(self._path), str(self._fresh), str(self._map_bytes)]
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and file
                [sys.executable, "-I", script, *files, *_DATABASES],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=COPY_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise IndexBroken("index: copying it took too long") from error
        if done.returncode:
            raise IndexBroken(f"index: the copy ended with status {done.returncode}")
        self._swap()
        self.copied = True

    def _swap(self) -> None:
        self._disk.rename(self._fresh, self._path)
        self._disk.fsync_dir(self._path.parent)

    def build(self, fill: Iterable[Changes]) -> Index:
        self._disk.unlink(self._fresh)
        try:
            fresh = LmdbIndex(self._disk, self._fresh, self._map_bytes)
            for changes in fill:
                fresh.commit(changes)
            fresh.close()
            self._swap()
            return LmdbIndex(self._disk, self._path, self._map_bytes)
        except lmdb.Error as error:
            raise lmdb_error(error) from error


assert KEY_BYTES + 8 < ROW_BYTES < BLOCK
