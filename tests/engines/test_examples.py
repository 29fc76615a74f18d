"""The examples run, on the CPU, as their own head says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(daemon: Any, name: str, *arguments: str) -> str:
    """Run an example against a daemon; its output."""
    path = ROOT / "examples" / name
    done = subprocess.run(
        [sys.executable, path, "--socket", daemon.socket, *arguments],
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
