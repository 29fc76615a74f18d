"""A GPU made of host memory, whose streams move on only when told to, in any order.

Work is done when its turn comes, not when it is asked for: a copy published too early shows the old
bytes, a stage used too early the wrong ones. "Addresses" are real ones of this process, and kernels
are carried out by the NumPy reference.
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

    def current_stream(self) -> int:
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
        if host and not any(a <= host < a + n for a, n in self.registered.items()):
            self.unregistered_copies += 1
        self._do(stream, lambda: ctypes.memmove(target, source, size))

    def fill(self, target: int, value: int, size_bytes: int, stream: int) -> None:
        self._do(stream, lambda: ctypes.memset(target, value, size_bytes))

    def launch(self, call: Call, stream: int) -> None:
        self._do(stream, lambda: reference.run(call, at))

    def alloc(self, size_bytes: int) -> int:
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
        self._ask()
        assert address not in self.registered
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        if not self.idle():
            raise Overlap("unpinned while streams have work")
        del self.registered[address]

    def export(self, address: int) -> bytes:
        assert address in self.memory
        return address.to_bytes(8, "little") + bytes(56)

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle[:8], "little")

    def close(self, address: int) -> None:
        assert address
