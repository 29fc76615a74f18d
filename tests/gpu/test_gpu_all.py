"""The one script for a GPU host, as a dry run and with parts that fail, hang and are cut off."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import _gpu_all, _gpu_machine, _gpu_targets, gpu_check
from bench._gpu_all import Part

ROOT = Path(__file__).resolve().parents[2]
STATED: dict[str, Any] = {"missing": {}, "warnings": [], "machine": {"gpu": "one of ours"}}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    """On the fake GPU the script ends with 0, and nothing in it looks like a measurement."""
    pytest.importorskip("torch", reason="torch is not installed")
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(ROOT / "bench/gpu_all.sh"), str(out)],
        env={**os.environ, "KVD_BENCH_FAKE_GPU": "1", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=230,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert not (out / "gpu.json").exists()
    found = json.loads((out / "gpu-dry-run.json").read_text(encoding="utf-8"))
    assert {name: part["ended"] for name, part in found["parts"].items()} == {
        "check": "ok",
        "bench": "ok",
        "ttft": "ok",
    }
    for part in ("check", "bench", "ttft"):
        assert part not in found
        assert "no figure here is a measurement" in found[f"{part}_dry_run"]["dry_run"]
    outcomes = {name: found["check_dry_run"][name]["outcome"] for name in gpu_check.CHECKS}
    assert set(outcomes.values()) == {"ok"}, outcomes
    judged = {row["figure"] for row in found["targets"] if row["part"] == "check"}
    assert judged == set(outcomes)
    complete(found["bench_dry_run"], found["ttft_dry_run"])
    assert found["machine"]["python"] == platform.python_version()
    assert {row["verdict"] for row in found["targets"]} == {"dry run", "not measured"}
    assert "DRY RUN on a fake GPU" in done.stdout
    assert found["seconds"] < _gpu_all.BUDGET_S
    assert {path.name for path in out.iterdir()} == {"gpu-dry-run.json", "gpu.log"}


def complete(bench: dict[str, Any], ttft: dict[str, Any]) -> None:
    """Every figure is there, whatever it is worth."""
    assert bench["failed"] == ttft["failed"] == {}
    rates = (
        "raw_h2d_gbps raw_d2h_gbps load_gbps store_gbps load_fp8_gbps store_fp8_gbps"
        " gpu_tier_gbps index_copy_gbps register_gib_s first_use_ms load_to_raw store_to_raw"
        " load_fp8_to_raw store_fp8_to_raw"
    )
    assert all(bench[name] > 0 for name in rates.split())
    assert {"memcpy_batch_gbps", "gpu_tier_device_gbps"} <= set(bench)  # both need CUDA
    assert bench["load_error"] == 0
    assert bench["gpu_tier_share"] == 1
    assert bench["pinned_bytes"] == bench["pinned_fp8_bytes"] == 8 << 20
    assert bench["pinned_note"] == ttft["pinned_note_300"] == ""
    times = ("cold_ms", "warm_ms", "suffix_ms", "limit_ms", "speedup", "warm_to_limit")
    assert all(ttft[f"{name}_{length}"] > 0 for name in times for length in (128, 300))
    assert ttft["model"]


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the machine be one with a GPU."""
    told: dict[str, Any] = json.loads(json.dumps(STATED))
    monkeypatch.setattr(_gpu_all, "state", lambda _environment: told)
    return told


def python(name: str, code: str, limit_s: float = 20.0) -> Part:
    """Make a part of a few lines; `partial` is the file for what there is so far."""
    head = "import json, os, sys, time, subprocess, signal; partial = sys.argv[-1]\n"
    return Part(name, [sys.executable, "-c", head + code], limit_s)


def read(out: Path) -> dict[str, Any]:
    """Read the result."""
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    return found


GOOD = """print("something"); print(json.dumps({"load_to_raw": 0.97, "gpu_tier_gbps": 10.0}))"""
BAD = """print(json.dumps({"kernels": {"outcome": "FAILED"}})); sys.exit(1)"""
CRASHED = """
open(partial, "w").write(json.dumps({"speedup_32768": 14.0}))
print("nonsense"); os.kill(os.getpid(), signal.SIGSEGV)
"""
HUNG = """
open(partial, "w").write(json.dumps({"kernels": {"outcome": "ok"}, "running": "round_trip"}))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
more = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("child", more.pid, file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_part_that_fails_or_crashes_leaves_the_others(
    tmp_path: Path, stated: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part's result is there, a crashed one's as far as it came; targets are judged."""
    chosen = [python("check", BAD), python("ttft", CRASHED), python("bench", GOOD)]
    found, status = _gpu_all.everything(tmp_path, chosen)
    assert status == 1
    assert found == read(tmp_path)
    ended = {name: (part["ended"], part["whole"]) for name, part in found["parts"].items()}
    wanted = {"check": ("failed", True), "ttft": ("failed", False), "bench": ("ok", True)}
    assert ended == wanted
    verdicts = {row["figure"]: row["verdict"] for row in found["targets"]}
    assert verdicts["kernels"] == "MISSED"
    assert verdicts["round_trip"] == "not measured"
    assert verdicts["load_to_raw"] == verdicts["speedup_32768"] == verdicts["seconds"] == "met"
    assert verdicts["gpu_tier_gbps"] == "MISSED"
    assert found["machine"]["gpu"] == "one of ours"
    assert "== ttft: failed" in capsys.readouterr().out


