"""How a Hugging Face cache is cut into objects, and opened to be filled with loaded ones.

A cache's tokens lie in *slots*, in the order they were fed. A row (one sequence of a batch) whose
prompt is padded on the left begins some slots later than the others, but its positions, and with
them its KV, are those of the same prompt alone.

    kind of layer              holds                              `Kept.start`
    DynamicLayer               every slot                         0
    DynamicSlidingWindowLayer  the last window - 1, or all        what it has dropped
    StaticLayer                every slot, room for more          0
    StaticSlidingWindowLayer   the last window                    what it has dropped
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from kvd_client.errors import KvdError
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Cache

ORDER: Final = "layer,kv,head,token,dim/1"
_PLAIN: Final = (DynamicLayer, StaticLayer)
_SLIDING: Final = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)


class Unsupported(KvdError):
    """kvd cannot keep this KV without risking a wrong hit; the text says what to change."""


class UnsupportedModel(Unsupported):
    """The model's KV does not follow from weights and token prefix alone, or has no digest."""


class UnsupportedCache(Unsupported):
    """A cache, or one of its layers, is of a kind that kvd cannot cut into chunks."""


class UnsupportedInput(Unsupported):
    """A prompt, or a way to generate, whose KV kvd cannot tell from its token ids."""


class LayerShape(NamedTuple):
    """One cache layer: K is `[rows, heads, slots, key_size]`, V the same with `value_size`."""

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

    def first_needed(self, tokens: int, chunk_tokens: int) -> int:
        """Return the first chunk this group needs so that a prefix of `tokens` is usable.

        For a prefix of whole chunks it is kvd's own rule, the last `reach` of them.
        """
        if not self.shape.window:
            return 0
        return max(0, tokens - (self.shape.window - 1)) // chunk_tokens


class ModelPlan(NamedTuple):
    """How one model's cache is cut into objects."""

    groups: tuple[LayerGroup, ...]
    layers: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """Of each layer's KV."""
    media_tokens: frozenset[int]
    """Token ids that stand for images or sound, whose KV the ids do not determine."""
    pads: bool
    """Whether the model takes position ids, so that padding on the left shifts nothing."""

    @property
    def windowed(self) -> bool:
        """Whether some layers see a window only."""
        return any(group.shape.window for group in self.groups)

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
        name = str(self.dtype).removeprefix("torch.")
        try:
            return Layout(chunk_tokens, chunk_tokens, name, groups, order=ORDER).check()
        except ValueError as error:
            msg = f"kvd cannot describe this model's cache: {error}"
            raise UnsupportedModel(msg) from error


class Kept(NamedTuple):
    """What a layer holds: K and V `[rows, heads, slots, size]`, the first being slot `start`."""

    keys: torch.Tensor
    values: torch.Tensor
    start: int

    @property
    def end(self) -> int:
        """The slot after the last."""
        return self.start + self.keys.shape[-2]


def new_cache(
    model: Any,  # noqa: ANN401 - any decoder model
    static_tokens: int = 0,
) -> Cache:
    """Make the empty cache to prefill with, if it is to be stored afterwards.

    Sliding-window layers normally drop all but the last `window - 1` tokens, and kvd stores whole
    chunks only; this cache keeps them all. It costs the memory of full attention until it is
    dropped. For models without sliding windows it is a plain `DynamicCache`.

    Args:
        model: Whose.
        static_tokens: Make a `StaticCache` with room for so many tokens instead, whose sliding
            layers keep their window and no more.

    Raises:
        UnsupportedCache: The model's cache has layers kvd cannot cut.
    """
    cache: Cache
    if static_tokens:
        cache = StaticCache(config=model.config, max_cache_len=static_tokens)
    else:
        cache = DynamicCache(config=model.config)
    check_layers(cache)
    record_past(cache)
    return cache


def record_past(cache: Any) -> None:  # noqa: ANN401 - a method without types
    """Let sliding-window layers keep what their window has left behind, where they can."""
    cache.activate_past_recording()


def check_layers(cache: object) -> None:
    """Refuse any cache but a dynamic or static one of plain and sliding-window layers.

    Raises:
        UnsupportedCache: Naming the first odd layer, its kind and what to do.
    """
    for index, layer in enumerate(getattr(cache, "layers", ())):
        kind = type(layer).__name__
        if type(layer) in _PLAIN + _SLIDING:
            continue
        if "Quanti" in kind:
            mend = "give generate() no cache_implementation, or 'static'"
        else:
            mend = "run this model without kvd: such a state cannot be cut at a chunk's end"
        msg = f"cache layer {index} is a {kind}; kvd takes plain and sliding-window layers: {mend}"
        raise UnsupportedCache(msg)
    if type(cache) not in (DynamicCache, StaticCache):
        msg = f"the cache is a {type(cache).__name__}, not dynamic or static: use new_cache(model)"
        raise UnsupportedCache(msg)
    if getattr(cache, "offloading", False):
        msg = "the cache offloads its layers while it is read: use new_cache(model)"
        raise UnsupportedCache(msg)


