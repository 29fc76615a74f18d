"""What makes one vLLM engine's KV the same as another's.

vLLM's block hashes cover a request's tokens, images, adapter name and salt, each hash with all
before it. What they leave out is the deployment: model, weights, types, layout, ranks. That is put
into kvd's namespace and layout here, and whatever is not known keeps kvd out of the engine.

Imports neither vLLM nor torch: it reads the configuration objects it is given.

Invariants:

V1. Two engines get the same namespace and layout only if a page of one is a page of the other.
V2. A kind of cache that is not named here is refused, not guessed.
"""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvd_client.errors import Unsupported
from kvd_client.identity import DTYPES, Group, Layout, Namespace
from kvd_client.vllm.messages import Identity
from kvd_client.weights import model_place, weights_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd_client.vllm.options import Options

KINDS: Final = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "recurrent",
}
"""vLLM's cache specifications, by exact type, and kvd's kinds."""
LAYOUTS: Final = frozenset({"LBNHC", "LBHNC", "BLHNC", "BLNHC"})
"""Physical orders in which one layer's page of one block is one run of bytes."""
SPECULATION: Final = frozenset({"ngram", "suffix"})
"""Ways to speculate that have no KV of their own."""
ROPES_OF_LENGTH: Final = frozenset({"longrope", "su", "dynamic"})
"""Rotary embeddings that depend on the longest prompt the engine takes."""
_VOLATILE: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
_VERSION: Final = "kvd-vllm-1"


