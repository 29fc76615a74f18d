"""`kernels.cu` compiled as C++ for this CPU, and called as a device would."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd_client.cuda.kernels import NAMES, SOURCE

if TYPE_CHECKING:
    from kvd_client.cuda.kernels import Call

SHIM: Final = Path(__file__).with_name("cuda_cpu.h")
COMPILER: Final = shutil.which("g++") or shutil.which("clang++")
MISSING: Final = "no C++ compiler: kernels.cu is not run on the CPU (apt install g++)"
_TYPES: Final = {
    "pointer": ctypes.c_uint64,
    "u64": ctypes.c_uint64,
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
}


class BarrierError(Exception):
    """Some threads of a block wait where others never come: a hang on a GPU."""


@cache
def compiled() -> ctypes.CDLL:
    """Compile once for the session; the library is kept by its content."""
    assert COMPILER is not None, MISSING
    source = "".join(
        [
            f'#include "{SHIM}"\n#include "{SOURCE}"\n',
            *(f"KVD_ON_CPU({name})\n" for name in NAMES),
        ]
    )
    text = source + SHIM.read_text() + SOURCE.read_text()
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"kvd-cpu-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++14", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-x", "c++"]
        subprocess.run(
            [COMPILER, *flags, "-", "-o", str(partial)],
            input=source.encode(),
            check=True,
            timeout=120,
        )
        partial.replace(library)
    return ctypes.CDLL(str(library))


def run(call: Call, *, threads: int = 64, seed: int = 1) -> None:
    """Carry out one launch on memory of this process; addresses are real."""
    kinds = NAMES[call.name]
    assert len(kinds) == len(call.arguments)
    values = [_TYPES[kind](value) for kind, value in zip(kinds, call.arguments, strict=True)]
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    if getattr(compiled(), f"cpu_{call.name}")(call.grid, threads, seed, addresses):
        raise BarrierError(call.name)
