"""`kvd doctor` about the GPU that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd import config, doctor
from kvd.doctor import gpu
from kvd.doctor.base import Finding, Host, Level

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)


def finding(tmp_path: Path, name: str, table: str) -> Finding:
    """Run a check on a host with this [gpu] table."""
    file = tmp_path / "kvd.toml"
    file.write_text(f'socket = "{tmp_path}/s"\n[host]\nbytes = "64MiB"\n[gpu]\n{table}')
    host = Host(root=tmp_path, config=config.load(str(file), {}))
    (result,) = doctor.examine(host, [doctor.checks()[name]], 150)
    return result.finding


@pytest.mark.parametrize("name", ["gpu-driver", "gpu-tier"])
def test_without_the_tier_nothing_is_needed(tmp_path: Path, name: str) -> None:
    """A host without a GPU, and without [gpu] bytes, is fine."""
    assert finding(tmp_path, name, "").level is Level.OK


def test_a_tier_without_a_driver_is_said(tmp_path: Path) -> None:
    """It fails, and names the mend; with a driver and a device it is fine."""
    found = finding(tmp_path, "gpu-driver", 'bytes = "1GiB"\n')
    assert found.level is Level.FAIL
    assert "no NVIDIA driver" in found.text
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Module 580.1\nGCC")
    assert "/dev/nvidia0" in finding(tmp_path, "gpu-driver", 'bytes = "1GiB"\n').text
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    found = finding(tmp_path, "gpu-driver", 'bytes = "1GiB"\n')
    assert (found.level, "nvidia-uvm" in found.mend) == (Level.FAIL, True)
    assert finding(tmp_path, "gpu-driver", "").level is Level.OK
    (tmp_path / "dev/nvidia-uvm").touch()
    found = finding(tmp_path, "gpu-driver", 'bytes = "1GiB"\n')
    assert (found.level, found.text[:6]) == (Level.OK, "1 GPUs")


def test_a_device_that_does_not_open_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs in its own process, and its reason is shown."""
    monkeypatch.setattr(gpu, "PROBE_S", 120.0)
    found = finding(tmp_path, "gpu-tier", 'bytes = "1GiB"\ndevice = 63\n')
    assert found.level is Level.FAIL
    assert found.text.startswith("GPU 63: ")
    assert "kvd[cuda13]" in found.mend


@pytest.mark.parametrize(("users", "level"), [("[7]", Level.OK), ("[7, 8]", Level.WARN)])
def test_engines_that_cannot_map_the_tier_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str, level: Level
) -> None:
    """The driver opens handles for processes of one user."""
    monkeypatch.setattr(gpu, "_PROBE", "print('ok', 2 << 30)")
    monkeypatch.setattr("os.geteuid", lambda: 7)
    found = finding(tmp_path, "gpu-tier", f'bytes = "1GiB"\n[tenants.a]\nuids = {users}\n')
    assert found.level is level, found
