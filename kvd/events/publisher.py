"""Sends batches of events: a thread with two ZeroMQ sockets, as vLLM's publisher has them.

    PUB     [topic, sequence as 8 bytes big-endian, payload]
    ROUTER  asked with [b"", sequence]: [b"", topic, sequence, payload] for each batch that is kept
            from there on, then [b"", b"", -1 as 8 bytes, b""]

P1. The loop never waits: it hands a batch over, or hears that there is no room.
P2. What is kept for replay has a bound in batches and in bytes; the oldest goes.
P3. A subscriber that is slow loses batches, and sees so by the sequence: nothing waits for it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import zmq

from kvd import log
from kvd.errors import StartError

if TYPE_CHECKING:
    from kvd.config_events import EventsKnobs

_LOG = log.get("events")
END: Final = (-1).to_bytes(8, "big", signed=True)
QUEUE_MAX: Final = 256
"""Batches between the loop and the thread."""
KEPT_BYTES_MAX: Final = 64 << 20
REQUEST_BYTES_MAX: Final = 256
"""Longest message from outside: a subscription or the number of a batch."""
CLOSE_S: Final = 2.0
_REQUEST_FRAMES: Final = 3
_SEQUENCE_BYTES: Final = 8


class Publisher:
    """Owns the sockets, the thread, and what is kept for replay."""

    def __init__(self, knobs: EventsKnobs) -> None:
        """Bind and start the thread.

        Raises:
            StartError: An endpoint cannot be had; the text says what to change.
        """
        self._topic = knobs.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_max = knobs.buffer_steps
        self._kept_bytes = 0
        self._sequence = 0
        self._queue: queue.Queue[bytes] = queue.Queue(QUEUE_MAX)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended = False
        self._context = zmq.Context(io_threads=1)
        try:
            self._pub = self._bind(zmq.PUB, knobs.endpoint, "endpoint", knobs.hwm)
            more = knobs.buffer_steps + 1  # all of a replay, for a client that reads slowly
            self._router = self._bind(zmq.ROUTER, knobs.replay_endpoint, "replay_endpoint", more)
        except StartError:
            self._context.destroy(linger=0)
            os.close(self._bell)
            raise
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str, key: str, hwm: int) -> zmq.Socket[bytes] | None:
        if not endpoint:
            return None
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, hwm)
        made.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            text = f"cannot publish events at {endpoint}: {error.strerror}; change [events] {key}"
            raise StartError(text) from error
        return made

    @property
    def sequence(self) -> int:
        """The number of the next batch: as many were taken over."""
        return self._sequence

    def send(self, payload: bytes) -> bool:
        """Hand a batch over; False when the thread is too far behind (P1). The loop only."""
        try:
            self._queue.put_nowait(payload)
        except queue.Full:
            return False
        self._sequence += 1
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)
        return True

    def close(self) -> None:
        """Send what was taken over, end the thread and let go of the endpoints."""
        self._ended = True
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=0)
            os.close(self._bell)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        number = 0
        while True:
            poller.poll(1000)
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            ended = self._ended
            number = self._send_waiting(number)
            self._answer_one()
            if ended:
                return

    def _send_waiting(self, number: int) -> int:
        """Send every batch that waits; return the next number."""
        assert self._pub is not None
        while True:
            try:
                payload = self._queue.get_nowait()
            except queue.Empty:
                return number
            sequence = number.to_bytes(_SEQUENCE_BYTES, "big")
            number += 1
            self._keep(sequence, payload)
            with suppress(zmq.ZMQError):  # PUB drops for who is slow, and does not wait (P3)
                self._pub.send_multipart([self._topic, sequence, payload], zmq.DONTWAIT)

    def _keep(self, sequence: bytes, payload: bytes) -> None:
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._kept_max or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_one(self) -> None:
        """Answer one request for a replay, if there is one; the next turn takes the next."""
        if self._router is None:
            return
        try:
            frames = self._router.recv_multipart(zmq.DONTWAIT)
        except zmq.ZMQError:
            return
        if len(frames) != _REQUEST_FRAMES or len(frames[2]) != _SEQUENCE_BYTES:
            _LOG.limited("replay request refused", frames=len(frames))
            return
        client, _, start = frames
        for sequence, payload in self._kept:
            if sequence >= start and not self._reply(client, self._topic, sequence, payload):
                return
        self._reply(client, b"", END, b"")

    def _reply(self, client: bytes, *frames: bytes) -> bool:
        assert self._router is not None
        try:
            self._router.send_multipart([client, b"", *frames], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False  # it left, or reads nothing
        return True
