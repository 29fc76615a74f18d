"""Real engines that keep KV as FP8: half of the bytes, the same on GPU and CPU, none of others'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd import codec
from kvd.codec.shape import ObjectShape
from tests.engines.vllm_kit import (
    CHUNK,
    llama,
    needs_vllm,
    poison,
    prompt,
    reset,
    save_model,
    saved,
    settled,
    start_engine,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._daemon import DaemonProcess

__all__ = ["llama", "start_engine"]
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHUNKS = 8
LONG = prompt(CHUNKS * CHUNK + 1)
PROMPTS = [prompt(CHUNKS * CHUNK + 1, seed=seed) for seed in range(8)]
ANSWER = 12
SHAPE = ObjectShape(CHUNK * 1024, "bfloat16", 4, CHUNK // 32, 2 * 2, 32 * 32)
"""An object of the small model in bfloat16, as vLLM's CPU back end has it: 4 layers, blocks of 32
tokens, of each of 2 heads K before V."""
FRAME_BYTES = 64 + 4 * 4 * 2 + CHUNK * 512
"""Header, scales, codes."""
GPU = ("FakeGpuConnector", "tests.engines.vllm_doubles")
SMALL: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 512}
FP8: dict[str, Any] = {**SMALL, "extra": {"fp8": True}}


def slots(daemon: DaemonProcess, size: int) -> set[bytes]:
    """Read the daemon's slabs in steps of an object's size; what is not empty."""
    found = set()
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if "slab" in str(entry.readlink()):
            slab = entry.read_bytes()
            found |= {slab[at : at + size] for at in range(0, len(slab), size)}
    return {content for content in found if any(content)}


def frames(daemon: DaemonProcess) -> set[bytes]:
    """Find all FP8 objects that the daemon's slabs hold."""
    found, mark = set(), b"kvdc\1\1"
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if "slab" in str(entry.readlink()):
            slab = entry.read_bytes()
            at = slab.find(mark)
            while at >= 0:
                found.add(slab[at : at + FRAME_BYTES])
                at = slab.find(mark, at + FRAME_BYTES)
    return found


def coded(content: bytes) -> bytes:
    """Encode an exact object by the daemon's codec."""
    out = bytearray(codec.frame_bytes_max("fp8", SHAPE))
    assert codec.encode("fp8", SHAPE, content, out, planes=0).size_bytes == len(out)
    return bytes(out)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far the first tokens' log-probabilities differ, the mean over the likeliest."""
    means = []
    for mine, its in zip(one["logprobs"], other["logprobs"], strict=True):
        least = min(*mine.values(), *its.values())
        names = {*mine, *its}
        means.append(sum(abs(mine.get(n, least) - its.get(n, least)) for n in names) / len(names))
    return float(sum(means) / len(means))


def in_turn(engine: Any) -> dict[str, Any]:
    """Answer one prompt after the other: what shares a step may change an answer a little."""
    answers = [engine.generate([ids], 1, logprobs=20) for ids in PROMPTS]
    return {
        name: [answer[name][0] for answer in answers] for name in ("tokens", "cached", "logprobs")
    }


def turned(answer: dict[str, Any]) -> dict[str, Any]:
    """Give each prompt the answer of the next one."""
    return {**answer, "logprobs": answer["logprobs"][1:] + answer["logprobs"][:1]}


def lossy(daemon: DaemonProcess) -> list[bool]:
    """Tell of each namespace whether it is lossy, as `kvd ls` shows it."""
    shown = subprocess.run(
        [sys.executable, "-m", "kvd", "ls", "--socket", daemon.socket, "--json"],
        check=True,
        capture_output=True,
        env={k: v for k, v in os.environ.items() if k != "KVD_CONFIG"},
    )
    return sorted(space["lossy"] for space in json.loads(shown.stdout)["spaces"])


