"""`kvd demo`: three engine processes and one daemon, one prompt computed once.

Act 1: engine A computes a prompt of 2,000 tokens, stores it and exits. Act 2: engine B, another
process, loads an exact copy from host memory. Act 3: the daemon is stopped and started again, and
engine C loads what it has on NVMe, in FP8. At the end A runs without kvd.

A, B and A without kvd must answer alike, and B and C must have reused something; the exit status
says whether it was so. C works from a lossy copy: how far it agrees is reported, not required.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd.demo import model, processes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from kvd.demo.engine import Result

WIDTH: Final = 88
TICK_S: Final = 0.2
NVME_BYTES: Final = "2GiB"


class Report(NamedTuple):
    """The four runs, and what kvd said of itself after the third, as text and as numbers."""

    cold: Result
    warm: Result
    disk: Result
    without: Result
    stat: str
    stats: dict[str, Any]

    @property
    def same_output(self) -> bool:
        """Whether A, B and A without kvd answered with the same tokens."""
        return self.cold.new_tokens == self.warm.new_tokens == self.without.new_tokens

    @property
    def agreement(self) -> int:
        """Tokens from the first on in which C's answer is the one computed."""
        pairs = zip(self.cold.new_tokens, self.disk.new_tokens, strict=False)
        differ = (i for i, (computed, loaded) in enumerate(pairs) if computed != loaded)
        return next(differ, min(len(self.cold.new_tokens), len(self.disk.new_tokens)))

    def speedup(self, loading: Result) -> float:
        """Time to first token of the faster computing run over that of a loading one."""
        computed_ms = min(self.cold.first_token_ms, self.without.first_token_ms)
        return computed_ms / loading.first_token_ms

    @property
    def disk_bytes(self) -> int:
        """What the stored prefix takes on NVMe."""
        return int(self.stats["nvme"]["live_bytes"])

    @property
    def stored_bytes(self) -> int:
        """What the engines gave kvd, once."""
        return self.cold.bytes_stored + self.warm.bytes_stored

    @property
    def failures(self) -> list[str]:
        """What did not hold, in words; empty when the demo succeeded."""
        found = []
        if self.warm.lossy:
            found.append("engine B was to get an exact copy, and got a lossy one")
        if not self.stats["counters"]["promotions"]:
            found.append("engine C was to load from NVMe, and nothing was read there")
        if not self.same_output:
            found.append("the answers of A, B and A without kvd differ")
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


EPILOG: Final = """\
examples:
  kvd demo
  kvd demo --json

exit codes:
  0  it worked
  1  it did not; stderr says why
  2  wrong option, or something it needs is missing

It takes a minute on two cores, 1 GiB of memory and some 800 MB of disk, most of it the model,
which is kept in the user's cache folder.
"""


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
        0 if all went as the module says, 1 if not, 2 if the model is missing.
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
    options = ["--tokens", str(args.tokens), "--new-tokens", str(args.new_tokens), "--lossy"]
    options += ["--socket", str(folder / "kvd.sock")]

    def engine(title: str) -> Result:
        with steps.step(title) as stage:
            return processes.engine(options, stage)

    if not model.prepared_folder().is_dir():
        with steps.step("first run only: preparing the model") as stage:
            processes.prepare(stage)
    with contextlib.ExitStack() as stack:

        def serve() -> Path:
            return stack.enter_context(processes.daemon(folder, nvme_bytes=NVME_BYTES))

        with steps.step("kvd serve starts"):
            serve()
        cold = engine("engine A computes and stores")
        _need(cold.tokens_stored, "engine A stored nothing", cold)
        warm = engine("engine B, a new process, loads from memory")
        _need(warm.tokens_reused, "engine B reused nothing", warm)
        with steps.step("kvd serve stops and starts again"):
            stack.close()
            path = serve()
        disk = engine("engine C, a new process, loads from NVMe")
        _need(disk.tokens_reused, "engine C reused nothing", disk)
        stat, stats = processes.stat(path), json.loads(processes.stat(path, "--json"))
        with steps.step("kvd serve stops"):
            stack.close()
    without = engine("engine A again, without kvd")
    return Report(cold, warm, disk, without, stat, stats)


