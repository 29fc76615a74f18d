"""Pins the host slabs that an engine has mapped, one after the other, behind its back.

A slab is pinned when a transfer first names it; until then its copies go through the driver's own
staging, at a third of the rate, and nothing waits. The thread pins in pieces, so that it can stop.

Ownership: an entry holds the slab's map. It is undone by `retire`, when no transfer runs, or by
`close`: memory that is unmapped while it is pinned is the driver's undoing.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvd_client.cuda.device import DeviceError

if TYPE_CHECKING:
    from kvd_client.cuda.device import Device

PIECE_BYTES: Final = 64 << 20


class Slab:
    """A mapped slab: where it lies, and how much of it is pinned."""

    __slots__ = ("address", "epoch", "keep", "pieces", "pinned_bytes", "size_bytes")

    def __init__(self, view: memoryview, epoch: int) -> None:
        import numpy as np

        whole: Any = np.frombuffer(view.obj, dtype=np.uint8)  # type: ignore[call-overload]  # holds the map
        self.keep = whole
        self.address = int(whole.ctypes.data)
        self.size_bytes = int(whole.size)
        self.epoch = epoch
        self.pieces: list[int] = []
        self.pinned_bytes = 0


class Registrar:
    """What of the host tier is pinned for one GPU."""

    def __init__(self, device: Device) -> None:
        """Start with nothing pinned; `start` begins the thread."""
        self._device = device
        self._slabs: dict[int, Slab] = {}
        self._todo: deque[Slab] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.failed = ""

    def start(self) -> None:
        """Begin the thread."""
        self._thread = threading.Thread(target=self._run, name="kvd-pin", daemon=True)
        self._thread.start()

    def address(self, view: memoryview, epoch: int) -> int:
        """Return the address of a slot's bytes, and see to it that its slab gets pinned."""
        import numpy as np

        address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        with self._wake:
            for slab in self._slabs.values():
                if slab.address <= address < slab.address + slab.size_bytes:
                    return address
            slab = Slab(view, epoch)
            self._slabs[slab.address] = slab
            if not self.failed:
                self._todo.append(slab)
                self._wake.notify()
        return address

    def pinned(self, address: int) -> bool:
        """Tell whether the slab of an address is pinned as a whole."""
        with self._wake:
            return any(
                slab.address <= address < slab.address + slab.size_bytes
                and slab.pinned_bytes == slab.size_bytes
                for slab in self._slabs.values()
            )

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned so far."""
        with self._wake:
            return sum(slab.pinned_bytes for slab in self._slabs.values())

    def step(self) -> bool:
        """Pin one piece; tell whether there is more to do."""
        with self._wake:
            if not self._todo or self._closing or self.failed:
                return False
            slab = self._todo[0]
        at = slab.address + slab.pinned_bytes
        size = min(PIECE_BYTES, slab.size_bytes - slab.pinned_bytes)
        try:
            self._device.register(at, size)
        except DeviceError as error:
            with self._wake:  # slower, and nothing worse: copies do not need it
                self.failed = str(error)
                self._todo.clear()
            return False
        with self._wake:
            slab.pieces.append(at)
            slab.pinned_bytes += size
            if slab.pinned_bytes == slab.size_bytes:
                self._todo.popleft()
            return bool(self._todo)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._todo)
                if self._closing:
                    return
            self.step()

    def retire(self, epoch: int) -> None:
        """Let go of the slabs of other epochs; no transfer may be under way."""
        with self._wake:
            old = [slab for slab in self._slabs.values() if slab.epoch != epoch]
            for slab in old:
                if slab in self._todo:
                    if self._todo[0] is slab:
                        continue  # being pinned at this moment: next time
                    self._todo.remove(slab)
                del self._slabs[slab.address]
                self._undo(slab)

    def _undo(self, slab: Slab) -> None:
        for at in slab.pieces:
            try:
                self._device.unregister(at)
            except DeviceError as error:
                self.failed = self.failed or str(error)
                _KEPT.append(slab.keep)  # still pinned, perhaps: never unmap it
        slab.pieces.clear()

    def close(self) -> None:
        """Stop, and undo everything; no transfer may be under way."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        for slab in self._slabs.values():
            self._undo(slab)
        self._slabs.clear()


_KEPT: list[Any] = []
"""Maps that outlive everything, as the driver may still have them pinned."""
