"""One byte plane through zstd, into memory that is already there, without the GIL.

The parameters are for bytes that repeat no strings but are far from uniform, as exponents and FP8
codes are: all the gain is in the entropy coder, and looking for matches only costs. With the
smallest hash table (64 entries) and matches of 7 bytes, the search gives up at once. Against level
1 on a real exponent plane: 4 times as fast to write, 1.8 times to read, and smaller (ADR 0010).
Negative levels are no way to get this: they switch the entropy coding of literals off.

Invariants:

Z1. Only private memory is compressed, never a slot that a client may still map: zstd reads its
    input more than once.
Z2. A frame's declared size equals the plane's and its window is at most 8 MiB before a byte is
    decompressed, and the target has exactly that size.

Contexts and scratch memory belong to the thread that uses them.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.codec.frame import CodecMissing, CorruptFrame

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

WINDOW_BYTES_MAX: Final = 8 << 20
SCRATCH_BYTES_KEPT: Final = 64 << 20  # a thread's; what is larger is freed after each object
SAVED_PARTS_MIN: Final = 32  # compressed must save at least one part in so many, or stays raw

# 128 KiB is zstd's block; a longer window would only help matches.
_PARAMETERS: Final = {
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,  # above 0 zstd leaves literals as they are
    "write_checksum": False,  # the record around the frame has one
}


class _Thread(threading.local):
    """One thread's contexts and scratch memory, made when first used."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.compressor: Any = None
        self.decompressor: Any = None
        self.error: Any = None
        self.scratch: Any = None

    def zstd(self) -> None:
        """Make the contexts.

        Raises:
            CodecMissing: zstandard is not installed.
        """
        if self.compressor is None:
            zstandard = zstandard_module()
            self.compressor = zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters(
                    strategy=zstandard.STRATEGY_FAST, **_PARAMETERS
                )
            )
            self.decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
            self.error = zstandard.ZstdError


_thread = _Thread()


def zstandard_module() -> Any:  # noqa: ANN401 - a module
    """Import zstandard.

    Raises:
        CodecMissing: It is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise CodecMissing("zstd needs the package zstandard, not installed here") from error


def scratch(size_bytes: int) -> Bytes:
    """Give this thread's scratch memory: (size_bytes,) uint8, valid until its next call."""
    import numpy as np

    if size_bytes > SCRATCH_BYTES_KEPT:
        return np.empty(size_bytes, dtype=np.uint8)
    if _thread.scratch is None or len(_thread.scratch) < size_bytes:
        _thread.scratch = None  # the old one is freed before the new one is there
        _thread.scratch = np.empty(size_bytes, dtype=np.uint8)
    kept: Bytes = _thread.scratch[:size_bytes]
    return kept


def compress(plane: Bytes, out: Bytes) -> tuple[int, int]:
    """Compress a byte plane into the beginning of `out`, if that saves enough.

    Args:
        plane: (n,) uint8, private to this thread (Z1).
        out: (n,) uint8 or more, another memory; overwritten in any case.

    Returns:
        Bytes written, 0 where it does not pay; nanoseconds it took.

    Raises:
        CodecMissing: zstandard is not installed.
    """
    _thread.zstd()
    limit = len(plane) - max(1, len(plane) // SAVED_PARTS_MIN)
    if limit <= 0:
        return 0, 0
    started = time.perf_counter_ns()
    with _thread.compressor.stream_reader(plane, size=len(plane)) as reader:
        written: int = reader.readinto(out[:limit])
    spent = time.perf_counter_ns() - started
    # A full target may hold a frame cut short: it counts as not paying either way.
    return (written if written < limit else 0), spent


def decompress(stored: memoryview, plane: Bytes) -> int:
    """Decompress one byte plane into `plane`, which it must fill exactly (Z2).

    What follows the zstd frame in `stored` is not looked at.

    Args:
        stored: The zstd frame; not trusted.
        plane: (n,) uint8, overwritten; void after an error.

    Returns:
        Nanoseconds it took.

    Raises:
        CorruptFrame: Not such a frame.
        CodecMissing: zstandard is not installed.
    """
    _thread.zstd()
    started = time.perf_counter_ns()
    try:
        parameters = zstandard_module().get_frame_parameters(stored)
        if parameters.content_size != len(plane) or parameters.window_size > WINDOW_BYTES_MAX:
            raise CorruptFrame("a byte plane declares another size or too large a window")
        if parameters.dict_id:
            raise CorruptFrame("a byte plane wants a dictionary")
        with _thread.decompressor.stream_reader(stored) as reader:
            size = reader.readinto(plane)
    except _thread.error as error:
        raise CorruptFrame("a byte plane that zstd cannot read") from error
    if size != len(plane):
        raise CorruptFrame("a byte plane of another length than it declares")
    return time.perf_counter_ns() - started
