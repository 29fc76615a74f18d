"""A ring pair against a deque: honest ends in any order, then a hostile end on the other side."""

from __future__ import annotations

from collections import deque
from contextlib import closing
from mmap import mmap
from struct import Struct
from typing import Final
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvd_client.errors import RingError
from kvd_client.ring import FRAME_BYTES, HEADER_BYTES, Consumer, Producer, memory_bytes

LIMIT: Final = 60
"""Longest body a consumer takes in these tests."""
SIZES: Final = (16, 17, 31, 33, 64, 97, 100, 257, 1000)
"""Data bytes of a ring: no room for a body, odd, tight, roomy."""
INDEX: Final = Struct("<Q")
LINES: Final = {"tail": 0, "head": 64}
COMPLETION_LINE: Final = 128

bodies = st.binary(max_size=LIMIT)
indexes = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 400),
    st.sampled_from([0, 1, 2**32, 2**63, 2**64 - 1]),
)


class Side:
    """One ring with its model: what was sent and not received, and the bytes it takes."""

    def __init__(self, memory: mmap, ring_bytes: int, *, completion: bool = False) -> None:
        """Start empty."""
        self.producer = Producer(memory, ring_bytes, completion=completion)
        self.consumer = Consumer(memory, ring_bytes, completion=completion, message_bytes_max=LIMIT)
        self.sent: deque[bytes] = deque()
        self.start = HEADER_BYTES + completion * ring_bytes
        self.stop = self.start + ring_bytes
        self.lines = completion * COMPLETION_LINE

    @property
    def used(self) -> int:
        """Bytes of the frames that are in the ring."""
        return sum(FRAME_BYTES + len(body) for body in self.sent)

    def close(self) -> None:
        """Let go of the memory."""
        self.producer.close()
        self.consumer.close()


class RingPair(RuleBasedStateMachine):
    """Both rings of one memory, four honest ends."""

    @initialize(ring_bytes=st.sampled_from(SIZES))
    def start(self, ring_bytes: int) -> None:
        """Make the memory of a session."""
        self.ring_bytes = ring_bytes
        self.memory = mmap(-1, memory_bytes(ring_bytes))
        self.sides = [
            Side(self.memory, ring_bytes, completion=completion) for completion in (False, True)
        ]

    def teardown(self) -> None:
        """Let go of the memory: no end may keep a view."""
        if hasattr(self, "memory"):
            for side in self.sides:
                side.close()
            self.memory.close()

    @rule(which=st.integers(0, 1), body=bodies)
    def send(self, which: int, body: bytes) -> None:
        """A body is taken exactly when frame and body have room."""
        side = self.sides[which]
        room = self.ring_bytes - side.used - FRAME_BYTES
        assert side.producer.room_bytes() == room
        assert side.producer.send(body) == (len(body) <= room)
        if len(body) <= room:
            side.sent.append(body)

    @rule(which=st.integers(0, 1))
    def receive(self, which: int) -> None:
        """Bodies come out whole and in order; an empty ring says None."""
        side = self.sides[which]
        assert side.consumer.pending() == bool(side.sent)
        expected = side.sent.popleft() if side.sent else None
        assert side.consumer.receive() == expected

    @rule(which=st.integers(0, 1), size=st.integers(0, LIMIT))
    def fill(self, which: int, size: int) -> None:
        """A ring takes as many bodies as fit and then says no, as often as it is asked."""
        side = self.sides[which]
        while side.producer.send(bytes([size]) * size):
            side.sent.append(bytes([size]) * size)
        assert side.used + FRAME_BYTES + size > self.ring_bytes
        assert side.used <= self.ring_bytes

    @rule(which=st.integers(0, 1))
    def drain(self, which: int) -> None:
        """A ring gives all that is in it and then says None, as often as it is asked."""
        side = self.sides[which]
        while side.sent:
            assert side.consumer.receive() == side.sent.popleft()
        assert side.consumer.receive() is None
        assert side.producer.room_bytes() == self.ring_bytes - FRAME_BYTES


