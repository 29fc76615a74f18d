"""The vLLM connector in a real engine: what is loaded is what the engine would have hit itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import zmq

from tests.engines.vllm_kit import (
    CHUNK,
    llama,
    needs_vllm,
    poison,
    prompt,
    reset,
    save_adapter,
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


def stored_tokens(listener: Any) -> list[list[int]]:
    """Return the tokens of what vLLM's event stream says kvd has taken, event by event."""
    told = []
    while listener.poll(200):
        _, _, body = listener.recv_multipart()
        for event in msgpack.unpackb(body)[1]:
            if event["type"] == "BlockStored" and event.get("medium") == "CPU":
                told.append(event["token_ids"])
                assert "extra_keys" not in event
    return told


def test_loaded_output_is_the_engines_own(
    daemon: DaemonProcess, llama: Path, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """A load answers bit for bit as the engine's own hit, and in another process as well.

    After a reset of the engine's cache, for one request and for eight at once; in a second engine,
    of several processes; and with a byte of every value changed the answer is another. What kvd has
    taken is told to vLLM's event stream.
    """
    listener: Any = zmq.Context.instance().socket(zmq.SUB)
    listener.connect(f"ipc://{tmp_path}/events")
    listener.subscribe(b"")
    engine = start_engine(
        llama,
        daemon.socket,
        dtype="float32",
        max_num_batched_tokens=512,
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{tmp_path}/events",
        },
    )
    cold = engine.generate([LONG], ANSWER)
    own = engine.generate([LONG], ANSWER)
    assert cold["cached"] == [0]
    assert own["cached"] == [15 * CHUNK]
    settled(daemon, published=15 * CHUNK * 2048)
    reset(engine)
    loaded = engine.generate([LONG], ANSWER)
    assert loaded["cached"] == own["cached"]
    assert loaded["tokens"] == own["tokens"]

    told = stored_tokens(listener)
    listener.close(linger=0)
    assert told == [LONG[n * CHUNK : (n + 1) * CHUNK] for n in range(15)]

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
    in_another_process(second, daemon, own)


def in_another_process(second: Any, daemon: DaemonProcess, own: dict[str, Any]) -> None:
    """Load what the first engine saved; then the same with other bytes."""
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


def test_pages_on_a_gpu(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """The GPU's copies, on a fake one: loaded as the engine's own; an engine without shares them.

    So objects are byte for byte those of host memory, in both directions.
    """
    options = {"dtype": "float32", "max_num_batched_tokens": 512}
    gpu = ("FakeGpuConnector", "tests.engines.vllm_doubles")
    engine = start_engine(llama, daemon.socket, connector=gpu, **options)
    engine.generate([LONG], ANSWER)
    own = engine.generate([LONG], ANSWER)
    assert own["cached"] == [15 * CHUNK]
    settled(daemon, published=15 * CHUNK * 2048)
    reset(engine)
    loaded = engine.generate([LONG], ANSWER)
    assert (loaded["cached"], loaded["tokens"]) == (own["cached"], own["tokens"])
    prompts = batch(40)
    again = [engine.generate(prompts, ANSWER) for _ in range(2)][1]
    settled(daemon)
    reset(engine)
    loaded = engine.generate(prompts, ANSWER)
    assert loaded["cached"] == [(4 + n) * CHUNK for n in range(8)]
    assert loaded["tokens"] == again["tokens"]
    engine.close()
    other = start_engine(llama, daemon.socket, **options)
    loaded = other.generate([LONG], ANSWER)
    assert (loaded["cached"], loaded["tokens"]) == (own["cached"], own["tokens"])
    fresh = prompt(6 * CHUNK + 1, seed=77)
    cold = other.generate([fresh], ANSWER)
    settled(daemon)
    other.close()
    engine = start_engine(llama, daemon.socket, connector=gpu, **options)
    loaded = engine.generate([fresh], ANSWER)
    assert loaded["cached"] == [6 * CHUNK]
    assert loaded["tokens"] == cold["tokens"]
    settled(daemon)
    reset(engine)


def test_another_kind_of_engine_never_hits(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """Of the same model and prompt, another type or block size finds nothing but its own."""
    for other in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"block_size": 64}):
        engine = start_engine(llama, daemon.socket, **{"dtype": "float32", **other})
        before = settled(daemon)["host"]["published_bytes"]
        assert engine.generate([LONG], 1)["cached"] == [0], f"{other} hit another's KV"
        settled(daemon, published=before + 15 * CHUNK * 1024)
        reset(engine)
        assert engine.generate([LONG], 1)["cached"] == [15 * CHUNK]
        engine.close()


def test_adapters_are_cached_by_their_digest(
    daemon: DaemonProcess, llama: Path, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """With a digest an adapter's KV is loaded, for that adapter only; without one it is not."""
    known, unknown = save_adapter(tmp_path / "known", 1), save_adapter(tmp_path / "unknown", 2)
    engine = start_engine(
        llama,
        daemon.socket,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        extra={"adapters": {"known": "1f"}},
    )
    cold = {}
    for name, adapter in (("base", None), ("known", known), ("unknown", unknown)):
        cold[name] = engine.generate([LONG], ANSWER, adapter=adapter)
        assert cold[name]["cached"] == [0], f"{name} found another's KV"
    assert len({str(answer["tokens"]) for answer in cold.values()}) == 3
    settled(daemon, published=2 * 15 * CHUNK * 2048)
    reset(engine)
    for name, adapter in (("base", None), ("known", known), ("unknown", unknown)):
        again = engine.generate([LONG], ANSWER, adapter=adapter)
        assert again["cached"] == [0 if name == "unknown" else 15 * CHUNK]
        assert again["tokens"] == cold[name]["tokens"]
