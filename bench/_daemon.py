"""A real daemon on a private socket, for benches and tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_S = 60.0


class DaemonProcess:
    """A `kvd serve` of our own: start, signal, stop.

    Attributes:
        socket: Where it listens.
        directory: Its private directory, with `daemon.log`.
        process: The running process.
    """

    def __init__(
        self, directory: Path, *, host_bytes: int | str = 256 << 20, arguments: Sequence[str] = ()
    ) -> None:
        """Describe the daemon; `start` runs it."""
        self.directory = directory
        self.socket = str(directory / "kvd.sock")
        self.log = directory / "daemon.log"
        self._command = [
            sys.executable,
            *("-m", "kvd", "serve", "--socket", self.socket),
            *("--state-dir", str(directory / "state"), "--host-bytes", str(host_bytes)),
            *arguments,
        ]
        self.process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return self.process.pid

    def start(self, *, until: str | None = "whole") -> None:
        """Run it, and wait until its log says that it is "ready", or its host tier "whole"."""
        environment = {k: v for k, v in os.environ.items() if k != "KVD_CONFIG"}
        with self.log.open("ab") as log:
            seen = log.tell()
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + START_S
        while until is not None:
            text = self.log.read_bytes()[seen:]
            if b"ready" in text and until.encode() in text:
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                msg = f"the daemon did not start: {self.log.read_text()[-2000:]}"
                raise RuntimeError(msg)
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill it the hard way and reap it."""
        self.process.kill()
        self.process.wait()

    def clean_up(self) -> None:
        """End it if it runs, and remove the page that a killed daemon leaves behind."""
        if hasattr(self, "process") and self.process.poll() is None:
            self.kill()
        page = Path("/dev/shm") / stat_page_name(self.socket)[1:]  # noqa: S108 - where Linux has it
        page.unlink(missing_ok=True)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask it to drain; return its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@contextlib.contextmanager
def running_daemon(host_bytes: int | str = 1 << 30, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Run a daemon in a temporary directory; yields its socket."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
        daemon = DaemonProcess(Path(directory), host_bytes=host_bytes, arguments=arguments)
        daemon.start()
        try:
            yield daemon.socket
        finally:
            daemon.stop()
