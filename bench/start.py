"""How long things take to begin: a daemon to be ready, `kvd stat` to answer, a client to import.

    python -m bench.start [--json] [--rounds N]

Medians over rounds; a bare interpreter's start is measured in the same rounds and given beside.
Byte code may be kept, as on any ordinary host: without, compiling is most of an import.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench._daemon import DaemonProcess
from bench._table import report

HOST_BYTES = 1 << 30


def command_ms(*arguments: str) -> float:
    """Time one command of this interpreter, from start to end."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
    )
    return (time.perf_counter() - start) * 1e3


def run(rounds: int) -> dict[str, Any]:
    """Measure everything, interleaved."""
    times: dict[str, list[float]] = {
        key: [] for key in ("python_ms", "import_ms", "stat_ms", "ready_ms", "whole_tier_ms")
    }
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
            daemon = DaemonProcess(Path(directory), host_bytes=HOST_BYTES)
            start = time.perf_counter()
            daemon.start(until="ready")
            times["ready_ms"].append((time.perf_counter() - start) * 1e3)
            times["whole_tier_ms"].append((whole_tier(daemon) - start) * 1e3)
            times["stat_ms"].append(command_ms("-m", "kvd", "stat", "--socket", daemon.socket))
            daemon.stop()
        bare = command_ms("-c", "pass")
        times["python_ms"].append(bare)
        times["import_ms"].append(command_ms("-c", "import kvd_client") - bare)
    return {key: round(statistics.median(values), 1) for key, values in times.items()}


def whole_tier(daemon: DaemonProcess) -> float:
    """Wait until all memory is faulted in; return when it was."""
    from kvd import statpage
    from kvd_client.paths import stat_page_name

    while True:
        host = statpage.read(stat_page_name(daemon.socket)).stats["host"]
        if host["ready_bytes"] >= HOST_BYTES:
            return time.perf_counter()
        time.sleep(0.01)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured")
    arguments = parser.parse_args()
    report("bench.start", run(arguments.rounds), as_json=arguments.json)


if __name__ == "__main__":
    main()