def grandchild(out: Path) -> int | None:
    """Give the process that a part which hangs has started, once it has told."""
    log = out / "gpu.log"
    found = (
        re.search(r"^child (\d+)$", log.read_text(encoding="utf-8"), re.MULTILINE)
        if log.exists()
        else None
    )
    return int(found[1]) if found else None


def await_gone(pid: int) -> None:
    """Wait for a killed process to have ended; a zombie has."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return
        if state[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("a process was left behind")


def test_a_part_that_hangs_is_ended_with_all_it_started(
    tmp_path: Path, stated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had found is kept, and the next part runs."""
    monkeypatch.setattr(_gpu_all, "GRACE_S", 0.3)
    chosen = [python("check", HUNG, 2.0), python("bench", GOOD)]
    start = time.monotonic()
    found, status = _gpu_all.everything(tmp_path, chosen)
    assert time.monotonic() - start < 15
    assert status == 1
    assert found["parts"]["check"]["ended"] == "out of time"
    assert found["check"]["running"] == "round_trip"
    assert found["parts"]["check"]["log"][1].startswith("child ")
    assert found["parts"]["bench"]["ended"] == "ok"
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.json", "gpu.log"}
    child = grandchild(tmp_path)
    assert child is not None
    await_gone(child)


def test_parts_share_one_budget(tmp_path: Path, stated: dict[str, Any]) -> None:
    """A part gets what is left, and none where nothing is: all together stay below the bound."""
    chosen = [python("check", HUNG, 60.0), python("bench", GOOD)]
    found, status = _gpu_all.everything(tmp_path, chosen, budget_s=2.5)
    assert status == 1
    assert found["parts"]["check"]["limit_s"] <= 2.5
    assert found["parts"]["bench"] == {"ended": "no time left"}
    longest = _gpu_all.BUDGET_S + 2 * _gpu_all.GRACE_S
    assert longest < _gpu_targets.TOTAL_S


@pytest.mark.timeout(60)
def test_a_run_that_is_cut_off_leaves_what_there_was(tmp_path: Path) -> None:
    """SIGTERM, as from a time limit around the script: gpu.json has the parts until then."""
    code = f"""
import signal, sys
from pathlib import Path
from bench import _gpu_all
from tests.gpu import test_gpu_all as own
signal.signal(signal.SIGTERM, signal.default_int_handler)
_gpu_all.state = lambda environment: own.STATED
chosen = [own.python("bench", own.GOOD), own.python("check", own.HUNG, 60.0)]
sys.exit(_gpu_all.everything(Path({str(tmp_path)!r}), chosen)[1])
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as run:
        deadline = time.monotonic() + 30
        while (child := grandchild(tmp_path)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert read(tmp_path)["parts"]["bench"]["ended"] == "ok"  # what a SIGKILL would leave
        run.send_signal(signal.SIGTERM)
        assert run.wait(20) == 1
    found = read(tmp_path)
    assert found["not_run"] == "cut off in check"
    assert found["bench"]["load_to_raw"] == 0.97
    assert found["check"]["running"] == "round_trip"
    await_gone(child)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"missing": {"posix_ipc": "ModuleNotFoundError: no"}}, "lacks posix_ipc"),
        ({"machine": {"cuda_devices": 0}}, "no CUDA device here"),
    ],
)
def test_without_what_is_needed_nothing_runs(
    tmp_path: Path, stated: dict[str, Any], told: dict[str, Any], reason: str
) -> None:
    """The result says why, and the status is 3."""
    stated |= told
    found, status = _gpu_all.everything(tmp_path, [python("bench", GOOD)])
    assert status == 3
    assert reason in found["not_run"]
    assert read(tmp_path)["parts"] == {}
    assert {row["verdict"] for row in found["targets"]} == {"not measured"}


def test_a_machine_that_cannot_be_stated_is_still_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement that hangs costs its time, and no more."""
    monkeypatch.setattr(_gpu_all, "STATE_S", 0.0)
    found, status = _gpu_all.everything(tmp_path, [python("bench", GOOD)])
    assert status == 0
    assert "cannot be stated" in found["warnings"][0]


TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
MACHINE = platform.machine()


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        (f"a-1-{TAG}-{TAG}-manylinux_2_17_{MACHINE}.manylinux2014_{MACHINE}.whl", True),
        (f"a-1-{TAG}-{TAG}-musllinux_1_2_{MACHINE}.whl", False),
        (f"a-1-{TAG}-{TAG}-macosx_11_0_{MACHINE}.whl", False),
        (f"a-1-{TAG}-{TAG}-manylinux_2_17_riscv64.whl", False),
        (f"a-1-cp39-abi3-manylinux_2_28_{MACHINE}.whl", True),
        (f"a-1-cp399-abi3-manylinux_2_28_{MACHINE}.whl", False),
        (f"a-1-cp310-cp310-manylinux_2_28_{MACHINE}.whl", False),
        (f"a-1-1build-{TAG}-{TAG}-linux_{MACHINE}.whl", True),
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py2-none-any.whl", False),
    ],
)
def test_wheels_that_fit(wheel: str, fits: bool) -> None:  # noqa: FBT001 - a table's column
    """Only wheels for this Python, C library and machine are unpacked."""
    assert _gpu_all.fits(wheel) is fits


