"""Short waits of kvd's own threads. On the thread that calls."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_PR_SET_TIMERSLACK: Final = 29
SLACK_NS: Final = 1000


def precise_waits() -> None:
    """Let the calling thread's timed waits end when they should, and not 50 us later."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
