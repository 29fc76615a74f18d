"""The prompts of a batch, as token ids without their padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd_client.hf_cache import UnsupportedInput

if TYPE_CHECKING:
    import torch

    from kvd_client.hf_cache import ModelPlan

_MATRIX = 2


class Row(NamedTuple):
    """One sequence of a batch.

    Attributes:
        tokens: Its token ids, padding left out.
        pad: Slots of padding on its left.
    """

    tokens: list[int]
    pad: int


def rows_of(
    plan: ModelPlan, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[Row]:
    """Read a batch.

    Args:
        plan: The model's.
        input_ids: `[rows, slots]`, or `[slots]` for one prompt.
        attention_mask: Of the same shape, 0 where there is padding; None for none.

    Raises:
        UnsupportedInput: Padding that is not on the left, or that shifts this model's positions.
    """
    if input_ids.dim() == 1:
        input_ids = input_ids[None]
        attention_mask = None if attention_mask is None else attention_mask.reshape(1, -1)
    if input_ids.dim() != _MATRIX or input_ids.is_floating_point() or not input_ids.numel():
        msg = f"input_ids has shape {list(input_ids.shape)}; kvd takes token ids, [rows, tokens]"
        raise UnsupportedInput(msg)
    prompts: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return [Row(tokens, 0) for tokens in prompts]
    if attention_mask.shape != input_ids.shape:
        msg = (
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids "
            f"{list(input_ids.shape)}: kvd takes the plain mask of the whole prompt"
        )
        raise UnsupportedInput(msg)
    seen = attention_mask.bool()
    pads: list[int] = (~seen).sum(dim=1).tolist()
    starts: list[int] = seen.int().argmax(dim=1).tolist()  # the first slot that is no padding
    if pads != starts or not bool(seen.any(dim=1).all()):
        msg = "padding must be on the left only: set tokenizer.padding_side = 'left'"
        raise UnsupportedInput(msg)
    if any(pads) and not plan.pads:
        msg = "the prompt is padded, and this model takes no position ids: pass it without padding"
        raise UnsupportedInput(msg)
    return [Row(tokens[pad:], pad) for tokens, pad in zip(prompts, pads, strict=True)]
