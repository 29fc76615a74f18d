"""How many bytes of KV a token has, from a model's config.json or from numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Mapping

_BY_BYTES: Final = {
    4: ("float32", "fp32"),
    2: ("bfloat16", "bf16", "float16", "fp16", "half"),
    1: ("float8_e4m3fn", "float8_e5m2", "fp8", "int8", "uint8"),
}
DTYPE_BYTES: Final = {name: size for size, names in _BY_BYTES.items() for name in names}
_FULL: Final = {"full_attention", "attention", "full", "global"}
_SLIDING: Final = {"sliding_attention", "chunked_attention", "local_attention", "sliding", "local"}


class PlanError(KvdError):
    """Something to plan with is missing or makes no sense; the text says what to give."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how large its KV is, over all ranks.

    Attributes:
        full_layers: Layers that see every token.
        sliding_layers: Layers that see the last `window` tokens.
        window: See there; 0 without such layers.
        values: Values a token and layer: twice heads times head size, or MLA's latent width.
        dtype_bytes: Of a value.
        stateless_layers: Without KV of their own: recurrent ones; their state is not counted.
        name: For people.
    """

    full_layers: int
    sliding_layers: int
    window: int
    values: int
    dtype_bytes: int
    stateless_layers: int = 0
    name: str = ""

    @property
    def layer_bytes(self) -> int:
        """Bytes a token and layer."""
        return self.values * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes a token as stored: every layer keeps every chunk."""
        return (self.full_layers + self.sliding_layers) * self.layer_bytes

    def load_bytes(self, tokens: int) -> int:
        """Return what loading a prefix takes: sliding layers load what their window reaches."""
        seen = min(tokens, self.window)
        return (self.full_layers * tokens + self.sliding_layers * seen) * self.layer_bytes


def from_numbers(
    layers: int, kv_heads: int, head_size: int, dtype: str, *, window: int = 0, sliding: int = 0
) -> Shape:
    """Return the shape of a model of ordinary attention.

    Args:
        layers: In all.
        kv_heads: Of all ranks together.
        head_size: Values a head.
        dtype: Of the KV.
        window: Of the sliding layers.
        sliding: How many of the layers are such.
    """
    for name, value in (("layers", layers), ("KV heads", kv_heads), ("head size", head_size)):
        if not 0 < value < 1 << 20:
            raise PlanError(f"{name}: {value} makes no model; give a whole number from 1 on")
    if sliding and not window:
        raise PlanError("sliding layers need their window, in tokens")
    if not 0 <= sliding <= layers:
        raise PlanError(f"{sliding} of {layers} layers cannot be sliding")
    values = 2 * kv_heads * head_size
    return Shape(layers - sliding, sliding, window if sliding else 0, values, _bytes_of(dtype))


def _bytes_of(dtype: object) -> int:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise PlanError(f"dtype {name[:40]!r} is not known; one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def from_config(config: Mapping[str, Any], *, kv_dtype: str = "") -> Shape:
    """Return the shape of a model from its config.json, as Hugging Face writes it.

    Args:
        config: The file's object.
        kv_dtype: Of the KV, where the engine keeps it in another dtype than the model computes in.

    Raises:
        PlanError: A field is missing or odd; the text names it and the option that replaces it.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    layers = _whole(text, "num_hidden_layers", "n_layer")
    dtype = kv_dtype or text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    full, sliding, without = _kinds(text, layers)
    window = 0
    if sliding:
        window = _whole(text, "sliding_window", "attention_chunk_size")
    return Shape(
        full,
        sliding,
        window,
        _values(text),
        _bytes_of(dtype or "bfloat16"),
        without,
        str(config.get("_name_or_path") or config.get("model_type") or ""),
    )


def _whole(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
            return value
    raise PlanError(
        f"config.json has no {names[0]}; give --layers, --kv-heads, --head-size instead of it"
    )


def _values(config: Mapping[str, Any]) -> int:
    """Return the values a token and layer."""
    if config.get("kv_lora_rank"):  # MLA: one latent and one rotary key a token, no V
        return _whole(config, "kv_lora_rank") + _whole(config, "qk_rope_head_dim")
    heads = _whole(config, "num_attention_heads", "n_head")
    kv_heads = config.get("num_key_value_heads")
    head_size = config.get("head_dim")
    if not isinstance(head_size, int) or head_size <= 0:
        hidden = _whole(config, "hidden_size", "n_embd")
        if hidden % heads:
            raise PlanError("config.json has no head_dim, and hidden_size is no multiple of heads")
        head_size = hidden // heads
    return 2 * (kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads) * head_size


def _kinds(config: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Return how many layers are full, sliding, and without KV."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list) and len(kinds) == layers:
        full = sum(kind in _FULL for kind in kinds)
        sliding = sum(kind in _SLIDING for kind in kinds)
        return full, sliding, layers - full - sliding
    if config.get("sliding_window") and config.get("use_sliding_window", True) is not False:
        pattern = config.get("sliding_window_pattern")
        if isinstance(pattern, int) and pattern > 1:  # every pattern-th layer is full
            return layers // pattern, layers - layers // pattern, 0
        return 0, layers, 0
    return layers, 0, 0
