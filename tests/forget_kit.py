"""What tests on the file system that forgets need: its mount, and processes to work there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.forgetfs import CANNOT_MOUNT, START_S, unmount

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
JOB_S = 120
"""How long a job may take before it is killed by SIGALRM."""


class CannotMountError(Exception):
    """There is no FUSE here; the text says what is missing."""


class Mount:
    """A mounted file system that forgets, in a process of its own.

    Attributes:
        path: Where it is mounted.
        image: Where `save` writes what is durable.
    """

    def __init__(self, directory: Path) -> None:
        """Mount it below a directory.

        Raises:
            CannotMountError: It cannot be mounted here.
        """
        if not os.access("/dev/fuse", os.R_OK | os.W_OK):
            raise CannotMountError("/dev/fuse is not there, or not ours")
        if shutil.which("fusermount3") is None:
            raise CannotMountError("fusermount3 is missing: apt install fuse3")
        self.path, self.image = directory / "mount", directory / "image"
        self.path.mkdir()
        paths = [str(self.image), str(self.path), str(directory / "control")]
        command = [sys.executable, "-m", "tests.forgetfs", *paths]
        self._log = (directory / "forgetfs.log").open("w+b")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != "ready":
            self.close()
            assert self._process.returncode == CANNOT_MOUNT, Path(self._log.name).read_text()
            raise CannotMountError(said)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(2 * START_S)
        self._socket.connect(paths[-1])
        self._lines = self._socket.makefile("rw")

    def tell(self, *words: object) -> str:
        """Give a command; return the answer."""
        self._lines.write(" ".join(map(str, words)) + "\n")
        self._lines.flush()
        word, _, rest = self._lines.readline().strip().partition(" ")
        assert word == "ok", f"{words}: {word} {rest}"
        return rest

    @property
    def is_cut(self) -> bool:
        """Whether the power is off."""
        return self.tell("status").startswith("cut")

    def close(self) -> None:
        """Unmount and end the process."""
        with contextlib.suppress(AttributeError):
            self._lines.close()
            self._socket.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            unmount(str(self.path), "-z")
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


# -------------------------------------------------------------------------------- processes


def serve_jobs(jobs: dict[str, Callable[..., None]]) -> None:
    """Run each line of stdin, a job's name and its arguments, in a fresh child; say how it ended.

    What takes long to import is imported once, here.
    """
    for line in sys.stdin:
        name, *arguments = line.split()
        child = os.fork()
        if not child:
            signal.alarm(JOB_S)
            try:
                jobs[name](*arguments)
                os._exit(0)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        _, status = os.waitpid(child, 0)
        say("exit", os.waitstatus_to_exitcode(status))


def say(*words: object) -> None:
    """Write a line at once, whole: it counts even if the process ends now."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Jobs:
    """A process that runs jobs, one after the other, each in a process of its own."""

    def __init__(self, module: str, log: Path) -> None:
        """Start it.

        Args:
            module: Has a function `jobs`, which calls `serve_jobs`.
            log: For what the jobs write to stderr.
        """
        code = f"from {module} import jobs; jobs()"
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
            )

    def run(self, *words: object) -> tuple[list[str], int]:
        """Run a job; return the lines it said, and its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        said: list[str] = []
        for line in self._process.stdout:
            if line.startswith("exit "):
                return said, int(line.split()[1])
            said.append(line.strip())
        raise AssertionError("the process that runs the jobs has ended")

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=START_S)
