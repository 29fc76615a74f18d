"""The checks and benches that a GPU host runs: on its GPU, and here on a fake one.

That all of them run on the fake one is in test_gpu_all.py; here is that they see what they are for.
It says nothing about CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from bench import _gpu, _gpu_kill, _gpu_place, _gpu_ttft, _llama, gpu, gpu_check
from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.imports import Imports
from tests.gpu.shared_device import SharedDevice

if TYPE_CHECKING:
    from bench._gpu_place import Place


@pytest.fixture(scope="module")
def place() -> Place:
    """Open the GPU of this host, or skip."""
    try:
        return _gpu_place.Place(_gpu.real_device())
    except _gpu.NotHere as reason:
        pytest.skip(f"GPU tests: {reason}")


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", gpu_check.CHECKS)
def test_on_a_gpu(name: str, place: Place) -> None:
    """On a GPU, what comes back is what was stored, whatever dies meanwhile."""
    gpu_check.CHECKS[name](place)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Take the fake GPU; processes started from here do so, too."""
    monkeypatch.setenv(_gpu_place.FAKE_VARIABLE, "1")
    return _gpu_place.here()


@pytest.mark.timeout(180)
def test_a_check_sees_wrong_bytes(
    fake: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A device that copies one byte wrongly fails the checks, and the rest still runs."""
    copy_in = SharedDevice.copy_in

    def wrong(self: Any, target: int, source: int, size_bytes: int, stream: int) -> None:
        copy_in(self, target, source, size_bytes, stream)
        if size_bytes > 4096:
            self.fill(target + 100, 1, 1, stream)

    monkeypatch.setattr(SharedDevice, "copy_in", wrong)
    found = gpu_check.run(fake, ("kernels", "round_trip"))
    assert found["kernels"]["outcome"] == found["round_trip"]["outcome"] == "FAILED"
    assert "than were stored" in found["round_trip"]["error"]
    capfd.readouterr()  # the traces


@pytest.mark.timeout(180)
def test_a_check_sees_memory_that_is_not_pinned(
    fake: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed memory that a driver does not take fails the check, with the driver's reason."""

    def refuse(*_: object) -> None:
        raise DeviceError("operation not supported")

    monkeypatch.setattr(fake.device, "register", refuse)
    with pytest.raises(AssertionError, match="operation not supported"):
        gpu_check.CHECKS["pinning"](fake)


def test_a_check_sees_handles_that_do_not_open(
    fake: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A handle that is none is refused in the other process, and the check fails."""
    monkeypatch.setattr(fake.device, "export", lambda _: b"fake" + bytes(60))
    with pytest.raises(AssertionError, match="does not open in another process: refused"):
        gpu_check.CHECKS["handles"](fake)
    assert "opened as the same user: refused" in capfd.readouterr().err


def test_another_user_has_a_folder_for_cupy(
    fake: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """CuPy does not load without one: then nothing would be known of handles and users."""
    owners: dict[str, int] = {}
    seen: list[str] = []

    def run(*_: object, user: int | None, env: dict[str, str], **__: object) -> Any:
        cache = env.get("CUPY_CACHE_DIR", "")
        seen.append(cache)
        right = user is None or (Path(cache).is_dir() and owners[cache] == user)
        return types.SimpleNamespace(stdout="7 7" if right else "no folder", returncode=0)

    monkeypatch.setenv("CUPY_CACHE_DIR", "ours")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, user, _: owners.update({path: user}))
    monkeypatch.setattr(subprocess, "run", run)
    gpu_check.CHECKS["handles"](fake)
    assert "opened as another user: 7 7" in capfd.readouterr().err
    assert seen[0] == "ours"
    assert not Path(seen[1]).exists()


def test_a_check_sees_memory_that_does_not_come_back(
    fake: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed engine that leaves memory behind fails the check that kills."""
    asked = iter(range(1000))

    def less(self: Any) -> int:
        return int(self.left_bytes) - (next(asked) << 24)

    monkeypatch.setattr(SharedDevice, "free_bytes", less)
    with pytest.raises(AssertionError, match="GPU memory is missing 1 s after kill 1"):
        _gpu_kill.engines_killed(fake)


@pytest.mark.timeout(180)
def test_a_check_sees_a_stale_handle(fake: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that goes on with slabs of a dead daemon fails the check that kills daemons."""
    monkeypatch.setattr(Imports, "retire", lambda _self, _epoch: None)
    with pytest.raises(AssertionError, match="a handle of the old daemon was taken"):
        _gpu_kill.daemon_killed(fake)


def test_an_engine_that_ends_by_itself_was_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that never killed anything in the middle of a copy must not pass."""
    start = subprocess.Popen

    def other(_: object, **options: Any) -> Any:
        return start(["sh", "-c", "echo ready; read _; echo copying; exit 3"], **options)

    monkeypatch.setattr(subprocess, "Popen", other)
    with _gpu_kill.Victim("socket", 7) as victim:
        assert victim.hear(30) == ["ready"]
        with pytest.raises(AssertionError, match="engine 7 had ended before it was killed"):
            victim.kill(1.0)


@pytest.mark.timeout(60)
def test_a_part_of_the_bench_that_fails_leaves_the_others(
    fake: Place,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A failure is told under its part's name, and no ratio is made of what is not there."""
    seen: list[str] = []
    partial = tmp_path / "partial"

    def fails(_: Place) -> dict[str, Any]:
        seen.append(partial.read_text(encoding="utf-8"))
        raise RuntimeError("no such luck")

    parts = {"bus": gpu.bus, "host": fails, "first_use": gpu.first_use}
    monkeypatch.setattr(gpu, "PARTS", parts)
    figures = gpu.measure(fake, str(partial))
    assert figures["failed"] == {"host": "RuntimeError: no such luck"}
    assert '"running": "host"' in seen[0]
    assert '"raw_h2d_gbps"' in seen[0]
    assert figures["first_use_ms"] > 0
    assert "load_to_raw" not in figures
    assert "dry run" in partial.read_text(encoding="utf-8")
    capfd.readouterr()


def test_time_on_the_gpu_is_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's part lies before the first event has happened, as the GPU sleeps until then."""
    told: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            told.append("record")

        def synchronize(self) -> None:
            told.append("synchronize")

        def elapsed_time(self, last: Event) -> float:
            assert last is not self
            return 2.5

    class Done:
        state = "done"

        def wait_pages(self) -> bool:
            told.append("wait_pages")
            return True

        def wait(self, _: float) -> bool:
            return True

    def begin() -> Any:
        told.append("begin")
        return Done()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: told.append("sleep"))
    assert gpu.on_stream(begin, 1, lambda: told.append("between")) == 0.0025
    wanted = ["sleep", "record", "begin", "wait_pages", "record", "synchronize", "between"]
    assert told == wanted


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arguments", [8, 9], ids=["cuda 13", "cuda 12"])
def test_pages_are_copied_by_one_call(
    fake: Place, monkeypatch: pytest.MonkeyPatch, arguments: int
) -> None:
    """The batch copy of CUDA 12 and 13 gets every page's addresses."""
    copied: list[int] = []

    def copy(*given: Any) -> tuple[int]:
        if len(given) != arguments:
            raise TypeError
        targets, sources, sizes, count = given[:4]
        assert len(targets) == len(sources) == len(sizes) == count
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        copied.append(count)
        return (0,)

    runtime = types.SimpleNamespace(
        cudaMemcpyAttributes=types.SimpleNamespace,
        cudaMemcpySrcAccessOrder=types.SimpleNamespace(cudaMemcpySrcAccessOrderStream=1),
        cudaMemcpyBatchAsync=copy,
    )
    bindings = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cuda", types.SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    stream = types.SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    shape = fake.shape
    with fake.daemon(gpu=False) as running, fake.engine(running.socket, shape) as engine:
        figures = gpu.by_hand(engine)
    assert figures["memcpy_batch_gbps"] > 0
    assert set(copied) == {2 * shape.layers * shape.tokens // shape.page}


def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide transformers from the bench."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)


def broken_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers be of a release whose model is another."""

    def fails(*_: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(_llama.HfLlama, "forward", fails)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("hide", "note"),
    [
        (no_transformers, "transformers is not installed"),
        (broken_transformers, "TypeError: no such argument"),
    ],
    ids=["none", "broken"],
)
def test_the_first_token_bench_needs_no_transformers(
    fake: Place, monkeypatch: pytest.MonkeyPatch, hide: Any, note: str
) -> None:
    """Where its model cannot be had, a plain one's first token is measured, and that is said."""
    if hide is broken_transformers:
        pytest.importorskip("transformers", reason="transformers is not installed")
    hide(monkeypatch)
    figures = _gpu_ttft.measure(fake)
    assert not figures["failed"]
    assert figures["model"].startswith("plain torch")
    assert note in figures["model_note"]
    assert figures["loaded_bytes_300"] == 256 * 4 * 2 * 2 * 64


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_first_token_bench_sees_wrong_bytes(
    fake: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A prompt whose pages come back wrong has no figures."""
    no_transformers(monkeypatch)
    copy_in = SharedDevice.copy_in

    def wrong(self: Any, target: int, source: int, size_bytes: int, stream: int) -> None:
        copy_in(self, target, source, size_bytes, stream)
        if size_bytes > 4096:
            self.fill(target + 100, 1, 1, stream)

    monkeypatch.setattr(SharedDevice, "copy_in", wrong)
    figures = _gpu_ttft.measure(fake)
    assert set(figures["failed"]) == {"128", "300"}
    assert "other bytes than were stored" in figures["failed"]["300"]
    assert "speedup_300" not in figures
    capfd.readouterr()


@pytest.mark.slow
def test_the_plain_model_computes_what_transformers_does() -> None:
    """With the same weights both give the same logits, whole and behind a cache."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    shape = _gpu.Shape(layers=2, heads=2, dim=16)
    one = _llama.HfLlama(shape, "cpu", 64, 96)
    two = _llama.PlainLlama(shape, "cpu", 64, 96)
    weights = dict(one._model.named_parameters())
    two._embedding = weights["model.embed_tokens.weight"]
    two._head, two._norm = weights["lm_head.weight"], weights["model.norm.weight"]
    names = {
        "before": "input_layernorm",
        "after": "post_attention_layernorm",
        **{letter: f"self_attn.{letter}_proj" for letter in "qkvo"},
        **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    for index, layer in enumerate(two._layers):
        for own, theirs in names.items():
            assert layer[own].shape == weights[f"model.layers.{index}.{theirs}.weight"].shape
            layer[own] = weights[f"model.layers.{index}.{theirs}.weight"]
    tokens = torch.randint(
        0, _llama.VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(1)
    )
    logits = []
    for model in (one, two):
        whole = model.forward(tokens, model.cache())
        cache = model.cache()
        model.forward(tokens[:, :24], cache)
        behind = model.forward(tokens[:, 24:], model.cache(model.layers(cache)))
        assert (whole - behind).abs().max() < 0.03 * whole.abs().max()
        logits.append(whole)
    assert (logits[0] - logits[1]).abs().max() < 0.03 * logits[0].abs().max()
