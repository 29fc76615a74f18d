"""Engines and models for the tests of the vLLM connector. `make test-engines` runs them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from bench._vllm import PYTHON, Engine
from kvd import statpage
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

    Tokens = list[int]

needs_vllm = pytest.mark.skipif(
    os.environ.get("KVD_TEST_VLLM") != "1" or not PYTHON.exists(),
    reason="needs vLLM: run `make test-engines`",
)
CHUNK: Final = 64
BLOCKS: Final = 256
"""Of the engine's KV cache, 32 tokens each."""
SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
"""Small, with weights so large that the answer depends on the whole prompt."""


def save_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a small random model where every layer sees all tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": 4, **changes})
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompt(tokens: int, seed: int = 1) -> Tokens:
    """Return token ids, different for each seed."""
    return [(i * i * 7 + i * 13 + seed * 977) % 500 + 5 for i in range(tokens)]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the small model once."""
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Start engines; all are ended with the test."""
    made: list[Engine] = []

    def start(model: Path, socket: str | None, **options: Any) -> Engine:
        extra = options.pop("extra", {})
        kvd = (
            None
            if socket is None
            else {"socket": socket, "chunk_tokens": CHUNK, "wait_s": 10, **extra}
        )
        options.setdefault("num_gpu_blocks_override", BLOCKS)
        environment = {"VLLM_CPU_CI_ENV": "1", **options.pop("environment", {})}
        log = tmp_path / f"engine{len(made)}.log"
        engine = Engine(model, log, kvd=kvd, environment=environment, **options)
        made.append(engine)
        return engine

    yield start
    for engine in made:
        engine.close()


def stats(daemon: DaemonProcess) -> dict[str, Any]:
    """Read the daemon's statistics, on a page that was written after this was called."""
    called_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        page = statpage.read(stat_page_name(daemon.socket))
        if asked_s - page.age_s > called_s:
            return dict(page.stats)
        assert asked_s < called_s + 30, "the daemon does not write its page"
        time.sleep(0.02)


def settled(daemon: DaemonProcess, published: int = 0, seconds: float = 30.0) -> dict[str, Any]:
    """Wait until nothing is being filled or held, and at least so many bytes are published."""
    until = time.monotonic() + seconds
    while True:
        host = (page := stats(daemon))["host"]
        busy = host["reserved_bytes"] or host["quarantined_bytes"] or host["pinned_bytes"]
        if not busy and not page["leases"] and host["published_bytes"] >= published:
            return page
        assert time.monotonic() < until, f"kvd does not come to rest: {page}"
        time.sleep(0.05)


def saved(daemon: DaemonProcess, quiet_s: float = 1.5, seconds: float = 60.0) -> None:
    """Wait until something is published, by all ranks: nothing more comes for a while."""
    until = time.monotonic() + seconds
    before, since = 0, time.monotonic()
    while not before or time.monotonic() - since < quiet_s:
        now = settled(daemon)["host"]["published_bytes"]
        if now != before:
            before, since = now, time.monotonic()
        assert time.monotonic() < until, "nothing is saved"
        time.sleep(0.05)


def reset(engine: Engine, seconds: float = 30.0) -> None:
    """Clear the engine's own cache; every block must come free."""
    until = time.monotonic() + seconds
    while not engine.reset():
        assert time.monotonic() < until, "the engine leaks blocks"
        time.sleep(0.05)


def poison(daemon: DaemonProcess) -> int:
    """Move all bytes that kvd holds, so that each value is another's; return how many.

    Moved, not flipped: a slab may be open twice in the daemon, and flipping twice changes nothing.
    """
    size = 0
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if "slab" not in str(entry.readlink()):
            continue
        with entry.open("r+b", buffering=0) as slab:
            length = slab.seek(0, os.SEEK_END)
            for start in range(0, length, 1 << 20):
                slab.seek(start)
                block = slab.read(1 << 20)
                if any(block):
                    slab.seek(start)
                    slab.write(block[4100:] + block[:4100])
                    size += len(block)
    return size


def save_model(folder: Path, kind: str) -> Path:
    """Write a small random model.

    Args:
        folder: Where.
        kind: `gemma`, full and sliding layers; `deepseek`, latent ones; `lfm2`, full ones and
            convolutions with a state.
    """
    import torch
    import transformers

    torch.manual_seed(3)
    model: Any
    if kind == "gemma":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config: Any = transformers.Gemma3TextConfig(
            **SHAPE, num_hidden_layers=6, sliding_window=CHUNK * 2, layer_types=kinds
        )
        model = transformers.Gemma3ForCausalLM(config)
        for name, weight in model.named_parameters():
            if "post_attention_layernorm" in name:
                weight.data.fill_(8.0)  # else the answer hardly depends on the prompt
    elif kind == "lfm2":
        wide = SHAPE["hidden_size"]
        asked: dict[str, Any] = {  # by vLLM, beside what transformers has
            "conv_dim": wide,
            "conv_dim_out": wide,
            "block_dim": wide,
            "block_ff_dim": SHAPE["intermediate_size"],
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        }
        config = transformers.Lfm2Config(
            **SHAPE,
            **asked,
            num_hidden_layers=4,
            layer_types=["conv", "full_attention"] * 2,
            block_auto_adjust_ff_dim=False,
        )
        model = transformers.Lfm2ForCausalLM(config)
    else:
        shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
        config = transformers.DeepseekV3Config(
            **{**shape, "num_key_value_heads": 4},
            num_hidden_layers=3,
            first_k_dense_replace=3,
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            kv_lora_rank=512,  # with the next 576, the one size that the CPU back end knows
            qk_rope_head_dim=64,
            q_lora_rank=32,
            qk_nope_head_dim=32,
            v_head_dim=32,
        )
        model = transformers.DeepseekV3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int) -> dict[str, Any]:
    """Write a random LoRA adapter of the small model; return it as the engine is told of it."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, rank = SHAPE["hidden_size"], 8
    sizes = {"q_proj": hidden, "v_proj": SHAPE["num_key_value_heads"] * SHAPE["head_dim"]}
    weights = {}
    for layer in range(4):
        for name, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "target_modules": list(sizes),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {"name": folder.name, "number": seed, "path": str(folder)}
