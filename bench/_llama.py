"""Llama-shaped models with random weights, for benches in which only time and memory matter.

`HfLlama` is transformers' own. `PlainLlama` is the same computation in torch alone, for hosts that
have no transformers. Both give a prompt's KV as a list of (keys, values) a layer, each of (1,
heads, tokens, dim), and take it back, so that a cache can be filled from outside.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench._gpu import Shape

VOCABULARY: Final = 32000
SPREAD: Final = 0.02
_BASE: Final = 10000.0

Layers = list[tuple[Any, Any]]


class Model(Protocol):
    """What a bench asks of a model.

    Attributes:
        name: What it is, for the results.
    """

    name: str

    def cache(self, layers: Iterable[tuple[Any, Any]] = ()) -> Any:
        """Make a cache that holds these keys and values, layer by layer."""
        ...

    def layers(self, cache: Any) -> Layers:
        """Give what a cache holds."""
        ...

    def forward(self, tokens: Any, cache: Any) -> Any:
        """Compute (1, tokens) behind what the cache has, and add them; the last one's logits."""
        ...


def build(shape: Shape, where: str, hidden: int, inner: int) -> tuple[Model, str]:
    """Make transformers' model, or the plain one; and say why it is the plain one."""
    if importlib.util.find_spec("transformers") is None:
        return PlainLlama(shape, where, hidden, inner), "transformers is not installed"
    try:
        model = HfLlama(shape, where, hidden, inner)
        _try(model, where)
    except Exception as error:  # noqa: BLE001 - a release that we do not know
        why = f"transformers' model does not run here: {type(error).__name__}: {error}"
        return PlainLlama(shape, where, hidden, inner), why[:300]
    return model, ""


def _try(model: Model, where: str) -> None:
    """Compute two tokens, the second with a cache made from outside."""
    import torch

    token, cache = torch.zeros((1, 1), dtype=torch.long, device=where), model.cache()
    model.forward(token, cache)
    model.forward(token, model.cache(model.layers(cache)))


