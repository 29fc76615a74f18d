"""Pins the host slabs that an engine has mapped, one after the other, behind its back.

A slab is pinned when a transfer first names it; until then its copies go through the driver's own
staging, at a third of the rate, and nothing waits. One that cannot be pinned stays that way.

A slab is pinned whole, by one call: a copy of memory that is pinned in part, or by two calls, is
an error to CUDA. And by one registrar, whatever the number of layer groups with pages in it: to pin
memory twice is an error too, and who undoes the first would pull it from under the second.

Ownership: an entry holds the slab's map. It is undone by `retire`, when no user's transfer runs, or
by the last `close`: memory that is unmapped while it is pinned is the driver's undoing.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvd_client.cuda.device import DeviceError

if TYPE_CHECKING:
    from typing import Self

    from kvd_client.cuda.device import Device


class Slab:
    """A mapped slab: where it lies, whether it is pinned, and whose transfers name it."""

    __slots__ = ("address", "epoch", "keep", "pinned", "size_bytes", "users")

    def __init__(self, view: memoryview, epoch: int) -> None:
        import numpy as np

        whole: Any = np.frombuffer(view.obj, dtype=np.uint8)  # type: ignore[call-overload]  # holds the map
        self.keep = whole
        self.address = int(whole.ctypes.data)
        self.size_bytes = int(whole.size)
        self.epoch = epoch
        self.pinned = False
        self.users: set[object] = set()


class Registrar:
    """What of the host tier is pinned for one GPU. Any thread."""

    def __init__(self, device: Device) -> None:
        """Start with nothing pinned; `start` begins the thread."""
        self._device = device
        self._slabs: dict[int, Slab] = {}  # by the identity of its map
        self._todo: deque[Slab] = deque()
        self._wake = threading.Condition()
        self.closed = False
        self._thread: threading.Thread | None = None
        self._users: set[object] = set()
        self.failed = ""

    @classmethod
    def of(cls, owner: object, device: Device) -> Registrar:
        """Return the one for all that have the slabs mapped through this owner, a client."""
        with _GUARD:
            found = _REGISTRARS.get(owner)
            if found is None or found.closed:
                found = _REGISTRARS[owner] = cls(device)
            return found

    def join(self, user: object) -> Self:
        """Count in a user, until its `close`."""
        with self._wake:
            self._users.add(user)
        return self

    def start(self) -> None:
        """Begin the thread."""
        with self._wake:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="kvd-pin", daemon=True)
        self._thread.start()

    def address(self, view: memoryview, epoch: int, user: object = None) -> int:
        """Return the address of a slot's bytes, and see to it that its slab gets pinned."""
        import numpy as np

        address = int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
        with self._wake:
            slab = self._slabs.get(id(view.obj))
            if slab is None:
                slab = self._slabs[id(view.obj)] = Slab(view, epoch)
                self._todo.append(slab)
                self._wake.notify()
            slab.users.add(user)
        return address

    def pinned(self, address: int) -> bool:
        """Tell whether the slab of an address is pinned."""
        with self._wake:
            return any(
                slab.address <= address < slab.address + slab.size_bytes and slab.pinned
                for slab in self._slabs.values()
            )

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned so far."""
        with self._wake:
            return sum(slab.size_bytes for slab in self._slabs.values() if slab.pinned)

    def step(self) -> bool:
        """Pin one slab; tell whether there is more to do."""
        with self._wake:
            if not self._todo or self.closed:
                return False
            slab = self._todo[0]
        error = ""
        _populate(slab)
        try:
            self._device.register(slab.address, slab.size_bytes)
        except DeviceError as failed:
            error = str(failed)  # slower, and nothing worse: copies do not need it
        with self._wake:
            slab.pinned = not error
            self.failed = self.failed or error
            self._todo.popleft()
            return bool(self._todo)

    def _run(self) -> None:
        with contextlib.suppress(DeviceError):  # then it fails to pin, too
            self._device.own_thread()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self.closed or self._todo)
                if self.closed:
                    return
            self.step()

    def retire(self, epoch: int, user: object = None) -> None:
        """Let go of the slabs of other epochs, as far as this user goes: nothing of it may run."""
        with self._wake:
            for key, slab in list(self._slabs.items()):
                if slab.epoch == epoch:
                    continue
                slab.users.discard(user)
                if slab.users:
                    continue
                if slab in self._todo:
                    if self._todo[0] is slab:
                        continue  # being pinned at this moment: next time
                    self._todo.remove(slab)
                del self._slabs[key]
                self._undo(slab)

    def _undo(self, slab: Slab) -> None:
        if not slab.pinned:
            return
        slab.pinned = False
        try:
            self._device.unregister(slab.address)
        except DeviceError as error:
            self.failed = self.failed or str(error)
            _KEPT.append(slab.keep)  # still pinned, perhaps: never unmap it

    def close(self, user: object = None) -> None:
        """Count out a user with nothing under way; the last one's undoes everything."""
        with _GUARD, self._wake:
            self._users.discard(user)
            for slab in self._slabs.values():
                slab.users.discard(user)  # so that the others' `retire` need not wait for it
            if self._users:
                return
            self.closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        for slab in self._slabs.values():
            self._undo(slab)
        self._slabs.clear()


def _populate(slab: Slab) -> None:
    """Map the pages of a slab, ahead of the driver: other threads' calls of it wait while it pins.

    An older kernel does not know how, and leaves it to the driver.
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise  # that of `mmap` holds the GIL
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(slab.address, slab.size_bytes, _MADV_POPULATE_WRITE)


_MADV_POPULATE_WRITE: Final = 23
_GUARD = threading.Lock()
_REGISTRARS: weakref.WeakKeyDictionary[Any, Registrar] = weakref.WeakKeyDictionary()
_KEPT: list[Any] = []
"""Maps that outlive everything, as the driver may still have them pinned."""
