"""A disk that fails when told to: a library that is loaded into the daemon before libc."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).with_name("faultydisk.c")


class FaultyDisk:
    """What the library in the daemon does to its files."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(20))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 20)

    def set(self, *, write: int = 0, read: int = 0, sync: int = 0, delay_ms: int = 0) -> None:
        """Fail calls with these error numbers, and hold up every call; nothing said: be good."""
        self._memory[:16] = struct.pack("=4i", write, read, sync, delay_ms)

    @property
    def held(self) -> int:
        """Calls that are held up at the moment."""
        return int(struct.unpack_from("=i", self._memory, 16)[0])


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """Have every daemon of the test use a disk that can be told to fail."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = tmp_path / "faultydisk.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True
    )
    disk = FaultyDisk(tmp_path / "control")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("KVD_TEST_DISK", str(tmp_path / "control"))
    return disk
