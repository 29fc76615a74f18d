"""A file system that forgets: what was not synced is gone when the power is cut.

    python -m tests.forgetfs BACKING MOUNT CONTROL_SOCKET

A real mount (FUSE, by libfuse3 and mfusepy), so the real store and the real LMDB run on it. All is
kept in memory: for each file the durable bytes and the pieces of pages written since, for each
directory the durable names and the changes since. What makes something durable:

- `fsync` and `fdatasync` of a file: its bytes and its length, not its name;
- a write through a handle opened with O_SYNC or O_DSYNC: the pages it touches, and the length;
- `fsync` of a directory: the names in it.

At a cut each pending piece, name and length survives by chance, in any order of names, and the last
piece of a file may be torn at 512 bytes. From then on every call fails with EIO, until `restore`
mounts anew what is left; that also empties the kernel's page cache. There is no writeback cache: a
write arrives here before it returns. What is mapped may be read, not written. A file that shrinks
and grows again without a sync may show old bytes, which nothing here does.

Commands, one a line over the socket; the answer is a line, `ok ...` or `error ...`. When the
connection ends, so do the mount and this process:

    cut SEED KEEP           now; KEEP is the chance of a pending piece to survive
    cut_after N SEED KEEP   at the Nth change or sync from now
    restore                 mount what is left; also without a cut, as after a clean stop
    empty                   forget everything; before `restore`
    ignore GLOB...          syncs of these paths do nothing from now on; a directory's ends in `/`
    status                  `cut` or `up`, and the number of changes and syncs since the last cut
    save                    write what is durable to BACKING, to be looked at
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4096
SECTOR = 512
NEVER = 1 << 60
START_S = 30.0
END_S = 3.0  # for a session to end by itself
CANNOT_MOUNT = 3
"""Exit status."""


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _put(content: bytearray, offset: int, piece: bytes) -> None:
    """Write what lies within the content."""
    end = min(len(content), offset + len(piece))
    if offset < end:
        content[offset:end] = piece[: end - offset]


def _split(offset: int, content: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    """Cut at multiples of `size` in the file."""
    at = 0
    while at < len(content):
        end = min(len(content), at + size - (offset + at) % size)
        yield offset + at, content[at:end]
        at = end


@dataclass(eq=False)
class File:
    """A file: what is seen, what is durable, and what was written since, page by page."""

    mode: int
    live: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, content: bytes) -> None:
        """Change what is seen."""
        end = offset + len(content)
        if end > len(self.live):
            _resize(self.live, end)
        self.live[offset:end] = content
        self.pending += _split(offset, content, PAGE)

    def sync(self, start: int = 0, end: int = NEVER) -> None:
        """Make the pages of a range durable, and the length."""
        first, last = start // PAGE, (end - 1) // PAGE
        _resize(self.disk, len(self.live))
        rest = []
        for offset, piece in self.pending:
            page = offset // PAGE
            if first <= page <= last:
                _put(self.disk, page * PAGE, bytes(self.live[page * PAGE : (page + 1) * PAGE]))
            else:
                rest.append((offset, piece))
        self.pending = rest

    def cut(self, chance: random.Random, keep: float) -> None:
        """Let chance decide what of the pending becomes durable, and forget the rest."""
        if chance.random() < keep:
            _resize(self.disk, len(self.live))
        survived = [piece for piece in self.pending if chance.random() < keep]
        for offset, piece in survived[:-1]:
            _put(self.disk, offset, piece)
        for offset, piece in survived[-1:]:
            whole = chance.random() < 0.5
            for at, sector in _split(offset, piece, SECTOR):
                if whole or chance.random() < 0.5:
                    _put(self.disk, at, sector)
        self.live = bytearray(self.disk)
        self.pending.clear()


@dataclass(eq=False)
class Dir:
    """A directory: the names seen, the durable ones, and the changes since, one group a call."""

    mode: int
    live: dict[str, Node] = field(default_factory=dict)
    disk: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, names: dict[str, Node | None]) -> None:
        """Change what is seen."""
        _apply(self.live, names)
        self.pending.append(names)

    def sync(self) -> None:
        """Make the names durable."""
        self.disk = dict(self.live)
        self.pending.clear()

    def cut(self, chance: random.Random, keep: float) -> None:
        """Let chance decide which changes become durable, in which order; the same below."""
        chance.shuffle(self.pending)
        for names in self.pending:
            if chance.random() < keep:
                _apply(self.disk, names)
        self.live = dict(self.disk)
        self.pending.clear()
        for node in self.disk.values():
            node.cut(chance, keep)


Node = File | Dir


def _apply(names: dict[str, Node], changes: dict[str, Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class ForgetFs:
    """The operations that mfusepy calls, in one thread; the commands come from another."""

    use_ns = True

    def __init__(self) -> None:
        """Begin empty, with the power on."""
        self.root = Dir(0o755)
        self.guard = threading.Lock()
        self.mounted = threading.Event()
        self.dead = False
        self.steps = 0
        self.ignored: list[str] = []
        self._cut_at = NEVER
        self._cut_how = (0, 0.0)
        self._handles: dict[int, tuple[File, bool]] = {}
        self._next = 1

    # ------------------------------------------------------------------ power

    def arm(self, after: int, seed: int, keep: float) -> None:
        """Cut the power at a later change or sync."""
        self._cut_at, self._cut_how = self.steps + after, (seed, keep)

    def cut(self, seed: int, keep: float) -> None:
        """Cut the power."""
        self.root.cut(random.Random(seed), keep)
        self.dead = True

    def power_on(self) -> None:
        """Begin again with what is durable."""
        self.dead, self.steps, self._cut_at = False, 0, NEVER
        self._handles.clear()

    def _alive(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the power is off")

    def _step(self) -> None:
        """Count a change that was made, or a sync that is to come."""
        self.steps += 1
        if self.steps >= self._cut_at:
            self.cut(*self._cut_how)
        self._alive()

    def _syncs(self, path: str) -> bool:
        return not any(fnmatchcase(path, pattern) for pattern in self.ignored)

    # ------------------------------------------------------------------ names

    def _at(self, path: str) -> Node:
        self._alive()
        node: Node = self.root
        for name in path.split("/")[1:]:
            if name:
                if not isinstance(node, Dir) or name not in node.live:
                    raise OSError(errno.ENOENT, "not there")
                node = node.live[name]
        return node

    def _parent(self, path: str) -> tuple[Dir, str]:
        folder, _, name = path.rpartition("/")
        node = self._at(folder)
        assert isinstance(node, Dir)
        return node, name

    def _change(self, path: str, node: Node | None) -> None:
        folder, name = self._parent(path)
        folder.change({name: node})
        self._step()

    def init(self, _path: str) -> None:
        """Say that the mount is there."""
        self.mounted.set()

    def getattr(self, path: str, _handle: int | None = None) -> dict[str, Any]:
        with self.guard:
            node = self._at(path)
            size = len(node.live) if isinstance(node, File) else 0
            kind = stat.S_IFREG if isinstance(node, File) else stat.S_IFDIR
            return {
                "st_mode": kind | node.mode,
                "st_size": size,
                "st_blocks": -(-size // 512),
                "st_nlink": 1 if isinstance(node, File) else 2,
                "st_uid": os.getuid(),
                "st_gid": os.getgid(),
            }

    def readdir(self, path: str, _handle: int) -> list[str]:
        with self.guard:
            node = self._at(path)
            assert isinstance(node, Dir)
            return [".", "..", *node.live]

    def statfs(self, _path: str) -> dict[str, int]:
        blocks = (1 << 30) // PAGE
        sizes = {"f_bsize": PAGE, "f_frsize": PAGE, "f_namemax": 255}
        return sizes | dict.fromkeys(("f_blocks", "f_bfree", "f_bavail"), blocks)

    def mkdir(self, path: str, mode: int) -> int:
        with self.guard:
            self._change(path, Dir(mode & 0o7777))
        return 0

    def unlink(self, path: str) -> int:
        with self.guard:
            self._change(path, None)
        return 0

    def rmdir(self, path: str) -> int:
        with self.guard:
            node = self._at(path)
            if isinstance(node, Dir) and node.live:
                raise OSError(errno.ENOTEMPTY, "not empty")
            self._change(path, None)
        return 0

    def rename(self, old: str, new: str) -> int:
        with self.guard:
            node = self._at(old)
            (source, old_name), (target, new_name) = self._parent(old), self._parent(new)
            if source is target:
                source.change({new_name: node, old_name: None})
            else:
                target.change({new_name: node})
                source.change({old_name: None})
            self._step()
        return 0

    def chmod(self, path: str, mode: int) -> int:
        with self.guard:
            self._at(path).mode = stat.S_IMODE(mode)
        return 0

    def utimens(self, _path: str, _times: tuple[int, int] | None = None) -> int:
        return 0

    # ------------------------------------------------------------------ bytes

    def _opened(self, node: Node, flags: int) -> int:
        assert isinstance(node, File)
        self._next += 1
        self._handles[self._next] = (node, bool(flags & (os.O_DSYNC | os.O_SYNC)))
        return self._next

    def _file(self, handle: int) -> File:
        self._alive()
        return self._handles[handle][0]

    def create(self, path: str, mode: int, flags: int) -> int:
        with self.guard:
            node = File(stat.S_IMODE(mode))
            self._change(path, node)
            return self._opened(node, flags)

    def open(self, path: str, flags: int) -> int:
        with self.guard:
            return self._opened(self._at(path), flags)

    def release(self, _path: str, handle: int) -> int:
        with self.guard:
            self._handles.pop(handle, None)
        return 0

    def read(self, _path: str, size: int, offset: int, handle: int) -> bytes:
        with self.guard:
            return bytes(self._file(handle).live[offset : offset + size])

    def write(self, path: str, content: bytes, offset: int, handle: int) -> int:
        with self.guard:
            file = self._file(handle)
            file.write(offset, content)
            self._step()
            if self._handles[handle][1] and self._syncs(path):
                file.sync(offset, offset + len(content))
        return len(content)

    def truncate(self, path: str, size: int, _handle: int | None = None) -> int:
        with self.guard:
            file = self._at(path)
            assert isinstance(file, File)
            _resize(file.live, size)
            file.pending = [(at, piece) for at, piece in file.pending if at < size]
            self._step()
        return 0

    def fallocate(self, _path: str, mode: int, offset: int, size: int, handle: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only to grow")
        with self.guard:
            file = self._file(handle)
            _resize(file.live, max(len(file.live), offset + size))
            self._step()
        return 0

    def fsync(self, path: str, _datasync: int, handle: int) -> int:
        """Sync a file.

        The kernel sends one after each write through an O_DSYNC handle, for the pages written
        only: `write` did that already.
        """
        with self.guard:
            file, through = self._file(handle), self._handles[handle][1]
            if not through:
                self._step()
                if self._syncs(path):
                    file.sync()
        return 0

    def fsyncdir(self, path: str, _datasync: int, _handle: int) -> int:
        with self.guard:
            node = self._at(path)
            assert isinstance(node, Dir)
            self._step()
            if self._syncs(path.rstrip("/") + "/"):
                node.sync()
        return 0


# -------------------------------------------------------------------------------- the process


def _save(node: Dir, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, child in node.disk.items():
        if isinstance(child, Dir):
            _save(child, path / name)
        else:
            (path / name).write_bytes(child.disk)


def unmount(mount: str, *options: str) -> bool:
    """Unmount; False if it is in use, or not mounted."""
    command = ["fusermount3", "-u", *options, mount]
    return not subprocess.run(command, capture_output=True, check=False).returncode


class Server:
    """Mounts, and mounts again; takes commands."""

    def __init__(self, backing: str, mount: str) -> None:
        """Nothing is mounted before `run`."""
        self.fs = ForgetFs()
        self._backing, self._mount = Path(backing), mount
        self._again = True
        self._sessions = 0

    def run(self, control: str) -> int:
        """Serve one connection; return the exit status."""
        try:
            import mfusepy
        except (ImportError, OSError) as error:  # OSError: without libfuse
            sys.stdout.write(f"mfusepy: {error}\n")
            return CANNOT_MOUNT
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(START_S)
            listener.bind(control)
            listener.listen()
            threading.Thread(target=self._talk, args=(listener,), daemon=True).start()
            while self._again:
                self._again = False
                self.fs.power_on()
                self._sessions += 1
                try:
                    mfusepy.FUSE(self.fs, self._mount, foreground=True, nothreads=True)
                except RuntimeError as error:
                    if self._again:
                        continue  # ended by `_end`
                    sys.stdout.write(f"libfuse cannot mount: status {error}\n")
                    return CANNOT_MOUNT
        return 0

    def _talk(self, listener: socket.socket) -> None:
        self.fs.mounted.wait()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                try:
                    answer = f"ok {self._obey(*line.split())}"
                except (OSError, TypeError, ValueError, KeyError) as error:
                    answer = f"error {error!r}"
                lines.write(answer + "\n")
                lines.flush()
        unmount(self._mount, "-z")
        self._end(self._sessions)

    def _end(self, session: int) -> None:
        """End the session of a mount that a mount namespace made meanwhile still has."""
        deadline = time.monotonic() + END_S
        while self._sessions == session and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._sessions == session:
            os.kill(os.getpid(), signal.SIGHUP)

    def _obey(self, word: str, *rest: str) -> str:
        commands: dict[str, Callable[..., str | None]] = {
            "cut": lambda seed, keep: self.fs.cut(int(seed), float(keep)),
            "cut_after": lambda n, seed, keep: self.fs.arm(int(n), int(seed), float(keep)),
            "empty": lambda: setattr(self.fs, "root", Dir(0o755)),
            "ignore": lambda *globs: setattr(self.fs, "ignored", list(globs)),
            "status": lambda: f"{'cut' if self.fs.dead else 'up'} {self.fs.steps}",
            "save": lambda: _save(self.fs.root, self._backing),
        }
        if word == "restore":
            return self._restore()
        with self.fs.guard:
            return commands[word](*rest) or ""

    def _restore(self) -> str:
        """Mount anew, once nobody has anything open there."""
        self.fs.mounted.clear()
        self._again, session = True, self._sessions
        deadline = time.monotonic() + START_S
        while not unmount(self._mount):
            if time.monotonic() > deadline:
                raise OSError(errno.EBUSY, "something on the mount is still open")
            time.sleep(0.005)
        self._end(session)
        if not self.fs.mounted.wait(START_S):
            raise OSError(errno.ETIMEDOUT, "not mounted again")
        return ""


if __name__ == "__main__":
    sys.exit(Server(sys.argv[1], sys.argv[2]).run(sys.argv[3]))
