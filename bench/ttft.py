"""Time to first token with and without a stored prefix.

    python -m bench.ttft --engine hf
    python -m bench.ttft --engine hf --rounds 5 --json
    python -m bench.ttft --engine vllm --json            # see bench/_vllm_ttft.py
    python -m bench.ttft --device cuda --shape 8b --json # see bench/_gpu_ttft.py

Each round takes two engine processes of the demo, which share a salt that no other round has:
the first finds nothing, computes and stores; the second loads. Times are medians over the rounds.
The ratio depends on the machine and on the prompt: what is loaded need not be computed, and the
part of a chunk at the prompt's end is always computed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu_ttft, _vllm_ttft
from bench._table import report
from kvd.demo import model, processes

if TYPE_CHECKING:
    from kvd.demo.engine import Result

SPEEDUP_WANTED: Final = 10.0


def run_rounds(rounds: int, options: list[str]) -> list[tuple[Result, Result]]:
    """Run a computing and a loading engine per round, against one daemon."""
    pairs = []
    with (
        tempfile.TemporaryDirectory(prefix="kvd-ttft-") as folder,
        processes.daemon(Path(folder)) as path,
    ):
        for number in range(rounds):
            own = [*options, "--socket", str(path), "--salt", os.urandom(16).hex()]

            def stage(text: str, number: int = number) -> None:
                print(f"round {number + 1}/{rounds}: {text}", file=sys.stderr, flush=True)

            cold = processes.engine(own, stage)
            pairs.append((cold, processes.engine(own, stage)))
    return pairs


def summary(pairs: list[tuple[Result, Result]]) -> dict[str, Any]:
    """Reduce the rounds to medians; rates in GB/s, times in ms."""
    cold = median(cold.first_token_ms for cold, _ in pairs)
    warm = median(warm.first_token_ms for _, warm in pairs)
    return {
        "engine": "hf",
        "rounds": len(pairs),
        "prompt_tokens": pairs[0][0].prompt_tokens,
        "cold_ms": round(cold, 2),
        "warm_ms": round(warm, 2),
        "speedup": round(cold / warm, 2),
        "tokens_reused": min(warm.tokens_reused for _, warm in pairs),
        "bytes_reused": min(warm.bytes_reused for _, warm in pairs),
        "load_ms": round(median(warm.load_ms for _, warm in pairs), 3),
        "load_gb_s": round(median(warm.load_gb_s for _, warm in pairs), 3),
        "memcpy_gb_s": round(median(warm.memcpy_gb_s for _, warm in pairs), 3),
        "store_ms": round(median(cold.store_ms for cold, _ in pairs), 3),
        "same_output": all(cold.new_tokens == warm.new_tokens for cold, warm in pairs),
        "cold_ms_all": [round(cold.first_token_ms, 2) for cold, _ in pairs],
        "warm_ms_all": [round(warm.first_token_ms, 2) for _, warm in pairs],
    }


def main() -> int:
    """Run the bench; 1 if outputs differ or nothing was reused, 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="bench.ttft", description=__doc__)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf", help="hf: transformers")
    parser.add_argument("--rounds", type=int, default=3, help="cold and warm pairs of processes")
    parser.add_argument("--tokens", type=int, default=0, help="of the prompt (default: the demo's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--part",
        choices=["all", "latency", "overhead"],
        default="all",
        help="vllm: measure only a part",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="hf: where")
    parser.add_argument("--shape", choices=["demo", "8b"], default="demo", help="hf: which model")
    parser.add_argument("--partial", default="", help="8b: a file for what there is so far")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if (arguments.device == "cuda") != (arguments.shape == "8b"):
        parser.error("--device cuda and --shape 8b go together")
    if arguments.device == "cuda":
        return on_gpu(as_json=arguments.json, partial=arguments.partial)
    options = ["--tokens", str(arguments.tokens), "--new-tokens", "24"]
    try:
        model.gguf_folder()
        if arguments.engine == "vllm":
            figures = _vllm_ttft.run(arguments.rounds, arguments.tokens, arguments.part)
            return show(figures, arguments.json)
        processes.prepare(lambda text: print(text, file=sys.stderr, flush=True))
        figures = summary(run_rounds(arguments.rounds, options))
    except (model.ModelMissing, processes.StepFailed) as error:
        print(error, file=sys.stderr)
        return 2
    return show(figures, arguments.json)


def on_gpu(*, as_json: bool, partial: str) -> int:
    """Measure an 8B-shaped model on a GPU; 1 if a length failed, 3 where there is no GPU."""
    figures, status = _gpu_ttft.run(partial)
    if figures:
        report("time to first token on a GPU", figures, as_json=as_json)
    return status


def show(figures: dict[str, Any], as_json: bool) -> int:  # noqa: FBT001 - a flag of the user's
    """Print the figures; return the exit status."""
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print("\n".join(f"{name:<18}{value}" for name, value in figures.items()))
        print(f"{'wanted':<18}{SPEEDUP_WANTED:.0f} times sooner or more")
    return 0 if figures.get("same_output", True) and figures.get("tokens_reused", True) else 1


if __name__ == "__main__":
    sys.exit(main())
