"""What `"fp8": true` of the vLLM connector does to bytes and answers.

    make setup-vllm
    python -m bench.vllm_fp8 [--json] [--prompts 24] [--tokens 1024] [--new-tokens 32]
    python -m bench.vllm_fp8 --rates    # without vLLM: how fast the connector's copies are

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
    .._save_gbps            8 objects between pages of that shape in host memory and slots, counted
    .._load_gbps            in the engine's bytes: exact, FP8 in the order of the CPU's back end,
                            and in that of most GPUs' (`nhc`); two threads copy, one codes; medians
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
OBJECTS: Final = 8
TURNS: Final = 15

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
) -> tuple[Answers, Answers, float]:
    """Answer from the engine's own cache and from kvd; and tell an object's bytes."""
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
    return own, loaded, size


def rates() -> dict[str, float]:
    """Time the connector's copies in host memory; nothing else may run."""
    import numpy as np

    from kvd_client._copiers import best_copier
    from kvd_client.cuda.kernels import Axes
    from kvd_client.vllm.cuts import Cut
    from kvd_client.vllm.pages import GroupPages, Pages, Piece, cut_pages

    layers, blocks, tokens, heads, size = 30, 512, 32, 3, 64
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((layers, blocks, tokens * heads * 2 * size)).astype(np.float32)
    memory = (wide.view(np.uint32) >> 16).astype(np.uint16)
    page, count = memory[0, 0].nbytes, CHUNK_TOKENS // tokens
    starts = memory.ctypes.data + np.arange(layers)[:, None] * blocks * page
    exact = GroupPages(starts, page, page, count)
    kinds = {
        "exact": exact,
        "fp8": cut_pages(exact, Cut(1, Axes("bfloat16", 1, 2 * heads, tokens * size))),
        "fp8_nhc": cut_pages(exact, Cut(1, Axes("bfloat16", tokens, 2 * heads, size))),
    }
    figures: dict[str, float] = {}
    for name, group in kinds.items():
        pages = Pages([group], blocks, best_copier(2))
        pieces = [
            Piece(
                0,
                range(1 + n * count, 1 + (n + 1) * count),
                memoryview(bytearray(group.object_bytes)),
            )
            for n in range(OBJECTS)
        ]
        for way, copy in (("save", pages.save), ("load", pages.load)):
            seconds = []
            for _ in range(TURNS):
                began = time.perf_counter()
                copy(pieces, 1)
                seconds.append(time.perf_counter() - began)
            figures[f"{name}_{way}_gbps"] = OBJECTS * exact.object_bytes / median(seconds) / 1e9
    return figures


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
    return {
        "prompts": count,
        "prompt_tokens": tokens + 1,
        "new_tokens": new_tokens,
        "exact_object_bytes": round(exact[2]),
        "fp8_object_bytes": round(lossy[2]),
        "exact_same": sum(a == b for a, b in zip(*exact[:2], strict=True)) / count,
        "fp8_first_token_same": round(sum(a[0] == b[0] for a, b in pairs) / count, 3),
        "fp8_tokens_same": round(sum(places) / len(places), 3),
        "fp8_alike_first": median(alike(a, b) for a, b in pairs),
        "fp8_same": round(sum(a == b for a, b in pairs) / count, 3),
    }


def main() -> int:
    """Measure and print; 1 if an exact load answers otherwise, 2 without vLLM or the model."""
    parser = argparse.ArgumentParser(prog="bench.vllm_fp8", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--prompts", type=int, default=24, help="how many")
    parser.add_argument("--tokens", type=int, default=1024, help="of each, without its last")
    parser.add_argument("--new-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rates", action="store_true", help="time copies, and nothing else")
    arguments = parser.parse_args()
    if arguments.rates:
        report("vLLM's pages in host memory", rates(), as_json=arguments.json)
        return 0
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
