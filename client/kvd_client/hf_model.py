"""What kvd must know of a Hugging Face model: its identity, its cache's shape, its limits.

Invariants:

M1. Two models have one identity only if every byte of their weights and buffers, their
    configuration, their active adapters and the versions of transformers and torch are equal.
M2. A model whose KV depends on more than the token prefix (a RoPE that changes with the prompt's
    length, attention to later tokens) is refused, not cached.
M3. Shapes come from a run of one token, not from the names of configuration fields.

The digest reads *all* bytes. A sample is cheaper but cannot see that a fine-tune touched a few
rows of an embedding, and then the hit is a wrong one. BLAKE2b runs without the GIL, so
`DIGEST_THREADS` threads share the tensors: 0.5 to 1 GB/s a core, once a connection. Whoever has
a digest of the checkpoint already may pass it (`connect_model(identity=...)`).
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvd_client.errors import KvdError
from kvd_client.identity import TEXT_BYTES_MAX, Group, Layout, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import Cache

DIGEST_THREADS: Final = min(8, os.cpu_count() or 1)
ORDER: Final = "layer,kv,head,token,dim/1"
_VOLATILE: Final = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "use_cache", "torch_dtype"}
)
"""Configuration fields that differ between equal models (a path, a version kept elsewhere)."""


class Unsupported(KvdError):
    """kvd cannot keep this KV without risking a wrong hit; the text says what to change."""


class UnsupportedModel(Unsupported):
    """The model's KV does not follow from weights and token prefix alone, or has no digest."""


class UnsupportedCache(Unsupported):
    """A cache, or one of its layers, is of a kind that kvd cannot cut into chunks."""


class UnsupportedInput(Unsupported):
    """More than one prompt at once, or a prompt with padding."""


class WrongModel(KvdError):
    """The client was connected for another model, or the model has changed since."""


class LayerShape(NamedTuple):
    """One cache layer: K is `[1, heads, tokens, key_size]`, V the same with `value_size`."""

    heads: int
    key_size: int
    value_size: int
    window: int
    """Tokens the layer sees, itself included; 0 for all."""


