"""What this host was measured to give: what the cost gate and `kvd plan` begin with.

`kvd doctor --measure` writes the file `rates.json` into the state directory; the daemon reads it at
its start, and goes by its own measurements as soon as it has any. A file that makes no sense counts
as none: not to know is what the gate can do without.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from pathlib import Path

NAME: Final = "rates.json"
VERSION: Final = 1
FILE_BYTES_MAX: Final = 4096
RATE_MAX: Final = 1e15


class HostRates(NamedTuple):
    """Measured on this host; 0 is not known.

    Attributes:
        host_bytes_s: Copies out of shared memory, one thread.
        nvme_read_bytes_s: Reads at the depth that the tier is used with.
        nvme_write_bytes_s: Writes, synced.
        nvme_read_s: One read of 1 MiB, alone.
    """

    host_bytes_s: float = 0.0
    nvme_read_bytes_s: float = 0.0
    nvme_write_bytes_s: float = 0.0
    nvme_read_s: float = 0.0


NONE: Final = HostRates()


def read(state_dir: str | Path) -> HostRates:
    """Return what was stored; `NONE` if nothing was, or nothing that can be used."""
    try:
        with open(os.path.join(state_dir, NAME), "rb") as file:  # noqa: PTH118, PTH123 - light
            stored = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return NONE
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        return NONE
    found = [stored.get(name) for name in HostRates._fields]
    if not all(isinstance(value, int | float) and 0 <= value < RATE_MAX for value in found):
        return NONE
    return HostRates(*map(float, found))  # type: ignore[arg-type]


def write(state_dir: str | Path, rates: HostRates) -> str:
    """Store rates in place of the last ones; return the file's path.

    Raises:
        KvdError: The directory cannot be written; the text says so.
    """
    path = os.path.join(state_dir, NAME)  # noqa: PTH118 - as above
    try:
        replace_json(path, {"version": VERSION, **rates._asdict()})
    except OSError as error:
        raise KvdError(
            f"{path}: {error.strerror}; run it as the daemon's user, or name its --config"
        ) from error
    return path


def replace_json(path: str, document: object) -> None:
    """Put a document in place of a file, whole or not at all; raises OSError."""
    os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)  # noqa: PTH103, PTH120 - light
    with open(f"{path}.new", "w", encoding="utf-8") as file:  # noqa: PTH123 - as above
        file.write(json.dumps(document) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)  # noqa: PTH105 - as above
