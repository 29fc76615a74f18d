"""What the daemon has for its operators: ages, pins, and the desk that answers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.admin.copies import forgetting
from kvd.admin.desk import Desk, Parts
from kvd.admin.pins import PinBook
from kvd.ages import Ages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.admin.recording import Recorder
    from kvd.daemon import Daemon


class AdminSide:
    """Made once by the daemon, when its parts are there; the loop is the only caller."""

    def __init__(self, daemon: Daemon, *, stop: Callable[[], None]) -> None:
        """Share the loop's state; `stop` begins the drain."""
        self._catalog = daemon.catalog
        self._clock = daemon.clock
        self._dispatcher = daemon.dispatcher
        self.ages = Ages(daemon.started_ns)
        self.pins = PinBook(daemon.catalog)
        cold, promote_s = daemon.cold, daemon.config.limits.promote_s
        forget = forgetting(daemon.catalog, cold.store) if cold is not None else None
        parts = Parts(self.pins, cold, forget, stop, promote_s, self._record)
        self.desk = Desk(daemon.catalog, self.ages, daemon.clock, parts)
        if daemon.directory is not None:
            self.desk.holders = daemon.directory.holders

    def _record(self, recorder: Recorder | None) -> None:
        self._dispatcher.recorder = recorder

    def tick(self) -> None:
        """Let time pass; some five times a second."""
        now_ns = self._clock.now_ns()
        self.ages.note(self._catalog.tick, now_ns)
        self.pins.tick(now_ns)
