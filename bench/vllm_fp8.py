"""What `"fp8": true` of the vLLM connector does to bytes and answers.

    make setup-vllm
    python -m bench.vllm_fp8 [--json] [--prompts 24] [--tokens 1024] [--new-tokens 32]

SmolLM2 (135 million parameters, bf16) in vLLM's CPU build; prompts of English text and of kvd's own
documentation, whole chunks and one token each. An engine computes each prompt, answers it greedily
from its own cache, and, that cleared, from what it loads of kvd: first an exact engine, then one
with FP8.

    object_bytes            of a chunk
    exact_same              share of an exact engine's answers that are those of its own cache
    fp8_first_token_same    share of answers whose first token is the same
    fp8_tokens_same         share of all tokens that are the same at the same place
    fp8_alike_first         tokens that are the same before the first that is not, the median
    fp8_same                share of answers that are the same to the end
    save_gbps, load_gbps    the connector's copies by its own clock, of the engine's bytes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from bench._daemon import running_daemon
from bench._table import report
from bench._vllm import PYTHON, Engine
from bench._vllm_ttft import clear, tell, text_tokens
from kvd import statpage
from kvd.demo import model
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_TOKENS: Final = 256

Answers = list[list[int]]


def published(socket: str) -> int:
    """Return the bytes that kvd has taken, once it takes no more."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 2:
        now = int(statpage.read(stat_page_name(socket)).stats["host"]["published_bytes"])
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.1)
    return before


def ask(engine: Engine, prompts: Sequence[list[int]], tokens: int, cached: int) -> Answers:
    """Answer one prompt after the other; each must have so many tokens cached."""
    answers = []
    for ids in prompts:
        clear(engine)
        if not cached:
            engine.generate([ids], 1)
            answers.append(engine.generate([ids], tokens)["tokens"][0])
        else:
            answer = engine.generate([ids], tokens)
            assert answer["cached"] == [cached], answer["cached"]
            answers.append(answer["tokens"][0])
    return answers


def one_kind(
    start: Any,  # noqa: ANN401
    socket: str,
    prompts: Sequence[list[int]],
    tokens: int,
    *,
    fp8: bool,
) -> tuple[Answers, Answers, dict[str, float]]:
    """Answer from the engine's own cache and from kvd; and tell bytes and rates."""
    whole = len(prompts[0]) - 1
    before = published(socket)
    with start(fp8=fp8) as engine:
        tell("fp8: computed" if fp8 else "exact: computed")
        own = ask(engine, prompts, tokens, 0)
        size = (published(socket) - before) / (len(prompts) * whole // CHUNK_TOKENS)
        tell("loaded")
        loaded = ask(engine, prompts, tokens, whole)
        found = engine.ask("metrics", prefix="vllm:kvd_")["metrics"]
    assert not found["vllm:kvd_loads_failed"]
    share = {"object_bytes": size}
    for name in ("save", "load"):
        moved, micros = (
            found[f"vllm:kvd_{name}{'d' if name == 'save' else 'ed'}_bytes"],
            found[f"vllm:kvd_{name}_micros"],
        )
        share[f"{name}_bytes_s"] = moved / micros * 1e6
    return own, loaded, share


def alike(one: list[int], other: list[int]) -> int:
    """Count the tokens before the first that differs."""
    same = [a == b for a, b in zip(one, other, strict=True)]
    return same.index(False) if False in same else len(same)


def run(count: int, tokens: int, new_tokens: int) -> dict[str, Any]:
    """Measure.

    Raises:
        kvd.demo.model.ModelMissing: vLLM's environment or the model is not there.
    """
    if not PYTHON.exists():
        raise model.ModelMissing("no environment with vLLM: run `make setup-vllm`")
    folder = model.prepare()
    ids = text_tokens(folder, count * tokens + 1)
    prompts = [ids[n * tokens : (n + 1) * tokens + 1] for n in range(count)]
    with (
        tempfile.TemporaryDirectory(prefix="kvd-fp8-") as log,
        running_daemon(host_bytes=4 << 30) as socket,
    ):

        def start(*, fp8: bool) -> Engine:
            return Engine(
                folder,
                Path(log) / "engine.log",
                kvd={"socket": socket, "chunk_tokens": CHUNK_TOKENS, "save": "prompt", "fp8": fp8},
                environment={"VLLM_CPU_CI_ENV": "1"},
                max_num_batched_tokens=4096,
            )

        exact = one_kind(start, socket, prompts, new_tokens, fp8=False)
        lossy = one_kind(start, socket, prompts, new_tokens, fp8=True)
    pairs = list(zip(exact[0], lossy[1], strict=True))
    places = [a == b for own, loaded in pairs for a, b in zip(own, loaded, strict=True)]
    factor = exact[2]["object_bytes"] / lossy[2]["object_bytes"]
    return {
        "prompts": count,
        "prompt_tokens": tokens + 1,
        "new_tokens": new_tokens,
        "exact_object_bytes": round(exact[2]["object_bytes"]),
        "fp8_object_bytes": round(lossy[2]["object_bytes"]),
        "exact_same": sum(a == b for a, b in zip(*exact[:2], strict=True)) / count,
        "fp8_first_token_same": round(sum(a[0] == b[0] for a, b in pairs) / count, 3),
        "fp8_tokens_same": round(sum(places) / len(places), 3),
        "fp8_alike_first": median(alike(a, b) for a, b in pairs),
        "fp8_same": round(sum(a == b for a, b in pairs) / count, 3),
        "exact_save_gbps": round(exact[2]["save_bytes_s"] / 1e9, 2),
        "exact_load_gbps": round(exact[2]["load_bytes_s"] / 1e9, 2),
        "fp8_save_gbps": round(lossy[2]["save_bytes_s"] * factor / 1e9, 2),
        "fp8_load_gbps": round(lossy[2]["load_bytes_s"] * factor / 1e9, 2),
    }


def main() -> int:
    """Measure and print; 1 if an exact load answers otherwise, 2 without vLLM or the model."""
    parser = argparse.ArgumentParser(prog="bench.vllm_fp8", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--prompts", type=int, default=24, help="how many")
    parser.add_argument("--tokens", type=int, default=1024, help="of each, without its last")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer")
    arguments = parser.parse_args()
    if arguments.tokens < CHUNK_TOKENS or arguments.tokens % CHUNK_TOKENS:
        parser.error(f"--tokens must be a multiple of {CHUNK_TOKENS}")
    try:
        figures = run(arguments.prompts, arguments.tokens, arguments.new_tokens)
    except model.ModelMissing as missing:
        print(missing, file=sys.stderr)
        return 2
    report("vLLM with FP8", figures, as_json=arguments.json)
    return 0 if figures["exact_same"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
