"""One daemon a state directory: a lock the kernel lets go of when its holder dies."""

from __future__ import annotations

import fcntl
import os

from kvd.errors import StartError


class LockFile:
    """An flock on `<directory>/lock`, with its holder's pid inside for people."""

    def __init__(self, directory: str, socket: str) -> None:
        """Take the lock.

        Raises:
            StartError: Another daemon holds it, or the directory cannot be used.
        """
        path = os.path.join(directory, "lock")  # noqa: PTH118
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            msg = f"cannot use state_dir {directory}: {error.strerror}; set another --state-dir"
            raise StartError(msg) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._fd, 512, 0).decode(errors="replace").strip() or "a process"
            os.close(self._fd)
            msg = (
                f"state_dir {directory} is in use by {holder}: "
                "stop that daemon or set another --state-dir"
            )
            raise StartError(msg) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"kvd pid {os.getpid()} at {socket}\n".encode(), 0)

    def release(self) -> None:
        """Let go of the lock; the file stays."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
