"""The vLLM engine goes on whatever happens to kvd, and kvd gets its memory back from the engine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench._vllm import EngineDied
from tests.engines.vllm_kit import (
    CHUNK,
    llama,
    needs_vllm,
    prompt,
    reset,
    settled,
    start_engine,
    stats,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._daemon import DaemonProcess

__all__ = ["llama", "start_engine"]
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = prompt(10 * CHUNK + 1)
ANSWER = 6
FREE_S = 30.0
"""Far more than it takes (the log tells), since a test machine may be busy."""
log = logging.getLogger(__name__)
DOUBLES = "tests.engines.vllm_doubles"
CUT_OFF = ("CutOffConnector", DOUBLES)
SLOW = ("SlowConnector", DOUBLES)
VERY_SLOW = ("VerySlowConnector", DOUBLES)


def test_the_engine_outlives_the_daemon(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """Killed, restarted, stopped: each request is answered as before, and no block is lost."""
    engine = start_engine(llama, daemon.socket, dtype="float32", extra={"wait_s": 1})
    want = engine.generate([LONG], ANSWER)["tokens"]
    settled(daemon, published=10 * CHUNK * 2048)
    reset(engine)

    daemon.kill()
    dead = engine.generate([LONG], ANSWER)
    assert (dead["tokens"], dead["cached"], dead["finish"]) == (want, [0], ["length"])
    reset(engine)

    daemon.start()
    until = time.monotonic() + 30
    while not stats(daemon)["sessions"]:  # found again by itself, as requests come
        assert time.monotonic() < until, "the engine does not find the new daemon"
        engine.generate([prompt(CHUNK + 1, seed=int(time.monotonic() * 10) % 997)], 1)
    back = engine.generate([LONG], ANSWER)
    assert back["tokens"] == want
    settled(daemon, published=CHUNK * 2048)
    reset(engine)
    found = engine.generate([LONG], ANSWER)
    assert found["tokens"] == want

    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        reset(engine)
        stopped = engine.generate([LONG, prompt(3 * CHUNK + 1, seed=7)], ANSWER)
        assert stopped["tokens"][0] == want[0]
        assert stopped["cached"] == [0, 0]
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    reset(engine)
    again = engine.generate([LONG], ANSWER)
    assert again["tokens"] == want
    settled(daemon)
    reset(engine)


def test_a_load_that_fails_is_computed(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """The worker loses its session before each load: the engine computes the same answers."""
    engine = start_engine(llama, daemon.socket, connector=CUT_OFF, dtype="float32")
    want = engine.generate([LONG], ANSWER)["tokens"]
    settled(daemon, published=10 * CHUNK * 2048)
    reset(engine)
    failed = engine.generate([LONG, LONG], ANSWER)
    assert failed["tokens"] == [*want, *want]
    assert failed["finish"] == ["length"] * 2
    counted = engine.ask("metrics", prefix="vllm:kvd_")["metrics"]
    assert counted["vllm:kvd_loads_failed"]
    assert not counted["vllm:kvd_loads"]
    reset(engine)
    engine.close()
    settled(daemon)


@pytest.mark.parametrize("moment", ["save", "load"])
def test_a_killed_engine_gives_all_back(
    moment: str, daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """SIGKILL in the middle of a save, or of a load: what it held is free at once."""
    if moment == "load":
        engine = start_engine(llama, daemon.socket, dtype="float32")
        engine.generate([LONG], 1)
        settled(daemon, published=10 * CHUNK * 2048)
        engine.close()
    engine = start_engine(
        llama, daemon.socket, connector=VERY_SLOW, dtype="float32", multiprocess=moment == "save"
    )
    call = threading.Thread(target=suppressed, args=(engine, LONG))
    call.start()
    held = "reserved_bytes" if moment == "save" else "pinned_bytes"
    until = time.monotonic() + 60
    while not stats(daemon)["host"][held]:
        assert time.monotonic() < until, f"no {moment} begins"
        time.sleep(0.02)
    holders = [session["pid"] for session in stats(daemon)["sessions"]]
    engine.kill()
    while any(map(running, holders)):
        assert time.monotonic() < until
        time.sleep(0.002)
    died = time.monotonic()
    page = settled(daemon, seconds=FREE_S)
    while page["sessions"]:
        assert time.monotonic() < died + FREE_S, "the session of a dead engine stays"
        page = stats(daemon)
    log.info("all free %.3f s after the engine's end, in a %s", time.monotonic() - died, moment)
    assert moment == "load" or not page["host"]["published_bytes"]
    call.join()


def running(pid: int) -> bool:
    """Tell whether a process has not ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def suppressed(engine: Any, ids: list[int]) -> None:
    """Ask an engine that is killed meanwhile."""
    with contextlib.suppress(EngineDied):
        engine.generate([ids], 1)


def test_a_full_host_tier_is_no_fault(
    make_daemon: Callable[..., DaemonProcess], llama: Path, start_engine: Callable[..., Any]
) -> None:
    """With far more to save than there is room, answers are right and the engine loses nothing."""
    daemon = make_daemon(host_bytes=4 << 20)
    daemon.start()
    engine = start_engine(llama, daemon.socket, dtype="float32")
    prompts = [prompt(20 * CHUNK + 1, seed=seed) for seed in range(30, 34)]
    want = [engine.generate([ids], 2)["tokens"][0] for ids in prompts]
    settled(daemon)
    for ids, tokens in zip(prompts, want, strict=True):
        reset(engine)
        assert engine.generate([ids], 2)["tokens"] == [tokens]
    reset(engine)
    page = settled(daemon)
    assert page["host"]["published_bytes"] <= 4 << 20


def test_blocks_taken_again_are_never_saved_wrong(
    daemon: DaemonProcess, llama: Path, start_engine: Callable[..., Any]
) -> None:
    """A small KV cache, slow saves and preemption: whatever was saved answers as if computed.

    Blocks are given to other requests while they are being saved; each such save must be whole, or
    not there.
    """
    small = {
        "num_gpu_blocks_override": 46,  # four prompts and one block more; answers need four more
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 1024,
    }
    prompts = [prompt(5 * CHUNK + 1, seed=seed) for seed in range(40, 48)]
    plain = start_engine(llama, None, **small)
    want = plain.generate(prompts, 40)["tokens"]
    plain.close()
    engine = start_engine(llama, daemon.socket, connector=SLOW, **small)
    assert engine.generate(prompts, 40)["tokens"] == want
    counted = engine.ask("metrics", prefix="vllm:")["metrics"]
    assert counted["vllm:num_preemptions"], "nothing was preempted: make the cache smaller"
    settled(daemon, published=1)
    reset(engine)
    again = engine.generate(prompts, 4)
    assert again["tokens"] == [tokens[:4] for tokens in want]
    assert sum(again["cached"]), "nothing was saved"
    settled(daemon)
    reset(engine)
