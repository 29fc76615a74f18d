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

import inspect
import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from kvd_client.errors import KvdError
from kvd_client.hf_cache import (
    LayerGroup,
    LayerShape,
    ModelPlan,
    UnsupportedModel,
    check_layers,
    layer_shape,
    new_cache,
)
from kvd_client.identity import TEXT_BYTES_MAX, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator

DIGEST_THREADS: Final = min(8, os.cpu_count() or 1)
_VOLATILE: Final = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "use_cache", "torch_dtype"}
)
"""Configuration fields that differ between equal models (a path, a version kept elsewhere)."""


class WrongModel(KvdError):
    """The client was connected for another model, or the model has changed since."""


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
        _takes_positions(model),
    )


def _takes_positions(model: Any) -> bool:  # noqa: ANN401 - any decoder model
    """Whether a padded prompt's positions can be told to the model, as `generate` does."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps it
    return "position_ids" in inspect.signature(base.forward).parameters


def _check_model(model: Any) -> None:  # noqa: ANN401 - any decoder model
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        msg = "the model has an encoder: its KV does not follow from the decoder's tokens"
        raise UnsupportedModel(msg)
    check_mode(model)
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


def check_mode(model: Any) -> None:  # noqa: ANN401 - any decoder model
    """Refuse what may change from call to call and changes KV.

    Raises:
        UnsupportedModel: The model is in training mode, or autocast is on.
    """
    if model.training:
        msg = "the model is in training mode, where dropout changes KV: call model.eval()"
        raise UnsupportedModel(msg)
    if torch.is_autocast_enabled(model.device.type):
        msg = "autocast computes KV in another dtype than the model's: load the model in that dtype"
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

    And when the attention implementation or the matmul precision is set anew.

    It reads torch's version counters, in microseconds a tensor. Writes through `.data` do not
    count up: who writes so must call `connect_model` again.
    """
    marks = [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)  # noqa: SLF001
        for weight in model.parameters()
    ]
    settings = [
        model.config._attn_implementation,  # noqa: SLF001
        model.config.get_text_config(decoder=True)._attn_implementation,  # noqa: SLF001
        torch.get_float32_matmul_precision(),
    ]
    return hash((tuple(marks), json.dumps([adapter_state(model), settings])))


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
