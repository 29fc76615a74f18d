"""Time to first token of a real vLLM engine, and what kvd costs when nothing is reused.

    make setup-vllm
    python -m bench.ttft --engine vllm --json

SmolLM2 (135 million parameters, bf16) in vLLM's CPU build, in processes as in production; 3,073
tokens of English text, which is twelve chunks and one token, so that what is loaded is as long as
what the engine hits itself. A round has a salt of its own: computed, hit in the engine's own cache,
and, that cache cleared, loaded from kvd; the last load is in a second engine. Outputs are compared
over 24 tokens. Then, each prompt with a salt of its own, so that nothing can be reused: the same
work with kvd and without, in turn.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench._daemon import running_daemon
from bench._vllm import PYTHON, ROOT, Engine
from kvd.demo import model
from kvd.demo.text import DOCUMENT

CHUNKS: Final = 12
CHUNK_TOKENS: Final = 256
ANSWER: Final = 24
WORK: Final = (2, 1025, 4)
"""Of a round of the second part: prompts, tokens of each, tokens of each answer."""


def text_tokens(folder: Path, count: int) -> list[int]:
    """Tokenize real text: the demo's document, then kvd's documentation."""
    from transformers import AutoTokenizer

    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer("\n".join([DOCUMENT, *pages]), verbose=False)["input_ids"]
    assert len(ids) >= count
    return ids[:count]


def tell(text: str) -> None:
    """Say how far it is."""
    print(text, file=sys.stderr, flush=True)


def clear(engine: Engine) -> None:
    """Clear the engine's own cache, once all its blocks are free."""
    until = time.monotonic() + 30
    while not engine.reset():
        assert time.monotonic() < until, "the engine keeps blocks"
        time.sleep(0.05)


def first_token(engine: Engine, ids: list[int], salt: str, cached: int) -> float:
    """Time one token in milliseconds; what was cached must be as expected."""
    answer = engine.generate([ids], 1, salts=[salt])
    assert answer["cached"] == [cached], answer["cached"]
    return float(answer["seconds"]) * 1e3


def warm_up(engine: Engine, ids: list[int]) -> None:
    """Let the engine's first steps be over, of each kind."""
    for _ in range(2):
        engine.generate([ids[:600]], 2, salts=[os.urandom(8).hex()])


def latencies(first: Engine, start: Any, ids: list[int], rounds: int) -> dict[str, Any]:  # noqa: ANN401
    """Run the rounds in one engine, then load in a second."""
    whole = len(ids) - 1
    cold, own, warm, same = [], [], [], []
    salts = [f"round {number} {os.urandom(4).hex()}" for number in range(rounds)]
    wanted = {}
    for number, salt in enumerate(salts):
        tell(f"round {number + 1}/{rounds}: computed, own hit, loaded")
        clear(first)
        cold.append(first_token(first, ids, salt, 0))
        own.append(first_token(first, ids, salt, whole))
        wanted[salt] = first.generate([ids], ANSWER, salts=[salt])["tokens"]
        time.sleep(1)  # the save is over by then; nothing else runs
        clear(first)
        warm.append(first_token(first, ids, salt, whole))
        clear(first)
        answer = first.generate([ids], ANSWER, salts=[salt])["tokens"]
        same.append(answer == wanted[salt])
    first.close()
    tell("a second engine")
    with start() as second:
        warm_up(second, ids)
        other = []
        for salt in salts:
            other.append(first_token(second, ids, salt, whole))
            clear(second)
            answer = second.generate([ids], ANSWER, salts=[salt])["tokens"]
            same.append(answer == wanted[salt])
    return {
        "cold_ms": round(median(cold), 2),
        "own_hit_ms": round(median(own), 2),
        "warm_ms": round(median(warm), 2),
        "second_engine_ms": round(median(other), 2),
        "speedup": round(median(cold) / median(warm), 2),
        "warm_over_own": round(median(warm) / median(own), 2),
        "same_output": all(same),
        "tokens_reused": whole,
        "cold_ms_all": [round(value, 1) for value in cold],
        "own_hit_ms_all": [round(value, 1) for value in own],
        "warm_ms_all": [round(value, 1) for value in warm],
    }


def overhead(start: Any, ids: list[int], rounds: int) -> dict[str, Any]:  # noqa: ANN401
    """Time the same work with kvd and without; nothing is reused in either."""
    count, tokens, answer = WORK
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with start(kvd=True) as one, start(kvd=False) as other:
        for engine in (one, other):
            warm_up(engine, ids)
        for number in range(rounds):
            tell(f"overhead {number + 1}/{rounds}")
            order = (True, False) if number % 2 else (False, True)
            for with_kvd in order:
                engine = one if with_kvd else other
                clear(engine)
                salts = [os.urandom(8).hex() for _ in range(count)]
                done = engine.generate([ids[:tokens]] * count, answer, salts=salts)
                assert done["cached"] == [0] * count
                seconds[with_kvd].append(float(done["seconds"]))
    on, off = median(seconds[True]), median(seconds[False])
    work = count * (tokens + answer)
    return {
        "overhead_pct": round((on / off - 1) * 100, 2),
        "tokens_s_on": round(work / on, 1),
        "tokens_s_off": round(work / off, 1),
        "seconds_on_all": [round(value, 2) for value in seconds[True]],
        "seconds_off_all": [round(value, 2) for value in seconds[False]],
    }


def run(rounds: int, tokens: int, parts: str) -> dict[str, Any]:
    """Measure.

    Raises:
        kvd.demo.model.ModelMissing: vLLM's environment or the model is not there.
    """
    if not PYTHON.exists():
        raise model.ModelMissing("no environment with vLLM: run `make setup-vllm`")
    folder = model.prepare()
    chunks = tokens // CHUNK_TOKENS or CHUNKS
    ids = text_tokens(folder, chunks * CHUNK_TOKENS + 1)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-ttft-") as log,
        running_daemon(host_bytes=2 << 30) as socket,
    ):

        def start(*, kvd: bool = True) -> Engine:
            return Engine(
                folder,
                Path(log) / "engine.log",
                kvd={"socket": socket, "chunk_tokens": CHUNK_TOKENS} if kvd else None,
                multiprocess=True,
                environment={"VLLM_CPU_CI_ENV": "1"},
                max_num_batched_tokens=4096,
            )

        figures: dict[str, Any] = {"engine": "vllm", "rounds": rounds, "prompt_tokens": len(ids)}
        if parts != "overhead":
            tell("an engine")
            first = start()
            warm_up(first, ids)
            figures |= latencies(first, start, ids, rounds)
        if parts != "latency":
            tell("two engines, with kvd and without")
            figures |= overhead(start, ids, 2 * rounds + 1)
    return figures
