"""Time to first token on a GPU, with a randomly initialised model of the shape of an 8B Llama.

    python -m bench.ttft --engine hf --device cuda --shape 8b --json

Cold: the whole prompt is computed. Warm: all chunks but the last come from kvd's host tier into
pages, layer by layer from there into the model's cache while later layers are still on the bus, and
the rest is computed. Beside it stands what a perfect cache could do: the bytes at the rate of the
bus, and the rest of the prompt computed with its cache at hand. Weights are random, as only time
matters; what was loaded is compared with what was stored, byte by byte, and both ways must give the
same next token's logits but for rounding. Without transformers the model is one in torch alone,
and the result says so.
"""

from __future__ import annotations

import sys
import time
import traceback
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu, _gpu_place, _llama
from bench._gpu_machine import machine
from bench._gpu_place import GIB
from bench._table import keep
from bench.gpu import NO_DEVICE, finished, raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench._gpu_place import Place
    from bench._llama import Model
    from kvd_client.cuda.transfer import Transfer

ROUNDS: Final = 3
OFF_MAX: Final = 0.3
"""Most that logits may differ, of the largest: other kernels, other roundings."""


def into_pages(engine: _gpu.Engine, layers: _llama.Layers, blocks: Sequence[int]) -> None:
    """Copy a model's keys and values into pages."""
    count = len(blocks) * engine.shape.page
    shape = (len(blocks), engine.shape.page, engine.shape.heads, engine.shape.dim)
    for pages, planes in zip(engine.kv, layers, strict=True):
        for index, plane in enumerate(planes):
            pages[index, list(blocks)] = plane[0, :, :count].transpose(0, 1).reshape(shape)


def out_of_pages(
    engine: _gpu.Engine, blocks: Sequence[int], load: Transfer | None = None
) -> Iterator[tuple[Any, Any]]:
    """Give keys and values, layer by layer, each as soon as a load has brought it."""
    import torch

    index = torch.tensor(list(blocks), device=engine.kv[0].device)
    for layer, pages in enumerate(engine.kv):
        if load is not None and not load.wait_layer(layer):
            raise AssertionError(f"layer {layer} did not come: {load.state}")
        picked = pages.index_select(1, index).flatten(1, 2).transpose(1, 2)
        yield picked[0][None].contiguous(), picked[1][None].contiguous()


def cold(model: Model, prompt: Any, wait: Callable[[], None]) -> tuple[float, Any, Any]:  # noqa: ANN401
    """Compute a prompt; give seconds, the last token's logits and the cache."""
    times = []
    cache, logits = None, None
    for _ in range(ROUNDS):
        cache = model.cache()
        start = time.perf_counter()
        logits = model.forward(prompt, cache)
        wait()
        times.append(time.perf_counter() - start)
    return median(times), logits, cache


def warm(
    engine: _gpu.Engine,
    model: Model,
    hashes: Sequence[bytes],
    blocks: Sequence[int],
    rest: Any,  # noqa: ANN401
) -> tuple[float, float, Any]:
    """Load what is stored and compute the rest; seconds, those of the rest alone, and logits."""

    def wait() -> None:
        finished(engine.device, engine.device.current_stream())

    logits: Any = None
    both, alone = [], []
    for _ in range(ROUNDS + 1):
        engine.wipe(blocks)
        wait()
        start = time.perf_counter()
        load = engine.side.load(engine.client.acquire(hashes), blocks, by_layer=True)
        if not engine.kv[0].is_cuda:  # torch on the CPU has no stream that waits
            load.wait(_gpu.WAIT_S)
        logits = model.forward(rest, model.cache(out_of_pages(engine, blocks, load)))
        wait()
        both.append(time.perf_counter() - start)
        if not load.wait(_gpu.WAIT_S):
            raise AssertionError(f"a load ended as {load.state}")
        ready = model.cache(out_of_pages(engine, blocks))
        wait()
        start = time.perf_counter()
        model.forward(rest, ready)
        wait()
        alone.append(time.perf_counter() - start)
        del ready
    return median(both[1:]), median(alone[1:]), logits


def one_length(engine: _gpu.Engine, model: Model, length: int) -> dict[str, Any]:
    """Measure one prompt's length."""
    import torch

    draw = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, _llama.VOCABULARY, (1, length), generator=draw)
    hashes = engine.client.chunk_hashes(tokens[0])[: (length - 1) // engine.shape.chunk]
    stored = len(hashes) * engine.shape.chunk
    blocks, others = engine.blocks(1, stored), engine.blocks(2, stored)
    prompt = tokens.to(engine.kv[0].device)
    cold_s, expected, cache = cold(
        model, prompt, lambda: finished(engine.device, engine.device.current_stream())
    )
    into_pages(engine, model.layers(cache), blocks)
    del cache
    content = engine.content(blocks)
    engine.stored(hashes, blocks)
    pinned = engine.pinned()
    warm_s, suffix_s, got = warm(engine, model, hashes, others, prompt[:, stored:])
    if not _gpu.same(engine.content(others), content):
        raise AssertionError("loaded other bytes than were stored")
    off = float((got - expected).abs().max() / expected.abs().max())
    if not off <= OFF_MAX:
        raise AssertionError(f"the warm answer differs by {off:.3g}")
    return {
        "cold_ms": cold_s * 1e3,
        "warm_ms": warm_s * 1e3,
        "suffix_ms": suffix_s * 1e3,
        "loaded_bytes": stored * engine.shape.total_bytes // engine.shape.tokens,
        "logits_off": off,
        "pinned_note": pinned["note"],
    }


def measure(place: Place, partial: str = "") -> dict[str, Any]:
    """Measure every length; what there is so far goes to the file `partial`."""
    shape, device = place.prompt, place.device
    figures: dict[str, Any] = {"engine": "hf", "device": place.where, "shape": "8b", "failed": {}}
    keep(partial, _gpu_place.mark(figures | {"running": "the model"}))
    figures |= raw(device, min(GIB, shape.total_bytes), place.rounds)
    start = time.perf_counter()
    model, why = _llama.build(shape, place.where, *place.model)
    figures |= {"model": model.name, "model_note": why, "build_s": time.perf_counter() - start}
    with (
        _gpu.daemon(place.prompt_host_bytes, main=place.main) as running,
        place.engine(running.socket, shape) as engine,
    ):
        for length in place.lengths:
            keep(partial, _gpu_place.mark(figures | {"running": f"{length} tokens"}))
            try:
                found = one_length(engine, model, length)
            except Exception as error:  # noqa: BLE001 - a shorter prompt's figures stay
                traceback.print_exc()
                figures["failed"][str(length)] = f"{type(error).__name__}: {error}"[:300]
                continue
            limit = found["suffix_ms"] + found["loaded_bytes"] / figures["raw_h2d_gbps"] / 1e6
            found["limit_ms"] = limit
            found["speedup"] = found["cold_ms"] / found["warm_ms"]
            found["warm_to_limit"] = found["warm_ms"] / limit
            figures |= {f"{name}_{length}": value for name, value in found.items()}
    keep(partial, _gpu_place.mark(figures))
    return figures


def run(partial: str = "") -> tuple[dict[str, Any], int]:
    """Measure on GPU 0; figures and exit status, 3 where there is none."""
    try:
        place = _gpu_place.here()
    except _gpu.NotHere as reason:
        print(f"bench.ttft: not run: {reason}", file=sys.stderr)
        return {}, NO_DEVICE
    figures = measure(place, partial)
    return _gpu_place.mark({**machine(), **figures}), int(bool(figures["failed"]))
