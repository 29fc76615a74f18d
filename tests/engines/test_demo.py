"""What the demo says of its runs; the runs themselves take a minute and a model (`kvd demo`)."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvd import statpage
from kvd.demo import main, model, processes
from kvd.demo.engine import Result
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLD = Result(
    connected=True,
    prompt_tokens=2060,
    first_token_ms=4000.0,
    total_ms=5000.0,
    tokens_found=0,
    tokens_reused=0,
    bytes_reused=0,
    lossy=False,
    load_ms=1.0,
    load_gb_s=0.0,
    memcpy_gb_s=0.0,
    tokens_stored=2048,
    bytes_stored=100_000_000,
    store_ms=30.0,
    new_tokens=[1, 2, 3],
    text="In October 1871.",
    note="",
)
WARM = COLD._replace(
    first_token_ms=100.0, tokens_reused=2048, bytes_reused=100_000_000, bytes_stored=0
)
DISK = WARM._replace(first_token_ms=300.0, lossy=True, load_ms=250.0)
WITHOUT = COLD._replace(first_token_ms=3000.0, tokens_stored=0, bytes_stored=0)
STATS: dict[str, Any] = {"nvme": {"live_bytes": 25_000_000}, "counters": {"promotions": 32}}


def report(**changes: Any) -> main.Report:
    """A good run, but for `changes`."""
    plain = {"cold": COLD, "warm": WARM, "disk": DISK, "without": WITHOUT}
    return main.Report(**{**plain, "stat": "kvd 0.1.0", "stats": STATS, **changes})


def test_a_good_run_is_told_with_its_figures() -> None:
    """The page has both speed-ups over the faster computing run, sizes, and the answer once."""
    good = report()
    assert good.failures == []
    page = main._page(good)
    for part in (
        "First token 30.0 times sooner than computed",
        "First token 10.0 times sooner than computed",
        "100.0 MB in 250 ms, from 25.0 MB on disk, 4.0 times smaller (FP8 and zstd).",
        "C worked from a lossy copy, which may change a token; its 3 tokens are the same as well.",
    ):
        assert part in page
    assert page.count("In October 1871.") == 1
    assert "FAILED" not in page
    assert max(map(len, page.splitlines())) <= 100


def test_another_answer_from_a_lossy_copy_is_reported_not_failed() -> None:
    """C may differ: the page says from where on, and shows its answer; the demo succeeds."""
    other = report(disk=DISK._replace(new_tokens=[1, 9, 3], text="In May 1871."))
    assert (other.failures, other.agreement) == ([], 1)
    page = main._page(other)
    assert "the first 1 of 3 tokens agree:" in page
    assert "> In May 1871." in page
    shorter = report(disk=DISK._replace(new_tokens=[1, 2]))
    assert shorter.agreement == 2
    assert "the first 2 of 3 tokens agree" in main._page(shorter)


def test_a_copy_that_is_exact_is_not_called_lossy() -> None:
    """Where the daemon cannot write FP8, C's copy is exact, and the page says so."""
    page = main._page(report(disk=DISK._replace(lossy=False)))
    assert "C worked from a copy from disk; its 3 tokens are the same" in page
    assert "(no FP8 here)" in page


def test_each_failure_is_named() -> None:
    """A wrong kind of copy, one from elsewhere, another answer: each in words."""
    cases: dict[str, dict[str, Any]] = {
        "engine B was to get an exact copy": {"warm": WARM._replace(lossy=True)},
        "engine C was to load from NVMe": {"stats": {**STATS, "counters": {"promotions": 0}}},
        "the answers of A, B": {"warm": WARM._replace(new_tokens=[1, 2, 4], text="Never.")},
    }
    for words, changes in cases.items():
        bad = report(**changes)
        assert len(bad.failures) == 1
        assert bad.failures[0].startswith(words)
        assert f"FAILED: {bad.failures[0]}" in main._page(bad)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([COLD._replace(tokens_stored=0, note="full")], "engine A stored nothing: full"),
        ([COLD, WARM._replace(tokens_reused=0)], "engine B reused nothing: no reason given"),
        ([COLD, WARM, DISK._replace(tokens_reused=0, note="slow")], "engine C reused nothing: sl"),
    ],
)
def test_a_demo_that_shows_nothing_ends_at_once(
    runs: list[Result],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing stored or nothing reused: status 1 and the reason, without the runs after it."""
    left = list(runs)

    @contextlib.contextmanager
    def daemon(folder: Path, **_: str) -> Iterator[Path]:
        yield folder

    monkeypatch.setattr(processes, "daemon", daemon)
    monkeypatch.setattr(processes, "engine", lambda *_: left.pop(0))
    monkeypatch.setattr(processes, "prepare", lambda _: None)
    monkeypatch.setattr(model, "gguf_folder", lambda: None)
    monkeypatch.setattr(model, "prepared_folder", Path.cwd)
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    assert main.run(parser.parse_args([])) == 1
    assert left == []
    assert words in capsys.readouterr().err


def test_a_missing_model_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the model's package the demo ends with 2 and says what to run."""
    monkeypatch.setattr(model, "NEEDED", ("kvd_no_such_package",))
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    assert main.run(parser.parse_args([])) == 2
    assert "kvd_no_such_package, not installed here: run `make setup`" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- processes


def daemon_pid(path: Path) -> int:
    """The process behind a socket."""
    return statpage.read(stat_page_name(str(path))).pid


def use_a_daemon(folder: Path, use: Callable[[Path], None], **options: str) -> None:
    """Run a small daemon of the demo's around `use`."""
    with processes.daemon(folder, "64MiB", **options) as path:
        use(path)


@pytest.mark.parametrize("notices", [True, False])
def test_a_daemon_that_dies_is_named(tmp_path: Path, *, notices: bool) -> None:
    """A killed daemon fails the demo with what killed it, whether or not something else did."""

    def kill(path: Path) -> None:
        pid = daemon_pid(path)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        while notices:
            processes.stat(path)  # fails when it is gone, with words of its own

    with pytest.raises(processes.StepFailed, match=r"kvd serve was killed by SIGKILL.*its log"):
        use_a_daemon(tmp_path, kill)


def test_a_daemon_that_cannot_start_is_named(tmp_path: Path) -> None:
    """What the daemon says of itself is in the error."""
    with pytest.raises(processes.StepFailed, match=r"(?s)ended with status 2.*less than four"):
        use_a_daemon(tmp_path, lambda _: None, nvme_bytes="1MiB")


def test_an_interrupt_stays_one(tmp_path: Path) -> None:
    """Ctrl-C in the middle is not turned into a failure, and ends the daemon."""
    pids = []

    def interrupt(path: Path) -> None:
        pids.append(daemon_pid(path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use_a_daemon(tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_this_host_s_configuration_plays_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's daemon never opens the NVMe tier of the host's own."""
    other = tmp_path / "host.toml"
    other.write_text(f'[nvme]\nbytes = "1GiB"\ndirectory = "{tmp_path}/precious"\n')
    monkeypatch.setenv("KVD_CONFIG", str(other))
    with processes.daemon(tmp_path, "64MiB", nvme_bytes="1GiB"):
        assert (tmp_path / "state" / "nvme").is_dir()
    assert not (tmp_path / "precious").exists()


def test_an_engine_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine says last is the error."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(processes.StepFailed, match="the engine ended with status 1"):
        processes.engine([], lambda _: None)
