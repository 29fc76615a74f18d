"""The demo's processes: one `kvd serve` of its own, and engines that come and go.

Shared by the demo and by bench/ttft.py. Every process started here is ended here, whatever
happens in between.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Final

from kvd.demo.engine import STAGE, Result
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

READY_S: Final = 30.0
STOP_S: Final = 45.0
"""A daemon may write down what is not yet on NVMe (`flush_s`, 30 s)."""
STAT_S: Final = 30.0
ENGINE_S: Final = 900.0
"""A slow, shared machine takes minutes; a hang takes longer."""
ERROR_LINES: Final = 15

_CONFIG: Final = "# The demo's own, so that this host's configuration plays no part.\n"

_ENGINE_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # torch's threads spin at every barrier by default. Where something else wants one of the
    # cores, 60 tokens then take 3 to 8 s instead of 0.3 (measured on two cores).
    "OMP_WAIT_POLICY": "PASSIVE",
}


class StepFailed(Exception):
    """A process of the demo ended badly; the text holds what it said last."""


@contextmanager
def daemon(folder: Path, host_bytes: str = "1GiB", nvme_bytes: str = "0") -> Iterator[Path]:
    """Run `kvd serve` on a socket in `folder`, and yield the socket once it answers.

    Stopped and started again in the same folder, it finds its NVMe tier there.

    Args:
        folder: Where its socket, state and log go; nobody else's.
        host_bytes: Of its host tier, as `kvd serve` takes them.
        nvme_bytes: Of its NVMe tier.

    Raises:
        StepFailed: It ended by itself, or did not answer within `READY_S`.
    """
    path, log, config = folder / "kvd.sock", folder / "kvd.log", folder / "kvd.toml"
    config.write_text(_CONFIG)
    command = [sys.executable, "-m", "kvd", "serve", "--config", str(config)]
    command += ["--socket", str(path), "--state-dir", str(folder / "state")]
    command += ["--host-bytes", host_bytes, "--nvme-bytes", nvme_bytes]
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        _wait_ready(process, path, log)
        try:
            yield path
        except StepFailed as error:  # because of the daemon's end, perhaps
            if (code := process.poll()) is None:
                raise
            raise StepFailed(_ended(code, log)) from error
        if (code := process.poll()) is not None:
            raise StepFailed(_ended(code, log))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    """Wait until it serves: it listens before that, while it looks through its NVMe tier."""
    from kvd import statpage

    deadline = time.monotonic() + READY_S
    while (code := process.poll()) is None:
        with suppress(statpage.NoStatPage):
            page = statpage.read(stat_page_name(str(path)))
            if page.pid == process.pid and page.stats.get("state") == "serving":
                return
        if time.monotonic() > deadline:
            raise StepFailed(_last(f"kvd serve does not answer after {READY_S:.0f} s", log))
        time.sleep(0.02)
    raise StepFailed(_ended(code, log))


def _ended(code: int, log: Path) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return _last(f"kvd serve {how}", log)


def _last(what: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-ERROR_LINES:]
    return "\n  ".join([f"{what}; the end of its log:", *lines])


def stat(path: Path, *options: str) -> str:
    """Return what `kvd stat` prints.

    Raises:
        StepFailed: It failed.
    """
    done = subprocess.run(  # noqa: S603 - our own
        [sys.executable, "-m", "kvd", "stat", "--socket", str(path), *options],
        capture_output=True,
        text=True,
        timeout=STAT_S,
        check=False,
    )
    if done.returncode:
        raise StepFailed(f"kvd stat failed with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.rstrip()


def engine(options: list[str], stage: Callable[[str], None]) -> Result:
    """Run one engine process to its end.

    Args:
        options: Of `python -m kvd.demo.engine`.
        stage: Called, in another thread, with the name of each stage as it begins.

    Raises:
        StepFailed: It failed, or took longer than `ENGINE_S`.
    """
    return Result(**json.loads(_run(options, stage)))


def prepare(stage: Callable[[str], None]) -> None:
    """Expand the model, which is slow, unless that was done before.

    Raises:
        StepFailed: As `engine`.
    """
    _run(["--prepare"], stage)


def _run(options: list[str], stage: Callable[[str], None]) -> str:
    environment = {**_ENGINE_ENVIRONMENT, **os.environ}
    command = [sys.executable, "-m", "kvd.demo.engine", *options]
    errors: deque[str] = deque(maxlen=ERROR_LINES)

    def read_errors(stream: IO[str]) -> None:
        for line in stream:
            if line.startswith(STAGE):
                stage(line.removeprefix(STAGE).strip())
            else:
                errors.append(line.rstrip())

    with subprocess.Popen(  # noqa: S603 - our own
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=read_errors, args=(process.stderr,), daemon=True)
        timer = threading.Timer(ENGINE_S, process.kill)
        reader.start()
        timer.start()
        try:
            output = process.stdout.read()
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # an interrupt: leave nothing behind
                process.kill()
            reader.join(STOP_S)
    if code:
        raise StepFailed("\n".join(errors) or f"the engine ended with status {code}")
    return output
