"""The examples run, on the CPU, as their own head says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench._vllm import PYTHON
from kvd.demo import model
from tests.engines.vllm_kit import needs_vllm

ROOT = Path(__file__).resolve().parent.parent.parent


def run(daemon: Any, name: str, *arguments: str, python: str = sys.executable) -> str:
    """Run an example against a daemon; its output."""
    path = ROOT / "examples" / name
    done = subprocess.run(
        [python, path, "--socket", daemon.socket, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_transformers_generate(daemon: Any) -> None:
    """It loads what it stored, answers the same, and each turn loads the turns before."""
    pytest.importorskip("transformers")
    out = run(daemon, "transformers_generate.py", "--answer-s", "10")
    assert "the same answer: True" in out
    loaded = [int(line.split(" ms")[1].split()[0]) for line in out.splitlines() if " ms" in line]
    assert loaded[:2] == [0, 576], out
    assert loaded[4] > loaded[2] >= 576, out


@pytest.mark.timeout(300)
def test_sglang_hicache(daemon: Any, tmp_path: Path) -> None:
    """Pages come back as they were; a folder's weights are known by content, none are refused."""
    pytest.importorskip("torch")
    out = run(daemon, "sglang_hicache.py")
    assert "stored 32 of 32 pages" in out
    assert "read 32 of 32 pages" in out
    assert "the same bytes: True" in out
    assert '"class_name": "KvdHiCache"' in out
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert f"model {tmp_path.name}, weights" in run(
        daemon, "sglang_hicache.py", "--model", str(tmp_path)
    )


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_offline(make_daemon: Any) -> None:
    """The second engine loads at once what the first one computed, and answers the same."""
    folder = str(model.prepare())
    daemon = make_daemon(host_bytes=256 << 20)
    daemon.start()
    runs = [
        run(daemon, "vllm_offline.py", "--model", folder, python=str(PYTHON)).splitlines()
        for _ in range(2)
    ]
    loaded = [[int(line.split(" tokens, ")[1].split()[0]) for line in lines] for lines in runs]
    assert loaded == [[0, 1024], [1024, 1024]]
    assert runs[0][1].partition(" s: ")[2] == runs[1][1].partition(" s: ")[2]
