"""A transfer between an engine's pages and slots, and what its engine may wait for.

    QUEUED --mover begins--> RUNNING --its events have happened--> DONE
       |                        |------- the device failed ------> LOST
       +-- cancelled, refused --> FAILED

Three completions, three events: the engine's work on the pages so far (`after`, recorded on its
stream when it asks); the pages are loaded, or read and free again (`wait_layer`, `wait_pages`, on
the engine's stream); the copy to or from the slots is over (`ended`): only then is a slot published
or a lease released.

Invariants:

X1. From the call until `ended` the pages belong to the transfer; for a store, until the engine's
    stream has passed `wait_pages`.
X2. `finish` is called once, after the last event has happened or before the first copy was begun.
    In LOST it hears so: nobody knows what the GPU still does, and nothing is given back.
X3. The engine's thread never waits for the GPU: only, within a bound, for the mover to have put
    the work on its streams.
"""

from __future__ import annotations

import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvd_client.cuda.device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd_client.cuda.device import Device
    from kvd_client.cuda.forms import Form
    from kvd_client.cuda.kernels import Direction

ENQUEUE_S = 2.0
"""Longest wait for the mover to begin."""


class State(Enum):
    """Where a transfer is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


class Piece(NamedTuple):
    """One object's slot.

    Attributes:
        address: Its first byte.
        on_device: In a slab of the GPU tier, mapped into this process.
        keep: What keeps the address mapped.
    """

    address: int
    on_device: bool = False
    keep: object = None


class Transfer:
    """One load or store under way. `wait_*` from any thread; the rest is the mover's."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        form: Form,
        *,
        pieces: Sequence[Piece],
        blocks: Sequence[int],
        planes_a_layer: int,
        finish: Callable[[State], None],
        by_layer: bool = False,
        after: int = 0,
    ) -> None:
        """Describe it.

        Args:
            device: Whose memory.
            direction: Gather is a store, scatter a load.
            form: Of the objects in their slots.
            pieces: The objects' slots.
            blocks: (objects * pages) block ids, in the order of `pieces`.
            planes_a_layer: 2 for K and V, 1 for latents.
            finish: Hears the final state, on the mover's thread.
            by_layer: Move the first layers of all objects first.
            after: Event before which the pages are not touched; 0 for none.
        """
        assert len(blocks) == len(pieces) * form.pages
        self.direction = direction
        self.form = form
        self.by_layer = by_layer
        self.planes_a_layer = planes_a_layer
        # Slots in host memory first: the mover treats the two kinds apart. Those on the GPU by
        # their addresses: what lies at one distance is one launch.
        order = sorted(
            range(len(pieces)),
            key=lambda i: (pieces[i].on_device, pieces[i].address * pieces[i].on_device),
        )
        self.pieces = [pieces[i] for i in order]
        self.blocks = [b for i in order for b in blocks[i * form.pages : (i + 1) * form.pages]]
        self.after = after
        self.state = State.QUEUED
        self.started_s = 0.0
        self._device = device
        self._finish = finish
        self._marks: list[tuple[int, tuple[int, ...]]] = []
        self._changed = threading.Condition()

    # ---------------------------------------------------------------- for the engine

    @property
    def ended(self) -> bool:
        """Whether the copy is over, or will never be (X2)."""
        return self.state not in {State.QUEUED, State.RUNNING}

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.state is State.DONE

    @property
    def useful_bytes(self) -> int:
        """Bytes of the engine's memory that it moves."""
        return len(self.pieces) * self.form.useful_bytes

    def wait_layer(self, layer: int, timeout_s: float = ENQUEUE_S) -> bool:
        """Let the engine's stream wait until this layer and those before it are in its pages.

        Returns:
            False if they will not be: compute them, into other pages unless it has `ended`.
        """
        return self._wait_planes((layer + 1) * self.planes_a_layer, timeout_s)

    def wait_pages(self, timeout_s: float = ENQUEUE_S) -> bool:
        """Let the engine's stream wait until it may use all pages: loaded, or read (X1)."""
        return self._wait_planes(self.form.planes, timeout_s)

    def _wait_planes(self, planes: int, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self._mark(planes) is not None, timeout_s)
            events = self._mark(planes)
            if self.ended or events is None:
                return self.ok
            try:
                stream = self._device.current_stream()
                for event in events:
                    self._device.wait(stream, event)
            except DeviceError:
                return False
            return True

    def _mark(self, planes: int) -> tuple[int, ...] | None:
        """Return the events after which so many planes are moved, once they are known."""
        return next((events for covered, events in self._marks if covered >= planes), None)

    def wait(self, timeout_s: float) -> bool:
        """Wait on the host until the copy is over; False when it is not yet, or did not succeed."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended, timeout_s)
        return self.ok

    def cancel(self) -> bool:
        """Take back what has not begun; False when it has: its pages are kvd's until it ends."""
        with self._changed:
            if self.state is not State.QUEUED:
                return self.ended
            self.state = State.FAILED
            self._changed.notify_all()
        self._finish(State.FAILED)
        return True

    # ---------------------------------------------------------------- for the mover

    def begin(self) -> bool:
        """Enter RUNNING; False if it was cancelled."""
        with self._changed:
            if self.state is not State.QUEUED:
                return False
            self.state = State.RUNNING
            self.started_s = time.monotonic()
        return True

    def mark(self, planes: int, events: tuple[int, ...]) -> None:
        """Say that after these events so many planes, from the first on, are moved."""
        with self._changed:
            self._marks.append((planes, events))
            self._changed.notify_all()

    def end(self, state: State) -> None:
        """Enter a final state; the marks' events may be used for others from now on."""
        with self._changed:
            if self.ended:
                return
            self.state = state
            self._marks.clear()
            self._changed.notify_all()
        self._finish(state)
