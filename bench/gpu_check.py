"""Is what comes back from a GPU what was stored, whatever dies meanwhile.

    python -m bench.gpu_check            # all checks
    python -m bench.gpu_check kernels    # one of them
    python -m bench.gpu_check --json     # one JSON object at the end

Needs no pytest, so that it runs where only kvd's own wheels are; tests/gpu/test_device.py runs the
same checks. Prints a line a check; ends with 0, 1 for a failed check, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu, _gpu_doubts, _gpu_kill, _gpu_place
from bench._table import keep, print_json
from bench.gpu import NO_DEVICE
from kvd_client.cuda.forms import Form as Bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench._gpu_place import Place
    from kvd_client.cuda.transfer import Transfer
    from kvd_client.paged import Form


# ------------------------------------------------------------------------------- kernels, no daemon


def kernels(place: Place) -> None:
    """Gather and scatter every supported form of pages, plain and FP8: equal to the references."""
    import torch

    for form in ("kv_blocks", "blocks_kv", "pairs", "latent"):
        for page in (16, 64, 256):
            _plain(place, form, page, permuted=False)
        _plain(place, form, 16, permuted=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads_first in (False, True):
            _fp8(place, dtype, heads_first=heads_first)


def _plain(place: Place, form: Form, page: int, *, permuted: bool) -> None:
    """Compare with the copy on the CPU: `kvd_client.paged`."""
    import torch

    from kvd_client.paged import PagedKV

    blocks, heads, dim, layers = 32, 2, 64, 3
    layer = {
        "kv_blocks": (2, blocks, page, heads, dim),
        "blocks_kv": (blocks, 2, page, heads, dim),
        "pairs": (blocks, page, heads, dim),
        "latent": (blocks, page, 576),
    }[form]

    def make() -> Any:  # noqa: ANN401 - a tensor
        if permuted and form != "latent":  # heads before tokens in memory
            swapped = (*layer[:-3], heads, page, dim)
            return torch.randn(swapped, device=place.where).bfloat16().transpose(-2, -3)
        return torch.randn(layer, device=place.where).bfloat16()

    made: list[Any] = [(make(), make()) if form == "pairs" else make() for _ in range(layers)]
    cpu = [tuple(t.cpu() for t in m) if isinstance(m, tuple) else m.cpu() for m in made]
    paged = PagedKV.from_layers(cpu, form, page, threads=1)
    pages, ids = 4, [7, 30, 1, 12]
    planes = len(paged._planes)  # noqa: SLF001 - the reference's own count
    expected = bytearray(paged.object_bytes(pages))
    paged.gather(ids, expected)
    slot = _through(place, made, form, Bytes(planes, pages, paged.page_bytes), (ids, [0, 3, 2, 5]))
    if slot != bytes(expected):
        raise AssertionError(f"{form}, pages of {page}: another object than on the CPU")
    back = bytearray(len(expected))
    after = [tuple(t.cpu() for t in m) if isinstance(m, tuple) else m.cpu() for m in made]
    PagedKV.from_layers(after, form, page, threads=1).gather([0, 3, 2, 5], back)
    if back != expected:
        raise AssertionError(f"{form}, pages of {page}: scattered other bytes")


def _through(
    place: Place,
    layers: list[Any],
    form: Form,
    kind: Bytes,
    blocks: tuple[list[int], list[int]],
) -> bytes:
    """Gather blocks into a pinned slot and scatter it into others; give the slot's bytes."""
    import ctypes

    from kvd_client.cuda.mover import Mover
    from kvd_client.cuda.pages import DevicePages
    from kvd_client.cuda.transfer import Piece, Transfer

    mover = Mover(place.device, DevicePages.from_layers(layers, form), stage_bytes=16 << 20)
    slot = place.device.alloc_pinned(kind.object_bytes)
    per_layer = kind.planes // len(layers)
    for direction, chosen in zip(("gather", "scatter"), blocks, strict=True):
        transfer = Transfer(
            place.device,
            "gather" if direction == "gather" else "scatter",
            kind,
            pieces=[Piece(slot)],
            blocks=chosen,
            planes_a_layer=per_layer,
            finish=lambda _: None,
            after=mover.record_after(),
        )
        mover.submit(transfer)
        deadline = time.monotonic() + _gpu.WAIT_S
        while not transfer.ended and time.monotonic() < deadline:
            mover.turn()
        if not transfer.ok:
            raise AssertionError(f"{direction} ended as {transfer.state}: {mover.broken}")
    if not mover.close():
        raise AssertionError("the mover did not end")
    return ctypes.string_at(slot, kind.object_bytes)


