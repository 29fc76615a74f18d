"""The salt that engines who share prefixes have in common, out of a file."""

from __future__ import annotations

from pathlib import Path

from kvd_client.errors import Unsupported
from kvd_client.identity import Namespace


def read_salt(file: str) -> bytes:
    """Read 16 to 64 bytes; none where no file is named.

    Raises:
        Unsupported: The file cannot be read, or holds too little or too much.
    """
    if not file:
        return b""
    try:
        return Namespace("m", "r", "d", salt=Path(file).read_bytes()).check().salt
    except (OSError, ValueError) as error:
        raise Unsupported(f"salt_file {file}: {error}") from error
