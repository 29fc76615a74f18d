"""Runs everything that needs a GPU, each part in its time: what bench/gpu_all.sh begins.

    bench/gpu_all.sh [OUT]
    KVD_BENCH_FAKE_GPU=1 bench/gpu_all.sh    # dry run on the tests' fake GPU, with tiny sizes

A part is a process group of its own. When its time is over it is ended with all that it started,
and what it had found until then counts as its result. OUT gets two files: `gpu.json`, written anew
after each part, so that a run that is itself cut off leaves what there was, and `gpu.log`. Imports
nothing but Python's own, so that it can say what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench._gpu_targets import judge
from bench._table import print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
FAKE_VARIABLE: Final = "KVD_BENCH_FAKE_GPU"
DRY_RUN: Final = "DRY RUN on a fake GPU in host memory: no figure here is a measurement"
BUDGET_S: Final = 285.0
"""For all parts; with what ends a part that hangs it stays below five minutes."""
GRACE_S: Final = 4.0
"""From asking a part to end to killing it."""
STATE_S: Final = 40.0
"""For saying what machine this is: torch and CuPy are imported and the driver is asked."""
NOT_RUN: Final = 3
TAIL: Final = 3000
"""Bytes of a part's log that are printed, and kept in the result."""


class Part(NamedTuple):
    """A command that prints one JSON object as its last line.

    Attributes:
        name: Of its result.
        command: What is run; a file's name for partial results is added, as `--partial FILE`.
        limit_s: It gets no more time than this.
    """

    name: str
    command: Sequence[str]
    limit_s: float


def parts() -> list[Part]:
    """Give the parts in their order."""
    python = [sys.executable, "-m"]
    ttft = ["bench.ttft", "--engine", "hf", "--device", "cuda", "--shape", "8b", "--json"]
    return [
        Part("check", [*python, "bench.gpu_check", "--json"], 130.0),
        Part("bench", [*python, "bench.gpu", "--json"], 90.0),
        Part("ttft", [*python, *ttft], 80.0),
    ]


# ------------------------------------------------------------------------------------- surroundings


def unpack(wheels: Path, site: Path) -> list[str]:
    """Unpack the wheels that fit this Python, without pip; names of those that do not go in."""
    left = []
    for wheel in sorted(wheels.glob("*.whl")):
        if not fits(wheel.name):
            left.append(wheel.name)
            continue
        try:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(site)
        except zipfile.BadZipFile:  # cut short on its way here
            left.append(wheel.name)
            continue
        for data in site.glob("*.data/*lib"):  # purelib, platlib: what belongs beside the rest
            shutil.copytree(data, site, dirs_exist_ok=True)
    return left


def fits(wheel: str) -> bool:
    """Tell by a wheel's name whether it is for this Python and machine."""
    pythons, abis, platforms = (part.split(".") for part in wheel[:-4].split("-")[-3:])
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if "any" not in platforms:
        linux = [p for p in platforms if "linux" in p and p.endswith(platform.machine())]
        if not any("musl" not in p for p in linux):
            return False
    older = {f"cp3{minor}" for minor in range(2, sys.version_info[1] + 1)}
    if "abi3" in abis:
        return bool(older & set(pythons))
    return own in pythons or "py3" in pythons


def surroundings(scratch: Path) -> dict[str, str]:
    """Give the environment of the parts: our wheels, and folders that can be written."""
    found = dict(os.environ)
    entries = [str(ROOT), str(ROOT / "client"), found.get("PYTHONPATH", ""), str(scratch / "site")]
    found["PYTHONPATH"] = ":".join(entry for entry in entries if entry)
    found["PYTHONUNBUFFERED"] = "1"
    found["TMPDIR"] = str(scratch)
    found.setdefault("CUPY_CACHE_DIR", str(scratch / "cupy"))  # the home may not be writable
    found.pop("KVD_CONFIG", None)
    return found


def short_folder() -> str | None:
    """Give a folder for sockets, whose paths have at most some hundred bytes."""
    return None if len(tempfile.gettempdir()) < 40 else "/tmp"  # noqa: S108 - the names are random


# ---------------------------------------------------------------------------------------- one part


