"""A GPU made of host memory, whose streams move on only when told to, in any order.

Work is done when its turn comes, not when it is asked for: a copy published too early shows the old
bytes, a stage used too early the wrong ones. "Addresses" are real ones of this process, and kernels
are carried out by the NumPy reference.

It is as strict as CUDA: memory pinned twice or copied while it is pinned in part, vectors at odd
addresses, handles opened by who made them, and calls that would spoil a graph that the engine
records, are errors.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from kvd_client.cuda import reference
from kvd_client.cuda.device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvd_client.cuda.kernels import Call

ENGINE_STREAM = 1


class Overlap(AssertionError):
    """Memory was used after it had been given back."""


def at(address: int, size: int) -> NDArray[np.uint8]:
    """Look at memory of this process."""
    kind: Any = ctypes.c_uint8 * size
    return np.frombuffer(kind.from_address(address), np.uint8)


def check_aligned(call: Call) -> None:
    """Fail if a kernel would load whole vectors at addresses that are none, as a GPU does."""
    unit = int(call.name.rpartition("_")[2])
    if unit == 1:
        return
    fp8 = "fp8" in call.name
    bases, strides, _, objects, stride, *rest = call.arguments
    planes = rest[-7 if fp8 else -3]
    size = (
        {"bfloat16": 2, "float16": 2, "float32": 4}[call.name.split("_")[3]] * unit if fp8 else 16
    )
    paged = [*at(bases, 8 * planes).view(np.uint64), *at(strides, 8 * planes).view(np.uint64)]
    assert not [p for p in paged if int(p) % size], "misaligned pages"
    assert objects % unit == stride % unit == 0, "a misaligned object"
    assert fp8 or rest[-1] % unit == 0, "pages that are not whole vectors"


class FakeDevice:
    """See the module; `advance` does one thing, `finish` all, `begin_life` uses a thread."""

    def __init__(self, seed: int = 0, memory_bytes: int = 1 << 30) -> None:
        self.uuid = b"fake-gpu-of-test"
        self.multiprocessors = 2
        self.random = random.Random(seed)
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.left_bytes = memory_bytes
        self.registered: dict[int, int] = {}
        self.unregistered_copies = 0
        self.events: dict[int, int] = {}  # event -> what it was last recorded as
        self.reached: set[int] = set()
        self.streams: dict[int, deque[tuple[str, Any]]] = {ENGINE_STREAM: deque()}
        self.fail_after = -1
        self.stuck = False
        self.held = threading.Event()
        self.recording = False
        """The engine's thread records a graph: what is not asked by kvd's own threads spoils it."""
        self.spoiled: list[str] = []
        self._own: set[int] = set()
        self._dead = threading.Event()
        self._names = iter(range(100, 1 << 30))
        self._guard = threading.RLock()
        self._pinned: list[NDArray[np.uint8]] = []

    # ------------------------------------------------------------------------------ time

    def _ready(self, stream: int) -> bool:
        work = self.streams[stream]
        return bool(work) and not (work[0][0] == "wait" and work[0][1] not in self.reached)

    def advance(self) -> bool:
        """Do the next thing of some stream; False when no stream can go on."""
        with self._guard:
            able = [s for s in self.streams if self._ready(s)]
            if not able or self.stuck:
                return False
            kind, what = self.streams[self.random.choice(able)].popleft()
            if kind == "do":
                what()
            elif kind == "record":
                self.reached.add(what)
            return True

    def finish(self) -> None:
        """Do everything."""
        while self.advance():
            pass

    def begin_life(self) -> Callable[[], None]:
        """Move by itself, but while `held` is set; call what is returned to end that."""
        thread = threading.Thread(target=self._live, daemon=True)
        thread.start()

        def end() -> None:
            self._dead.set()
            thread.join()

        return end

    def _live(self) -> None:
        while not self._dead.is_set():
            if self.held.is_set() or not self.advance():
                time.sleep(0.0005)

    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not any(self.streams.values())

    def _ask(self) -> None:
        if self.fail_after == 0:
            raise DeviceError("the fake device fails as told")
        self.fail_after -= self.fail_after > 0

    def _do(self, stream: int, work: Callable[[], object]) -> None:
        with self._guard:
            self._ask()
            self.streams[stream].append(("do", work))

    # ------------------------------------------------------------------------------ Device

    def own_thread(self) -> None:
        self._own.add(threading.get_ident())

    def prepare(self) -> None:
        self._unsafe("prepare")

    def _unsafe(self, what: str) -> None:
        """Note a call that a thread may not make while another records, unless it said so."""
        if self.recording and threading.get_ident() not in self._own:
            self.spoiled.append(what)

    def current_stream(self) -> int:
        if self.recording:
            raise DeviceError("the engine's stream is recorded into a graph")
        return ENGINE_STREAM

    def make_stream(self) -> int:
        with self._guard:
            stream = next(self._names)
            self.streams[stream] = deque()
            return stream

    def make_event(self) -> int:
        with self._guard:
            event = next(self._names)
            self.events[event] = 0
            return event

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        with self._guard:
            self._ask()
            self.events[event] = name = next(self._names)
            self.streams[stream].append(("record", name))

    def wait(self, stream: int, event: int) -> None:
        with self._guard:
            self._ask()
            if self.events[event]:  # an event never recorded holds nobody up
                self.streams[stream].append(("wait", self.events[event]))

    def happened(self, event: int) -> bool:
        self._unsafe("happened")
        with self._guard:
            self._ask()
            return not self.events[event] or self.events[event] in self.reached

    def copy_in(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._copy(target, source, size_bytes, stream, host=source)

    def copy_out(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._copy(target, source, size_bytes, stream, host=target)

    def copy_on(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self._copy(target, source, size_bytes, stream, host=0)

    def _copy(self, target: int, source: int, size: int, stream: int, *, host: int) -> None:
        with self._guard:
            met = [(a, n) for a, n in self.registered.items() if a < host + size and host < a + n]
        if host and not met:
            self.unregistered_copies += 1
        elif host and (len(met) > 1 or host < met[0][0] or host + size > sum(met[0])):
            raise DeviceError("a copy of memory that is pinned in part: invalid argument")
        self._do(stream, lambda: ctypes.memmove(target, source, size))

    def fill(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        self._do(stream, lambda: ctypes.memset(target, value, size_bytes))

    def launch(self, call: Call, stream: int) -> None:
        def run() -> None:
            check_aligned(call)
            reference.run(call, at)

        self._do(stream, run)

    def alloc(self, size_bytes: int) -> int:
        self._unsafe("alloc")
        self._ask()
        if size_bytes > self.left_bytes:
            raise DeviceError("out of memory")
        self.left_bytes -= size_bytes
        memory = np.full(size_bytes, 0xEE, np.uint8)
        self.memory[int(memory.ctypes.data)] = memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        if not self.idle():
            raise Overlap("freed while streams have work")
        self.left_bytes += self.memory.pop(address).size

    def alloc_pinned(self, size_bytes: int) -> int:
        memory = np.full(size_bytes, 0xDD, np.uint8)
        self._pinned.append(memory)
        self.registered[int(memory.ctypes.data)] = size_bytes
        return int(memory.ctypes.data)

    def free_bytes(self) -> int:
        return self.left_bytes

    def register(self, address: int, size_bytes: int) -> None:
        self._unsafe("register")
        with self._guard:
            self._ask()
            if any(
                a < address + size_bytes and address < a + n for a, n in self.registered.items()
            ):
                raise DeviceError("part of it is pinned already")
            self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        if not self.idle():
            raise Overlap("unpinned while streams have work")
        if address not in self.registered:
            raise DeviceError("it is not pinned, or not from there on")
        del self.registered[address]

    def export(self, address: int) -> bytes:
        assert address in self.memory
        return address.to_bytes(8, "little") + bytes(56)

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle[:8], "little")
        if address in self.memory:
            raise DeviceError("a handle of this process's own memory: invalid context")
        return address

    def close(self, address: int) -> None:
        assert address
