"""The command line: options, errors as one line, exit codes, and that `kvd stat` stays light."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import types
from typing import TYPE_CHECKING

import pytest

from kvd import __version__, cli, config
from kvd.commands import COMMANDS
from kvd.errors import StartError
from kvd.statpage import StatPage
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of this host plays a part."""
    monkeypatch.delenv("KVD_CONFIG", raising=False)
    monkeypatch.setattr(config, "SYSTEM_FILE", "/nowhere/kvd.toml")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[str]:
    """The socket of a daemon whose page was just written."""
    socket = str(tmp_path / "kvd.sock")
    made = StatPage.create(stat_page_name(socket))
    made.write({"version": "9.9.9", "sessions": [{"id": 1}] * 64}, time.monotonic_ns() + 60 * 10**9)
    yield socket
    made.close()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> list[config.Config]:
    """Stands in for the daemon: remembers what it was told."""
    told: list[config.Config] = []

    def run(given: config.Config) -> int:
        told.append(given)
        return 5

    module = types.ModuleType("kvd.daemon")
    module.run = run  # type: ignore[attr-defined]
    _replace(monkeypatch, "kvd.daemon", module)
    return told


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, module: types.ModuleType) -> None:
    package, _, last = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, module)
    if package in sys.modules:
        monkeypatch.setattr(sys.modules[package], last, module, raising=False)


@pytest.mark.parametrize(
    "command",
    [[], *([name] for name in COMMANDS)],
    ids=lambda c: " ".join(c) or "kvd",
)
def test_help_has_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every command's help has an example, its exit codes, and fits a terminal."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "example" in out
    assert "exit code" in out
    assert f"kvd {' '.join(command)}".strip() in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_other_commands_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`replay` and `check` reach their modules, and their errors are a line like any other."""
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}'
    trace.write_text(f"{row}\n" * 3)
    assert cli.main(["replay", str(trace), "--capacity", "9"]) == 0
    assert "lifetable" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path / "no"), "--capacity", "9"]) == 2
    assert cli.main(["check", str(tmp_path)]) == 2
    assert "there is no NVMe store in" in capsys.readouterr().err


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose libraries are not installed says what to install; a bug stays a bug."""

    def lack(name: str) -> object:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(importlib, "import_module", lack)
    missing = "lmdb"
    assert cli.main(["check", "/tmp"]) == 2
    assert "needs lmdb, which is not installed: pip install" in capsys.readouterr().err
    missing = "kvd.misspelt"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["check", "/tmp"])


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["stat", "--no"], ["stat", "--watch", "soon"], ["stat", "--watch", "0"]],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option is exit code 2 and a line that says so."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Both spellings print the version."""
    assert cli.main(["version"]) == 0
    assert f"kvd {__version__} (protocol 1)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert f"kvd {__version__}" in capsys.readouterr().out


def test_serve_passes_the_configuration_on(daemon: list[config.Config], tmp_path: Path) -> None:
    """Options arrive over the file's values, and the daemon's status is the exit code."""
    file = tmp_path / "kvd.toml"
    file.write_text('socket = "/file"\nstate_dir = "/file"\n[limits]\ndrain_s = 1\n')
    options = ["--config", str(file), "--socket", "/option", "--host-bytes", "8MiB"]
    assert cli.main(["serve", *options, "--state-dir", "/state"]) == 5
    (told,) = daemon
    assert (told.socket, told.state_dir) == ("/option", "/state")
    assert (told.host.size_bytes, told.limits.drain_s) == (8 << 20, 1.0)


def test_check_prints_and_does_not_start(
    daemon: list[config.Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--check prints a configuration that loads as the same, and starts nothing."""
    options = ["--socket", str(tmp_path / "s"), "--host-bytes", "8MiB"]
    assert cli.main(["serve", "--check", *options]) == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    overrides = {"socket": options[1], "host.bytes": "8MiB"}
    assert config.load(str(file), {}) == config.load(None, overrides)
    assert daemon == []


def test_user_errors_are_one_line(
    daemon: list[config.Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong configuration or host is a line on stderr and exit code 2, never a traceback."""
    assert cli.main(["serve", "--host-bytes", "8 apples"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvd: error: --host-bytes: ")
    assert err.count("\n") == 1

    def refuse(_: object) -> int:
        raise StartError("another daemon is here; stop it first")

    monkeypatch.setattr(sys.modules["kvd.daemon"], "run", refuse)
    assert cli.main(["serve", "--host-bytes", "8MiB", "--socket", "/tmp/s"]) == 2
    assert capsys.readouterr().err == "kvd: error: another daemon is here; stop it first\n"


def test_bugs_keep_their_traceback(
    daemon: list[config.Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not a user's error is not hidden."""

    def fail(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["kvd.daemon"], "run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["serve", "--host-bytes", "8MiB", "--socket", "/tmp/s"])


def test_demo_gets_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's module adds its options and runs; no other command imports it."""
    module = types.ModuleType("kvd.demo.main")
    seen: list[bool] = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args.fast)
        return 4

    module.add_arguments = lambda parser: parser.add_argument("--fast", action="store_true")  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    module.EPILOG = "exit codes: 4"  # type: ignore[attr-defined]
    __import__("kvd.demo")
    _replace(monkeypatch, "kvd.demo.main", module)
    assert cli.main(["demo", "--fast"]) == 4
    assert seen == [True]
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    out = capsys.readouterr().out
    assert "--fast" in out
    assert "exit codes: 4" in out


def test_stat_reads_the_named_daemon(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--socket, or else KVD_SOCKET, names the daemon."""
    assert cli.main(["stat", "--socket", page]) == 0
    assert "kvd 9.9.9" in capsys.readouterr().out
    monkeypatch.setenv("KVD_SOCKET", page)
    assert cli.main(["stat", "--json"]) == 0
    assert '"version": "9.9.9"' in capsys.readouterr().out
    assert cli.main(["stat", "--socket", f"{page}.other"]) == 1
    assert "no daemon here" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- processes


def test_broken_pipe_is_quiet(page: str) -> None:
    """`kvd stat | head -1` ends without a word on stderr."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with subprocess.Popen(
        [sys.executable, "-m", "kvd", "stat", "--watch", "0.05", "--socket", page],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write_end)
        _, err = process.communicate(timeout=50)
    assert err == ""
    assert process.returncode == 141


def test_interrupted_watch_is_quiet(page: str) -> None:
    """Ctrl-C ends --watch with code 0 and nothing on stderr."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvd", "stat", "--watch", "30", "--json", "--socket", page],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "9.9.9" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")


def test_optimised_python_is_refused(tmp_path: Path) -> None:
    """A daemon whose assertions are switched off does not start."""
    done = subprocess.run(
        [sys.executable, "-O", "-m", "kvd", "serve", "--host-bytes=8MiB", f"--socket={tmp_path}/s"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert "without -O" in done.stderr


def test_stat_stays_light(page: str) -> None:
    """`kvd stat` imports nothing that takes long: it must answer when the host is in trouble."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from kvd.cli import main; main(sys.argv[1:]); print(*sys.modules)",
            *("stat", "--socket", page),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kvd.statview" in loaded
    heavy = {"asyncio", "numpy", "torch", "rich", "json", "tomllib", "kvd.config", "kvd.daemon"}
    heavy |= {"kvd.check", "kvd.replay_cli", "kvd.demo", "lmdb"}
    assert not loaded.intersection(heavy)
