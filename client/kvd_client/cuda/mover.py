"""Puts transfers on the GPU's streams and sees them end: one thread, two streams a direction.

    load    slots --copy--> stage --scatter--> pages        bus and kernels overlap, because the
    store   pages --gather--> stage --copy--> slots         two streams of a direction take turns

A stage belongs to one stream, so that its reuse needs no waiting: what comes later on the stream
comes later in the stage. Slots of the GPU tier need no stage. The memory held on the GPU is the
stages, the planes' addresses and the block ids of `SLOTS` transfers.

Everything that may wait (a full launch queue, memory not registered) waits on this thread. Events
are polled: a callback would take the GIL in a thread of the driver's.

Invariants:

M1. A stage's next use is ordered behind its last one by its stream.
M2. The pages are touched only behind the transfer's `after`.
M3. After a device error nothing is put on the GPU any more, and nothing that was is given back.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.kernels import aligned, copy_call, fp8_call, fp8_wide
from kvd_client.cuda.steps import COPY_BYTES_MIN, Step, stage_of, steps
from kvd_client.cuda.transfer import State
from kvd_client.cuda.waits import precise_waits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd_client.cuda.device import Device
    from kvd_client.cuda.kernels import Call, Direction
    from kvd_client.cuda.pages import DevicePages
    from kvd_client.cuda.transfer import Piece, Transfer

STAGE_BYTES_DEFAULT: Final = 4 * ((16 << 20) + (64 << 10))
"""GPU memory for staging: four stages, two a direction.

Each takes 16 MiB, with the scales of FP8: half an object of an 8B model, or all of it as FP8."""
QUEUE_MAX: Final = 64
"""Most transfers that wait; more are refused, which is a miss."""
SLOTS: Final = 8
"""Most transfers on the GPU at a time."""
TABLE_BYTES: Final = 256 << 10
"""For the block ids of one transfer."""
LOST_S: Final = 60.0
"""A transfer that takes longer is given up, and the device with it."""
POLL_S: Final = 100e-6
"""Longest time between two looks at what is under way."""
POLL_MIN_S: Final = 20e-6
POLLS_A_COPY: Final = 16
"""A transfer is seen to end late by at most this part of its time, for short ones."""
_STREAMS: Final = 2
_BLOCKS_A_MULTIPROCESSOR: Final = 4


def one_stage(stage_bytes: int) -> int:
    """Return what one stage has of the memory for all of them."""
    return stage_bytes // (2 * _STREAMS) // 4096 * 4096


class _Lane:
    """One direction: two streams, each with a stage."""

    def __init__(self, device: Device, base: int, stage_bytes: int) -> None:
        self.streams = [device.make_stream() for _ in range(_STREAMS)]
        self.stages = [base + i * stage_bytes for i in range(_STREAMS)]
        self.turn = 0


class _Running:
    """A transfer on the GPU: its table's place, and the events that end it."""

    def __init__(self, transfer: Transfer, slot: int) -> None:
        self.transfer = transfer
        self.slot = slot
        self.last: dict[int, int] = {}  # stream -> its last event
        self.used: list[int] = []  # all events, for reuse


