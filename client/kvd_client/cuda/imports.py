"""Slabs of the GPU tier that this process has mapped, by the daemon's epoch.

A slab is opened when a transfer first names it (0.6 ms) and closed when its daemon is gone and no
transfer is under way: until then the memory lives, whatever became of the daemon. A handle is
opened only if it is of the epoch of the session that named it.

Where one does not open (NVIDIA's driver refuses other users' processes, and some containers), that
is a miss once: the session then says that it uses no GPU, and is told of host memory.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvd_client.cuda.device import IPC_BYTES, DeviceError
from kvd_client.wire_gpu import NO_GPU

if TYPE_CHECKING:
    from kvd_client.client import Client
    from kvd_client.cuda.device import Device


class Imports:
    """What of the GPU tier is mapped. One thread at a time.

    Attributes:
        failed: Why a handle did not open, empty if all did.
    """

    def __init__(self, client: Client, device: Device) -> None:
        """Map nothing yet."""
        self._client = client
        self._device = device
        self._slabs: dict[tuple[int, int], tuple[int, int]] = {}
        self._given_up = -1  # epoch
        self.failed = ""

    def __len__(self) -> int:
        """Count the mapped slabs."""
        return len(self._slabs)

    def address(self, slab: int, offset_bytes: int, size_bytes: int, epoch: int) -> int | None:
        """Return where a place of a slab lies in this process.

        Args:
            slab: As the daemon named it in the session of `epoch`.
            offset_bytes: Of the place.
            size_bytes: Of the object.
            epoch: Of the daemon that named it.

        Returns:
            An address, or None: another epoch, a place beyond the slab, or a handle that does not
            open. All of these are a miss.
        """
        found = self._slabs.get((epoch, slab))
        if found is None:
            if epoch == self._given_up:
                return None
            told = self._client.gpu_slab(slab)
            if told is None or told.epoch != epoch or len(told.handle) != IPC_BYTES:
                return None
            try:
                found = (self._device.open(told.handle), told.slab_bytes)
            except DeviceError as error:
                self.failed, self._given_up = str(error), epoch
                self._client.begin_use_gpu(NO_GPU)
                return None
            self._slabs[epoch, slab] = found
        address, slab_bytes = found
        return address + offset_bytes if offset_bytes + size_bytes <= slab_bytes else None

    def retire(self, epoch: int) -> None:
        """Close the slabs of other epochs; no transfer may be under way."""
        for key in [key for key in self._slabs if key[0] != epoch]:
            self._device.close(self._slabs.pop(key)[0])

    def close(self) -> None:
        """Close all; no transfer may be under way."""
        with contextlib.suppress(DeviceError):  # a GPU that has failed: the process's end does it
            self.retire(-1)
