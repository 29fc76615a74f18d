"""The statistics page: what `kvd stat` reads, in named shared memory, without asking the daemon.

Two halves hold the last two snapshots, so that one is whole whenever the writer stops, be it in
the middle of writing the other. Native byte order: writer and reader share a host.

    0       magic, version, pid, its start time, boot id
    64      half 0: sequence, written (monotonic ns), length, crc32
    128     half 1: the same
    4096    payload of half 0
    69632   payload of half 1
    135168

S1. A half's sequence is odd while it is being written; even sequences of both halves only rise,
    and the next snapshot goes over the lower one.
S2. A reader believes a half whose sequence is even, above 0 and the same after copying as before,
    and whose checksum over sequence, time and payload is right. The checksum alone decides what
    is whole, so that the order in which a processor shows the writes does not matter.
S3. The page is sized once, by its one writer, before anybody can find the magic in it.
S4. The writer has the page locked (flock) from before the magic until it ends. Process ids mean
    nothing to a reader in another container; the lock does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import zlib
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import posix_ipc

from kvd.errors import StartError
from kvd_client.errors import KvdError
from kvd_client.paths import STAT_PAGE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAGIC = b"kvdstat\n"
VERSION = 1
PAYLOAD_BYTES_MAX = 64 << 10
PAGE_BYTES = 4096 + 2 * PAYLOAD_BYTES_MAX

_HEAD = Struct("@8sIIQQ16s")
_HALF = Struct("@QQII")
_SEQUENCE = Struct("@Q")
_COVERED = Struct("@QQ")
_HALF_AT = (64, 128)
_PAYLOAD_AT = (4096, 4096 + PAYLOAD_BYTES_MAX)
_TRIES = 100
_TRY_S = 0.001
_LOCK_TRIES = 1000
_NO_BOOT_ID = bytes(16)

Memory = mmap.mmap | bytearray


class NoStatPage(KvdError):
    """There is no page that can be read; the text says why and what to do."""


class Snapshot(NamedTuple):
    """What a page said.

    Attributes:
        stats: The daemon's map.
        age_s: Seconds since it was written.
        pid: Who wrote it.
        alive: Whether that process still lives.
        stopped: Whether it is alive, but stopped by a signal or debugger.
    """

    stats: dict[str, Any]
    age_s: float
    pid: int
    alive: bool
    stopped: bool


class StatPage:
    """The writer's end; one thread."""

    def __init__(self, name: str, memory: mmap.mmap, fd: int) -> None:
        """Take over a fresh mapping, and the locked descriptor; use `create`."""
        self._name = name
        self._memory = memory
        self._fd = fd
        self._sequence = 0

    @classmethod
    def create(cls, name: str, mode: int = 0o644) -> StatPage:
        """Make the page, in place of one that an earlier daemon left.

        Args:
            name: The POSIX name, see `kvd_client.paths.stat_page_name`.
            mode: Who may read it.

        Raises:
            StartError: The name is taken by another user, or there is no room for it.
        """
        with suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
            posix_ipc.unlink_shared_memory(name)
        sweep()
        try:
            shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=mode, size=PAGE_BYTES)
        except (posix_ipc.Error, OSError) as error:
            reason = str(error) or type(error).__name__
            raise StartError(
                f"no statistics page: {reason}; stop the other user's daemon at this socket,"
                " or make room in /dev/shm"
            ) from error
        os.fchmod(shared.fd, mode)  # whatever the umask
        memory = mmap.mmap(shared.fd, PAGE_BYTES)
        fd = os.dup(shared.fd)
        shared.close_fd()
        if not _lock(fd):
            os.close(fd)
            raise StartError(f"no statistics page: {name} is locked by another user's process")
        write_head(memory, os.getpid())
        return cls(name, memory, fd)

    def write(self, stats: Mapping[str, object], now_ns: int) -> None:
        """Replace the older snapshot.

        Args:
            stats: Text keys; lists are cut short when all of it does not fit.
            now_ns: The monotonic clock.
        """
        self._sequence = write_half(self._memory, self._sequence, _pack(stats), now_ns)

    def close(self) -> None:
        """Take the page away, unless another daemon has put its own in its place."""
        self._memory.close()
        with suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
            shared = posix_ipc.SharedMemory(self._name, flags=0, read_only=True)
            here, own = os.fstat(shared.fd), os.fstat(self._fd)
            shared.close_fd()
            if (here.st_dev, here.st_ino) == (own.st_dev, own.st_ino):
                posix_ipc.unlink_shared_memory(self._name)
        os.close(self._fd)