class HostileProducer(RuleBasedStateMachine):
    """An honest consumer; whoever writes the ring also writes what it likes where it likes.

    Each honest frame may be damaged. The consumer may only say what was sent, in order, None, or
    RingError. Damage that is a valid frame of the next sequence is not damage, so bytes changed at
    random are told from the truth by the checksum alone.
    """

    @initialize(ring_bytes=st.sampled_from(SIZES), completion=st.booleans())
    def start(self, ring_bytes: int, completion: bool) -> None:  # noqa: FBT001 - drawn
        """Make the memory of a session; only one of its rings is used."""
        self.memory = mmap(-1, memory_bytes(ring_bytes))
        self.side = Side(self.memory, ring_bytes, completion=completion)
        self.taken = 0

    def teardown(self) -> None:
        """Let go of the memory, whatever it looks like."""
        if hasattr(self, "memory"):
            self.side.close()
            self.memory.close()

    @rule(body=bodies)
    def send(self, body: bytes) -> None:
        """Append an honest frame."""
        try:
            if self.side.producer.send(body):
                self.side.sent.append(body)
        except RingError:
            pass  # the head was scribbled on

    @rule(at=st.integers(0, 2000), junk=st.binary(min_size=1, max_size=40))
    def scribble_data(self, at: int, junk: bytes) -> None:
        """Overwrite bytes of the ring: frames in it, or places free for the next."""
        at = self.side.start + at % (self.side.stop - self.side.start)
        junk = junk[: self.side.stop - at]
        self.memory[at : at + len(junk)] = junk

    @rule(count=st.integers(1, 4), at=st.integers(0, 2000), bit=st.integers(0, 7))
    def flip(self, count: int, at: int, bit: int) -> None:
        """Flip a few neighbouring bits."""
        size = self.side.stop - self.side.start
        for step in range(count):
            place = self.side.start + (at + step) % size
            self.memory[place] ^= 1 << bit

    @rule(line=st.sampled_from(sorted(LINES)), value=indexes)
    def scribble_index(self, line: str, value: int) -> None:
        """Set one of the ring's two indexes to anything."""
        at = self.side.lines + LINES[line]
        self.memory[at : at + 8] = INDEX.pack(value)

    @rule(line=st.sampled_from(sorted(LINES)), by=st.integers(-100, 100))
    def nudge_index(self, line: str, by: int) -> None:
        """Move one of the ring's two indexes a little."""
        at = self.side.lines + LINES[line]
        (value,) = INDEX.unpack(self.memory[at : at + 8])
        self.memory[at : at + 8] = INDEX.pack((value + by) % 2**64)

    @rule()
    def replay(self) -> None:
        """Copy the first frame of the ring over what follows it."""
        start, size = self.side.start, self.side.stop - self.side.start
        frame = self.memory[start : start + size // 2]
        self.memory[start + size // 2 : start + 2 * (size // 2)] = frame

    @rule(tries=st.integers(1, 5))
    def receive(self, tries: int) -> None:
        """Only the next body sent, nothing, or RingError comes out."""
        for _ in range(tries):
            try:
                body = self.side.consumer.receive()
            except RingError:
                continue
            if body is None:
                return
            assert self.side.sent, "a message that nobody sent"
            assert body == self.side.sent.popleft()

    @invariant()
    def pending_does_not_raise(self) -> None:
        """Asking whether something is there is safe, whatever is there."""
        if hasattr(self, "side"):
            assert self.side.consumer.pending() in {True, False}


class HostileConsumer(RuleBasedStateMachine):
    """An honest producer; its consumer says anything about how far it has read."""

    @initialize(ring_bytes=st.sampled_from(SIZES), completion=st.booleans())
    def start(self, ring_bytes: int, completion: bool) -> None:  # noqa: FBT001 - drawn
        """Make the memory of a session, with a guard in everything the producer must not touch."""
        self.memory = mmap(-1, memory_bytes(ring_bytes))
        self.memory[:] = b"\xa5" * len(self.memory)
        self.side = Side(self.memory, ring_bytes, completion=completion)
        self.tail = 0
        self.said = 0
        self.set_head(0)

    def set_head(self, value: int) -> None:
        """Write the consumer's index."""
        at = self.side.lines + LINES["head"]
        self.memory[at : at + 8] = INDEX.pack(value)
        self.head = value

    def teardown(self) -> None:
        """Let go of the memory."""
        if hasattr(self, "memory"):
            self.side.close()
            self.memory.close()

    @rule(value=indexes)
    def say(self, value: int) -> None:
        """Claim to have read up to here."""
        self.set_head(value)

    @rule(share=st.integers(0, 4))
    def say_something_possible(self, share: int) -> None:
        """Claim to have read part of what was sent."""
        self.set_head(self.said + (self.tail - self.said) * share // 4)

    @rule(body=bodies)
    def send(self, body: bytes) -> None:
        """An impossible index is RingError; else room and answer follow the claim."""
        capacity = self.side.stop - self.side.start
        if not self.said <= self.head <= self.tail:
            with pytest.raises(RingError):
                self.side.producer.send(body)
            return
        self.said = self.head
        room = capacity - (self.tail - self.head) - FRAME_BYTES
        assert self.side.producer.room_bytes() == room <= capacity
        assert self.side.producer.send(body) == (len(body) <= room)
        if len(body) <= room:
            self.tail += FRAME_BYTES + len(body)

    @invariant()
    def nothing_else_is_written(self) -> None:
        """The producer writes its data and its own index, nothing else of the shared memory."""
        if not hasattr(self, "side"):
            return
        seen = bytearray(self.memory)
        seen[self.side.start : self.side.stop] = b"\xa5" * (self.side.stop - self.side.start)
        for line in LINES.values():
            seen[self.side.lines + line : self.side.lines + line + 8] = b"\xa5" * 8
        assert seen == b"\xa5" * len(seen)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", [RingPair, HostileProducer, HostileConsumer])
def test_ring(machine: type[RuleBasedStateMachine]) -> None:
    """The ends behave as a bounded deque; a hostile other end gets RingError and no more."""
    run_state_machine_as_test(machine)


def forge(length: int, sequence: int, body: bytes) -> bytes:
    """Make a frame with a right checksum, whatever it says."""
    crc = crc32(body, crc32(Struct("<IQ").pack(length, sequence)))
    return Struct("<IIQ").pack(length, crc, sequence) + body


@given(
    st.sampled_from([0, 1, LIMIT, LIMIT + 1, 2**31, 2**32 - 1]),
    st.sampled_from([0, 1, 2, 2**64 - 1]),
    st.binary(max_size=LIMIT + 1),
    indexes,
)
def test_forged_frame(length: int, sequence: int, body: bytes, tail: int) -> None:
    """A frame counts only with its true length, next sequence, and inside limit and index."""
    with mmap(-1, memory_bytes(257)) as memory, closing(Side(memory, 257)) as side:
        frame = forge(length, sequence, body)
        memory[HEADER_BYTES : HEADER_BYTES + len(frame)] = frame
        memory[:8] = INDEX.pack(tail)
        try:
            got = side.consumer.receive()
        except RingError:
            got = None
        else:
            assert (got is None) == (tail == 0)
        if got is not None:
            assert got == body
            assert (length, sequence) == (len(body), 1)
            assert len(frame) <= tail <= 257
            assert length <= LIMIT


@pytest.mark.parametrize(
    ("size", "tail"),
    [
        (LIMIT + 1, FRAME_BYTES + LIMIT + 1),
        (LIMIT, FRAME_BYTES + LIMIT - 1),
        (LIMIT, FRAME_BYTES - 1),
        (LIMIT, 258),
        (LIMIT, 2**64 - 1),
    ],
)
def test_a_good_frame_in_the_wrong_place(size: int, tail: int) -> None:
    """A frame that is right in itself is RingError over the limit or outside the index."""
    with mmap(-1, memory_bytes(257)) as memory, closing(Side(memory, 257)) as side:
        frame = forge(size, 1, b"x" * size)
        memory[HEADER_BYTES : HEADER_BYTES + len(frame)] = frame
        memory[:8] = INDEX.pack(tail)
        with pytest.raises(RingError):
            side.consumer.receive()
        if size == LIMIT:
            memory[:8] = INDEX.pack(max(len(frame), side.consumer._tail_seen))
            assert side.consumer.receive() == b"x" * size


def test_an_index_that_goes_back_is_an_error() -> None:
    """A tail seen and then taken back is RingError, also when it is back at the head exactly."""
    with mmap(-1, memory_bytes(257)) as memory, closing(Side(memory, 257)) as side:
        assert side.producer.send(b"one")
        assert side.producer.send(b"two")
        assert side.consumer.receive() == b"one"
        for tail in (FRAME_BYTES + 3, 2 * FRAME_BYTES + 5, 0):
            memory[:8] = INDEX.pack(tail)
            with pytest.raises(RingError):
                side.consumer.receive()
        memory[:8] = INDEX.pack(2 * FRAME_BYTES + 6)
        assert side.consumer.receive() == b"two"


def test_memory_smaller_than_promised_is_refused() -> None:
    """An end over less memory than the greeting said is RingError, not a later fault."""
    with mmap(-1, memory_bytes(257) - 1) as memory:
        for completion in (False, True):
            with pytest.raises(RingError):
                Side(memory, 257, completion=completion)


def test_each_side_writes_its_own_lines() -> None:
    """The four indexes lie on four cache lines, in the order the module draws."""
    with (
        mmap(-1, memory_bytes(257)) as memory,
        closing(Side(memory, 257)) as request,
        closing(Side(memory, 257, completion=True)) as completion,
    ):
        assert request.producer.send(b"12")
        assert completion.producer.send(b"1234")
        assert request.consumer.receive() == b"12"
        assert completion.consumer.receive() == b"1234"
        lines = [INDEX.unpack(memory[at : at + 8])[0] for at in range(0, 256, 64)]
        assert lines == [18, 18, 20, 20]
