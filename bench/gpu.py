"""How fast KV goes between an engine's pages on a GPU and kvd, beside what the bus can do.

    python -m bench.gpu --json

One run, one process with a GPU and a daemon beside it: the KV of 8,192 tokens of an 8B-shaped model
(1 GiB in 32,768-byte pages of K and V, blocks scattered) is stored and loaded, exact and as FP8,
through host memory and through the GPU tier. Rates are medians by the clock of the process, from
asking the daemon to the end of the copy, in 10^9 bytes of the engine's KV a second; every load is
compared with what was stored. Host memory is full and pinned before anything is timed, as it is
once an engine has run for a while; `first_use_ms` is what it costs before that.

A part that fails leaves its error under `failed`, and the others run. Ends with 0, 1 if a part
failed, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
import traceback
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu, _gpu_place
from bench._gpu_machine import machine
from bench._gpu_place import GIB
from bench._table import keep, report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench._gpu_place import Place
    from kvd_client.cuda.device import Device
    from kvd_client.cuda.transfer import Transfer

NO_DEVICE: Final = 3
SLEEP_CYCLES: Final = 30_000_000
"""Some 15 ms: longer than it takes to put a load of 1 GiB on the GPU's streams."""


def timed(
    what: Callable[[], object], rounds: int, between: Callable[[], object] = lambda: None
) -> float:
    """Give the median time, after one that does not count; `between` them time does not either."""
    what()
    between()
    times = []
    for _ in range(rounds):
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


def raw(device: Device, size: int, rounds: int) -> dict[str, float]:
    """Copy pinned host memory in one piece, each way: the limit of everything else."""
    host, there, stream = device.alloc_pinned(size), device.alloc(size), device.make_stream()

    def copy_in() -> None:
        device.copy_in(there, host, size, stream)
        finished(device, stream)

    def copy_out() -> None:
        device.copy_out(host, there, size, stream)
        finished(device, stream)

    ctypes.memset(host, 1, size)
    rates = {"raw_h2d_gbps": size / timed(copy_in, rounds) / 1e9}
    rates["raw_d2h_gbps"] = size / timed(copy_out, rounds) / 1e9
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


def through_kvd(
    engine: _gpu.Engine, suffix: str, rounds: int, *, fill_bytes: int = 0, factor: int = 1
) -> dict[str, Any]:
    """Store prompts of their own, and load one into other blocks; compare.

    Args:
        engine: Whose KV.
        suffix: Of the figures' names.
        rounds: See `timed`.
        fill_bytes: The host tier, to be full and pinned before; 0 where no slot of it is copied.
        factor: How often each byte counts: 2 where reading and writing are on the same GPU.
    """
    total = engine.shape.total_bytes * factor
    blocks, others = engine.blocks(1), engine.blocks(2)
    fills = fill_bytes // engine.stored_bytes + 1 if fill_bytes else 0
    chains = iter([engine.hashes(number) for number in range(1, rounds + fills + 3)])
    told: list[bytes] = []

    def store() -> None:
        told[:] = next(chains)
        engine.store(told, blocks)

    def found() -> None:  # what is in GPU memory only is not found, and takes up room there
        _gpu.until(lambda: engine.client.lookup(told).chunks == len(told), "a store is not found")

    for _ in range(fills):
        store()
        found()
    figures: dict[str, Any] = {f"pinned{suffix}_{k}": v for k, v in engine.pinned().items()}
    store_s = timed(store, rounds, between=found)
    hashes = next(chains)
    engine.stored(hashes, blocks)
    expected = engine.content(blocks)
    engine.pinned()
    load_s = timed(lambda: engine.load(hashes, others), rounds)
    by_layer_s = timed(lambda: engine.load(hashes, others, by_layer=True), rounds)
    loaded = engine.content(others)
    exact = _gpu.same(loaded, expected)
    error = max(_error(a, b) for a, b in zip(loaded, expected, strict=True))
    if not (exact or (suffix == "_fp8" and error < 1 / 15)):
        raise AssertionError(f"loaded other bytes than were stored (error {error:.3g})")
    return figures | {
        f"store{suffix}_gbps": total / store_s / 1e9,
        f"load{suffix}_gbps": total / load_s / 1e9,
        f"load{suffix}_by_layer_gbps": total / by_layer_s / 1e9,
        f"load{suffix}_error": error,
    }