def _lock(fd: int) -> bool:
    """Lock a page for its writer; readers that look whether it is locked hold it for an instant."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TRY_S)
        else:
            return True
    return False


def write_head(memory: Memory, pid: int) -> None:
    """Say whose page it is; the magic last, so that nobody believes half of it (S3)."""
    head = _HEAD.pack(MAGIC, VERSION, 0, pid, _process(pid)[0], _boot_id())
    memory[len(MAGIC) : len(head)] = head[len(MAGIC) :]
    memory[: len(MAGIC)] = MAGIC


def sweep(prefix: str = STAT_PAGE_PREFIX) -> int:
    """Take away the pages of daemons that died without a chance to; return how many."""
    swept = 0
    with suppress(OSError):
        for entry in os.scandir("/dev/shm"):  # noqa: S108 - where Linux keeps POSIX shared memory
            name = f"/{entry.name}"
            if not name.startswith(prefix) or entry.stat().st_uid != os.geteuid():
                continue
            with suppress(NoStatPage, posix_ipc.Error):
                if not read(name).alive:
                    posix_ipc.unlink_shared_memory(name)
                    swept += 1
    return swept


def write_half(memory: Memory, sequence: int, payload: bytes, now_ns: int) -> int:
    """Write a snapshot over the older half; return its sequence."""
    assert sequence % 2 == 0
    assert len(payload) <= PAYLOAD_BYTES_MAX
    done = sequence + 2
    half = done // 2 % 2
    crc = zlib.crc32(payload, zlib.crc32(_COVERED.pack(done, now_ns)))
    _SEQUENCE.pack_into(memory, _HALF_AT[half], done - 1)  # S1: odd from here ...
    at = _PAYLOAD_AT[half]
    memory[at : at + len(payload)] = payload
    _HALF.pack_into(memory, _HALF_AT[half], done - 1, now_ns, len(payload), crc)
    _SEQUENCE.pack_into(memory, _HALF_AT[half], done)  # ... to here
    return done


def _pack(stats: Mapping[str, object]) -> bytes:
    """Encode, with the longest lists halved until the payload fits."""
    fitting = dict(stats)
    while True:
        payload = msgpack.packb(fitting, use_bin_type=True)
        assert isinstance(payload, bytes)
        if len(payload) <= PAYLOAD_BYTES_MAX:
            return payload
        lists = {key: value for key, value in fitting.items() if isinstance(value, list) and value}
        assert lists, "statistics without lists are larger than the page"
        longest = max(lists, key=lambda key: len(msgpack.packb(lists[key])))
        fitting[longest] = lists[longest][: len(lists[longest]) // 2]
        fitting["cut_short"] = True


def read(name: str) -> Snapshot:
    """Read the page of a daemon, which need not be running.

    Raises:
        NoStatPage: There is none, or none that this version can read.
    """
    memory, alive = _map(name)
    try:
        magic, version, _, pid, started, boot_id = _HEAD.unpack_from(memory, 0)
        if magic != MAGIC or version != VERSION:
            raise NoStatPage(
                f"the daemon's statistics page is not of version {VERSION};"
                " use the `kvd` that the daemon was started with"
            )
        payload, written_ns = read_halves(memory)
    finally:
        memory.close()
    age_s = max(0.0, (time.monotonic_ns() - written_ns) / 1e9)
    started_now, state = _process(pid)
    known = started == started_now and boot_id == _boot_id()  # else it may be another container's
    return Snapshot(_unpack(payload), age_s, pid, alive, alive and known and state in {"T", "t"})


def _map(name: str) -> tuple[mmap.mmap, bool]:
    """Map a page; tell whether its writer lives (S4)."""
    try:
        shared = posix_ipc.SharedMemory(name, flags=0, read_only=True)
    except posix_ipc.ExistentialError:
        raise NoStatPage(
            "no daemon here: start one with `kvd serve`, or name its socket with --socket"
        ) from None
    except (posix_ipc.PermissionsError, OSError) as error:
        raise NoStatPage(
            "the daemon's statistics page may not be read by this user; use sudo"
        ) from error
    try:
        if os.fstat(shared.fd).st_size != PAGE_BYTES:
            raise NoStatPage(
                f"the daemon's statistics page is not of version {VERSION} or not ready;"
                " try again, or use the `kvd` that the daemon was started with"
            )
        memory = mmap.mmap(shared.fd, PAGE_BYTES, access=mmap.ACCESS_READ)
        try:
            fcntl.flock(shared.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return memory, True
        return memory, False
    finally:
        shared.close_fd()


def read_halves(memory: Memory, sleep: Callable[[float], None] = time.sleep) -> tuple[bytes, int]:
    """Return the payload and time of the latest whole snapshot.

    Raises:
        NoStatPage: None was whole in a hundred tries.
    """
    for _ in range(_TRIES):
        heads = [(*_HALF.unpack_from(memory, at), half) for half, at in enumerate(_HALF_AT)]
        for sequence, written_ns, length, crc, half in sorted(heads, reverse=True):
            if sequence % 2 or sequence == 0 or length > PAYLOAD_BYTES_MAX:
                continue
            payload = bytes(memory[_PAYLOAD_AT[half] : _PAYLOAD_AT[half] + length])
            same = _SEQUENCE.unpack_from(memory, _HALF_AT[half])[0] == sequence
            if same and zlib.crc32(payload, zlib.crc32(_COVERED.pack(sequence, written_ns))) == crc:
                return payload, written_ns
        sleep(_TRY_S)
    raise NoStatPage("the daemon has not written its statistics page yet; try again in a second")


def _unpack(payload: bytes) -> dict[str, Any]:
    try:
        stats = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_str_len=PAYLOAD_BYTES_MAX,
            max_bin_len=0,
            max_array_len=4096,
            max_map_len=256,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise NoStatPage("the statistics page makes no sense; restart the daemon") from error
    if not isinstance(stats, dict):
        raise NoStatPage("the statistics page makes no sense; restart the daemon")
    return stats


def _process(pid: int) -> tuple[int, str]:
    """Return a process's start time in clock ticks and its state; (0, "") when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib costs 10 ms to import
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[19]), fields[0].decode()
    except (OSError, ValueError, IndexError):
        return 0, ""


def _boot_id() -> bytes:
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # noqa: PTH123 - as above
            return bytes.fromhex(file.read().decode().strip().replace("-", ""))[:16]
    except (OSError, ValueError):
        return _NO_BOOT_ID
