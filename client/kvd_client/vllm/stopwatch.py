"""How long the engine's steps compute. On the engine's thread.

On a GPU a step is only asked for when its Python returns, so the GPU's own clock is read instead,
some steps later and without waiting.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

UNREAD_MAX: Final = 8
"""Steps whose end the GPU has not reached; more are not timed."""


class Step(NamedTuple):
    """A step that is over: tokens it computed, and seconds."""

    tokens: int
    seconds: float


class Stopwatch:
    """Times steps in host memory."""

    def __init__(self) -> None:
        """Be ready."""
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end(self, tokens: int) -> list[Step]:
        """A step of so many tokens ends; return what is known by now."""
        return [Step(tokens, time.perf_counter() - self._began)]


class GpuStopwatch(Stopwatch):
    """Times steps by events of the GPU."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """Take what makes a `torch.cuda.Event` with timing."""
        super().__init__()
        self._make_event = make_event
        self._unread: deque[tuple[int, Any, Any]] = deque()
        self._begin: Any = None

    def begin(self) -> None:
        """A step begins, as far as the host knows."""
        self._begin = None
        if len(self._unread) < UNREAD_MAX:
            self._begin = self._make_event()
            self._begin.record()

    def end(self, tokens: int) -> list[Step]:
        """A step of so many tokens ends; return those that the GPU has ended."""
        if self._begin is not None and tokens:
            end = self._make_event()
            end.record()
            self._unread.append((tokens, self._begin, end))
        self._begin = None
        steps = []
        while self._unread and self._unread[0][2].query():
            count, begin, end = self._unread.popleft()
            steps.append(Step(count, begin.elapsed_time(end) / 1e3))
        return steps


def stopwatch(*, on_gpu: bool) -> Stopwatch:
    """Return the one for where the engine computes."""
    if not on_gpu:
        return Stopwatch()
    import torch

    return GpuStopwatch(lambda: torch.cuda.Event(enable_timing=True))