def through_gpu_tier(engine: _gpu.Engine, rounds: int) -> dict[str, Any]:
    """Store and load through the GPU tier; reading and writing both count.

    `gpu_tier_gbps` is by the clock, as everywhere. `gpu_tier_device_gbps` is the copies' own time
    on the GPU: what an engine's stream waits whose host is ahead of it. None without CUDA's events.
    """
    figures = through_kvd(engine, "_gpu_tier", rounds, factor=2)
    total = 2 * engine.shape.total_bytes
    hashes, others = engine.hashes(900), engine.blocks(2)
    engine.stored(hashes, engine.blocks(1))
    lease = engine.client.acquire(hashes)
    there = sum(lease.on_gpu(chunk) is not None for chunk in range(lease.chunks))
    lease.release()
    figures["gpu_tier_share"] = there / len(hashes)
    figures["gpu_tier_gbps"] = min(figures["load_gpu_tier_gbps"], figures["store_gpu_tier_gbps"])
    figures["gpu_tier_device_gbps"] = None
    if engine.kv[0].is_cuda:
        chains = iter([engine.hashes(number) for number in range(901, 902 + rounds)])
        told: list[bytes] = []

        def load() -> Transfer:
            return engine.side.load(engine.client.acquire(hashes), others)

        def store() -> Transfer:
            told[:] = next(chains)
            return engine.side.store(engine.client.reserve(told), others)

        def found() -> None:
            _gpu.until(lambda: engine.client.lookup(told).chunks == len(told), "not found")

        seconds = max(on_stream(load, rounds), on_stream(store, rounds, found))
        figures["gpu_tier_device_gbps"] = total / seconds / 1e9
    return figures


def on_stream(
    begin: Callable[[], Transfer], rounds: int, between: Callable[[], object] = lambda: None
) -> float:
    """Give the median time on the GPU of transfers that are put there while it sleeps."""
    import torch

    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001 - there is no other
        first.record()
        transfer = begin()  # touches the pages behind `first`
        if not transfer.wait_pages():
            raise AssertionError(f"a transfer ended as {transfer.state}")
        last.record()
        if not transfer.wait(_gpu.WAIT_S):
            raise AssertionError(f"a transfer ended as {transfer.state}")
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
        between()
    return float(median(times))


def _error(loaded: Any, stored: Any) -> float:  # noqa: ANN401 - tensors
    """Give the largest error, relative to the value, or to 2**-8 of the largest if that is more."""
    one, two = loaded.float(), stored.float()
    return float(((one - two).abs() / two.abs().clamp(min=float(two.abs().max()) / 256)).max())


def by_hand(engine: _gpu.Engine) -> dict[str, Any]:
    """Measure what an engine would do without kvd: index, then copy to pinned memory."""
    import torch

    pin = engine.kv[0].is_cuda
    blocks = torch.tensor(engine.blocks(1), device=engine.kv[0].device)
    picked = engine.kv[0][:, blocks]
    host = [torch.empty(picked.shape, dtype=picked.dtype, pin_memory=pin) for _ in engine.kv]

    def index_copy() -> None:
        for layer, into in zip(engine.kv, host, strict=True):
            into.copy_(layer.index_select(1, blocks), non_blocking=True)
        finished(engine.device, engine.device.current_stream())

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
    from cuda.bindings import runtime  # type: ignore[import-not-found, import-untyped, unused-ignore]

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


