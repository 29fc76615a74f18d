"""Pinning of slabs as CUDA wants it: whole, once, and undone when nobody copies any more."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.registrar import Registrar
from tests.gpu.fake_device import ENGINE_STREAM, FakeDevice, at

SLAB_BYTES = 160 << 20


class Owner:
    """Stands for a client: what slabs are mapped through."""


def slab(size: int = 1 << 20) -> memoryview:
    """Map a slab."""
    return memoryview(mmap.mmap(-1, size))


def test_a_copy_anywhere_in_a_slab_that_is_being_pinned_is_no_error() -> None:
    """A slab is pinned by one call: no slot of it is pinned in part, or by two calls."""
    device, view = FakeDevice(), slab(SLAB_BYTES)
    registrar = Registrar(device)
    registrar.address(view, 1)
    more = True
    while more:
        for start in range(0, SLAB_BYTES - (24 << 20), 24 << 20):
            place = registrar.address(view[start : start + (24 << 20)], 1)
            device.copy_in(device.alloc(16), place, 24 << 20, ENGINE_STREAM)
        more = registrar.step()
    assert device.registered == {registrar.address(view, 1): SLAB_BYTES}
    assert registrar.pinned_bytes == SLAB_BYTES


def test_the_fake_refuses_what_cuda_refuses() -> None:
    """Memory that is pinned in part, or pinned twice, is an error."""
    device, view = FakeDevice(), slab()
    address = Registrar(device).address(view, 1)
    device.register(address, 4096)
    with pytest.raises(DeviceError, match="pinned in part"):
        device.copy_in(0, address + 4000, 4096, ENGINE_STREAM)
    with pytest.raises(DeviceError, match="pinned already"):
        device.register(address + 4095, 4096)
    device.copy_in(0, address, 4096, ENGINE_STREAM)
    device.copy_in(0, address + 4096, 4096, ENGINE_STREAM)


def test_a_slab_that_cannot_be_pinned_does_not_keep_others_from_it() -> None:
    """It is slow, and that is all; the reason is kept."""
    device, views = FakeDevice(), [slab(), slab()]
    registrar = Registrar(device)
    first, second = [registrar.address(view, 1) for view in views]
    device.register(first + 4096, 4096)  # by somebody else in this process
    assert registrar.step()
    assert not registrar.step()
    assert (registrar.pinned(first), registrar.pinned(second)) == (False, True)
    assert "pinned already" in registrar.failed
    registrar.close()
    assert device.registered == {first + 4096: 4096}


def test_layer_groups_of_one_client_pin_a_slab_once() -> None:
    """Whoever ends first leaves it pinned for the other; the last one undoes it."""
    device, owner, view = FakeDevice(), Owner(), slab()
    one, two = (Registrar.of(owner, device).join(user) for user in ("one", "two"))
    assert one is two
    address = one.address(view, 1, "one")
    assert two.address(view, 1, "two") == address
    one.step()
    one.close("one")
    assert two.pinned(address)
    two.close("two")
    assert not device.registered
    assert Registrar.of(owner, device).join("three") is not one


def test_slabs_of_a_daemon_that_is_gone_stay_while_one_group_may_copy() -> None:
    """Each group says when it has no copy under way; a slab goes with the last of them."""
    device, owner, old, new = FakeDevice(), Owner(), slab(), slab()
    registrar = Registrar.of(owner, device).join("one").join("two")
    for user in ("one", "two"):
        registrar.address(old, 1, user)
    kept = registrar.address(new, 2, "one")
    while registrar.step():
        pass
    registrar.retire(2, "one")
    assert len(device.registered) == 2
    registrar.retire(2, "two")
    assert set(device.registered) == {kept}
    registrar.close("one")
    registrar.close("two")
    assert not device.registered


def test_a_group_that_has_closed_keeps_no_slab_of_a_daemon_that_is_gone() -> None:
    """Only those that are left are asked; the slab's memory is the old daemon's, and much."""
    device, owner, old = FakeDevice(), Owner(), slab()
    registrar = Registrar.of(owner, device).join("one").join("two")
    for user in ("one", "two"):
        registrar.address(old, 1, user)
    registrar.step()
    registrar.close("one")
    registrar.retire(2, "two")
    assert not device.registered
    registrar.close("two")


def test_what_cannot_be_undone_stays_mapped() -> None:
    """Memory that is unmapped while it is pinned is the driver's undoing."""
    device, view = FakeDevice(), slab()
    registrar = Registrar(device)
    address = registrar.address(view, 1)
    registrar.step()

    def fail(_: int) -> None:
        raise DeviceError("no such memory")

    device.unregister = fail  # type: ignore[method-assign, assignment]
    registrar.close()
    assert registrar.failed == "no such memory"
    del registrar
    size, whole = len(view), view.obj
    view.release()
    with pytest.raises(BufferError):
        whole.close()  # type: ignore[attr-defined]
    contents: Any = at(address, size)
    assert not contents.any()


def resident(address: int) -> int:
    """Return how many bytes of the mapping at an address have their pages mapped."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines())
    for line in lines:
        start, _, end = line.split()[0].partition("-")
        if end and int(start, 16) <= address < int(end, 16):
            return next(int(word.split()[1]) << 10 for word in lines if word.startswith("Rss:"))
    raise AssertionError("not mapped")


def test_pages_are_mapped_before_the_driver_is_asked() -> None:
    """Their faults take most of the time, and while the driver pins, its other calls wait."""
    device = FakeDevice()
    fd = os.memfd_create("slab")
    os.ftruncate(fd, 1 << 22)
    view = memoryview(mmap.mmap(fd, 1 << 22))
    os.close(fd)
    registrar = Registrar(device)
    address = registrar.address(view, 1)
    seen: list[int] = []

    def register(address: int, size_bytes: int) -> None:
        seen.append(resident(address))
        assert size_bytes == 1 << 22

    device.register = register  # type: ignore[method-assign]
    before = resident(address)
    registrar.step()
    assert (before, seen) == (0, [1 << 22])
