"""Byte rings in shared memory: one producer, one consumer, neither trusting the other.

The memory of a session (one sealed memfd)::

    0      64     128    192    256                   4096            4096+N          4096+2N
    | req  | req  | cmp  | cmp  | unused              | request data  | completion    |
    | tail | head | tail | head |                     | N bytes       | data, N bytes |
      client daemon daemon client  <- the only writer of each 64-byte line

A frame is ``length u32, crc32 u32, sequence u64`` and then `length` bytes; frames follow each
other without padding and wrap at the ring's end. Indexes count bytes since the start and never
wrap (2**64).

Invariants:

R1. Each side keeps its own index in private memory; the shared copy of it is written, never read.
R2. The other side's index is a hint: more bytes than the ring holds, or fewer than were seen
    before, is a `RingError`.
R3. A frame is copied out before any of it is looked at twice; its checksum covers length,
    sequence and body, so a torn, repeated or rewritten frame is a `RingError`, never a message.
R4. No call waits: `send` says False when there is no room, `receive` None when there is nothing.

One thread a side. Index reads and writes are single aligned 8-byte copies (`memoryview` of
format Q); x86 keeps their order, and elsewhere the doorbell's system call lies between a write
and the read it announces (docs/adr/0003-rings.md).
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING
from zlib import crc32

from kvd_client.errors import RingError

if TYPE_CHECKING:
    from mmap import mmap

HEADER_BYTES = 4096
_FRAME = Struct("<IIQ")
_SEALED = Struct("<IQ")
FRAME_BYTES = _FRAME.size
_LINE = 64 // 8
REQUEST_LINES = (0 * _LINE, 1 * _LINE)
COMPLETION_LINES = (2 * _LINE, 3 * _LINE)


def memory_bytes(ring_bytes: int) -> int:
    """Size of the memory that holds both rings."""
    return HEADER_BYTES + 2 * ring_bytes


class _End:
    """What both ends share: their view of the memory and the two index lines."""

    def __init__(self, memory: mmap, ring_bytes: int, *, completion: bool) -> None:
        if len(memory) < memory_bytes(ring_bytes):
            msg = "the ring's memory is smaller than the greeting said"
            raise RingError(msg)
        start = HEADER_BYTES + (ring_bytes if completion else 0)
        self._view = memoryview(memory)
        self._lines = self._view[:HEADER_BYTES].cast("Q")
        self._data = self._view[start : start + ring_bytes]
        self._tail_line, self._head_line = COMPLETION_LINES if completion else REQUEST_LINES
        self._capacity = ring_bytes
        self._sequence = 0

    def close(self) -> None:
        """Let go of the memory; the end is unusable afterwards."""
        self._data.release()
        self._lines.release()
        self._view.release()


class Producer(_End):
    """The writing end of one ring."""

    def __init__(self, memory: mmap, ring_bytes: int, *, completion: bool) -> None:
        """Start at zero on fresh memory."""
        super().__init__(memory, ring_bytes, completion=completion)
        self._tail = 0
        self._head_seen = 0

    def room_bytes(self) -> int:
        """Bytes of body that `send` would take now.

        Raises:
            RingError: The consumer's index cannot be right (R2).
        """
        head = self._lines[self._head_line]
        if not self._head_seen <= head <= self._tail:
            msg = "the consumer's index went back or past the producer's"
            raise RingError(msg)
        self._head_seen = head
        return self._capacity - (self._tail - head) - FRAME_BYTES

    def send(self, body: bytes) -> bool:
        """Append one frame and show it to the consumer; False when there is no room.

        Raises:
            RingError: The consumer's index cannot be right (R2).
        """
        if self.room_bytes() < len(body):
            return False
        self._sequence += 1
        crc = crc32(body, crc32(_SEALED.pack(len(body), self._sequence)))
        frame = _FRAME.pack(len(body), crc, self._sequence) + body
        at = self._tail % self._capacity
        first = min(len(frame), self._capacity - at)
        self._data[at : at + first] = frame[:first]
        if first < len(frame):
            self._data[: len(frame) - first] = frame[first:]
        self._tail += len(frame)
        self._lines[self._tail_line] = self._tail  # last: shows the frame
        return True


class Consumer(_End):
    """The reading end of one ring."""

    def __init__(
        self, memory: mmap, ring_bytes: int, *, completion: bool, message_bytes_max: int
    ) -> None:
        """Start at zero on fresh memory; longer messages than the limit are errors."""
        super().__init__(memory, ring_bytes, completion=completion)
        self._head = 0
        self._tail_seen = 0
        self._limit = message_bytes_max

    def _copy(self, position: int, count: int) -> bytes:
        at = position % self._capacity
        first = min(count, self._capacity - at)
        head = bytes(self._data[at : at + first])
        return head if first == count else head + bytes(self._data[: count - first])

    def pending(self) -> bool:
        """Tell whether `receive` would find something."""
        return bool(self._lines[self._tail_line] != self._head)

    def receive(self) -> bytes | None:
        """Copy out the next frame's body and free its place; None when there is none.

        Raises:
            RingError: Index, length, sequence or checksum cannot be right (R2, R3).
        """
        tail = self._lines[self._tail_line]
        pending = tail - self._head
        if not pending and tail == self._tail_seen:
            return None
        if tail < self._tail_seen or not FRAME_BYTES <= pending <= self._capacity:
            msg = "the producer's index is outside the ring"
            raise RingError(msg)
        self._tail_seen = tail
        length, crc, sequence = _FRAME.unpack(self._copy(self._head, FRAME_BYTES))
        if length > self._limit or length > pending - FRAME_BYTES:
            msg = "a message is longer than the limit or than what was sent"
            raise RingError(msg)
        body = self._copy(self._head + FRAME_BYTES, length)
        if sequence != self._sequence + 1 or crc != crc32(
            body, crc32(_SEALED.pack(length, sequence))
        ):
            msg = "a message's checksum or sequence is wrong"
            raise RingError(msg)
        self._sequence = sequence
        self._head += FRAME_BYTES + length
        self._lines[self._head_line] = self._head
        return body