class Mover:
    """Moves the pages of one engine on one GPU."""

    def __init__(
        self,
        device: Device,
        pages: DevicePages,
        *,
        stage_bytes: int = STAGE_BYTES_DEFAULT,
        copy_bytes: int = COPY_BYTES_MIN,
        header: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take GPU memory for stages and tables; `start` begins the thread.

        Args:
            device: The GPU.
            pages: The engine's memory on it.
            stage_bytes: For all stages together.
            copy_bytes: Loads by layer move as many layers at once as make copies of this size.
            header: What slots of the GPU tier begin with.
            clock: Seconds, for the bound on a transfer.

        Raises:
            DeviceError: There is no memory, or no working device; nothing is kept.
        """
        self.device = device
        self.pages = pages
        self.broken = ""
        self.stage_bytes: Final = one_stage(stage_bytes)
        self._clock = clock
        self._copy_bytes = copy_bytes
        self._grid_max = device.multiprocessors * _BLOCKS_A_MULTIPROCESSOR
        self._header = header
        self._header_at = 16 * pages.planes
        self._fixed = -(-(self._header_at + len(header)) // 4096) * 4096
        size = self._fixed + SLOTS * TABLE_BYTES
        self._pinned = device.alloc_pinned(size)
        self._lanes: dict[Direction, _Lane] = {}
        self._memory = device.alloc(2 * _STREAMS * self.stage_bytes + size)
        self._tables = self._memory + 2 * _STREAMS * self.stage_bytes
        self._free = list(range(SLOTS))
        self._events: list[int] = []
        self._queue: deque[Transfer] = deque()
        self._running: list[_Running] = []
        self._wake = threading.Condition()
        self._closing = False
        self._lost = False
        self._thread: threading.Thread | None = None
        try:
            self._begin_lanes()
        except DeviceError:
            device.free(self._memory)
            raise

    def _begin_lanes(self) -> None:
        """Make the streams, and put on the GPU what stays there."""
        lane_bytes = _STREAMS * self.stage_bytes
        self._lanes["scatter"] = _Lane(self.device, self._memory, self.stage_bytes)
        self._lanes["gather"] = _Lane(self.device, self._memory + lane_bytes, self.stage_bytes)
        self._upload_planes()

    def _upload_planes(self) -> None:
        """Put the planes' addresses and strides where the kernels read them."""
        words = [*self.pages.starts, *self.pages.strides]
        self._paged = (math.gcd(*words),)
        self._put(self._pinned, ctypes.c_uint64, words)
        ctypes.memmove(self._pinned + self._header_at, self._header, len(self._header))
        first, *others = [stream for lane in self._lanes.values() for stream in lane.streams]
        ready = self._event()
        self.device.copy_in(self._tables, self._pinned, 8 * len(words), first)
        self.device.record(ready, first)
        for stream in others:
            self.device.wait(stream, ready)

    @staticmethod
    def _put(address: int, kind: type[ctypes.c_uint64 | ctypes.c_int32], words: list[int]) -> None:
        array = (kind * len(words))(*words)
        ctypes.memmove(address, array, ctypes.sizeof(array))

    # ---------------------------------------------------------------- from any thread

    def start(self) -> None:
        """Begin the thread."""
        self._thread = threading.Thread(target=self._run, name="kvd-cuda", daemon=True)
        self._thread.start()

    def submit(self, transfer: Transfer) -> None:
        """Take a transfer in; one that cannot be taken ends at once as FAILED."""
        too_many = len(transfer.blocks) * 4 > TABLE_BYTES
        with self._wake:
            refused = self._closing or self.broken or too_many or len(self._queue) >= QUEUE_MAX
            if not refused:
                self._queue.append(transfer)
                self._wake.notify()
        if refused:
            self._refuse(transfer)

    def _refuse(self, transfer: Transfer) -> None:
        """End what has not begun."""
        if transfer.after:
            self._events.append(transfer.after)
        transfer.end(State.FAILED)

    def record_after(self) -> int:
        """Return an event for the calling engine's work so far; the transfer gives it back.

        Raises:
            DeviceError: The device is gone.
        """
        stream = self.device.current_stream()  # fails where a graph is recorded
        event = self._event()
        self.device.record(event, stream)
        return event

    def close(self, timeout_s: float = 10.0) -> bool:
        """Refuse what waits, see the rest end and free the GPU memory.

        Returns:
            Whether nothing is under way any more; if not, the memory is left to the process's end.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        else:
            deadline = self._clock() + timeout_s
            while self.turn() and self._clock() < deadline:
                pass
        if self._running or self.broken:
            return not (self._running or self._lost)
        self.device.free(self._memory)
        return True

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self.device.own_thread()
            self.device.prepare()
        except DeviceError as error:
            self._break(str(error))
        precise_waits()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._queue or self._running)
                if self._closing and not self._queue and not self._running:
                    return
            if self.turn():
                with self._wake:
                    self._wake.wait_for(lambda: self._queue and self._free, self._poll_s())

    def _poll_s(self) -> float:
        """Return how long to wait before the next look: the less, the younger what is under way."""
        youngest = max(running.transfer.started_s for running in self._running)
        return min(POLL_S, max(POLL_MIN_S, (self._clock() - youngest) / POLLS_A_COPY))

    def turn(self) -> bool:
        """Begin what may begin, end what has ended; tell whether something is under way."""
        try:
            while self._free and (transfer := self._next()) is not None:
                if not transfer.begin():
                    self._refuse(transfer)  # cancelled: its event may be used again
                    continue
                running = _Running(transfer, self._free.pop())
                self._running.append(running)
                self._enqueue(running)
            self._look()
        except Exception as error:  # noqa: BLE001 - whatever it was: what is under way is not known
            self._break(f"{error}" or type(error).__name__)
        return bool(self._running)

    def _next(self) -> Transfer | None:
        with self._wake:
            if self._closing or self.broken:
                refused, self._queue = self._queue, deque()
            else:
                return self._queue.popleft() if self._queue else None
        for transfer in refused:
            self._refuse(transfer)
        return None

    def _look(self) -> None:
        """End the transfers whose last events have happened, in whatever order that is."""
        for running in list(self._running):
            if all(self.device.happened(event) for event in running.last.values()):
                self._running.remove(running)
                running.transfer.end(State.DONE)  # before its events are used again
                self._events += running.used
                self._free.append(running.slot)
            elif self._clock() - running.transfer.started_s > LOST_S:
                raise DeviceError(f"a copy did not end within {LOST_S:.0f} s")

    def _break(self, why: str) -> None:
        """Give the device up (M3)."""
        with self._wake:
            self.broken = why
            waiting, self._queue = self._queue, deque()
        lost, self._running = self._running, []
        self._lost |= bool(lost)
        for running in lost:
            running.transfer.end(State.LOST)
        for transfer in waiting:
            transfer.end(State.FAILED)

    # ---------------------------------------------------------------- onto the streams

    def _event(self) -> int:
        try:
            return self._events.pop()
        except IndexError:
            return self.device.make_event()

    def _enqueue(self, running: _Running) -> None:
        """Put all of a transfer on the streams of its direction."""
        transfer, device = running.transfer, self.device
        lane = self._lanes[transfer.direction]
        offset = self._fixed + running.slot * TABLE_BYTES
        self._put(self._pinned + offset, ctypes.c_int32, transfer.blocks)
        size = 4 * len(transfer.blocks)
        device.copy_in(self._tables + offset, self._pinned + offset, size, lane.streams[0])
        uploaded = self._record(running, lane.streams[0])
        device.wait(lane.streams[1], uploaded)
        if transfer.after:
            running.used.append(transfer.after)
        for stream in lane.streams:
            if transfer.after and transfer.direction == "gather":
                device.wait(stream, transfer.after)  # M2; loads wait before their first scatter
        behind: set[int] = set()
        by_planes = itertools.groupby(self._steps(transfer), key=lambda s: (s.plane, s.planes))
        for (plane, planes), own in by_planes:
            moved: dict[int, int] = {}
            for step in own:
                lane.turn = (lane.turn + 1) % _STREAMS
                moved[lane.streams[lane.turn]] = self._step(running, lane, step, behind)
            transfer.mark(plane + planes, tuple(moved.values()))

    def _steps(self, transfer: Transfer) -> Iterator[Step]:
        """Give the steps of slots in host memory and of those on the GPU, by planes."""
        layer = transfer.planes_a_layer if transfer.by_layer else 0
        form, pieces = transfer.form, transfer.pieces
        host = sum(not piece.on_device for piece in pieces)
        if not host and not layer:  # no stage, so nothing to cut for
            yield from (Step(first, count, 0, form.planes) for first, count in _runs(pieces, 0))
            return
        shares = list(
            steps(
                form,
                max(1, host),
                self.stage_bytes,
                planes_a_layer=layer,
                copy_bytes=self._copy_bytes,
            )
        )
        for (plane, planes), own in itertools.groupby(shares, key=lambda s: (s.plane, s.planes)):
            if host:
                yield from own
            for first, count in _runs(pieces, host):
                yield Step(first, count, plane, planes)

    def _step(self, running: _Running, lane: _Lane, step: Step, behind: set[int]) -> int:
        """Put one step on the lane's next stream; return the event of its kernel."""
        transfer, stream = running.transfer, lane.streams[lane.turn]
        stage = lane.stages[lane.turn]
        load = transfer.direction == "scatter"
        direct = transfer.pieces[step.first].on_device
        if load and not direct:
            self._copies(transfer, step, stage, stream)
        if load and transfer.after and stream not in behind:
            behind.add(stream)
            self.device.wait(stream, transfer.after)  # M2
        if direct and not load and not step.plane and self._header:
            header = self._pinned + self._header_at
            for piece in transfer.pieces[step.first : step.first + step.objects]:
                self.device.copy_in(piece.address, header, len(self._header), stream)
        self.device.launch(self._call(running, step, stage), stream)
        moved = self._record(running, stream)
        if not load and not direct:
            self._copies(transfer, step, stage, stream)
            self._record(running, stream)
        return moved

    def _record(self, running: _Running, stream: int) -> int:
        event = self._event()
        running.used.append(event)
        self.device.record(event, stream)
        running.last[stream] = event
        return event

    def _copies(self, transfer: Transfer, step: Step, stage: int, stream: int) -> None:
        """Copy a step's part of each object between its slot and the stage."""
        form, place = transfer.form, stage_of(transfer.form, step.planes)
        load = transfer.direction == "scatter"
        for k in range(step.objects):
            slot, there = transfer.pieces[step.first + k].address, stage + k * place.stride
            codes = form.codes_at + step.plane * form.plane_bytes
            parts = [(codes, place.codes_at, place.codes_bytes)]
            if place.joined:
                parts = [(form.scales_at, place.scales_at, form.object_bytes - form.scales_at)]
            elif form.scales_bytes:
                begin = form.scales_at + step.plane * form.scales_bytes
                parts.append((begin, place.scales_at, step.planes * form.scales_bytes))
            for in_slot, in_stage, size in parts:
                if load:
                    self.device.copy_in(there + in_stage, slot + in_slot, size, stream)
                else:
                    self.device.copy_out(slot + in_slot, there + in_stage, size, stream)

    def _call(self, running: _Running, step: Step, stage: int) -> Call:
        """Describe the kernel of a step, between the pages and the stage, or the slot itself."""
        transfer, planes = running.transfer, self.pages.planes
        form, piece = transfer.form, transfer.pieces[step.first]
        place = stage_of(form, step.planes)
        objects, scales, stride = stage + place.codes_at, stage + place.scales_at, place.stride
        if piece.on_device:
            objects = piece.address + form.codes_at + step.plane * form.plane_bytes
            scales = piece.address + form.scales_at + step.plane * form.scales_bytes
            stride = _distance(transfer.pieces, step.first) if step.objects > 1 else 0
        blocks = self._tables + self._fixed + running.slot * TABLE_BYTES
        bases = self._tables + 8 * step.plane
        strides = self._tables + 8 * (planes + step.plane)
        shape = (step.objects, step.planes, form.pages)
        blocks += 4 * step.first * form.pages
        if form.axes is None:
            return copy_call(
                transfer.direction,
                bases=bases,
                strides=strides,
                blocks=blocks,
                objects=objects,
                object_stride=stride,
                shape=shape,
                page_bytes=form.page_bytes,
                wide=aligned(16, objects, stride, form.page_bytes, *self._paged),
                grid_max=self._grid_max,
            )
        return fp8_call(
            transfer.direction,
            form.axes,
            bases=bases,
            strides=strides,
            blocks=blocks,
            codes=objects,
            code_stride=stride,
            exponents=scales,
            exponent_stride=stride,
            shape=shape,
            wide=fp8_wide(form.axes, self._paged, (objects, stride)),
            grid_max=self._grid_max,
        )


def _distance(pieces: Sequence[Piece], index: int) -> int:
    """Return how far behind a piece the next one lies."""
    return pieces[index + 1].address - pieces[index].address


def _runs(pieces: Sequence[Piece], start: int) -> Iterator[tuple[int, int]]:
    """Cut the pieces from `start` on into runs at one distance, for one kernel each.

    A copy of 32 MiB within the GPU takes no longer than a launch; what lies in a row in a slab, as
    the chunks of one store do, is one copy.
    """
    while start < len(pieces):
        end = start + 1
        if end < len(pieces) and _distance(pieces, start) > 0:
            step = _distance(pieces, start)
            while end < len(pieces) and _distance(pieces, end - 1) == step:
                end += 1
        yield start, end - start
        start = end
