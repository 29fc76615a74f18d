"""`model.generate` with kvd, in two lines: a question asked twice, then a conversation.

    kvd serve --host-bytes 2GiB &                    # if it is not running
    python examples/transformers_generate.py         # on the CPU, with a random small model
    python examples/transformers_generate.py --model Qwen/Qwen3-8B --device cuda

Start it twice: the second process loads what the first one stored.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvd_client.transformers import Cached, cached

PROMPT_TOKENS = 600


def load(name: str, device: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer; a random one, without a tokenizer, if none is named."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map=device)
        return model.eval(), tokenizer
    torch.manual_seed(0)  # the same weights in every process, or nothing would be shared
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2000,
        initializer_range=0.1,
    )
    small: Any = LlamaForCausalLM(config)
    return small.to(device).eval(), None


def encode(tokenizer: Any, texts: list[str], device: str) -> dict[str, torch.Tensor]:
    """Turn texts into a batch, padded on the left; into random token ids without a tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(len(texts[0]))
        ids = torch.randint(5, 2000, (len(texts), PROMPT_TOKENS), generator=generator)
        return {"input_ids": ids.to(device)}
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return dict(tokenizer(texts, return_tensors="pt", padding=True).to(device))


def ask(model: Any, kvd: Cached, title: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Generate, and print what kvd did for it."""
    began = time.perf_counter()
    output: torch.Tensor = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    took_ms = (time.perf_counter() - began) * 1e3
    prefix, stored, note = kvd.last
    count = inputs["input_ids"].numel()
    print(
        f"{title:<16}{took_ms:8.0f} ms  {prefix.tokens:5} of {count} tokens loaded,"
        f" {stored.tokens:5} in kvd now  {note or prefix.note or stored.note}"
    )
    return output


def main() -> None:
    """Ask once, again, and go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a model's name or folder (default: random)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--socket", help="kvd's socket (default: the usual place)")
    parser.add_argument("--answer-s", type=float, default=0.25, help="longest wait for kvd")
    arguments = parser.parse_args()
    options = {"socket": arguments.socket, "answer_s": arguments.answer_s}
    model, tokenizer = load(arguments.model, arguments.device)
    text = "A lighthouse keeper writes in his log every evening. " * 60
    inputs = encode(tokenizer, [text], arguments.device)
    with cached(model, **options) as kvd:  # these are
        answer = ask(model, kvd, "first time", inputs)  # the two lines
        again = ask(model, kvd, "again", inputs)
        print("the same answer:", bool((answer == again).all()))
        for turn in range(3):
            more = torch.full_like(answer[:, :20], 7 + turn)  # what the user says next
            answer = ask(
                model, kvd, f"turn {turn + 1}", {"input_ids": torch.cat([answer, more], 1)}
            )
        ask(
            model, kvd, "a batch of two", encode(tokenizer, [text, text + "Why?"], arguments.device)
        )


if __name__ == "__main__":
    main()
