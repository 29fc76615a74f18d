"""Named points at which a test kills the daemon. For tests only.

    KVD_FAILPOINT=demote.after_write:3 kvd serve ...

ends that daemon by SIGKILL when it passes the point for the third time (the first without a
number). Without the variable, which is looked at once, a point does nothing. Whoever can set it
starts the daemon anyway, and could as well kill it.

    KVD_STALL=mover.turn:3 kvd serve ...

makes what passes that point for the third time stay there for ever, which is how a test finds out
who notices.

Any thread.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Final

VARIABLE: Final = "KVD_FAILPOINT"
STALL_VARIABLE: Final = "KVD_STALL"
STALLS: Final = (
    *("loop.tick", "mover.turn", "nvme.call", "index.turn", "codec.call", "gpu.turn"),
    "verify.call",
)
"""Points at which the loop, one task of it, or a thread can be made to hang."""
_FOR_EVER_S: Final = 1e6

POINTS: Final = (
    # a client stores
    "reserve.before",
    "reserve.after",
    "publish.before",
    "publish.after",
    # a chunk goes down
    "demote.before_encode",
    "demote.before_write",
    "demote.after_write",
    "demote.after_end",
    # a chunk comes up
    "promote.before_read",
    "promote.after_read",
    "promote.after_end",
    # a cold copy turns out to be bad
    "forget.before_delete",
    "forget.after_delete",
    # a region is given up
    "rewrite.before_write",
    "rewrite.after_write",
    "reclaim.before_delete",
    "reclaim.after_delete",
    "reclaim.after_drop",
    # a start
    "open.before",
    "open.before_restore",
    "open.after_restore",
    "open.before_ready",
    # an orderly end
    "drain.begin",
    "flush.begin",
    "flush.end",
    "close.before",
    "close.after",
)
"""Every point there is; the kill matrix goes through all of them."""


class Failpoint:
    """One point that kills at the n-th pass."""

    def __init__(self, spec: str) -> None:
        """Read NAME or NAME:N.

        Raises:
            ValueError: There is no such point, or N is no number from 1.
        """
        self.name, _, number = spec.partition(":")
        self.left = int(number or "1")
        if self.name not in POINTS or self.left < 1:
            msg = f"{VARIABLE}={spec}: write NAME or NAME:N with a name of kvd/failpoints.py"
            raise ValueError(msg)

    def passed(self, name: str) -> None:
        """Count a pass of a point; does not return from the n-th of this one."""
        assert name in POINTS
        if name == self.name:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


_spec = os.environ.get(VARIABLE, "")
_armed = Failpoint(_spec) if _spec else None
_stall, _, _stall_number = os.environ.get(STALL_VARIABLE, "").partition(":")
_stall_left = int(_stall_number or "1")


def maybe_fault(name: str) -> None:
    """End the daemon here if this is the point that a test has chosen."""
    if _armed is not None:
        _armed.passed(name)


def stalls(name: str) -> bool:
    """Count a pass of a stall point; tell whether to hang here."""
    global _stall_left  # noqa: PLW0603 - armed once a process, from its environment
    assert name in STALLS
    if name == _stall:
        _stall_left -= 1
    return name == _stall and _stall_left <= 0


def maybe_hang(name: str) -> None:
    """Hold up this thread for ever if this is the point that a test has chosen."""
    if stalls(name):
        time.sleep(_FOR_EVER_S)


async def maybe_stall(name: str) -> None:
    """Hold up this task for ever, and no other, if this is the point that a test has chosen."""
    if stalls(name):
        import asyncio

        await asyncio.sleep(_FOR_EVER_S)
