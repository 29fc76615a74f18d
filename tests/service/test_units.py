"""The systemd units: what `kvd install-service` writes, and what systemd itself says of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from kvd import config, install_service
from kvd.cli import main

ROOT: Final = Path(__file__).resolve().parents[2]
KVD: Final = str(Path(sys.executable).with_name("kvd"))

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)


@pytest.fixture
def installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Install into a root of its own."""
    assert main(["install-service", "--root", str(tmp_path), "--command", KVD]) == 0
    capsys.readouterr()
    return tmp_path


def test_a_dry_run_shows_everything_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is shown whole, with its place; the root stays empty."""
    assert main(["install-service", "--root", str(tmp_path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for name, place in install_service.PLACES.items():
        assert place in shown
        last = (ROOT / "systemd" / name).read_text().splitlines()[-1]
        assert f"    | {last}" in shown
    assert "systemctl enable --now" in shown
    assert not list(tmp_path.iterdir())


def test_a_second_run_changes_nothing(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Installing again finds everything as it is."""
    assert main(["install-service", "--root", str(installed), "--command", KVD, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {file["action"] for file in told["files"]} == {"same"}
    assert len(told["files"]) == len(install_service.PLACES)
    assert not list(installed.rglob("*.new"))


def test_the_operator_s_configuration_is_kept(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed kvd.toml stays; a changed unit is replaced, since drop-ins are for that."""
    toml, unit = (installed / install_service.PLACES[name] for name in ("kvd.toml", "kvd.service"))
    toml.write_text("# mine\n")
    unit.write_text("# theirs\n")
    assert main(["install-service", "--root", str(installed), "--command", KVD]) == 0
    assert toml.read_text() == "# mine\n"
    assert f"ExecStart={KVD} serve" in unit.read_text()
    assert re.search(r"keep +.*kvd\.toml", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["--command", "kvd"], "absolute path"),
        (["--command", "/opt/my kvd/kvd"], "without spaces"),
        (["--command", "/opt/%h/kvd"], "%"),
        (["--root", "/proc/nowhere"], "another --root"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_a_line(
    arguments: list[str], mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command or root is one line that says what to change, and exit code 2."""
    assert main(["install-service", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert mend in told


@needs_systemd
def test_systemd_finds_no_fault(installed: Path) -> None:
    """`systemd-analyze verify` says nothing about unit and socket."""
    units = [str(installed / install_service.PLACES[n]) for n in ("kvd.service", "kvd.socket")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "kvd" in line]
    assert not said, said
    assert done.returncode == 0, done.stderr


@needs_systemd
def test_the_sandbox_is_tight(installed: Path) -> None:
    """`systemd-analyze security` rates the exposure at most 2.0, GPU devices allowed."""
    unit = installed / install_service.PLACES["kvd.service"]
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-400:]
    assert "DeviceAllow=char-nvidia* rw" in unit.read_text()


def settings(text: str) -> dict[str, str]:
    """Every setting of a unit, the last one where there are several."""
    return dict(re.findall(r"^([A-Z]\w+)=(.*)$", text, re.MULTILINE))


def test_the_files_agree_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit, socket, directories and kvd.toml name the same paths, and times that fit."""
    unit = settings((ROOT / "systemd/kvd.service").read_text())
    sock = settings((ROOT / "systemd/kvd.socket").read_text())
    toml = tomllib.loads((ROOT / "systemd/kvd.toml").read_text())
    assert sock["ListenSequentialPacket"] == toml["socket"]
    assert f"d {Path(toml['socket']).parent} " in (ROOT / "systemd/kvd.tmpfiles").read_text()
    assert toml["state_dir"] == f"/var/lib/{unit['StateDirectory']}"
    assert unit["Environment"] == f"CUPY_CACHE_DIR=%C/{unit['CacheDirectory']}/cupy"
    assert int(sock["SocketMode"], 8) == toml["socket_mode"]
    assert f"u {unit['User']} " in (ROOT / "systemd/kvd.sysusers").read_text()
    from kvd.activation import FDS_MAX
    from kvd.daemon import GIVE_UP_S, TICK_S
    from kvd.health import SILENT_S
    from kvd.keeping import KEEP_S, SLABS_MAX
    from kvd.pulse import TURN_S

    monkeypatch.delenv("KVD_CONFIG", raising=False)
    loaded = config.load(str(ROOT / "systemd/kvd.toml"), {"host.bytes": "64MiB"})
    ends_s = loaded.limits.drain_s + loaded.nvme.flush_s + GIVE_UP_S + KEEP_S
    assert SLABS_MAX < int(unit["FileDescriptorStoreMax"]) < FDS_MAX
    assert float(unit["TimeoutStopSec"].removesuffix("s")) > ends_s
    watchdog_s = float(unit["WatchdogSec"].removesuffix("s"))
    assert watchdog_s > 2 * max(SILENT_S, TURN_S) - 1 + TICK_S, "health is red first"
