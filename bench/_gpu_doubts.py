"""What only a GPU can tell of how CUDA treats pinned and shared memory; for `bench.gpu_check`.

    python -m bench._gpu_doubts HANDLE SIZE   (the other process: opens a handle, says what it sees)

What kvd relies on fails a check. What it only avoids, or has another way for, is said on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench import _gpu, _gpu_place
from kvd_client.cuda.device import SLAB_MULTIPLE_BYTES, Device, DeviceError
from kvd_client.cuda.registrar import Registrar

if TYPE_CHECKING:
    from bench._gpu_place import Place

ROOT: Final = Path(__file__).resolve().parent.parent
NOBODY: Final = 65534
OPEN_S: Final = 30.0
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def say(text: str) -> None:
    """Tell what is no failure, whatever it is."""
    print(f"    {text}", file=sys.stderr, flush=True)


def sealed(size: int) -> memoryview:
    """Map shared memory as an engine maps a slab, sealed as the daemon seals it."""
    fd = os.memfd_create("kvd-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    view = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(fd)
    return memoryview(view)


def over(device: Device, stream: int) -> None:
    """Wait until a stream has done what it was given."""
    event = device.make_event()
    device.record(event, stream)
    _gpu.until(lambda: device.happened(event), "a stream does not end")
    device.destroy_event(event)


def pinning(place: Place) -> None:
    """Copy a slab while it is pinned, to a GPU and back: no error, the right bytes."""
    device, size = place.device, place.check_bytes[2]
    view, back = sealed(size), sealed(size)
    pattern = os.urandom(1 << 16)
    for at in range(0, size, len(pattern)):
        view[at : at + len(pattern)] = pattern
    registrar = Registrar(device)
    address, target = registrar.address(view, 1), registrar.address(back, 1)
    there, stream, engine = device.alloc(size), device.make_stream(), device.current_stream()
    mark, longest, copies, piece = device.make_event(), 0.0, 0, size // 7 // 256 * 256
    registrar.start()
    start = time.perf_counter()
    try:
        while not (registrar.pinned(address) and registrar.pinned(target)):
            if registrar.failed or time.perf_counter() - start > _gpu.WAIT_S:
                raise AssertionError(f"sealed memory does not get pinned: {registrar.failed}")
            at = copies % 7 * piece
            device.copy_in(there + at, address + at, piece, stream)
            copies += 1
            before = time.perf_counter()
            device.record(mark, engine)
            longest = max(longest, time.perf_counter() - before)
        seconds = time.perf_counter() - start
        device.copy_in(there, address, size, stream)
        device.copy_out(target, there, size, stream)
        over(device, stream)
        if view != back:
            raise AssertionError("other bytes than were copied while they were pinned")
    finally:
        with contextlib.suppress(DeviceError, AssertionError):
            over(device, stream)  # what was copied meanwhile may still be under way
        registrar.close()
        device.free(there)
    say(f"2 slabs of {size >> 20} MiB pinned in {seconds * 1e3:.1f} ms, {copies} copies meanwhile;")
    say(f"the engine's longest call of the GPU took {longest * 1e3:.2f} ms")


def pinned_in_parts(place: Place) -> None:
    """Say whether CUDA copies memory that was pinned in part, or by two calls: kvd asks neither."""
    device, half = place.device, SLAB_MULTIPLE_BYTES
    view = sealed(2 * half)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    there, stream = device.alloc(half), device.make_stream()
    try:
        for part, name in ((0, "pinned in part"), (half, "pinned by two calls")):
            device.register(address + part, half)
            try:
                device.copy_in(there, address + half // 2, half, stream)
                over(device, stream)
                say(f"memory {name} can be copied")
            except DeviceError as error:
                say(f"memory {name} cannot be copied: {error}")
        device.copy_in(there, address, half, stream)  # the device works on after either
        over(device, stream)
        for part in (0, half):
            device.unregister(address + part)
    finally:
        device.free(there)


def handles(place: Place) -> None:
    """Open a slab's handle in another process, twice; say how it goes here, and for other users."""
    device, size = place.device, SLAB_MULTIPLE_BYTES
    address, stream = device.alloc(size), device.make_stream()
    device.fill(address, 7, size, stream)
    over(device, stream)
    handle = device.export(address)
    try:
        device.close(device.open(handle))
        say("a handle opens in the process that made it")
    except DeviceError as error:
        say(f"a handle does not open in the process that made it: {error}")
    users: dict[str, int | None] = {"the same user": None}
    if os.geteuid() == 0:
        users["another user"] = NOBODY
    told = {name: _ask(handle, size, user) for name, user in users.items()}
    device.free(address)
    for name, answer in told.items():
        say(f"a handle opened as {name}: {answer}")
    if told["the same user"] != "7 7":
        raise AssertionError(f"a handle does not open in another process: {told['the same user']}")


def _ask(handle: bytes, size: int, user: int | None) -> str:
    """Let another process open a handle; the last line that it says."""
    command = [sys.executable, "-m", "bench._gpu_doubts", handle.hex(), str(size)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        with tempfile.TemporaryDirectory(prefix="kvd-open-") as cache:
            if user is not None:  # CuPy does not load where it cannot write
                os.chown(cache, user, -1)
                environment["CUPY_CACHE_DIR"] = cache
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=OPEN_S,
                check=False,
                cwd=ROOT,
                user=user,
                env=environment,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return (done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1]


def main() -> int:
    """Open a handle twice, and say what is in the memory; close once, and say it again."""
    handle, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
    device = _gpu_place.here(1).device
    host, stream = device.alloc_pinned(size), device.make_stream()
    seen = []
    try:
        address, again = device.open(handle), device.open(handle)
        for close in (again, address):
            device.copy_out(host, address, size, stream)
            over(device, stream)
            seen.append(ctypes.string_at(host, size)[size - 1])
            device.close(close)
    except DeviceError as error:
        print(f"refused: {error}")
        return 1
    print(*seen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
