"""The daemon's HTTP process: bound before the daemon is ready, run beside it, started anew.

The daemon itself has no HTTP in it: the child is given a listening socket and the name of the
statistics page, and no memory of the cache. A loop that is stuck, a daemon that is stopped: the
child still answers, and says so. It goes when the daemon goes (the kernel sees to it).

One task of the loop owns it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvd import log
from kvd.http.main import PARENT, bind

if TYPE_CHECKING:
    from kvd.config_http import HttpKnobs

_LOG = log.get("http")
RESTART_S: Final = (1.0, 60.0)
"""First and longest pause before a child that has ended is started anew."""
STEADY_S: Final = 60.0
"""A child that lived so long had no trouble starting."""
END_S: Final = 2.0
_NOT_ITS_OWN: Final = {"NOTIFY_SOCKET", "WATCHDOG_USEC"}


class HttpChild:
    """Owns the listening socket and the process."""

    def __init__(self, knobs: HttpKnobs, kvd_socket: str) -> None:
        """Bind; the child comes with `run`.

        Raises:
            StartError: The address cannot be had; the text says what to change.
        """
        self._socket = bind(knobs.listen)
        self._knobs = knobs
        self._kvd_socket = kvd_socket
        self.starts = 0
        """Children so far; more than one means that some have ended."""

    def close(self) -> None:
        """Let go of the address."""
        self._socket.close()

    async def run(self) -> None:
        """Run a child after the other until cancelled; the last is ended, and waited for."""
        pause_s = RESTART_S[0]
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                code = await self._one()
            except OSError as error:
                code = error.errno or -1
            if loop.time() - began > STEADY_S:
                pause_s = RESTART_S[0]
            _LOG.limited("http process ended; it is started anew", code=code, in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S[1])

    async def _one(self) -> int:
        fd = self._socket.fileno()
        hosts = [part for name in self._knobs.names for part in ("--allow-host", name)]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvd", "http", "--fd", str(fd), "--socket", self._kvd_socket, *hosts),
            pass_fds=(fd,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={
                **{k: v for k, v in os.environ.items() if k not in _NOT_ITS_OWN},
                PARENT: str(os.getpid()),
            },
        )
        self.starts += 1
        _LOG.info("http", address=self._knobs.listen, pid=child.pid)
        try:
            return await child.wait()
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.terminate()
                try:
                    async with asyncio.timeout(END_S):
                        await child.wait()
                except TimeoutError:
                    child.kill()
