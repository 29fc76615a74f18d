"""The GPU tier's memory, and the daemon's own copies between it and host slots: one thread.

Slabs are whole allocations in multiples of 2 MiB, of one tenant each, zeroed before anybody sees
them and exported as CUDA IPC handles; a handle shows its whole allocation and no more. The daemon
imports nothing, so a dead engine takes its mappings with it. A context exists on the GPU that the
configuration names and on no other.

The thread opens the device, makes slabs, pins host slabs when a copy first names them, and puts
copies on two streams of its own, one a direction. What it finds it tells through callbacks, on this
thread: the owner passes them to its loop.

Invariants:

G1. A copy's `done` is called once: with OK after its event, REFUSED if it never began, LOST if the
    device failed meanwhile.
G2. After a device error nothing is put on the GPU any more.
G3. A copy that is to be verified is OK only if what is read back from the GPU has the host slot's
    hash.
G4. Host memory is unpinned, and GPU memory freed, only when no copy is under way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvd.failpoints import maybe_hang
from kvd.types import SlabId
from kvd_client.cuda.device import SLAB_MULTIPLE_BYTES, Device, DeviceError
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config_gpu import GpuKnobs

COPIES_MAX: Final = 8192
"""Most copies that wait."""
RUNNING_MAX: Final = 64
"""Most copies on the streams at a time."""
LOST_S: Final = 60.0
"""A copy that takes longer is given up, and the device with it."""
_POLL_S: Final = 200e-6


class Outcome(Enum):
    """How a copy ended."""

    OK = "ok"
    REFUSED = "refused"
    LOST = "lost"


class HostMemory(Protocol):
    """Where host slots lie."""

    def view(self, slab: SlabId, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a writable view of part of a slab."""
        ...


class Copy(NamedTuple):
    """One copy between a host slot and its twin."""

    up: bool
    host_slab: SlabId
    host_offset: int
    gpu_slab: int
    gpu_offset: int
    size_bytes: int
    done: Callable[[Outcome], None]


class _Running(NamedTuple):
    copy: Copy
    event: int
    begun_s: float
    due: bool
    verifying: bool = False


def open_device(index: int) -> Device:
    """Open the GPU of an index; raises DeviceError."""
    from kvd_client.cuda.cupy_device import CupyDevice

    return CupyDevice(index)