def kept(layer: Any) -> Kept:  # noqa: ANN401 - a cache layer
    """Return what one filled layer holds, as views."""
    length = int(layer.get_seq_length())
    keys: torch.Tensor = layer.keys
    values: torch.Tensor = layer.values
    if isinstance(layer, StaticLayer):
        count = min(length, layer.max_cache_len)
        return Kept(keys[:, :, :count], values[:, :, :count], length - count)
    return Kept(keys, values, length - keys.shape[-2])


def layer_shape(index: int, layer: Any, window: int = 0) -> LayerShape:  # noqa: ANN401 - a layer
    """Read one filled layer's shape.

    Args:
        index: Of the layer, for the error's text.
        layer: The layer.
        window: What a static sliding layer is held to have; it tells only how much it keeps.

    Raises:
        UnsupportedCache: The layer is empty.
    """
    if not layer.is_initialized:
        msg = f"cache layer {index} is empty: run the model on the prompt first"
        raise UnsupportedCache(msg)
    if isinstance(layer, StaticSlidingWindowLayer):
        window = max(window, layer.max_cache_len)
    else:
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0
    keys, values = layer.keys.shape, layer.values.shape
    return LayerShape(keys[1], keys[3], values[3], window)


def check_filled(plan: ModelPlan, cache: Cache, rows: int) -> int:
    """Return the slots a cache of this model holds.

    Raises:
        UnsupportedCache: It is of another kind, of another number of sequences, or not this
            model's.
    """
    check_layers(cache)
    if len(cache.layers) != plan.layers:
        msg = f"the cache has {len(cache.layers)} layers, the model {plan.layers}"
        raise UnsupportedCache(msg)
    length = int(cache.get_seq_length())
    for group in plan.groups:
        for index in group.layers:
            layer: Any = cache.layers[index]
            shape = layer_shape(index, layer, group.shape.window)
            if shape != group.shape or layer.keys.dtype != plan.dtype:
                msg = (
                    f"cache layer {index} holds {layer.keys.dtype} {tuple(shape)}, not this "
                    f"model's {plan.dtype} {tuple(group.shape)} (autocast, or another model)"
                )
                raise UnsupportedCache(msg)
            if layer.keys.shape[0] != rows:
                msg = f"the cache holds {layer.keys.shape[0]} sequences, input_ids {rows}"
                raise UnsupportedCache(msg)
            if int(layer.get_seq_length()) != length:
                msg = f"cache layer {index} holds {layer.get_seq_length()} tokens, not {length}"
                raise UnsupportedCache(msg)
    return length


class Opening(NamedTuple):
    """The slots that a cache is made to hold: `low` to `end` - 1 in each of `rows` sequences.

    Attributes:
        rows: Sequences.
        low: First slot; more than 0 only for sliding-window layers.
        end: The prefix's length in slots.
        clear: Not all of them will be filled: what attention masks must still be numbers.
    """

    rows: int
    low: int
    end: int
    clear: bool


def open_layer(plan: ModelPlan, group: LayerGroup, index: int, cache: Cache, to: Opening) -> Kept:
    """Make one layer of an empty cache (`new_cache`) hold slots; return them to be filled."""
    layer: Any = cache.layers[index]
    rows, low, end, clear = to
    heads, key_size, value_size, _ = group.shape
    static = isinstance(layer, StaticLayer)
    size = 0 if static else end - low
    make = torch.zeros if clear else torch.empty
    device = plan.devices[index]
    keys = make((rows, heads, size, key_size), dtype=plan.dtype, device=device)
    values = make((rows, heads, size, value_size), dtype=plan.dtype, device=device)
    layer.lazy_initialization(keys, values)
    if static:
        low = max(low, end - layer.max_cache_len)
        layer.cumulative_length.fill_(min(end, layer.max_cache_len))
    else:
        layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = end
    elif isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = end
    held = kept(layer)
    # A static layer that is full keeps one slot more than the window reaches: that one is zero.
    drop = max(0, low - held.start)
    return Kept(held.keys[:, :, drop:], held.values[:, :, drop:], held.start + drop)