def test_exact_and_fp8_engines_share_nothing(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """Of one model, beside each other: neither finds the other's, and each its own.

    An FP8 object is half of the exact one, byte for byte what the codec makes of that, and loaded
    it answers near the exact answer.
    """
    exact = start_engine(llama, daemon.socket, **SMALL)
    assert exact.generate([LONG], ANSWER)["cached"] == [0]
    own = exact.generate([LONG], ANSWER, logprobs=20)
    full = CHUNKS * CHUNK * 1024
    assert settled(daemon, published=full)["host"]["published_bytes"] == full
    expected = {coded(content) for content in slots(daemon, CHUNK * 1024)}
    assert len(expected) == CHUNKS

    engine = start_engine(llama, daemon.socket, **FP8)
    assert engine.generate([LONG], ANSWER)["cached"] == [0], "FP8 found an exact engine's KV"
    page = settled(daemon, published=full + CHUNKS * FRAME_BYTES)
    assert page["host"]["published_bytes"] == full + CHUNKS * FRAME_BYTES
    assert full * 0.502 > CHUNKS * FRAME_BYTES
    assert frames(daemon) == expected
    assert lossy(daemon) == [False, True]
    reset(engine)
    loaded = engine.generate([LONG], ANSWER, logprobs=20)
    assert loaded["cached"] == [CHUNKS * CHUNK]
    assert 0 < distance(loaded, own) < 1, "not what FP8 makes of it"
    assert engine.generate([PROMPTS[2]], 1)["cached"] == [0]
    settled(daemon, published=full + 2 * CHUNKS * FRAME_BYTES)

    assert exact.generate([PROMPTS[2]], 1)["cached"] == [0], "an exact engine found FP8"
    settled(daemon)
    reset(exact)
    again = exact.generate([LONG], ANSWER, logprobs=20)
    assert again == {**own, "seconds": again["seconds"]}
    settled(daemon)


def test_engines_on_gpu_and_cpu_share_fp8(
    make_daemon: Callable[..., DaemonProcess], llama: Path, start_engine: Callable[..., Any]
) -> None:
    """A GPU's kernels and host code make the same objects, and restore the same KV of them."""
    answers, made = [], []
    for name, kinds in (("a", (None, GPU)), ("b", (GPU, None))):
        daemon = make_daemon(name)
        daemon.start()
        for number, kind in enumerate(kinds):
            more = {"connector": kind} if kind else {}
            engine = start_engine(llama, daemon.socket, **FP8, **more)
            if not number:
                assert engine.generate([LONG], ANSWER)["cached"] == [0]
                settled(daemon, published=CHUNKS * FRAME_BYTES)
                reset(engine)
            answers.append(engine.generate([LONG], ANSWER, logprobs=20))
            settled(daemon)
            engine.close()
        made.append(frames(daemon))
    assert len(made[0]) == CHUNKS
    assert made[0] == made[1], "the GPU makes other objects"
    for answer in answers:
        assert answer["cached"] == [CHUNKS * CHUNK]
        assert answer == {**answers[0], "seconds": answer["seconds"]}


@pytest.mark.parametrize(
    ("kind", "connector"), [("gemma", None), ("gemma", GPU), ("lfm2", None), ("lfm2", GPU)]
)
def test_mixed_models(
    kind: str,
    connector: tuple[str, str] | None,
    daemon: DaemonProcess,
    tmp_path: Path,
    start_engine: Callable[..., Any],
) -> None:
    """Windows beside full attention, both FP8; states of convolutions beside it stay exact.

    What is loaded answers nearly as the engine's own hit; other bytes are not loaded.
    """
    model = save_model(tmp_path / "model", kind)
    more = {"connector": connector} if connector else {}
    engine = start_engine(model, daemon.socket, dtype="float32", **FP8, **more)
    engine.generate(PROMPTS, 1)
    own = in_turn(engine)
    assert own["cached"] == [CHUNKS * CHUNK] * 8
    saved(daemon)
    reset(engine)
    loaded = in_turn(engine)
    assert loaded["cached"] == own["cached"]
    assert sum(a == b for a, b in zip(loaded["tokens"], own["tokens"], strict=True)) >= 6
    assert 0 < distance(loaded, own) < distance(turned(own), own) / 4
    settled(daemon)
    assert poison(daemon)
    reset(engine)
    computed = in_turn(engine)
    counted = engine.ask("metrics", prefix="vllm:kvd_")["metrics"]
    assert counted["vllm:kvd_loads_failed"] == 8
    assert computed["cached"] == [0] * 8
    assert distance(computed, own) < distance(turned(own), own) / 4


def test_a_model_that_cannot_be_fp8_is_served_without_kvd(
    daemon: DaemonProcess, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """Latent attention, with the option: one line says what to change, and nothing is kept."""
    model = save_model(tmp_path / "model", "deepseek")
    engine = start_engine(model, daemon.socket, dtype="float32", **FP8)
    for _ in range(2):
        engine.generate([LONG], 1)
        reset(engine)
    assert engine.generate([LONG], 1)["cached"] == [0]
    assert not settled(daemon)["host"]["published_bytes"]
    said = engine.log.read_text(errors="replace")
    assert 'kvd stays out of this engine: "fp8" is for attention with K and V' in said
    assert 'leave "fp8" out of kv_connector_extra_config' in said
