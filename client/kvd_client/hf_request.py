"""Reading one call of `model.generate`: what of it kvd may cache, or why nothing.

Invariants:

Q1. A call is taken on only if every argument of it is one that is known to leave KV to the token
    ids and their mask alone. What is not known is refused, not guessed at.
Q2. Of a refused call nothing is changed: it runs as it would without kvd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kvd_client.hf_cache import UnsupportedInput

if TYPE_CHECKING:
    from collections.abc import Mapping

NEW_TOKENS_DEFAULT: Final = 20
"""What `generate` makes when told no length at all."""

_HARMLESS: Final = frozenset(
    {
        "attention_mask",
        "generation_config",
        "input_ids",
        "inputs",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
        "use_model_defaults",
    }
)
"""Arguments of `generate`, beside those of a GenerationConfig, that kvd can do with."""

_ASSISTED: Final = "assisted decoding takes tokens back from its cache, which kvd does not follow"
_REFUSED: Final = {
    "assistant_model": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "past_key_values": "the call brings a cache of its own: use load_prefix and store_prefix",
    "inputs_embeds": "inputs_embeds have no token ids to know them by: pass input_ids",
    "prefill_chunk_size": "generate() computes a prompt in chunks only from an empty cache",
    "token_healing": "token healing changes the prompt",
    "custom_generate": "a generation loop of your own may use its cache in any way",
    "dola_layers": "DoLa has a generation loop of its own",
    "penalty_alpha": "contrastive search has a generation loop of its own",
}
"""Arguments and settings that rule kvd out when they are given, and why."""


class Request(NamedTuple):
    """A call that kvd takes on.

    Attributes:
        input_ids: `[rows, tokens]`.
        attention_mask: Of the same shape; None when nothing is padded.
        sequences: Rows of the cache for each prompt (beams, or answers asked for).
        static_tokens: Room of the static cache asked for; 0 for a dynamic one.
        kwargs: For `generate`, with `input_ids`, the mask and without `cache_implementation`.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    sequences: int
    static_tokens: int
    kwargs: dict[str, Any]


class _Settings:
    """The settings of one call: its arguments first, then its configuration, then the model's."""

    def __init__(self, model: Any, kwargs: Mapping[str, Any], kind: str | None) -> None:  # noqa: ANN401
        self._kwargs = kwargs
        self._configs = [kwargs.get("generation_config"), model.generation_config]
        self._kind = kind

    def get(self, name: str) -> Any:  # noqa: ANN401 - a setting
        """Return a setting; None if nobody made it."""
        if self._kwargs.get(name) is not None:
            return self._kwargs[name]
        found = (getattr(config, name, None) for config in self._configs)
        usual = self._kind if name == "cache_implementation" else None
        return next((value for value in found if value is not None), usual)


def read_call(
    model: Any,  # noqa: ANN401 - any decoder model
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: str | None,
) -> Request:
    """Read one call of `generate`, given as it was made.

    Args:
        model: Whose.
        args: By position.
        kwargs: By name.
        kind: The model's own `cache_implementation`.

    Raises:
        UnsupportedInput: kvd must not take it on; the text says why (Q1).
    """
    kwargs = dict(kwargs)
    for name, value in zip(("inputs", "generation_config"), args, strict=False):
        kwargs[name] = value
    if len(args) > len(("inputs", "generation_config")):
        msg = "pass what follows generation_config by name"
        raise UnsupportedInput(msg)
    settings = _Settings(model, kwargs, kind)
    _refuse(model, kwargs, settings)
    inputs = kwargs.pop("inputs", None)
    input_ids = kwargs.pop("input_ids", None) if inputs is None else inputs
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:  # noqa: PLR2004
        msg = "kvd knows prompts by input_ids, [rows, tokens]: this call has none"
        raise UnsupportedInput(msg)
    if "input_ids" in kwargs:
        msg = "the call has both inputs and input_ids"
        raise UnsupportedInput(msg)
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = _inferred_mask(input_ids, settings)
        if mask is not None:
            kwargs["attention_mask"] = mask
    kwargs["input_ids"] = input_ids
    static_tokens = _static_tokens(model, input_ids.shape[1], settings)
    sequences = max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1)
    kwargs.pop("cache_implementation", None)
    if kwargs.get("generation_config") is not None:
        kwargs["generation_config"] = _without_cache(kwargs["generation_config"])
    return Request(input_ids, mask, sequences, static_tokens, kwargs)


def _refuse(model: Any, kwargs: Mapping[str, Any], settings: _Settings) -> None:  # noqa: ANN401
    for name, why in _REFUSED.items():
        value = settings.get(name)
        if isinstance(value, torch.Tensor) or value:
            msg = f"{name}: {why}"
            raise UnsupportedInput(msg)
    for name, value in kwargs.items():
        known = name in _HARMLESS or hasattr(model.generation_config, name)
        if value is not None and not known:
            msg = f"{name}: kvd does not know whether KV depends on it"
            raise UnsupportedInput(msg)
    if settings.get("use_cache") is False:
        msg = "use_cache is off"
        raise UnsupportedInput(msg)
    kind = settings.get("cache_implementation")
    if kind not in {None, "dynamic", "static", "hybrid"}:
        msg = f"cache_implementation={kind!r}: kvd fills dynamic and static caches"
        raise UnsupportedInput(msg)


def _inferred_mask(input_ids: torch.Tensor, settings: _Settings) -> torch.Tensor | None:
    """Mask padding as `generate` does when it gets no mask, so that both read the same prompt."""
    pad, end = settings.get("pad_token_id"), settings.get("eos_token_id")
    if pad is None or pad == end or (isinstance(end, list | tuple) and pad in end):
        return None
    mask = input_ids.ne(int(pad))
    return None if bool(mask.all()) else mask.long()


def _static_tokens(model: Any, prompt_tokens: int, settings: _Settings) -> int:  # noqa: ANN401
    """Return the room that `generate` would give a static cache; 0 if none is asked for."""
    if settings.get("cache_implementation") != "static":
        return 0
    new_tokens, length = settings.get("max_new_tokens"), settings.get("max_length")
    if new_tokens is not None:
        length = prompt_tokens + new_tokens
    elif length is None:
        length = prompt_tokens + NEW_TOKENS_DEFAULT
    wished = settings.get("max_cache_len") or 0
    before = getattr(model, "_previous_max_cache_length", 0)  # the same room needs no new graph
    return int(max(length - 1, wished, before, prompt_tokens + 1))


def _without_cache(config: Any) -> Any:  # noqa: ANN401 - a GenerationConfig
    """Copy a configuration without the cache it asks for, which the call brings now."""
    import copy

    config = copy.deepcopy(config)
    config.cache_implementation = None
    return config
