"""The checks that a GPU host runs (`bench.gpu_check`): on its GPU, and here on a fake one.

On the fake one they show that the checks themselves work, and see what they are for; they say
nothing about CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from bench import _gpu, _gpu_ttft, gpu, gpu_check
from tests.gpu.shared_device import SharedDevice

if TYPE_CHECKING:
    from kvd_client.cuda.device import Device

TINY = _gpu.Shape(layers=2, heads=2, dim=64, page=16, chunk=64, tokens=256, blocks=64)


@pytest.fixture(scope="module")
def device() -> Device:
    """Open the GPU of this host, or skip."""
    try:
        return _gpu.real_device()
    except _gpu.NotHere as reason:
        pytest.skip(f"GPU tests: {reason}")


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", gpu_check.CHECKS)
def test_on_a_gpu(name: str, device: Device) -> None:
    """On a GPU, what comes back is what was stored, whatever dies meanwhile."""
    gpu_check.CHECKS[name](gpu_check.Place(device))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> gpu_check.Place:
    """Make the fake GPU, and everything small."""
    monkeypatch.setattr(gpu_check, "SMALL", TINY)
    return gpu_check.Place(
        SharedDevice(),
        "cpu",
        main="tests.gpu.gpu_daemon",
        child="tests.gpu.gpu_child",
        kills=2,
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", gpu_check.CHECKS)
def test_the_checks_run_on_the_fake(name: str, fake: gpu_check.Place) -> None:
    """Each check passes where nothing is wrong."""
    gpu_check.CHECKS[name](fake)


@pytest.mark.timeout(180)
def test_a_check_sees_wrong_bytes(fake: gpu_check.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that copies one byte wrongly fails the checks."""
    copy_in = SharedDevice.copy_in

    def wrong(self: Any, target: int, source: int, size_bytes: int, stream: int) -> None:
        copy_in(self, target, source, size_bytes, stream)
        if size_bytes > 4096:
            self.fill(target + 100, 1, 1, stream)

    monkeypatch.setattr(SharedDevice, "copy_in", wrong)
    with pytest.raises(AssertionError):
        gpu_check.kernels(fake)
    with pytest.raises(AssertionError):
        gpu_check.round_trip(fake)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_bench_runs_on_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures come out, whatever they are worth on a fake GPU."""
    monkeypatch.setattr(gpu, "ROUNDS", 1)
    figures = gpu.measure(
        SharedDevice(),
        TINY,
        where="cpu",
        host_bytes=64 << 20,
        gpu_bytes=16 << 20,
        slab_bytes=4 << 20,
        first_use_bytes=32 << 20,
        main="tests.gpu.gpu_daemon",
    )
    wanted = (
        "raw_h2d_gbps raw_d2h_gbps load_gbps store_gbps load_fp8_gbps store_fp8_gbps"
        " gpu_tier_gbps index_copy_gbps register_gib_s first_use_ms load_to_raw store_fp8_to_raw"
    )
    assert all(figures[name] > 0 for name in wanted.split())
    assert figures["memcpy_batch_gbps"] is None
    assert figures["load_error"] == 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_first_token_bench_runs_on_the_fake() -> None:
    """A tiny model's next token is the same cold and warm, and every figure comes out."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    shape = TINY._replace(tokens=512, blocks=96)
    figures = _gpu_ttft.measure(
        SharedDevice(),
        shape,
        (128, 300),
        where="cpu",
        host_bytes=64 << 20,
        main="tests.gpu.gpu_daemon",
        hidden=128,
        inner=256,
    )
    assert figures["loaded_bytes_300"] == 256 * 4 * 2 * 2 * 64
    assert all(figures[f"{name}_128"] > 0 for name in ("cold_ms", "warm_ms", "warm_to_limit"))