def first_use(place: Place) -> dict[str, Any]:
    """Load one chunk right after joining a large host tier: nothing of it is pinned yet."""
    one = place.shape._replace(tokens=place.shape.chunk)
    with _gpu.daemon(place.first_use_bytes, main=place.main) as running:
        with _gpu.Engine(place.device, running.socket, one, where=place.where) as engine:
            hashes = engine.hashes(1)
            engine.stored(hashes, engine.blocks(1))
        with _gpu.Engine(place.device, running.socket, one, where=place.where) as again:
            start = time.perf_counter()
            again.load(hashes, again.blocks(2))
            seconds = time.perf_counter() - start
    return {"first_use_ms": seconds * 1e3}


def host_tier(place: Place, *, fp8: bool) -> dict[str, Any]:
    """Go through host memory; exact, also do by hand what there would be without kvd."""
    host_bytes = place.bench_bytes[0]
    with (
        _gpu.daemon(host_bytes, main=place.main) as running,
        _gpu.Engine(
            place.device, running.socket, place.shape, where=place.where, fp8=fp8
        ) as engine,
    ):
        if fp8:
            return through_kvd(engine, "_fp8", place.rounds, fill_bytes=host_bytes)
        return through_kvd(engine, "", place.rounds, fill_bytes=host_bytes) | by_hand(engine)


def gpu_tier(place: Place) -> dict[str, Any]:
    """Go through the GPU tier."""
    host_bytes, gpu_bytes, slab_bytes = place.bench_bytes
    with (
        _gpu.daemon(host_bytes, gpu_bytes, slab_bytes=slab_bytes, main=place.main) as running,
        _gpu.Engine(place.device, running.socket, place.shape, where=place.where) as engine,
    ):
        return through_gpu_tier(engine, place.rounds)


def bus(place: Place) -> dict[str, Any]:
    """Measure the bus alone, and how fast memory is pinned."""
    size = min(GIB, place.shape.total_bytes)
    rates: dict[str, Any] = dict(raw(place.device, size, place.rounds))
    return {"raw_bytes": size, **rates, "register_gib_s": registration(place.device, size)}


PARTS: Final[dict[str, Callable[[Place], dict[str, Any]]]] = {
    "bus": bus,
    "host": lambda place: host_tier(place, fp8=False),
    "fp8": lambda place: host_tier(place, fp8=True),
    "gpu_tier": gpu_tier,
    "first_use": first_use,
}


def measure(place: Place, partial: str = "") -> dict[str, Any]:
    """Run every part; what there is so far goes to the file `partial`."""
    figures: dict[str, Any] = {
        "tokens": place.shape.tokens,
        "kv_bytes": place.shape.total_bytes,
        "failed": {},
    }
    for name, part in PARTS.items():
        keep(partial, _gpu_place.mark(figures | {"running": name}))
        try:
            figures |= part(place)
        except Exception as error:  # noqa: BLE001 - the next part may still tell something
            traceback.print_exc()
            figures["failed"][name] = f"{type(error).__name__}: {error}"[:300]
        for way, bus_rate in (("load", "raw_h2d_gbps"), ("store", "raw_d2h_gbps")):
            for form in ("", "_fp8"):
                if f"{way}{form}_gbps" in figures and bus_rate in figures:
                    rate = figures[f"{way}{form}_gbps"] / figures[bus_rate]
                    figures[f"{way}{form}_to_raw"] = rate
    keep(partial, _gpu_place.mark(figures))
    return figures


def main() -> int:
    """Measure on GPU 0 and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--partial", default="", help="a file for what there is so far")
    options = parser.parse_args()
    try:
        place = _gpu_place.here()
    except _gpu.NotHere as reason:
        print(f"bench.gpu: not run: {reason}", file=sys.stderr)
        return NO_DEVICE
    figures = measure(place, options.partial)
    told = _gpu_place.mark({**machine(), **figures})
    report("KV between a GPU and kvd", told, as_json=options.json)
    return int(bool(figures["failed"]))


if __name__ == "__main__":
    sys.exit(main())
