"""The vLLM connector with other shapes: two ranks, sliding windows, latent attention, and LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.vllm_kit import (
    CHUNK,
    needs_vllm,
    poison,
    prompt,
    reset,
    save_llama,
    save_model,
    saved,
    settled,
    start_engine,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench._daemon import DaemonProcess

__all__ = ["start_engine"]
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = prompt(8 * CHUNK + 1)
ANSWER = 12
STATELESS = ("StatelessConnector", "tests.engines.vllm_doubles")
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 512,
}


def load(engine: Any, daemon: DaemonProcess, answer: list[list[int]]) -> dict[str, Any]:
    """Load all of the prompt; a load that failed was computed, with the right answer, and is asked
    for again: beside workers that wait by `sched_yield` and others that compute, the scheduler of
    Linux 6.18 keeps a daemon from running for ten seconds at times.
    """
    for _ in range(4):
        reset(engine)
        loaded: dict[str, Any] = engine.generate([LONG], ANSWER)
        settled(daemon)
        if loaded["cached"] == [8 * CHUNK]:
            return loaded
        assert loaded["tokens"] == answer
    pytest.fail("nothing was loaded")


def prove(engine: Any, daemon: DaemonProcess) -> None:
    """What is loaded answers as the engine's own hit, and other bytes do not."""
    assert engine.generate([LONG], ANSWER)["cached"] == [0]
    own = engine.generate([LONG], ANSWER)
    assert own["cached"] == [8 * CHUNK]
    saved(daemon)
    assert load(engine, daemon, own["tokens"])["tokens"] == own["tokens"]
    assert poison(daemon)
    poisoned = load(engine, daemon, own["tokens"])
    assert poisoned["tokens"] != own["tokens"], "what was loaded makes no difference"
    reset(engine)


def test_two_ranks(daemon: DaemonProcess, tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    """With TP=2 each rank loads its own part, under one lease."""
    engine = start_engine(
        save_llama(tmp_path / "model"),
        daemon.socket,
        **SMALL,
        tensor_parallel_size=2,
        multiprocess=True,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    prove(engine, daemon)


def test_a_step_may_wait_for_its_loads(
    daemon: DaemonProcess, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """With `load: sync`: the same bytes and answers, for one request and for several at once."""
    model = save_llama(tmp_path / "model")
    engine = start_engine(model, daemon.socket, **SMALL, extra={"load": "sync"})
    prompts = [prompt((2 + n) * CHUNK + 1, seed=40 + n % 2) for n in range(6)]
    own = [engine.generate(prompts, ANSWER) for _ in range(2)][1]
    saved(daemon)
    reset(engine)
    loaded = engine.generate(prompts, ANSWER)
    assert loaded["tokens"] == own["tokens"]
    assert loaded["cached"] == [(2 + n) * CHUNK for n in range(6)]
    counted = engine.ask("metrics", prefix="vllm:kvd_")["metrics"]
    assert counted["vllm:kvd_loads"] == counted["vllm:kvd_loads_begun"] == 6
    assert not counted["vllm:kvd_loads_failed"]
    reset(engine)
    prove(engine, daemon)


@pytest.mark.parametrize("kind", ["gemma", "deepseek", "lfm2"])
def test_other_attention(
    kind: str, daemon: DaemonProcess, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """Full and sliding layers in one model; one latent a token (MLA); states of convolutions."""
    model = save_model(tmp_path / "model", kind)
    prove(start_engine(model, daemon.socket, **SMALL), daemon)


def test_states_are_loaded_where_the_engine_kept_them(
    daemon: DaemonProcess, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """A prompt that goes on where another ended loads that; one that leaves it before, nothing.

    Without the state that was saved there the answer is another: so it is what is loaded.
    """
    model = save_model(tmp_path / "model", "lfm2")
    engine = start_engine(model, daemon.socket, **SMALL)
    longer = LONG[: 8 * CHUNK] + prompt(CHUNK, seed=5)
    parted = LONG[: 7 * CHUNK] + prompt(CHUNK, seed=6)
    short = [engine.generate([LONG], ANSWER) for _ in range(2)][1]
    own = engine.generate([longer], ANSWER)
    assert own["cached"] == [8 * CHUNK]
    saved(daemon)
    reset(engine)
    assert engine.generate([parted], ANSWER)["cached"] == [0]
    settled(daemon)
    reset(engine)
    loaded = engine.generate([longer], ANSWER)
    assert loaded["cached"] == [9 * CHUNK - 32]  # a block of the engine's is 32 tokens
    assert loaded["tokens"] == own["tokens"]
    settled(daemon)
    reset(engine)
    engine.close()
    stateless = start_engine(model, daemon.socket, connector=STATELESS, **SMALL)
    without = stateless.generate([LONG], ANSWER)
    assert without["cached"] == short["cached"]
    assert without["tokens"] != short["tokens"]