class HfLlama:
    """LlamaForCausalLM; bfloat16."""

    def __init__(self, shape: Shape, where: str, hidden: int, inner: int) -> None:
        """Make it on the device, without a copy in host memory."""
        import torch
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=hidden // shape.dim,
            num_key_value_heads=shape.heads,
            head_dim=shape.dim,
            vocab_size=VOCABULARY,
            max_position_embeddings=1 << 16,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = transformers.LlamaForCausalLM(config)
            model = model.to_empty(device=where)
        finally:
            torch.set_default_dtype(before)
        _fill(model.parameters())
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if "inv_freq" in name:
                    buffer.copy_(_frequencies(shape.dim, where))
        self.name = f"transformers {transformers.__version__}, {config._attn_implementation}"  # noqa: SLF001
        self._model = model.eval()

    def cache(self, layers: Iterable[tuple[Any, Any]] = ()) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
        return cache

    def layers(self, cache: Any) -> Layers:
        found = getattr(cache, "layers", None)
        if found is not None:
            return [(layer.keys, layer.values) for layer in found]
        return list(zip(cache.key_cache, cache.value_cache, strict=True))

    def forward(self, tokens: Any, cache: Any) -> Any:
        import torch

        with torch.inference_mode():
            out = self._model(
                input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
        return out.logits[0, -1].float()


class PlainLlama:
    """The same in torch alone: RMS norm, rotary positions, grouped-query attention, SiLU."""

    def __init__(self, shape: Shape, where: str, hidden: int, inner: int) -> None:
        """Make random weights on the device."""
        import torch

        self.name = f"plain torch {torch.__version__}"
        self._shape, self._heads = shape, hidden // shape.dim
        self._frequencies = _frequencies(shape.dim, where)
        own, shared = hidden, shape.heads * shape.dim

        def empty(*size: int) -> Any:
            return torch.empty(size, dtype=torch.bfloat16, device=where)

        self._embedding = empty(VOCABULARY, hidden)
        self._head = empty(VOCABULARY, hidden)
        self._norm = empty(hidden)
        self._layers = [
            {
                "before": empty(hidden),
                "q": empty(own, hidden),
                "k": empty(shared, hidden),
                "v": empty(shared, hidden),
                "o": empty(hidden, own),
                "after": empty(hidden),
                "gate": empty(inner, hidden),
                "up": empty(inner, hidden),
                "down": empty(hidden, inner),
            }
            for _ in range(shape.layers)
        ]
        _fill([self._embedding, self._head, self._norm])
        for layer in self._layers:
            _fill(layer.values())

    def cache(self, layers: Iterable[tuple[Any, Any]] = ()) -> Layers:
        return list(layers)

    def layers(self, cache: Layers) -> Layers:
        return cache

    def forward(self, tokens: Any, cache: Layers) -> Any:
        import torch
        from torch.nn import functional

        with torch.inference_mode():
            before = cache[0][0].shape[2] if cache else 0
            turn = self._turn(before, tokens.shape[1])
            hidden = functional.embedding(tokens, self._embedding)
            for index, layer in enumerate(self._layers):
                hidden = hidden + self._attend(
                    layer, self._normed(hidden, layer["before"]), turn, cache, index
                )
                inner = self._normed(hidden, layer["after"])
                gate = functional.silu(functional.linear(inner, layer["gate"]))
                gate *= functional.linear(inner, layer["up"])
                hidden = hidden + functional.linear(gate, layer["down"])
            last = self._normed(hidden[:, -1:], self._norm)
            return functional.linear(last, self._head)[0, -1].float()

    def _normed(self, hidden: Any, weight: Any) -> Any:
        from torch.nn import functional

        return functional.rms_norm(hidden, weight.shape, weight, 1e-6)

    def _turn(self, before: int, count: int) -> tuple[Any, Any]:
        """Give cosine and sine of each position's angles."""
        import torch

        at = torch.arange(before, before + count, device=self._frequencies.device)
        angles = (at[:, None].float() * self._frequencies).repeat(1, 2)
        return angles.cos().bfloat16(), angles.sin().bfloat16()

    def _attend(
        self,
        layer: dict[str, Any],
        hidden: Any,
        turn: tuple[Any, Any],
        cache: Layers,
        index: int,
    ) -> Any:
        """Attend to the cache's tokens and to those before in this call, and add these to it."""
        import torch
        from torch.nn import functional

        def cut(name: str) -> Any:
            whole = functional.linear(hidden, layer[name])
            return whole.unflatten(-1, (-1, self._shape.dim)).transpose(1, 2)

        queries, keys, values = _rotated(cut("q"), turn), _rotated(cut("k"), turn), cut("v")
        count = queries.shape[2]
        if index < len(cache):
            keys = torch.cat((cache[index][0], keys), dim=2)
            values = torch.cat((cache[index][1], values), dim=2)
            cache[index] = (keys, values)
        else:
            cache.append((keys, values))
        mask = None
        if keys.shape[2] > count:  # torch's own causal mask would begin at the first key
            mask = torch.ones((count, keys.shape[2]), dtype=torch.bool, device=keys.device)
            mask = mask.tril(keys.shape[2] - count)
        share = self._heads // self._shape.heads
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(share, 1),
            values.repeat_interleave(share, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return functional.linear(mixed.transpose(1, 2).flatten(2), layer["o"])


def _rotated(heads: Any, turn: tuple[Any, Any]) -> Any:
    import torch

    cosine, sine = turn
    one, two = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-two, one), dim=-1) * sine


def _frequencies(dim: int, where: str) -> Any:
    import torch

    steps = torch.arange(0, dim, 2, device=where, dtype=torch.float32)
    return 1.0 / (_BASE ** (steps / dim))


def _fill(weights: Iterable[Any]) -> None:
    """Set matrices at random, and norms to one."""
    import torch

    with torch.no_grad():
        for weight in weights:
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0, SPREAD)
