"""How fast KV goes between an engine's pages on a GPU and kvd, beside what the bus can do.

    python -m bench.gpu --json

One run, one process with a GPU and a daemon beside it: the KV of 8,192 tokens of an 8B-shaped model
(1 GiB in 65,536-byte pages of K and V, blocks scattered) is stored and loaded, exact and as FP8,
through host memory and through the GPU tier. Rates are medians, in 10^9 bytes of the engine's KV a
second, and every load is compared with what was stored. Without a GPU it says so and ends with 3.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu
from bench._table import report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd_client.cuda.device import Device

ROUNDS: Final = 7
NO_DEVICE: Final = 3
GIB: Final = 1 << 30


def timed(
    what: Callable[[], object],
    rounds: int = 0,
    between: Callable[[], object] = lambda: None,
) -> float:
    """Give the median time, after one that does not count; `between` them time does not either."""
    what()
    between()
    times = []
    for _ in range(rounds or ROUNDS):
        start = time.perf_counter()
        what()
        times.append(time.perf_counter() - start)
        between()
    return median(times)


def finished(device: Device, stream: int) -> None:
    """Wait for a stream by polling: at most some 10 us late."""
    event = device.make_event()
    device.record(event, stream)
    while not device.happened(event):
        pass
    device.destroy_event(event)


def raw(device: Device, size: int) -> dict[str, float]:
    """Copy pinned host memory in one piece, each way: the limit of everything else."""
    host, there, stream = device.alloc_pinned(size), device.alloc(size), device.make_stream()

    def copy_in() -> None:
        device.copy_in(there, host, size, stream)
        finished(device, stream)

    def copy_out() -> None:
        device.copy_out(host, there, size, stream)
        finished(device, stream)

    ctypes.memset(host, 1, size)
    rates = {"raw_h2d_gbps": size / timed(copy_in) / 1e9}
    rates["raw_d2h_gbps"] = size / timed(copy_out) / 1e9
    device.free(there)
    return rates


def registration(device: Device, size: int) -> float:
    """Pin shared memory whose pages are there; GiB a second."""
    import mmap
    import os

    fd = os.memfd_create("kvd-bench")
    os.ftruncate(fd, size)
    view = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    os.close(fd)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    ctypes.memset(address, 1, size)
    start = time.perf_counter()
    device.register(address, size)
    seconds = time.perf_counter() - start
    device.unregister(address)
    return size / GIB / seconds


def through_kvd(engine: _gpu.Engine, suffix: str, factor: int = 1) -> dict[str, Any]:
    """Store prompts of their own, and load one into other blocks; compare."""
    total = engine.shape.total_bytes * factor
    blocks, others = engine.blocks(1), engine.blocks(2)
    chains = iter([engine.hashes(number) for number in range(1, ROUNDS + 3)])
    told: list[bytes] = []

    def store() -> None:
        told[:] = next(chains)
        engine.store(told, blocks)

    def found() -> None:  # what is in GPU memory only is not found, and takes up room there
        _gpu.until(lambda: engine.client.lookup(told).chunks == len(told), "a store is not found")

    store_s = timed(store, between=found)
    hashes = next(chains)
    engine.stored(hashes, blocks)
    expected = engine.content(blocks)
    load_s = timed(lambda: engine.load(hashes, others))
    by_layer_s = timed(lambda: engine.load(hashes, others, by_layer=True))
    loaded = engine.content(others)
    exact = _gpu.same(loaded, expected)
    error = max(_error(a, b) for a, b in zip(loaded, expected, strict=True))
    if not (exact or (suffix == "_fp8" and error < 1 / 15)):
        raise AssertionError(f"loaded other bytes than were stored (error {error:.3g})")
    return {
        f"store{suffix}_gbps": total / store_s / 1e9,
        f"load{suffix}_gbps": total / load_s / 1e9,
        f"load{suffix}_by_layer_gbps": total / by_layer_s / 1e9,
        f"load{suffix}_error": error,
    }


def _error(loaded: Any, stored: Any) -> float:  # noqa: ANN401 - tensors
    """Give the largest error, relative to the value, or to 2**-8 of the largest if that is more."""
    one, two = loaded.float(), stored.float()
    return float(((one - two).abs() / two.abs().clamp(min=float(two.abs().max()) / 256)).max())


def by_hand(engine: _gpu.Engine, device: Device) -> dict[str, Any]:
    """Measure what an engine would do without kvd: index, then copy to pinned memory."""
    import torch

    pin = engine.kv[0].is_cuda
    blocks = torch.tensor(engine.blocks(1), device=engine.kv[0].device)
    picked = engine.kv[0][:, blocks]
    host = [torch.empty(picked.shape, dtype=picked.dtype, pin_memory=pin) for _ in engine.kv]

    def index_copy() -> None:
        for layer, into in zip(engine.kv, host, strict=True):
            into.copy_(layer.index_select(1, blocks), non_blocking=True)
        finished(device, device.current_stream())

    rates: dict[str, Any] = {
        "index_copy_gbps": engine.shape.total_bytes / timed(index_copy, 3) / 1e9
    }
    try:
        rates["memcpy_batch_gbps"] = _memcpy_batch(engine, host)
    except Exception as error:  # noqa: BLE001 - a comparison that may not exist here
        rates["memcpy_batch_gbps"] = None
        rates["memcpy_batch_note"] = f"{type(error).__name__}: {error}"[:120]
    return rates


def _memcpy_batch(engine: _gpu.Engine, host: Sequence[Any]) -> float:
    """Copy page by page with cudaMemcpyBatchAsync, by cuda.bindings."""
    import torch
    from cuda.bindings import runtime  # type: ignore[import-not-found, unused-ignore]

    size = engine.shape.page_bytes
    targets, sources = [], []
    for layer, into in zip(engine.kv, host, strict=True):
        for kv in range(2):
            base = layer[kv].data_ptr()
            sources += [base + block * size for block in engine.blocks(1)]
            targets += [into[kv].data_ptr() + i * size for i in range(into.shape[1])]
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    stream = torch.cuda.Stream()
    sizes, count = [size] * len(sources), len(sources)

    def copy() -> None:
        head = (targets, sources, sizes, count, [attributes], [0], 1)
        try:
            result = runtime.cudaMemcpyBatchAsync(*head, stream.cuda_stream)
        except TypeError:  # CUDA 12 has one argument more
            result = runtime.cudaMemcpyBatchAsync(*head, 0, stream.cuda_stream)
        if int(result[0]):
            raise RuntimeError(str(result[0]))
        stream.synchronize()

    return engine.shape.total_bytes / timed(copy, 3) / 1e9


def first_use(device: Device, shape: _gpu.Shape, where: str, host_bytes: int, main: str) -> float:
    """Load one chunk right after joining a host tier of this size: nothing of it is pinned yet."""
    one = shape._replace(tokens=shape.chunk)
    with _gpu.daemon(host_bytes, main=main) as running:
        with _gpu.Engine(device, running.socket, one, where=where) as engine:
            hashes = engine.hashes(1)
            engine.stored(hashes, engine.blocks(1))
        with _gpu.Engine(device, running.socket, one, where=where) as again:
            start = time.perf_counter()
            again.load(hashes, again.blocks(2))
            seconds = time.perf_counter() - start
    return seconds * 1e3


def measure(
    device: Device,
    shape: _gpu.Shape,
    *,
    where: str = "cuda",
    host_bytes: int = 24 * GIB,
    gpu_bytes: int = 4 * GIB,
    slab_bytes: int = 256 << 20,
    first_use_bytes: int = 16 * GIB,
    main: str = "kvd",
) -> dict[str, Any]:
    """Run everything; sizes are for the tests to make small."""
    figures: dict[str, Any] = {"tokens": shape.tokens, "kv_bytes": shape.total_bytes}
    figures |= raw(device, min(GIB, shape.total_bytes))
    figures["register_gib_s"] = registration(device, min(GIB, shape.total_bytes))
    with _gpu.daemon(host_bytes, main=main) as running:
        with _gpu.Engine(device, running.socket, shape, where=where) as engine:
            figures |= through_kvd(engine, "")
            figures |= by_hand(engine, device)
        with _gpu.Engine(device, running.socket, shape, where=where, fp8=True) as engine:
            figures |= through_kvd(engine, "_fp8")
    with (
        _gpu.daemon(host_bytes, gpu_bytes, slab_bytes=slab_bytes, main=main) as running,
        _gpu.Engine(device, running.socket, shape, where=where) as engine,
    ):
        tier = through_kvd(engine, "_gpu_tier", 2)  # read and write
    figures |= tier
    figures["gpu_tier_gbps"] = min(tier["load_gpu_tier_gbps"], tier["store_gpu_tier_gbps"])
    figures["first_use_ms"] = first_use(device, shape, where, first_use_bytes, main)
    for way, bus in (("load", "raw_h2d_gbps"), ("store", "raw_d2h_gbps")):
        for form in ("", "_fp8"):
            figures[f"{way}{form}_to_raw"] = figures[f"{way}{form}_gbps"] / figures[bus]
    return figures


def main() -> int:
    """Measure on GPU 0 and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--host-bytes", type=int, default=24 * GIB, help="of the daemon's tier")
    options = parser.parse_args()
    try:
        device = _gpu.real_device()
    except _gpu.NotHere as reason:
        print(f"bench.gpu: not run: {reason}", file=sys.stderr)
        return NO_DEVICE
    figures = measure(device, _gpu.Shape(), host_bytes=options.host_bytes)
    report("KV between a GPU and kvd", {**_gpu.machine(), **figures}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