def describe(
    config: Any,  # noqa: ANN401 - vLLM's VllmConfig
    caches: Any,  # noqa: ANN401 - vLLM's KVCacheConfig
    tensors: Mapping[str, Any],
    options: Options,
    *,
    backend: str,
    version: str,
) -> Identity:
    """Describe an engine.

    Args:
        config: The engine's configuration, with all defaults resolved.
        caches: What vLLM made of the model's caches.
        tensors: The view of each layer, or of each part of its state, by its name.
        options: The user's.
        backend: What writes the pages: attention back ends, and what else decides their inside.
        version: vLLM's.

    Raises:
        Unsupported: Something about this engine is unknown to kvd.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    _refuse(config, caches)
    page_tokens = tuple(int(group.kv_cache_spec.block_size) for group in caches.kv_cache_groups)
    hash_tokens = int(getattr(caches, "hash_block_size", None) or cache.block_size)
    aligned = int(getattr(caches, "cache_hit_alignment_tokens", None) or 1)
    unit = math.lcm(hash_tokens, aligned, *page_tokens)
    chunk_tokens = -(-options.chunk_tokens // unit) * unit
    if any(type(group.kv_cache_spec).__name__ == "MambaSpec" for group in caches.kv_cache_groups):
        chunk_tokens = unit  # the engine keeps states at ends of blocks, few of them
    dtype = str(model.dtype).removeprefix("torch.")
    layout = Layout(
        chunk_tokens=chunk_tokens,
        page_tokens=min(page_tokens),
        dtype=_kv_dtype(str(cache.cache_dtype), dtype),
        groups=tuple(_group(group, chunk_tokens) for group in caches.kv_cache_groups),
        tp=int(parallel.tensor_parallel_size),
        order=f"vllm;{cache_order(config, caches)};pages={','.join(map(str, page_tokens))};/1",
    )
    rope = _rope(model)
    facts = {
        "schema": _VERSION,
        "engine": version,
        "backend": backend,
        "config": _plain(_settings(model.hf_config)),
        "text": _plain(_settings(model.hf_text_config)),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "hash": f"{cache.prefix_caching_hash_algo}/{hash_tokens}",
        "length": int(model.max_model_len) if _needs_length(rope) else 0,
        "specs": [_spec_facts(group.kv_cache_spec) for group in caches.kv_cache_groups],
        "views": [
            sorted({_shape(tensors[name]) for name in group.layer_names if name in tensors})
            for group in caches.kv_cache_groups
        ],
    }
    namespace = Namespace(
        model=Path(str(model.model)).name[:128] or "model",
        revision=options.weights or _weights(model, config.load_config),
        dtype=dtype,
        rope=_short(rope),
        extra=f"vllm {version} {_digest(facts)}",
    )
    try:
        return Identity(namespace.check(), layout.check(), page_tokens, hash_tokens)
    except ValueError as error:
        raise Unsupported(str(error)) from error


def _weights(model: Any, load: Any) -> str:  # noqa: ANN401 - vLLM's
    """Digest the weights that vLLM loads."""
    name = str(model.model)
    place = model_place(name, model.revision, getattr(load, "download_dir", None))
    load_format = str(getattr(load.load_format, "value", load.load_format))
    mend = 'give "weights": "DIGEST" in kv_connector_extra_config'
    return weights_digest(name, place, load_format, mend)


def cache_order(config: Any, caches: Any) -> str:  # noqa: ANN401 - vLLM's
    """Name the physical order of the caches."""
    return str(caches.kv_cache_layout or config.cache_config.kv_cache_layout)


def _refuse(config: Any, caches: Any) -> None:  # noqa: ANN401 - vLLM's
    """Raise Unsupported for what kvd cannot keep apart (V2)."""
    cache, parallel = config.cache_config, config.parallel_config
    speculative = getattr(config, "speculative_config", None)
    layout = cache_order(config, caches)
    reasons = {
        "the model has no cache that a prefix could be loaded into": not (
            caches.prefix_cacheable_group_ids
        ),
        "some of the model's caches cannot be found by a prefix's hash": (
            tuple(caches.prefix_cacheable_group_ids) != tuple(range(len(caches.kv_cache_groups)))
        ),
        f"KV cache layout {layout} does not keep a page together;"
        f" set VLLM_KV_CACHE_LAYOUT to one of {', '.join(sorted(LAYOUTS))}": layout not in LAYOUTS,
        f"block hashes by {cache.prefix_caching_hash_algo} may collide;"
        " use --prefix-caching-hash-algo sha256_cbor": not str(
            cache.prefix_caching_hash_algo
        ).startswith("sha256"),
        "context parallelism spreads a page's tokens over ranks": (
            int(getattr(parallel, "decode_context_parallel_size", 1)) > 1
            or int(getattr(parallel, "prefill_context_parallel_size", 1)) > 1
        ),
        "pipeline parallelism was never run with kvd: vLLM's CPU build fails in it": (
            int(parallel.pipeline_parallel_size) > 1
        ),
        "a draft model's KV is not told apart": speculative is not None
        and str(speculative.method) not in SPECULATION,
        "KV scales are computed while serving": bool(getattr(cache, "calculate_kv_scales", False)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)


def _group(group: Any, chunk_tokens: int) -> Group:  # noqa: ANN401 - vLLM's
    spec = group.kv_cache_spec
    kind = KINDS.get(type(spec).__name__)
    if kind is None or getattr(spec, "prefix_replay_tokens", None):
        raise Unsupported(
            f"caches of kind {type(spec).__name__} are not known to kvd (known: {', '.join(KINDS)})"
        )
    if kind == "recurrent":
        return _states(group)
    if getattr(spec, "attention_chunk_size", None):
        raise Unsupported("chunked local attention is not known to kvd")
    window = int(spec.sliding_window) if kind == "sliding" else 0
    more = int(spec.extra_retained_tokens) if kind == "sliding" else 0
    pages = chunk_tokens // int(spec.block_size)
    return Group(
        kind=kind,
        layers=len(group.layer_names),
        kv_heads=int(spec.num_kv_heads),
        head_size=int(spec.head_size),
        object_bytes=len(group.layer_names) * pages * int(spec.page_size_bytes),
        window=window + more,
    )


def _states(group: Any) -> Group:  # noqa: ANN401 - vLLM's
    """Describe a group of recurrent states: one a chunk, opaque."""
    spec = group.kv_cache_spec
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"recurrent states are kept in mode {spec.mamba_cache_mode!r}:"
            " use --enable-prefix-caching --mamba-cache-mode align"
        )
    if spec.num_speculative_blocks:
        raise Unsupported("speculation leaves recurrent states in blocks that kvd cannot name")
    layers = len(group.layer_names)
    return Group("recurrent", layers, 0, 0, layers * int(spec.page_size_bytes))


def _kv_dtype(cache_dtype: str, dtype: str) -> str:
    """Name what a KV value is made of, as kvd's layouts do."""
    known = {"auto": dtype, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
    named = known.get(cache_dtype, {"fp8_e5m2": "float8_e5m2"}.get(cache_dtype, cache_dtype))
    return named if named in DTYPES else "uint8"


def _spec_facts(spec: Any) -> dict[str, str]:  # noqa: ANN401 - vLLM's
    """All that a cache specification says of itself: plain values, by name."""
    fields = getattr(spec, "__dataclass_fields__", {})
    facts = {name: str(getattr(spec, name)) for name in fields}
    return {"kind": type(spec).__name__, "page_bytes": str(spec.page_size_bytes), **facts}


def _shape(view: Any) -> str:  # noqa: ANN401 - vLLM's
    """Name the shape of a layer's blocks. The kernels' may be parts of the engine's.

    With heads before tokens that decides the order inside a page, and vLLM chooses it by the GPU
    and by settings that are named nowhere else here.
    """
    parts = view if isinstance(view, list | tuple) else [view]
    return str([tuple(map(int, part.shape[1:])) for part in parts])


def _settings(config: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers'
    to_dict = getattr(config, "to_dict", None)
    settings: dict[str, Any] = to_dict() if to_dict is not None else dict(vars(config))
    return settings


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Drop names and versions out of a model's settings: they say nothing about its KV."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _rope(model: Any) -> str:  # noqa: ANN401 - vLLM's ModelConfig
    text = model.hf_text_config
    found = {
        name: _plain(getattr(text, name))
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
        if getattr(text, name, None) is not None
    }
    return json.dumps(found, sort_keys=True, default=str)


def _needs_length(rope: str) -> bool:
    return any(f'"{name}"' in rope for name in ROPES_OF_LENGTH)


def _short(text: str) -> str:
    """Give a text of at most 64 characters that differs where the text does."""
    short = len(text) <= 64 and text.isprintable()  # noqa: PLR2004
    return text if short else blake2b(text.encode(), digest_size=32).hexdigest()


def _digest(facts: dict[str, Any]) -> str:
    body = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(body.encode(), digest_size=32, person=b"kvd.vllm.facts.1").hexdigest()


def adapter_hash(digest: str, block_hash: bytes) -> bytes:
    """Move a block hash into the domain of one adapter's content.

    vLLM's hashes know an adapter by name and path; two contents under one name must not meet.
    """
    key = blake2b(digest.encode(), digest_size=32, person=b"kvd.vllm.adapter").digest()
    return blake2b(block_hash, digest_size=32, key=key, person=b"kvd.vllm.lora.1").digest()
