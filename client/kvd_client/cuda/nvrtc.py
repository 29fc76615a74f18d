"""Compile `kernels.cu` with NVRTC and say what it cannot: `python -m kvd_client.cuda.nvrtc`.

Needs no GPU and no CUDA installation: NVRTC is a library, found where NVIDIA's wheels put it or
where the system has it. A GPU host's CuPy brings its own way of compiling; this one is for checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import sys
from pathlib import Path
from typing import Final

from kvd_client.cuda.kernels import ARCHITECTURES, NAMES, OPTIONS, SOURCE

_IN_WHEELS: Final = ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib", "nvidia/cu12/lib")
_CUPYS: Final = ("--device-as-default-execution-space",)  # what CuPy adds
MISSING: Final = "NVRTC is not installed: kernels.cu is not checked. pip install nvidia-cuda-nvrtc"


class CompileError(Exception):
    """The source does not compile; the text is the compiler's."""


def find() -> ctypes.CDLL | None:
    """Load NVRTC from the first place that has it."""
    places = [Path(entry) / inner for entry in sys.path for inner in _IN_WHEELS]
    found = [str(library) for place in places for library in place.glob("libnvrtc.so.*[0-9]")]
    system = ctypes.util.find_library("nvrtc")
    for name in [*sorted(found), *([system] if system else [])]:
        with contextlib.suppress(OSError):
            for part in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))  # which NVRTC looks for by name alone
            return ctypes.CDLL(name)
    return None


def version(library: ctypes.CDLL) -> str:
    """Give the compiler's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def compile_source(library: ctypes.CDLL, source: str, architecture: str) -> bytes:
    """Compile to a cubin for one architecture.

    Raises:
        CompileError: With the compiler's own words.
    """
    program = ctypes.c_void_p()
    text, name = source.encode(), b"kernels.cu"
    made = library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None)
    _check(library, made)
    try:
        wanted = (f"--gpu-architecture={architecture}", *OPTIONS, *_CUPYS)
        packed = (ctypes.c_char_p * len(wanted))(*(option.encode() for option in wanted))
        result = library.nvrtcCompileProgram(program, len(wanted), packed)
        if result:
            raise CompileError(_log(library, program))
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(library, library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _check(library, library.nvrtcGetProgramLog(program, log))
    return log.value.decode(errors="replace")


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(library.nvrtcGetErrorString(result).decode())


def missing_kernels(cubin: bytes) -> list[str]:
    """Give the names of `NAMES` that a cubin has no entry for."""
    return [name for name in NAMES if b".text." + name.encode() + b"\0" not in cubin]


def main() -> int:
    """Compile for every architecture; 1 if that fails, 2 if NVRTC is not installed."""
    library = find()
    if library is None:
        print(MISSING, file=sys.stderr)
        return 2
    for architecture in ARCHITECTURES:
        try:
            cubin = compile_source(library, SOURCE.read_text(encoding="utf-8"), architecture)
        except CompileError as error:
            print(f"kernels.cu for {architecture}:\n{error}", file=sys.stderr)
            return 1
        missing = missing_kernels(cubin)
        if missing:
            print(f"kernels.cu lacks {', '.join(missing)}", file=sys.stderr)
            return 1
    print(
        f"kernels.cu: {len(NAMES)} kernels for {', '.join(ARCHITECTURES)}, NVRTC {version(library)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