def _fp8(place: Place, dtype: Any, *, heads_first: bool) -> None:  # noqa: ANN401 - torch's
    """Compare codes, scales and what comes back with the NumPy reference."""
    import numpy as np
    import torch

    from kvd_client.cuda import reference
    from kvd_client.cuda.kernels import Axes
    from kvd_client.fp8 import EXPONENTS

    blocks, page, heads, dim, pages = 16, 16, 4, 64, 3
    name = str(dtype).removeprefix("torch.")
    axes = Axes(name, 1, heads, page * dim) if heads_first else Axes(name, page, heads, dim)
    inner = (heads, page, dim) if heads_first else (page, heads, dim)
    layers = [
        (torch.randn((2, blocks, *inner), device=place.where) * 3).to(dtype) for _ in range(2)
    ]
    layers[0][0, 1].view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 6e4]).to(dtype)
    ids, others = [1, 9, 4], [0, 2, 3]
    kind = Bytes(4, pages, axes.page_values * dtype.itemsize, axes)
    before = torch.stack([layer[:, ids] for layer in layers]).cpu()
    slot = np.frombuffer(_through(place, layers, "kv_blocks", kind, (ids, others)), np.uint8)
    bits = before.view(torch.int32 if dtype.itemsize == 4 else torch.int16).numpy()
    unsigned = bits.view(np.uint32 if dtype.itemsize == 4 else np.uint16)
    values = unsigned.reshape(4, pages, axes.rows, heads, axes.run)
    wide = reference.widen(values, name)
    magnitudes = wide & np.uint32(0x7FFFFFFF)
    largest = np.where(magnitudes < 0x7F800000, magnitudes, 0).max(axis=(1, 2, 4))
    scales = reference.choose_exponents(largest, *EXPONENTS[name])
    codes = reference.encode(wide, scales[:, None, None, :, None])
    if not np.array_equal(slot[kind.scales_at : kind.codes_at].view("<i2"), scales.ravel()):
        raise AssertionError(f"{name}: other scales than the reference's")
    if not np.array_equal(slot[kind.codes_at :], codes.ravel()):
        raise AssertionError(f"{name}: other codes than the reference's")
    expected = reference.narrow(reference.decode(codes, scales[:, None, None, :, None]), name)
    after = torch.stack([layer[:, others] for layer in layers]).cpu()
    got = after.view(torch.int32 if dtype.itemsize == 4 else torch.int16).numpy()
    if not np.array_equal(got.view(expected.dtype).ravel(), expected.ravel()):
        raise AssertionError(f"{name}: other values than the reference's")


# -------------------------------------------------------------------------------- with a daemon


def round_trip(place: Place) -> None:
    """Store and load through host memory, whole and by layer, with work on the stream around."""
    with place.daemon(gpu=False) as running:
        for fp8 in (False, True):
            with place.engine(running.socket, place.small, fp8=fp8) as engine:
                _trip(engine, exact=not fp8)


def gpu_tier(place: Place) -> None:
    """The same through the GPU tier, between two engines."""
    with place.daemon() as running:
        for fp8 in (False, True):
            with place.engine(running.socket, place.small, fp8=fp8) as engine:
                hashes = engine.hashes(77, place.small.chunk)
                if engine.client.reserve(hashes).placed[0].on_gpu is None:
                    raise AssertionError("the daemon gave no place in GPU memory")
                _trip(engine, exact=not fp8)


