"""Says on what machine GPU figures were taken, and what keeps them from being taken there.

    python -m bench._gpu_machine

Prints one JSON object. Imports nothing of kvd, so that it also runs where something is missing; one
broken library or a missing tool leaves a gap in the statement and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
NEEDED: Final = ("torch", "numpy", "cupy", "msgpack", "posix_ipc", "xxhash")
LIBRARIES: Final = (
    *("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "cuda-bindings", "transformers"),
    *("msgpack", "posix-ipc", "xxhash", "zstandard", "lmdb", "numba", "aiofiles"),
)
SOURCES: Final = ("kvd", "client/kvd_client", "bench")
_ASKED: Final = ("name", "driver_version", "memory.total", "memory.used", "compute_mode")
_PERHAPS: Final = ("mig.mode.current", "pcie.link.gen.current", "pcie.link.width.current")
_MPS: Final = "CUDA_MPS_PIPE_DIRECTORY"
NVIDIA_S: Final = 10.0
"""For nvidia-smi, which takes seconds where the driver sleeps between uses."""
DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")


def missing(names: tuple[str, ...] = NEEDED) -> dict[str, str]:
    """Import what is needed; name and error of what cannot be."""
    found = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - whatever a broken library raises
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def machine() -> dict[str, Any]:
    """State hardware, driver, libraries, limits and the commit."""
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        **_memory(),
        "mps": (Path(os.environ.get(_MPS, "/tmp/nvidia-mps")) / "control").exists(),  # noqa: S108
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "python": platform.python_version(),
        **_libraries(),
        **_nvidia(),
        **_cuda(),
        "commit": commit(),
        "source": source_digest(),
    }


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in {"MemTotal", "MemAvailable"}:
                found[f"{name.lower()}_gib"] = round(int(value.split()[0]) / (1 << 20), 1)
            if name == "HugePages_Free":
                found["huge_pages_free"] = int(value)
    with contextlib.suppress(OSError):
        found["shm_gib"] = round(shutil.disk_usage("/dev/shm").total / (1 << 30), 1)  # noqa: S108
    return found


def _limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except Exception:  # noqa: BLE001, S112 - it is not there, or its metadata is broken
            continue
    return found


def _nvidia() -> dict[str, str]:
    """Ask nvidia-smi; the driver also says its version in a file."""
    for names in ((*_ASKED, *_PERHAPS), _ASKED, _ASKED[:3]):
        try:
            told = subprocess.run(
                ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=NVIDIA_S,
                check=True,
            )
            values = [v.strip() for v in told.stdout.strip().splitlines()[0].split(",")]
        except (subprocess.CalledProcessError, IndexError):
            continue  # an older one refuses what it does not know
        except (OSError, subprocess.TimeoutExpired):
            break
        return {f"gpu_{n.replace('.', '_')}": v for n, v in zip(names, values, strict=False)}
    with contextlib.suppress(OSError, IndexError):
        return {"gpu_driver_version": DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0]}
    return {}


def _cuda() -> dict[str, Any]:
    """Ask torch and CuPy, which also know without nvidia-smi."""
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        import torch

        found["torch_cuda"] = torch.version.cuda
        found["cuda_devices"] = torch.cuda.device_count()
        if torch.cuda.is_available():
            about = torch.cuda.get_device_properties(0)
            free, total = torch.cuda.mem_get_info(0)
            found["gpu"] = about.name
            found["gpu_capability"] = f"{about.major}.{about.minor}"
            found["gpu_multiprocessors"] = about.multi_processor_count
            found["gpu_total_gib"] = round(total / (1 << 30), 1)
            found["gpu_free_gib"] = round(free / (1 << 30), 1)
    with contextlib.suppress(Exception):
        import cupy

        found["cuda_runtime"] = cupy.cuda.runtime.runtimeGetVersion()
        found["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
    return found


def warnings(found: dict[str, Any]) -> list[str]:
    """Say what of a statement will spoil checks or figures."""
    told = []
    mode = str(found.get("gpu_compute_mode", "Default"))
    if mode != "Default":
        told.append(f"compute mode is {mode}: several processes on one GPU need Default")
    if str(found.get("gpu_mig_mode_current", "")) == "Enabled":
        told.append("MIG is on: rates are those of a part of the GPU")
    if found.get("mps"):
        told.append("CUDA's MPS is on: a killed process may take others on the GPU with it")
    if found.get("gpu_free_gib", 64) < 48:
        told.append(f"{found['gpu_free_gib']} GiB of GPU memory are free; bench.ttft needs 48")
    if found.get("memavailable_gib", 64) < 32:
        told.append(f"{found['memavailable_gib']} GiB of host memory are there; some parts need 32")
    return told


def commit() -> str:
    """Tell the commit: by git, else from its files; "unknown" where neither is."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return told.stdout.strip()
    with contextlib.suppress(OSError, IndexError):
        folder = ROOT / ".git"
        if folder.is_file():  # a worktree
            folder = Path(folder.read_text(encoding="utf-8").split(":", 1)[1].strip())
        head = (folder / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head[:9]
        common = folder / "commondir"
        shared = folder / common.read_text(encoding="utf-8").strip() if common.exists() else folder
        ref = head.removeprefix("ref: ")
        if (shared / ref).exists():
            return (shared / ref).read_text(encoding="utf-8").strip()[:9]
        for line in (shared / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(" " + ref):
                return line[:9]
    return "unknown"


def source_digest() -> str:
    """Name the source that runs by its content, for a checkout without a commit."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".cu", ".sh"}:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()


def main() -> int:
    """Print the statement, with what is missing."""
    lacking = missing()
    found = machine()
    print(json.dumps({"missing": lacking, "warnings": warnings(found), "machine": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
