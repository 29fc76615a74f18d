"""The vLLM connector in a real engine: what is loaded is what the engine would have hit itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.vllm_kit import (
    CHUNK,
    llama,
    needs_vllm,
    poison,
    prompt,
    reset,
    settled,
    start_engine,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench._daemon import DaemonProcess

__all__ = ["llama", "start_engine"]
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = prompt(15 * CHUNK + 1)
"""Of whole chunks and one token: what kvd loads is then just what the engine hits itself."""
ANSWER = 12


def batch(salt: int) -> list[list[int]]:
    """Eight prompts: two of each of four prefixes, of different lengths."""
    return [
        prompt((4 + n) * CHUNK, seed=salt + n % 4) + prompt(1 + n, seed=90 + n) for n in range(8)
    ]


def test_loaded_output_is_the_engines_own(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """A load answers bit for bit as the engine's own hit, and in another process as well.

    After a reset of the engine's cache, for one request and for eight at once; in a second engine,
    of several processes; and with a byte of every value changed the answer is another.
    """
    engine = start_engine(llama, daemon.socket, dtype="float32", max_num_batched_tokens=512)
    cold = engine.generate([LONG], ANSWER)
    own = engine.generate([LONG], ANSWER)
    assert cold["cached"] == [0]
    assert own["cached"] == [15 * CHUNK]
    settled(daemon, published=15 * CHUNK * 2048)
    reset(engine)
    loaded = engine.generate([LONG], ANSWER)
    assert loaded["cached"] == own["cached"]
    assert loaded["tokens"] == own["tokens"]

    prompts = batch(20)
    first = engine.generate(prompts, ANSWER)
    again = engine.generate(prompts, ANSWER)
    assert first["tokens"] == again["tokens"]
    settled(daemon)
    reset(engine)
    loaded = engine.generate(prompts, ANSWER)
    assert loaded["cached"] == [(4 + n) * CHUNK for n in range(8)]
    assert loaded["tokens"] == again["tokens"]
    settled(daemon)
    reset(engine)
    for salt in ("a", "b"):
        salted = engine.generate([LONG], 1, salts=[salt])
        assert salted["cached"] == [0], "another salt's KV was found"
    engine.close()

    second = start_engine(
        llama, daemon.socket, dtype="float32", max_num_batched_tokens=512, multiprocess=True
    )
    loaded = second.generate([LONG], ANSWER)
    assert loaded["cached"] == own["cached"]
    assert loaded["tokens"] == own["tokens"]
    settled(daemon)
    assert poison(daemon)
    reset(second)
    poisoned = second.generate([LONG], ANSWER)
    assert poisoned["cached"] == own["cached"]
    assert poisoned["tokens"] != own["tokens"], "the bytes that were loaded make no difference"
    settled(daemon)
    reset(second)
