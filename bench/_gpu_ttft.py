"""Time to first token on a GPU, with a randomly initialised model of the shape of an 8B Llama.

    python -m bench.ttft --engine hf --device cuda --shape 8b --json

Cold: the whole prompt is computed. Warm: all chunks but the last come from kvd's host tier into
pages, from there into the model's cache, and the rest is computed. Beside it stands what a perfect
cache could do: the bytes at the rate of the bus, and the rest of the prompt computed with its cache
at hand. Weights are random, as only time matters; that both ways give one next token is checked.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu
from bench.gpu import GIB, NO_DEVICE, finished, raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd_client.cuda.device import Device

LENGTHS: Final = (1024, 8192, 32768)
ROUNDS: Final = 3


def build(shape: _gpu.Shape, where: str, *, hidden: int = 4096, inner: int = 14336) -> Any:  # noqa: ANN401
    """Make the model; bfloat16, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=hidden // shape.dim,
        num_key_value_heads=shape.heads,
        head_dim=shape.dim,
        vocab_size=32000,
        max_position_embeddings=1 << 16,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model = model.to_empty(device=where)
    finally:
        torch.set_default_dtype(before)
    torch.manual_seed(0)
    steps = torch.arange(0, shape.dim, 2, device=where, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        for name, buffer in model.named_buffers():
            if "inv_freq" in name:
                buffer.copy_(1.0 / (10000 ** (steps / shape.dim)))
    return model.eval()


def forward(model: Any, tokens: Any, cache: Any) -> Any:  # noqa: ANN401
    """Compute the last token's logits, with what the cache has before `tokens`."""
    import torch

    with torch.inference_mode():
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float()


def into_pages(engine: _gpu.Engine, cache: Any, blocks: Sequence[int]) -> None:  # noqa: ANN401
    """Copy a model's cache (1, heads, tokens, dim) a layer into pages."""
    count = len(blocks) * engine.shape.page
    shape = (len(blocks), engine.shape.page, engine.shape.heads, engine.shape.dim)
    for pages, (keys, values) in zip(engine.kv, _layers(cache), strict=True):
        for index, plane in enumerate((keys, values)):
            pages[index, list(blocks)] = plane[0, :, :count].transpose(0, 1).reshape(shape)


def out_of_pages(engine: _gpu.Engine, blocks: Sequence[int]) -> Any:  # noqa: ANN401
    """Make a model's cache of pages."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    index = torch.tensor(list(blocks), device=engine.kv[0].device)
    for layer, pages in enumerate(engine.kv):
        picked = pages.index_select(1, index).flatten(1, 2).transpose(1, 2)
        cache.update(picked[0][None].contiguous(), picked[1][None].contiguous(), layer)
    return cache


def _layers(cache: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401
    layers = getattr(cache, "layers", None)
    if layers is not None:
        return [(layer.keys, layer.values) for layer in layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def cold(model: Any, prompt: Any, wait: Callable[[], None]) -> tuple[float, Any, Any]:  # noqa: ANN401
    """Compute a prompt; give seconds, the last token's logits and the cache."""
    from transformers import DynamicCache

    times = []
    cache, logits = None, None
    for _ in range(ROUNDS):
        cache = DynamicCache()
        start = time.perf_counter()
        logits = forward(model, prompt, cache)
        wait()
        times.append(time.perf_counter() - start)
    return median(times), logits, cache


def warm(
    engine: _gpu.Engine,
    hashes: Sequence[bytes],
    blocks: Sequence[int],
    compute: Callable[[Any], Any],
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
        load = engine.side.load(engine.client.acquire(hashes), blocks)
        if not load.wait_pages() or (not engine.kv[0].is_cuda and not load.wait(_gpu.WAIT_S)):
            raise AssertionError(f"a load ended as {load.state}")
        logits = compute(out_of_pages(engine, blocks))
        wait()
        both.append(time.perf_counter() - start)
        load.wait(_gpu.WAIT_S)
        ready = out_of_pages(engine, blocks)
        wait()
        start = time.perf_counter()
        compute(ready)
        wait()
        alone.append(time.perf_counter() - start)
    return median(both[1:]), median(alone[1:]), logits


def one_length(engine: _gpu.Engine, model: Any, length: int) -> dict[str, float]:  # noqa: ANN401
    """Measure one prompt's length."""
    import torch

    tokens = torch.randint(0, 32000, (1, length), generator=torch.Generator().manual_seed(length))
    hashes = engine.client.chunk_hashes(tokens[0])[: (length - 1) // engine.shape.chunk]
    stored = len(hashes) * engine.shape.chunk
    prompt = tokens.to(engine.kv[0].device)
    cold_s, expected, cache = cold(
        model, prompt, lambda: finished(engine.device, engine.device.current_stream())
    )
    into_pages(engine, cache, engine.blocks(1, stored))
    del cache
    engine.stored(hashes, engine.blocks(1, stored))
    warm_s, suffix_s, got = warm(
        engine,
        hashes,
        engine.blocks(2, stored),
        lambda ready: forward(model, prompt[:, stored:], ready),
    )
    off = float((got - expected).abs().max() / expected.abs().max())
    if off > 0.3:  # other kernels, other roundings; wrong KV is far off
        raise AssertionError(f"the warm answer differs by {off:.3g}")
    return {
        "cold_ms": cold_s * 1e3,
        "warm_ms": warm_s * 1e3,
        "suffix_ms": suffix_s * 1e3,
        "loaded_bytes": stored * engine.shape.total_bytes // engine.shape.tokens,
        "logits_off": off,
    }


def measure(
    device: Device,
    shape: _gpu.Shape,
    lengths: Sequence[int] = LENGTHS,
    *,
    where: str = "cuda",
    host_bytes: int = 16 * GIB,
    main: str = "kvd",
    **model: int,
) -> dict[str, Any]:
    """Measure every length; sizes are for the tests to make small."""
    figures: dict[str, Any] = dict(raw(device, min(GIB, shape.total_bytes)))
    llama = build(shape, where, **model)
    with (
        _gpu.daemon(host_bytes, main=main) as running,
        _gpu.Engine(device, running.socket, shape, where=where) as engine,
    ):
        for length in lengths:
            found = one_length(engine, llama, length)
            limit = found["suffix_ms"] + found["loaded_bytes"] / figures["raw_h2d_gbps"] / 1e6
            found["speedup"] = found["cold_ms"] / found["warm_ms"]
            found["warm_to_limit"] = found["warm_ms"] / limit
            figures |= {f"{name}_{length}": value for name, value in found.items()}
    return figures


def run() -> dict[str, Any] | int:
    """Measure on GPU 0; the exit status where there is none."""
    try:
        device = _gpu.real_device()
    except _gpu.NotHere as reason:
        print(f"bench.ttft: not run: {reason}", file=sys.stderr)
        return NO_DEVICE
    figures = measure(device, _gpu.Shape(tokens=32768, blocks=4608))
    return {**_gpu.machine(), "engine": "hf", "device": "cuda", "shape": "8b", **figures}
