"""The GPU tier's thread alone, on a fake GPU."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

from kvd.config_gpu import GpuKnobs
from kvd.tiers import gpu
from kvd.tiers.gpu import Copy, GpuTier, Outcome
from kvd.types import SlabId
from kvd_client.cuda.device import DeviceError
from kvd_client.wire_gpu import GPU_SLABS
from tests.gpu.shared_device import SharedDevice

if TYPE_CHECKING:
    import pytest

SLAB_BYTES = 2 << 20
WAIT_S = 20.0


class Host:
    """Two host slabs."""

    def __init__(self) -> None:
        self.slabs = [mmap.mmap(-1, SLAB_BYTES) for _ in range(2)]

    def view(self, slab: SlabId, offset_bytes: int, size_bytes: int) -> memoryview:
        """As the host tier."""
        return memoryview(self.slabs[slab])[offset_bytes : offset_bytes + size_bytes]


def test_an_error_that_no_one_foresaw_closes_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that died would have the daemon killed again and again."""

    def broken(_: int) -> SharedDevice:
        raise TypeError("an integer is required")

    monkeypatch.setattr(gpu, "open_device", broken)
    over = threading.Event()
    failures: list[str] = []

    def failed(why: str) -> None:
        failures.append(why)
        over.set()

    knobs = GpuKnobs(SLAB_BYTES, slab_bytes=SLAB_BYTES)
    tier = GpuTier(knobs, Host(), SLAB_BYTES, on_slab=lambda _: None, on_failed=failed)
    tier.start()
    assert over.wait(WAIT_S)
    assert (tier.state, failures) == ("failed", ["an integer is required"])
    tier.close()


def test_host_memory_that_cannot_be_pinned_is_copied_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tier stays open, says so, and undoes only what it did."""
    device, host, ready = SharedDevice(), Host(), threading.Event()
    register = device.register

    def refuse(address: int, size_bytes: int) -> None:
        if not device.registered:
            register(address, size_bytes)
            return
        raise DeviceError("out of memory")

    device.register = refuse  # type: ignore[method-assign]
    monkeypatch.setattr(gpu, "open_device", lambda _: device)
    failures: list[str] = []
    tier = GpuTier(
        GpuKnobs(SLAB_BYTES, slab_bytes=SLAB_BYTES),
        host,
        SLAB_BYTES,
        on_slab=lambda _: ready.set(),
        on_failed=failures.append,
    )
    tier.start()
    assert ready.wait(WAIT_S)
    host.slabs[0][:4] = b"abcd"
    for slab, up in ((0, True), (1, False)):
        ended: list[Outcome] = []
        over = threading.Event()

        def done(
            outcome: Outcome, ended: list[Outcome] = ended, over: threading.Event = over
        ) -> None:
            ended.append(outcome)
            over.set()

        tier.submit(Copy(up, SlabId(slab), 0, GPU_SLABS, 0, 4096, done))
        assert over.wait(WAIT_S)
        assert ended == [Outcome.OK]
    assert host.slabs[1][:4] == b"abcd"
    assert (tier.state, tier.pinned_bytes, failures) == ("open", SLAB_BYTES, [])
    assert "not pinned" in tier.note
    tier.close()
    device.over.set()
    assert not device.registered
    assert not failures