def test_wheels_are_unpacked_without_pip(tmp_path: Path) -> None:
    """Modules lie in the folder, also those that a wheel keeps in its data; others are named."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name, inner in (
        ("one-1-py3-none-any.whl", "one.py"),
        ("two-1-py3-none-any.whl", "two-1.data/platlib/two/__init__.py"),
        ("three-1-py2-none-any.whl", "three.py"),
    ):
        with zipfile.ZipFile(wheels / name, "w") as packed:
            packed.writestr(inner, "x = 1\n")
    whole = (wheels / "one-1-py3-none-any.whl").read_bytes()
    (wheels / "four-1-py3-none-any.whl").write_bytes(whole[:40])
    left = ["four-1-py3-none-any.whl", "three-1-py2-none-any.whl"]
    assert _gpu_all.unpack(wheels, site) == left
    assert (site / "one.py").exists()
    assert (site / "two/__init__.py").exists()
    assert not (site / "three.py").exists()
    assert _gpu_all.unpack(tmp_path / "none", site) == []


def test_what_was_on_the_path_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that a host has in PYTHONPATH are seen by the parts, and caches are our own."""
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    found = _gpu_all.surroundings(tmp_path)
    assert "/somewhere/else" in found["PYTHONPATH"].split(":")
    assert found["CUPY_CACHE_DIR"].startswith(str(tmp_path))


def test_other_users_may_look_into_the_folder_of_the_parts(
    tmp_path: Path, stated: dict[str, Any]
) -> None:
    """Wheels lie there, and a check begins a process of another user."""
    code = """print(json.dumps({"mode": os.stat(os.environ["TMPDIR"]).st_mode & 0o777}))"""
    found, _ = _gpu_all.everything(tmp_path, [python("bench", code)])
    assert found["bench"]["mode"] == 0o755


def test_a_folder_that_cannot_be_emptied_keeps_no_result_back(
    tmp_path: Path, stated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the driver holds may write there while it is removed."""
    rmdir = os.rmdir

    def refuse(path: str, **named: Any) -> None:
        rmdir(path, **named)
        if "kvd-all-" in str(path):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    monkeypatch.setattr(os, "rmdir", refuse)
    assert _gpu_all.everything(tmp_path, [python("bench", GOOD)])[1] == 0


def test_the_commit_is_known_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with no git reads it from the files; without those it is unknown."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(_gpu_machine, "ROOT", tmp_path)
    assert _gpu_machine.commit() == "unknown"
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/one\n")
    (git / "packed-refs").write_text("# pack\n0123456789abcdef refs/heads/one\n")
    assert _gpu_machine.commit() == "012345678"
    (git / "refs/heads/one").write_text("fedcba9876543210\n")
    assert _gpu_machine.commit() == "fedcba987"
    (git / "HEAD").write_text("aaaabbbbccccdddd\n")
    assert _gpu_machine.commit() == "aaaabbbbc"


def test_warnings_name_what_spoils_a_run() -> None:
    """One GPU for several processes, whole and free, and enough memory."""
    good = {"gpu_compute_mode": "Default", "gpu_free_gib": 139.0, "memavailable_gib": 124.0}
    assert _gpu_machine.warnings(good) == []
    bad = {
        "gpu_compute_mode": "Exclusive_Process",
        "gpu_mig_mode_current": "Enabled",
        "gpu_free_gib": 20.0,
        "memavailable_gib": 8.0,
        "mps": True,
    }
    assert len(_gpu_machine.warnings(bad)) == 5


def test_nvidia_smi_may_know_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one that refuses a field is asked for fewer; without one the driver's file tells."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in *mig*) exit 2;; esac\n'
        "echo 'NVIDIA H200, 580.1, 143771 MiB, 0 MiB, Default'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = _gpu_machine._nvidia()
    assert found["gpu_name"] == "NVIDIA H200"
    assert found["gpu_compute_mode"] == "Default"
    monkeypatch.setattr(_gpu_machine, "NVIDIA_S", 0.3)
    tool.write_text("#!/bin/sh\necho $$ >>" + str(tmp_path / "asked") + "\nexec sleep 60\n")
    monkeypatch.setattr(_gpu_machine, "DRIVER_FILE", tmp_path / "none")
    assert _gpu_machine._nvidia() == {}
    assert len((tmp_path / "asked").read_text(encoding="utf-8").split()) == 1
    tool.unlink()
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 580.1\nmore\n")
    monkeypatch.setattr(_gpu_machine, "DRIVER_FILE", driver)
    assert _gpu_machine._nvidia() == {"gpu_driver_version": "NVRM version: 580.1"}