def _need(tokens: int, what: str, result: Result) -> None:
    """Go on only if there are some; raise StepFailed otherwise."""
    if not tokens:
        raise processes.StepFailed(f"{what}: {result.note or 'no reason given'}")


def _figures(report: Report) -> dict[str, object]:
    return {
        "cold": report.cold._asdict(),
        "warm": report.warm._asdict(),
        "nvme": report.disk._asdict(),
        "without_kvd": report.without._asdict(),
        "speedup": round(report.speedup(report.warm), 2),
        "speedup_nvme": round(report.speedup(report.disk), 2),
        "same_output": report.same_output,
        "nvme_agreement_tokens": report.agreement,
        "stored_bytes": report.stored_bytes,
        "nvme_bytes": report.disk_bytes,
        "failures": report.failures,
        "stats": report.stats,
    }


def _page(report: Report) -> str:
    """Lay the report out for a person."""
    runs = (report.cold, report.warm, report.disk, report.without)
    copies = ["lossy" if run.lossy else "exact" if run.tokens_reused else "-" for run in runs]
    rows = [
        ("", "A: computes", "B: memory", "C: NVMe", "A: no kvd"),
        ("time to first token", *(f"{run.first_token_ms:,.0f} ms" for run in runs)),
        ("whole answer", *(f"{run.total_ms:,.0f} ms" for run in runs)),
        ("prompt tokens", *(f"{run.prompt_tokens:,}" for run in runs)),
        ("  of these loaded", *(f"{run.tokens_reused:,}" for run in runs)),
        ("  from a copy that is", *copies),
    ]
    table = [f"{row[0]:<24}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows]
    table.insert(1, "-" * len(table[0]))
    lines = ["", *table, "", *_loads(report), "", *_answers(report)]
    lines += ["", "kvd stat, after C:", textwrap.indent(report.stat, "  ")]
    lines += ["", *(f"FAILED: {failure}" for failure in report.failures)]
    return "\n".join(lines).rstrip()


def _loads(report: Report) -> Iterator[str]:
    """Say what was moved, and how fast."""
    cold, warm, disk = report.cold, report.warm, report.disk
    ratio = report.stored_bytes / max(1, report.disk_bytes)
    yield f"Stored      {cold.bytes_stored / 1e6:,.1f} MB of KV in {cold.store_ms:.0f} ms."
    yield (
        f"B, memory   {warm.bytes_reused / 1e6:,.1f} MB in {warm.load_ms:.0f} ms, "
        f"{warm.load_gb_s:.2f} GB/s; a plain memcpy: {warm.memcpy_gb_s:.2f} GB/s."
    )
    yield f"            First token {report.speedup(warm):.1f} times sooner than computed."
    yield (
        f"C, NVMe     {disk.bytes_reused / 1e6:,.1f} MB in {disk.load_ms:.0f} ms, from "
        f"{report.disk_bytes / 1e6:,.1f} MB on disk, {ratio:.1f} times smaller"
        f"{' (FP8 and zstd)' if disk.lossy else ' (no FP8 here)'}."
    )
    yield f"            First token {report.speedup(disk):.1f} times sooner than computed."


def _answers(report: Report) -> Iterator[str]:
    """Say who answered what."""
    cold, warm, disk, without = report.cold, report.warm, report.disk, report.without
    if report.same_output:
        yield "A, B and A without kvd answered the same, token by token:"
        yield _quote(cold.text)
    else:
        for name, run in (("A", cold), ("B", warm), ("A without kvd", without)):
            yield f"{name} answered:"
            yield _quote(run.text)
    total = len(cold.new_tokens)
    copy = "a lossy copy, which may change a token" if disk.lossy else "a copy from disk"
    if disk.new_tokens == cold.new_tokens:
        yield f"C worked from {copy}; its {total} tokens are the same as well."
    else:
        yield f"C worked from {copy}; the first {report.agreement} of {total} tokens agree:"
        yield _quote(disk.text)


def _quote(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  > ", subsequent_indent="  > ")