def run(part: Part, out: Path, environment: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run a part for so long at most; its status, and its result under "result"."""
    partial, printed = out / f"{part.name}.partial", Path(environment["TMPDIR"], part.name)
    log = out / "gpu.log"
    start = time.monotonic()
    print(f"== {part.name}, {limit_s:.0f} s at most", flush=True)
    with printed.open("wb") as told, log.open("ab") as said:
        seen = said.tell()
        said.write(f"== {part.name}\n".encode())
        said.flush()
        process = subprocess.Popen(
            [*part.command, "--partial", str(partial)],
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=said,
            cwd=ROOT,
            env=environment,
            start_new_session=True,  # a group, so that nothing it starts outlives it
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            signal_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            signal_group(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)  # one that the driver holds may take its time: it is left behind
    result = last_json(printed) if status is not None else None
    whole = result is not None
    if result is None:
        result = last_json(partial)
    for left in (partial, partial.with_suffix(".partial.new")):
        left.unlink(missing_ok=True)
    seconds = round(time.monotonic() - start, 1)
    ended = "out of time" if status is None else ("ok" if status == 0 else "failed")
    if status == NOT_RUN:
        ended = "not run"
    tail = log.read_bytes()[seen:][-TAIL:].decode(errors="replace")
    print(tail, end="", flush=True)
    print(f"== {part.name}: {ended} after {seconds} s", flush=True)
    return {
        "ended": ended,
        "status": status,
        "seconds": seconds,
        "limit_s": round(limit_s, 1),
        "whole": whole,
        "log": tail.splitlines(),
        "result": result,
    }


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a part and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def last_json(path: Path) -> dict[str, Any] | None:
    """Read the JSON object that is a file's last line."""
    try:
        found = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


# -------------------------------------------------------------------------------------------- all


def state(environment: dict[str, str]) -> dict[str, Any]:
    """Say what machine this is, and what is missing on it."""
    said: dict[str, Any] = {"missing": {}, "warnings": [], "machine": {}}
    try:
        told = subprocess.run(
            [sys.executable, "-m", "bench._gpu_machine"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=STATE_S,
            check=True,
        )
        said |= json.loads(told.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        said["warnings"] = [f"the machine cannot be stated: {error.stderr[-300:]}"]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        said["warnings"] = [f"the machine cannot be stated: {error}"[:300]]
    return said


def obstacle(said: dict[str, Any], *, dry_run: bool) -> str:
    """Say why nothing can be run here; empty if it can."""
    lacking = {n: why for n, why in said["missing"].items() if not (dry_run and n == "cupy")}
    if lacking:
        told = "; ".join(f"{name} ({why})" for name, why in lacking.items())
        return f"{sys.executable} lacks {told}. Wheels may lie in wheels/"
    if said["machine"] and not said["machine"].get("gpu") and not dry_run:
        return "no CUDA device here: run this on a GPU host"
    return ""


def everything(
    out: Path, chosen: Sequence[Part], *, budget_s: float = BUDGET_S, dry_run: bool = False
) -> tuple[dict[str, Any], int]:
    """Run parts into a folder; the whole result, and the exit status."""
    start = time.monotonic()
    found: dict[str, Any] = {"dry_run": DRY_RUN} if dry_run else {}
    results: dict[str, Any] = {}
    out.joinpath("gpu.log").write_bytes(b"")
    with tempfile.TemporaryDirectory(
        prefix="kvd-all-",
        dir=short_folder(),
        ignore_cleanup_errors=True,  # a part that is left behind may still write there
    ) as scratch:
        os.chmod(scratch, 0o755)  # noqa: PTH101, S103 - a check runs a process of another user
        environment = surroundings(Path(scratch))
        left = unpack(ROOT / "wheels", Path(scratch, "site"))
        said = state(environment)
        found |= said | {"wheels_left": left, "not_run": obstacle(said, dry_run=dry_run)}
        found["parts"] = {}
        status = NOT_RUN if found["not_run"] else 0
        for part in () if found["not_run"] else chosen:
            left_s = budget_s - (time.monotonic() - start)
            if left_s < 1:
                found["parts"][part.name] = {"ended": "no time left"}
                status = 1
                continue
            try:
                done = run(part, out, environment, min(part.limit_s, left_s))
            except KeyboardInterrupt:
                found["not_run"] = f"cut off in {part.name}"
                results[part.name] = last_json(out / f"{part.name}.partial")
                status = 1
                break
            results[part.name] = done.pop("result")
            found["parts"][part.name] = done
            status = status or int(done["ended"] != "ok")
            write(out, found, results, start, dry_run=dry_run)
    write(out, found, results, start, dry_run=dry_run)
    return found, status


def write(
    out: Path, found: dict[str, Any], results: dict[str, Any], start: float, *, dry_run: bool
) -> None:
    """Write what there is; a dry run into a file of another name."""
    found["seconds"] = round(time.monotonic() - start, 1)
    whole = dict(results)
    if not found["not_run"]:
        whole["all"] = {"seconds": found["seconds"]}
    found["targets"] = judge(whole, dry_run=dry_run)
    found |= {f"{name}_dry_run" if dry_run else name: result for name, result in results.items()}
    path = out / ("gpu-dry-run.json" if dry_run else "gpu.json")
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", default="gpu-out", help="a folder for results and logs")
    out = Path(parser.parse_args().out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    dry_run = os.environ.get(FAKE_VARIABLE) == "1"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the part, leaves what there is
    found, status = everything(out, parts(), dry_run=dry_run)
    brief = {name: {**part, "log": []} for name, part in found["parts"].items()}  # it was printed
    print(json.dumps(found | {"parts": brief}))
    for warning in found["warnings"]:
        print(f"gpu_all: {warning}")
    if found["not_run"]:
        print(f"gpu_all: not run: {found['not_run']}")
    print_table(DRY_RUN if dry_run else "GPU run", found["targets"])
    return status


if __name__ == "__main__":
    sys.exit(main())