class LayerGroup(NamedTuple):
    """Layers of one shape and window: one object a chunk.

    An object is, for each layer in turn, K then V, each `[heads, chunk_tokens, size]`.
    """

    shape: LayerShape
    layers: tuple[int, ...]

    def values(self, tokens: int) -> tuple[int, int]:
        """Count the values of one layer's K and of its V for `tokens` tokens."""
        heads, key_size, value_size, _ = self.shape
        return heads * tokens * key_size, heads * tokens * value_size

    def split(self, flat: torch.Tensor, chunk_tokens: int) -> Sequence[torch.Tensor]:
        """Cut one object into K, V, K, V, ... as views `[heads, chunk_tokens, size]`."""
        heads, key_size, value_size, _ = self.shape
        if key_size == value_size:
            return flat.view(2 * len(self.layers), heads, chunk_tokens, key_size).unbind(0)
        parts = torch.split(flat, list(self.values(chunk_tokens)) * len(self.layers))
        return [part.view(heads, chunk_tokens, -1) for part in parts]

    def reach(self, chunk_tokens: int) -> int:
        """Count the chunks at a prefix's end that the next token's window touches."""
        assert self.shape.window > 0
        return -(-(self.shape.window - 1) // chunk_tokens)

    def first_needed(self, chunks: int, chunk_tokens: int) -> int:
        """Return the first chunk this group needs so that a prefix of `chunks` is usable."""
        return max(0, chunks - self.reach(chunk_tokens)) if self.shape.window else 0


class ModelPlan(NamedTuple):
    """How one model's cache is cut into objects."""

    groups: tuple[LayerGroup, ...]
    layers: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """Of each layer's KV."""
    media_tokens: frozenset[int]
    """Token ids that stand for images or sound, whose KV the ids do not determine."""

    def layout(self, chunk_tokens: int) -> Layout:
        """Describe the objects to the daemon.

        Raises:
            UnsupportedModel: kvd has no such dtype or too many groups.
        """
        groups = tuple(
            Group(
                kind="sliding" if group.shape.window else "full",
                layers=len(group.layers),
                kv_heads=group.shape.heads,
                head_size=group.shape.key_size,
                object_bytes=len(group.layers)
                * sum(group.values(chunk_tokens))
                * self.dtype.itemsize,
                window=group.shape.window,
            )
            for group in self.groups
        )
        try:
            return Layout(
                chunk_tokens, chunk_tokens, _name(self.dtype), groups, order=ORDER
            ).check()
        except ValueError as error:
            msg = f"kvd cannot describe this model's cache: {error}"
            raise UnsupportedModel(msg) from error


def new_cache(model: Any) -> DynamicCache:  # noqa: ANN401 - any decoder model
    """Make the empty cache to prefill with, if it is to be stored afterwards.

    Sliding-window layers normally drop all but the last `window - 1` tokens, and kvd stores whole
    chunks only; this cache keeps them all. It costs the memory of full attention until it is
    dropped. For models without sliding windows it is a plain `DynamicCache`.

    Raises:
        UnsupportedCache: The model's cache has layers kvd cannot cut.
    """
    cache = DynamicCache(config=model.config)
    check_layers(cache)
    record_past(cache)
    return cache


def record_past(cache: Any) -> None:  # noqa: ANN401 - a method without types
    """Let sliding-window layers keep what their window has left behind."""
    cache.activate_past_recording()


def check_layers(cache: object) -> None:
    """Refuse any cache but a `DynamicCache` of plain and sliding-window layers.

    Raises:
        UnsupportedCache: Naming the first odd layer, its kind and what to do.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        kind = type(layer).__name__
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            continue
        if "Static" in kind or "Quanti" in kind:
            mend = (
                "give generate() past_key_values=kvd_client.transformers.new_cache(model) and no "
                "cache_implementation"
            )
        else:
            mend = "run this model without kvd: such a state cannot be cut at a chunk's end"
        msg = f"cache layer {index} is a {kind}; kvd takes plain and sliding-window layers: {mend}"
        raise UnsupportedCache(msg)
    if not isinstance(cache, DynamicCache):
        msg = f"the cache is a {type(cache).__name__}, not a DynamicCache: use new_cache(model)"
        raise UnsupportedCache(msg)
    if cache.offloading:
        msg = "the cache offloads its layers while it is read: use new_cache(model)"
        raise UnsupportedCache(msg)


def plan_model(model: Any) -> ModelPlan:  # noqa: ANN401 - any decoder model
    """Check the model, run it on one token and read the shapes of its cache (M2, M3).

    Raises:
        UnsupportedModel: See M2; also a model in training mode.
        UnsupportedCache: The model's cache has layers kvd cannot cut.
    """
    _check_model(model)
    cache = new_cache(model)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True)
    check_layers(cache)
    members: dict[LayerShape, list[int]] = {}
    layers: list[Any] = list(cache.layers)
    for index, layer in enumerate(layers):
        members.setdefault(layer_shape(index, layer), []).append(index)
    dtypes = {layer.keys.dtype for layer in layers}
    if len(dtypes) != 1:
        msg = f"the cache mixes dtypes: {', '.join(sorted(map(str, dtypes)))}"
        raise UnsupportedModel(msg)
    # Full attention first, then by window: an order that every engine of the model arrives at.
    groups = sorted(members.items(), key=lambda item: (item[0].window, item[1]))
    return ModelPlan(
        tuple(LayerGroup(shape, tuple(indices)) for shape, indices in groups),
        len(layers),
        dtypes.pop(),
        tuple(layer.keys.device for layer in layers),
        frozenset(_media_tokens(model.config.to_dict())),
    )


def layer_shape(index: int, layer: Any) -> LayerShape:  # noqa: ANN401 - a cache layer
    """Read one filled layer's shape.

    Raises:
        UnsupportedCache: The layer is empty, or is not of one sequence.
    """
    if not layer.is_initialized:
        msg = f"cache layer {index} is empty: run the model on the prompt first"
        raise UnsupportedCache(msg)
    keys, values = layer.keys.shape, layer.values.shape
    if keys[0] != 1:
        msg = f"the cache holds {keys[0]} sequences; kvd takes one at a time: run a batch of 1"
        raise UnsupportedCache(msg)
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
    return LayerShape(keys[1], keys[3], values[3], window)


def loaded_cache(
    model: Any,  # noqa: ANN401 - any decoder model
    states: dict[int, tuple[torch.Tensor, torch.Tensor]],
    tokens: int,
) -> DynamicCache:
    """Make a cache of loaded states; it keeps its past, so that it can be stored again.

    Args:
        model: Whose.
        states: For each layer K and V as `[1, heads, tokens, size]`; of a sliding-window layer the
            last tokens are enough. The cache owns them from now on.
        tokens: Of the prefix.
    """
    cache = DynamicCache(config=model.config)
    layer: Any
    for index, layer in enumerate(cache.layers):
        keys, values = states[index]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = tokens
    record_past(cache)
    return cache


def check_filled(plan: ModelPlan, cache: Cache) -> int:
    """Return the tokens a cache of this model holds.

    Raises:
        UnsupportedCache: It is of another kind, of more than one sequence, or not this model's.
    """
    check_layers(cache)
    if len(cache.layers) != plan.layers:
        msg = f"the cache has {len(cache.layers)} layers, the model {plan.layers}"
        raise UnsupportedCache(msg)
    length: int = cache.get_seq_length()
    for group in plan.groups:
        for index in group.layers:
            layer: Any = cache.layers[index]
            shape = layer_shape(index, layer)
            if shape != group.shape or layer.keys.dtype != plan.dtype:
                msg = (
                    f"cache layer {index} holds {layer.keys.dtype} {tuple(shape)}, not this "
                    f"model's {plan.dtype} {tuple(group.shape)} (autocast, or another model)"
                )
                raise UnsupportedCache(msg)
            if layer.get_seq_length() != length:
                msg = f"cache layer {index} holds {layer.get_seq_length()} tokens, not {length}"
                raise UnsupportedCache(msg)
    return length


def first_complete(group: LayerGroup, cache: Cache, chunk_tokens: int) -> int:
    """Return the first chunk of which the cache still holds every token for this group."""
    layers: list[Any] = [cache.layers[index] for index in group.layers]
    dropped: int = max(layer.get_seq_length() - layer.keys.shape[-2] for layer in layers)
    return -(-dropped // chunk_tokens)


def prompt_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Return one prompt's token ids.

    Raises:
        UnsupportedInput: More than one prompt, or padding.
    """
    if input_ids.dim() == 2 and input_ids.shape[0] == 1:  # noqa: PLR2004 - [batch, tokens]
        input_ids = input_ids[0]
    if input_ids.dim() != 1:
        msg = f"input_ids has shape {list(input_ids.shape)}; kvd takes one prompt at a time"
        raise UnsupportedInput(msg)
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        msg = "the prompt is padded, which shifts positions: pass it without padding"
        raise UnsupportedInput(msg)
    tokens: list[int] = input_ids.tolist()
    return tokens


def _check_model(model: Any) -> None:  # noqa: ANN401 - any decoder model
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        msg = "the model has an encoder: its KV does not follow from the decoder's tokens"
        raise UnsupportedModel(msg)
    if model.training:
        msg = "the model is in training mode, where dropout changes KV: call model.eval()"
        raise UnsupportedModel(msg)
    if getattr(text, "use_bidirectional_attention", None) in {True, "all"}:
        msg = "the model attends to later tokens, so that a prefix has no KV of its own"
        raise UnsupportedModel(msg)
    for kind in _rope_types(getattr(text, "rope_parameters", None) or {}):
        if kind == "longrope" or "dynamic" in kind:
            msg = (
                f"RoPE of type {kind!r} changes with the whole prompt's length, so that one prefix "
                "has more than one KV: set a fixed type (yarn, linear) in config.rope_parameters"
            )
            raise UnsupportedModel(msg)


def _rope_types(parameters: Any) -> Iterator[str]:  # noqa: ANN401 - a nested configuration
    """Yield each RoPE type of a configuration, which may nest them by kind of layer."""
    for key, value in parameters.items():
        if isinstance(value, dict):
            yield from _rope_types(value)
        elif key in {"rope_type", "type"} and isinstance(value, str):
            yield value


def _media_tokens(config: dict[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        media = any(word in key for word in ("image", "video", "audio", "vision"))
        if media and key.endswith(("token_id", "token_index")) and isinstance(value, int):
            yield value


def describe_model(
    model: Any,  # noqa: ANN401 - any decoder model
    revision: str,
    adapter: str,
    salt: bytes,
    identity: str,
    *,
    lossy: bool = False,
) -> Namespace:
    """Build the namespace of a model (M1).

    Raises:
        UnsupportedModel: The weights cannot be read here (offloaded, sharded).
        ValueError: A field is too long, or the salt too short.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    settings = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    extra = {
        "config": settings,
        "attention": [config._attn_implementation, text._attn_implementation],  # noqa: SLF001
        "adapters": adapter_state(model),
        "versions": [transformers.__version__, torch.__version__],
        "device": model.device.type,
        "matmul": torch.get_float32_matmul_precision(),
    }
    millions = sum(weight.numel() for weight in model.parameters()) // 1_000_000
    return Namespace(
        model=f"{config.model_type}-{millions}M/{identity or weights_digest(model)}",
        revision=revision or "by-digest",
        dtype=_name(model.dtype),
        adapter=adapter,
        rope=_bounded(getattr(text, "rope_parameters", None) or {}),
        salt=salt,
        extra=_bounded(extra),
        lossy=lossy,
    ).check()


def weights_digest(model: Any) -> str:  # noqa: ANN401 - any torch module
    """Digest names, shapes, dtypes and all bytes of weights and buffers; 64 hex digits.

    Raises:
        UnsupportedModel: A tensor is not here to be read.
    """
    tensors: dict[str, torch.Tensor] = {
        name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }
    tensors.update(model.named_buffers())  # inv_freq and others that are not saved
    names = sorted(tensors)
    for name in names:
        if tensors[name].is_meta or hasattr(tensors[name], "device_mesh"):
            msg = (
                f"{name} is offloaded or sharded and cannot be read: load the whole model on one "
                "host, or pass connect_model(identity=...) a digest of the checkpoint's files"
            )
            raise UnsupportedModel(msg)
    whole = blake2b(digest_size=32, person=b"kvd.hf.weights.1")
    with ThreadPoolExecutor(DIGEST_THREADS, "kvd-digest") as pool:
        for name, part in zip(
            names, pool.map(_tensor_digest, (tensors[name] for name in names)), strict=True
        ):
            head = f"{name}|{tensors[name].dtype}|{tuple(tensors[name].shape)}".encode()
            whole.update(len(head).to_bytes(4, "little") + head + part)
    return whole.hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data, digest_size=32).digest()


def weights_mark(model: Any) -> int:  # noqa: ANN401 - any torch module
    """Return a number that changes when weights are moved, replaced or written in place.

    It reads torch's version counters, in microseconds a tensor. Writes through `.data` do not
    count up: who writes so must call `connect_model` again.
    """
    marks = [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)  # noqa: SLF001
        for weight in model.parameters()
    ]
    return hash((tuple(marks), json.dumps(adapter_state(model))))


def adapter_state(model: Any) -> list[list[object]]:  # noqa: ANN401 - any torch module
    """List which PEFT adapters act on which module, and how strongly; empty without PEFT."""
    if not (hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)):
        return []
    return [
        [
            name,
            str(getattr(module, "active_adapters", "")),
            bool(module.disable_adapters),
            str(sorted(module.scaling.items())),
        ]
        for name, module in model.named_modules()
        if hasattr(module, "disable_adapters")
        and isinstance(getattr(module, "scaling", None), dict)
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bounded(value: object) -> str:
    """Return the value as sorted JSON, or the digest of that where it is long."""
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= TEXT_BYTES_MAX:
        return text
    return "blake2b:" + blake2b(text.encode(), digest_size=32).hexdigest()