def _trip(engine: _gpu.Engine, *, exact: bool) -> None:
    blocks, others = engine.blocks(1), engine.blocks(2)
    hashes = engine.hashes(1)
    for layer in engine.kv:
        layer[:, blocks] *= 2  # on the engine's stream, just before the store
    store = engine.side.store(engine.client.reserve(hashes), blocks)
    expected = engine.content(blocks)
    if not (store.wait_pages() and _reached(engine, store)):
        raise AssertionError(f"a store ended as {store.state}")
    engine.wipe(blocks)  # behind `wait_pages`: the store must have the old bytes
    if not store.wait(_gpu.WAIT_S):
        raise AssertionError(f"a store ended as {store.state}")
    _gpu.until(lambda: engine.client.lookup(hashes).chunks == len(hashes), "a store is not found")
    for by_layer in (False, True):
        engine.wipe(others)
        lease = engine.client.acquire(hashes)
        load = engine.side.load(lease, others, by_layer=by_layer)
        loaded = []
        for index, layer in enumerate(engine.kv):
            if not (load.wait_layer(index) and _reached(engine, load)):
                raise AssertionError(f"layer {index} did not come: {load.state}")
            loaded.append(layer[:, others].clone())  # on the engine's stream, with no host wait
        if not load.wait(_gpu.WAIT_S):
            raise AssertionError(f"a load ended as {load.state}")
        if exact and not _gpu.same(loaded, expected):
            raise AssertionError("loaded other bytes than were stored")
        worst = max(_relative(a, b) for a, b in zip(loaded, expected, strict=True))
        if worst > 1 / 15:  # half a step of 2**-3 is 1/16; at most one more for a tie
            raise AssertionError(f"FP8 lost {worst:.3g}")


def _reached(engine: _gpu.Engine, transfer: Transfer) -> bool:
    """Wait on the host where the engine has no stream that does: torch on the CPU."""
    return engine.kv[0].is_cuda or transfer.wait(_gpu.WAIT_S)


def _relative(one: Any, two: Any) -> float:  # noqa: ANN401 - tensors
    floor = float(two.float().abs().max()) / 256
    return float(((one.float() - two.float()).abs() / two.float().abs().clamp(min=floor)).max())


CHECKS: Final[dict[str, Callable[[Place], None]]] = {
    "kernels": kernels,
    "pinning": _gpu_doubts.pinning,
    "round_trip": round_trip,
    "gpu_tier": gpu_tier,
    "engines_killed": _gpu_kill.engines_killed,
    "daemon_killed": _gpu_kill.daemon_killed,
    "handles": _gpu_doubts.handles,
    "pinned_in_parts": _gpu_doubts.pinned_in_parts,
}


def run(place: Place, names: Iterable[str], partial: str = "") -> dict[str, Any]:
    """Run checks one after the other; what there is so far goes to the file `partial`."""
    found: dict[str, Any] = {"kills": place.kills}
    for name in names:
        keep(partial, _gpu_place.mark(found | {"running": name}))
        start, why = time.perf_counter(), ""
        try:
            CHECKS[name](place)
        except Exception as error:  # noqa: BLE001 - the next check may still tell something
            why = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
        seconds = time.perf_counter() - start
        outcome = "FAILED" if why else "ok"
        print(f"{name:16} {outcome:6} {seconds:6.1f} s", file=sys.stderr, flush=True)
        found[name] = {"outcome": outcome, "seconds": round(seconds, 2), "error": why}
    keep(partial, _gpu_place.mark(found))
    return found


def main() -> int:
    """Run the checks on GPU 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checks", nargs="*", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    parser.add_argument("--partial", default="", help="a file for what there is so far")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.checks) - set(CHECKS)
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    try:
        place = _gpu_place.here(int(options.child[1]) if options.child else 0)
    except _gpu.NotHere as reason:
        print(f"bench.gpu_check: not run: {reason}", file=sys.stderr)
        return NO_DEVICE
    if options.child:
        _gpu_kill.child(place, options.child[0], int(options.child[1]))
        return 0
    found = run(place, options.checks or CHECKS, options.partial)
    if options.json:
        print_json(_gpu_place.mark(found))
    return int(any(isinstance(f, dict) and f["outcome"] != "ok" for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