class GpuTier:
    """Slabs on one GPU. `state` is "starting", "open" or "failed"; any thread may read it."""

    def __init__(
        self,
        knobs: GpuKnobs,
        host: HostMemory,
        host_slab_bytes: int,
        *,
        on_slab: Callable[[SlabId], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Plan; `start` begins the thread.

        Args:
            knobs: Size and device.
            host: Where host slots lie, good until `close`.
            host_slab_bytes: Size of its slabs.
            on_slab: Called on the tier's thread for each slab that is ready.
            on_failed: Called on the tier's thread, once, when the device fails.
        """
        assert knobs.slab_bytes % SLAB_MULTIPLE_BYTES == 0
        self.knobs = knobs
        self.state = "starting"
        self.note = ""
        self.uuid = b""
        self.copied_bytes = {True: 0, False: 0}  # up, down
        self.verified = self.differed = 0
        self._copies = 0
        self._scratch = 0
        self._host = host
        self._host_slab_bytes = host_slab_bytes
        self._on_slab = on_slab
        self._on_failed = on_failed
        self._addresses: dict[int, int] = {}
        self._handles: dict[int, bytes] = {}
        self._host_addresses: dict[SlabId, int] = {}
        self._pinned: set[SlabId] = set()
        self._events: list[int] = []
        self._queue: deque[Copy] = deque()
        self._running: deque[_Running] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._turned_s = 0.0
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)

    @property
    def ready_bytes(self) -> int:
        """Bytes of the slabs that are ready."""
        return len(self._handles) * self.knobs.slab_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that copies use without staging."""
        return len(self._pinned) * self._host_slab_bytes

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def handle(self, slab: int) -> bytes | None:
        """Return the IPC handle of a slab."""
        return self._handles.get(slab)

    def turned_s(self) -> float:
        """Return when the thread last turned, on the monotonic clock; 0 when it has died.

        It does while it has nothing to do, and while the device is not yet or no longer in use.
        """
        if self._closing or self.state != "open":
            return time.monotonic()
        if not self._thread.is_alive():
            return 0.0
        return self._turned_s if self._queue or self._running else time.monotonic()

    def submit(self, copy: Copy) -> None:
        """Begin a copy behind those before it; a full queue or a failed device refuses it."""
        with self._wake:
            if not self._queue and not self._running:
                self._turned_s = time.monotonic()
            refused = self._closing or self.state != "open" or len(self._queue) >= COPIES_MAX
            if not refused:
                self._queue.append(copy)
                self._wake.notify()
        if refused:
            copy.done(Outcome.REFUSED)

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse what waits, see the rest end, free the memory. Before the host tier closes."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            device = open_device(self.knobs.device)
            device.own_thread()
            self._streams = {up: device.make_stream() for up in (True, False)}
            self.uuid = device.uuid
            self._make_slabs(device)
            self._serve(device)
            self._let_go(device)
        except Exception as error:  # noqa: BLE001 - whatever it is, engines do without this tier
            self._fail(f"{error}" or type(error).__name__)

    def _make_slabs(self, device: Device) -> None:
        """Allocate the slabs; with less free memory than configured the tier is smaller."""
        size = self.knobs.slab_bytes
        for number in range(self.knobs.slab_count):
            if self._closing:
                return
            self._turned_s = time.monotonic()
            try:
                address = device.alloc(size)
            except DeviceError as error:
                if not number:
                    raise
                done = number * size
                self.note = f"GPU tier is smaller than configured: {done} bytes; {error}"
                break
            stream, event = self._streams[True], device.make_event()
            device.fill(address, 0, size, stream)  # what another process left there
            device.record(event, stream)
            _await(device, event)
            device.destroy_event(event)
            slab = SlabId(GPU_SLABS + number)
            self._addresses[slab] = address
            self._handles[slab] = device.export(address)
            self.state = "open"
            self._on_slab(slab)

    def _serve(self, device: Device) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._queue or self._running, None)
                if self._closing:
                    waiting, self._queue = self._queue, deque()
                else:
                    waiting = deque()
                if self._closing and not self._running and not waiting:
                    return
            maybe_hang("gpu.turn")
            for copy in waiting:
                copy.done(Outcome.REFUSED)
            self._begin(device)
            self._look(device)
            if self._running:
                time.sleep(_POLL_S)

    def _begin(self, device: Device) -> None:
        while len(self._running) < RUNNING_MAX:
            self._turned_s = time.monotonic()
            with self._wake:
                if not self._queue:
                    return
                copy = self._queue.popleft()
                event = self._events.pop() if self._events else device.make_event()
                self._running.append(_Running(copy, event, time.monotonic(), self._due()))
            host = self._pin(device, copy.host_slab) + copy.host_offset
            there = self._addresses[copy.gpu_slab] + copy.gpu_offset
            stream = self._streams[copy.up]
            if copy.up:
                device.copy_in(there, host, copy.size_bytes, stream)
            else:
                device.copy_out(host, there, copy.size_bytes, stream)
            device.record(event, stream)

    def _look(self, device: Device) -> None:
        for running in list(self._running):
            if device.happened(running.event):
                if running.due and not running.verifying:
                    if not any(other.verifying for other in self._running):
                        self._read_back(device, running)
                    continue  # one at a time
                self._running.remove(running)
                self._events.append(running.event)
                (self._compare if running.verifying else self._succeed)(running.copy)
            elif time.monotonic() - running.begun_s > LOST_S:
                raise DeviceError(f"a copy did not end within {LOST_S:.0f} s")

    def _due(self) -> bool:
        """Tell whether the next copy is one to verify."""
        every = self.knobs.verify
        self._copies += 1
        return bool(every) and self._copies % every == 0

    def _read_back(self, device: Device, running: _Running) -> None:
        """Copy what is on the GPU to memory of the tier's own; one at a time."""
        copy = running.copy
        if not self._scratch:
            self._scratch = device.alloc_pinned(self._host_slab_bytes)
        there = self._addresses[copy.gpu_slab] + copy.gpu_offset
        stream = self._streams[False]
        device.copy_out(self._scratch, there, copy.size_bytes, stream)
        device.record(running.event, stream)
        self._running.remove(running)
        self._running.append(running._replace(verifying=True))

    def _compare(self, copy: Copy) -> None:
        """Compare both sides of a copy (G3)."""
        import xxhash

        kind = ctypes.c_char * copy.size_bytes
        read = xxhash.xxh3_64_intdigest(memoryview(kind.from_address(self._scratch)))
        view = self._host.view(copy.host_slab, copy.host_offset, copy.size_bytes)
        self.verified += 1
        if read == xxhash.xxh3_64_intdigest(view):
            self._succeed(copy)
        else:
            self.differed += 1
            copy.done(Outcome.REFUSED)

    def _succeed(self, copy: Copy) -> None:
        self.copied_bytes[copy.up] += copy.size_bytes
        copy.done(Outcome.OK)

    def _pin(self, device: Device, slab: SlabId) -> int:
        """Return a host slab's address, pinned at its first use if it can be."""
        address = self._host_addresses.get(slab)
        if address is None:
            view = self._host.view(slab, 0, self._host_slab_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            self._host_addresses[slab] = address
            try:
                device.register(address, self._host_slab_bytes)
            except DeviceError as error:  # slower, and nothing worse
                self.note = self.note or f"host memory is not pinned, copies are slow: {error}"
            else:
                self._pinned.add(slab)
        return address

    def _let_go(self, device: Device) -> None:
        """Undo everything; nothing is under way (G4)."""
        for slab in self._pinned:
            device.unregister(self._host_addresses[slab])
        self._pinned.clear()
        for address in self._addresses.values():
            device.free(address)
        self._addresses.clear()

    def _fail(self, why: str) -> None:
        """Give the device up (G2)."""
        with self._wake:
            self.state, self.note = "failed", why
            waiting, self._queue = self._queue, deque()
            running, self._running = self._running, deque()
        self._on_failed(why)
        for copy in waiting:
            copy.done(Outcome.REFUSED)
        for lost in running:
            lost.copy.done(Outcome.LOST)


def _await(device: Device, event: int) -> None:
    """Wait for an event; raises DeviceError when it takes too long."""
    deadline = time.monotonic() + LOST_S
    while not device.happened(event):
        if time.monotonic() > deadline:
            raise DeviceError(f"the GPU did nothing for {LOST_S:.0f} s")
        time.sleep(_POLL_S)
