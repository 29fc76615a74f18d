"""The task of the loop that empties the journal into the publisher."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgpack

from kvd.clock import epoch_now
from kvd.events.journal import Journal

if TYPE_CHECKING:
    from kvd.catalog import Catalog
    from kvd.config_events import EventsKnobs

FLUSH_S: Final = 0.1
"""Between two batches: how late a router may hear."""
RETOLD_MAX: Final = 2000
"""Hashes of a batch while all is told anew: a million chunks take a minute, and no turn long."""


class EventFeed:
    """Events of one daemon. The loop owns it; the publisher's thread sends."""

    def __init__(self, knobs: EventsKnobs, catalog: Catalog) -> None:
        """Bind, and listen to the catalog.

        Raises:
            StartError: An endpoint cannot be had; the text says what to change.
        """
        from kvd.events.publisher import Publisher  # with ZeroMQ, which not every host has

        self._knobs = knobs
        self._publisher = Publisher(knobs)
        self._journal = Journal(catalog, knobs.hashes)
        self.events = 0
        """Events sent."""
        self.refused = 0
        """Batches that the sending thread had no room for; each is followed by a retelling."""

    async def run(self) -> None:
        """Send what has changed, ten times a second, until cancelled; then what is left."""
        try:
            while True:
                self.flush()
                await asyncio.sleep(FLUSH_S)
        finally:
            self.flush()

    def flush(self) -> None:
        """Send what waits as one batch, if anything does."""
        events = self._journal.take(RETOLD_MAX)
        if not events:
            return
        batch = [epoch_now() / 1e9, events, 0]
        if self._publisher.send(msgpack.packb(batch, use_bin_type=True)):
            self.events += len(events)
        else:
            self.refused += 1
            self._journal.tell_all()

    def close(self) -> None:
        """End the thread and let go of the endpoints."""
        self._publisher.close()

    def page(self) -> dict[str, Any]:
        """Return what the statistics page shows."""
        return {
            "endpoint": self._knobs.endpoint,
            "replay_endpoint": self._knobs.replay_endpoint,
            "batches": self._publisher.sequence,
            "events": self.events,
            "events_refused": self.refused,
            "retellings": self._journal.retellings,
            "waiting": self._journal.waiting,
        }
