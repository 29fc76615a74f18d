"""Tiny random models for the tests of Hugging Face transformers, and what an engine does with one.

Weights are large enough that answers depend on the whole prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvd_client import transformers as kvd_hf

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 16
PROMPT = 300
WHOLE = 18 * CHUNK
"""Tokens of whole chunks that leave at least one token of the prompt to compute."""
WAIT_S = 45.0
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 500,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    """Every layer sees all tokens."""
    torch.manual_seed(seed)
    dtype = changes.pop("dtype", torch.float32)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": 4, **changes})
    return LlamaForCausalLM(config).to(dtype).eval()


def mistral(window: int = 64) -> Any:
    """Every layer sees a window."""
    torch.manual_seed(1)
    config = MistralConfig(**SHAPE, num_hidden_layers=3, sliding_window=window)
    return MistralForCausalLM(config).eval()


def gemma(window: int = 64) -> Any:
    """Two layers in three see a window, the others all tokens."""
    torch.manual_seed(2)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SHAPE, num_hidden_layers=6, sliding_window=window, layer_types=kinds
    )
    return Gemma3ForCausalLM(config).eval()


def deepseek() -> Any:
    """Latent attention: K and V of a layer differ in width."""
    torch.manual_seed(3)
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    config = DeepseekV3Config(
        **{**shape, "num_key_value_heads": 4},
        num_hidden_layers=3,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=24,
    )
    return DeepseekV3ForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "llama-bfloat16": lambda: llama(dtype=torch.bfloat16),
    "mistral-64": mistral,
    "mistral-65": lambda: mistral(65),  # window - 1 is a whole number of chunks
    "mistral-1000": lambda: mistral(1000),  # wider than the prompt
    "gemma3": gemma,
    "deepseek": deepseek,
}


def prompt(tokens: int = PROMPT, seed: int = 3) -> Any:
    """Token ids, `[1, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 500, (1, tokens), generator=generator)


@torch.no_grad()
def greedy(model: Any, ids: Any, cache: Any = None, tokens: int = 16) -> list[int]:
    """Generate greedily; the new tokens only."""
    output = model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        past_key_values=cache,
    )
    answer: list[int] = output[0, ids.shape[1] :].tolist()
    return answer


@torch.no_grad()
def greedy_rows(
    model: Any, ids: Any, mask: Any = None, cache: Any = None, tokens: int = 16, **options: Any
) -> list[list[int]]:
    """Generate greedily for a batch; the new tokens of each row."""
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        past_key_values=cache,
        **options,
    )
    answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return answers


def padded(prompts: list[Any]) -> tuple[Any, Any]:
    """A batch of prompts of any lengths, padded on the left, and its mask."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(prompts):
        ids[row, longest - each.shape[1] :] = each[0]
        mask[row, longest - each.shape[1] :] = 1
    return ids, mask


def run_rows(
    client: Any, model: Any, ids: Any, mask: Any = None
) -> tuple[list[list[int]], kvd_hf.Prefix, kvd_hf.Stored]:
    """What an engine does with a batch: load, generate, store."""
    prefix = load(client, model, ids, attention_mask=mask)
    cache = kvd_hf.new_cache(model) if prefix.cache is None else prefix.cache
    answer = greedy_rows(model, ids, mask, cache)
    stored = kvd_hf.store_prefix(client, model, cache, ids, attention_mask=mask)
    return answer, prefix, stored


def load(client: Any, model: Any, ids: Any, **options: Any) -> kvd_hf.Prefix:
    """Load; what is on NVMe may have to wait until the daemon has compiled its codec."""
    return kvd_hf.load_prefix(client, model, ids, **{"wait_s": WAIT_S, **options})


def connect(daemon: Any, model: Any, **options: Any) -> Any:
    """Connect an engine with small chunks; a busy machine's daemon may take its time."""
    usual = {"chunk_tokens": CHUNK, "answer_s": 5.0}
    return kvd_hf.connect_model(model, daemon.socket, **{**usual, **options})


def run(client: Any, model: Any, ids: Any) -> tuple[list[int], kvd_hf.Prefix, kvd_hf.Stored]:
    """What an engine does with one prompt: load, generate, store."""
    prefix = load(client, model, ids)
    cache = kvd_hf.new_cache(model) if prefix.cache is None else prefix.cache
    answer = greedy(model, ids, cache)
    return answer, prefix, kvd_hf.store_prefix(client, model, cache, ids)
