"""`kvd demo`: two engine processes, one daemon, one prompt computed once.

Engine A computes a prompt of 2,000 tokens, stores it and exits. Engine B, another process, loads
it and answers. Engine A runs again with kvd stopped. All three must answer alike, and B must have
reused something; the exit status says whether it was so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.demo import model, processes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvd.demo.engine import Result

WIDTH: Final = 88
TICK_S: Final = 0.2


class Report(NamedTuple):
    """The three runs and what kvd said of itself before it was stopped."""

    cold: Result
    warm: Result
    without: Result
    stat: str

    @property
    def same_output(self) -> bool:
        """Whether all three engines answered with the same tokens."""
        return self.cold.new_tokens == self.warm.new_tokens == self.without.new_tokens

    @property
    def speedup(self) -> float:
        """Time to first token of the faster computing run over that of the loading one."""
        computed_ms = min(self.cold.first_token_ms, self.without.first_token_ms)
        return computed_ms / self.warm.first_token_ms

    @property
    def failures(self) -> list[str]:
        """What did not hold, in words; empty when the demo succeeded."""
        found = []
        if not self.cold.tokens_stored:
            found.append(f"engine A stored nothing: {self.cold.note or 'no reason given'}")
        if not self.warm.tokens_reused:
            found.append(f"engine B reused nothing: {self.warm.note or 'no reason given'}")
        if not self.same_output:
            found.append("the answers differ")
        return found


class Steps:
    """Shows what is going on, and for how long, on stderr."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._live = sys.stderr.isatty()
        self._title = ""
        self._stage = ""
        self._began = 0.0

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Show one step while the block runs; yield a function that names its stages."""
        self._title, self._stage, self._began = title, "", time.monotonic()
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(done,), daemon=True)
        ticker.start()
        try:
            yield self._set_stage
        finally:
            done.set()
            ticker.join()
            self._line(f"{title}  {time.monotonic() - self._began:.1f} s", end="\n")

    def _set_stage(self, stage: str) -> None:
        self._stage = stage
        if not self._live:
            self._line(f"{self._title}: {stage}", end="\n")

    def _tick(self, done: threading.Event) -> None:
        while self._live and not done.wait(TICK_S):
            self._line(f"{self._title}: {self._stage}  {time.monotonic() - self._began:.0f} s")

    def _line(self, text: str, end: str = "") -> None:
        total = time.monotonic() - self._started
        start = "\r\x1b[K" if self._live else ""
        sys.stderr.write(f"{start}[{total:6.1f} s] {text}{end}")
        sys.stderr.flush()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvd demo`."""
    parser.add_argument(
        "--tokens", type=int, default=0, help="prompt length (default: that of the document)"
    )
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to generate, at most")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the daemon's folder and log")


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if it reused a prefix and all answers are the same, 1 if not, 2 if the model is missing.
    """
    try:
        model.gguf_folder()
    except model.ModelMissing as error:
        print(error, file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="kvd-demo-"))
    try:
        report = _run_engines(args, folder, Steps())
    except processes.StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if args.keep:
            print(f"kept {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(_figures(report), indent=2) if args.json else _page(report))
    return 1 if report.failures else 0


def _run_engines(args: argparse.Namespace, folder: Path, steps: Steps) -> Report:
    options = ["--tokens", str(args.tokens), "--new-tokens", str(args.new_tokens)]
    if not model.prepared_folder().is_dir():
        with steps.step("first run only: preparing the model") as stage:
            processes.prepare(stage)
    with contextlib.ExitStack() as stack:
        with steps.step("kvd serve starts"):
            path = stack.enter_context(processes.daemon(folder))
        options += ["--socket", str(path)]
        with steps.step("engine A computes and stores") as stage:
            cold = processes.engine(options, stage)
        with steps.step("engine B, a new process, loads") as stage:
            warm = processes.engine(options, stage)
        stat = processes.stat(path)
        with steps.step("kvd serve stops"):
            stack.close()
    with steps.step("engine A again, without kvd") as stage:
        without = processes.engine(options, stage)
    return Report(cold, warm, without, stat)


def _figures(report: Report) -> dict[str, object]:
    return {
        "cold": report.cold._asdict(),
        "warm": report.warm._asdict(),
        "without_kvd": report.without._asdict(),
        "speedup": round(report.speedup, 2),
        "same_output": report.same_output,
        "failures": report.failures,
        "stat": report.stat,
    }


def _page(report: Report) -> str:
    """Lay the report out for a person."""
    cold, warm, without = report.cold, report.warm, report.without
    rows = [
        ("", "A: computes", "B: loads", "A: kvd stopped"),
        ("time to first token", *(f"{r.first_token_ms:,.0f} ms" for r in report[:3])),
        ("whole answer", *(f"{r.total_ms:,.0f} ms" for r in report[:3])),
        ("prompt tokens", *(f"{r.prompt_tokens:,}" for r in report[:3])),
        ("  of these reused", *(f"{r.tokens_reused:,}" for r in report[:3])),
        ("  in kvd afterwards", *(f"{r.tokens_stored:,}" for r in report[:3])),
    ]
    table = [f"{a:<24}{b:>16}{c:>16}{d:>18}" for a, b, c, d in rows]
    table.insert(1, "-" * len(table[0]))
    lines = ["", *table, ""]
    if warm.tokens_reused:
        rates = f"{warm.load_gb_s:.2f} GB/s, a plain memcpy {warm.memcpy_gb_s:.2f} GB/s"
        lines += [
            f"The first token came {report.speedup:.1f} times sooner than in the faster run of A.",
            f"Loaded {warm.bytes_reused / 1e6:,.1f} MB of KV in {warm.load_ms:.1f} ms: {rates}.",
            f"Stored {cold.bytes_stored / 1e6:,.1f} MB in {cold.store_ms:.1f} ms.",
            "",
        ]
    if report.same_output:
        lines += ["All three answered the same, token by token:", _quote(cold.text)]
    else:
        named = zip(("A", "B", "A without kvd"), (cold, warm, without), strict=True)
        lines += [f"{name} answered:\n{_quote(result.text)}" for name, result in named]
    lines += ["", "kvd stat, before it was stopped:", textwrap.indent(report.stat, "  ")]
    lines += ["", *(f"FAILED: {failure}" for failure in report.failures)]
    return "\n".join(lines).rstrip()


def _quote(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  > ", subsequent_indent="  > ")
