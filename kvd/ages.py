"""When a tick of the catalog was: how long ago a chunk was last used, without a time in each. Pure.

The catalog numbers uses (`Chunk.tick`); somebody with a clock notes now and then which number it
has come to. A use is then known to within a second if it was lately, and more coarsely the longer
ago it was. What is told is never longer ago than it was.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

STEP_NS: Final = 10**9
NOTES_MAX: Final = 4096
"""Notes kept; when there are more, every other of the older half goes."""


class Ages:
    """Ticks and their times, both rising."""

    def __init__(self, now_ns: int) -> None:
        """Begin now; what has tick 0 was not used since."""
        self._ticks = [0]
        self._times_ns = [now_ns]

    def note(self, tick: int, now_ns: int) -> None:
        """Remember that all ticks up to this one are past; free, when none is new."""
        if tick == self._ticks[-1]:
            return
        if len(self._ticks) > 1 and now_ns - self._times_ns[-2] < STEP_NS:
            self._ticks[-1], self._times_ns[-1] = tick, now_ns
            return
        self._ticks.append(tick)
        self._times_ns.append(now_ns)
        if len(self._ticks) > NOTES_MAX:
            half = NOTES_MAX // 2
            for notes in (self._ticks, self._times_ns):
                notes[1:half] = notes[2:half:2]

    def age_s(self, tick: int, now_ns: int) -> int | None:
        """Return the whole seconds since a use, at least; None for none since the beginning."""
        if tick == 0:
            return None
        at = bisect_left(self._ticks, tick)
        if at == len(self._ticks):
            return 0  # since the last note
        return max(0, now_ns - self._times_ns[at]) // 10**9
