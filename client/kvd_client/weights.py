"""A digest of a model's weights, made from its files once and remembered.

A model that lies in Hugging Face's cache is named by content already: its large files are links to
blobs called by their SHA-256, and those names are taken. Any other file is read whole, once: the
digest is remembered under the file's path, size, inode and times (of change, too, which nobody can
set), so that the next start, and the next rank, only look. One process reads, the others wait.

A file rewritten in place while it is read, or between the engine's reading of it and this, is not
noticed: do not update a model's folder under a running engine.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvd_client.errors import Unsupported

SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
LOAD_FORMATS: Final = frozenset(
    {"auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "mistral"}
)
"""Those that read the files in the model's folder and nothing else."""
READ_BYTES: Final = 8 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def weights_digest(name: str, place: Path | None, load_format: str, mend: str) -> str:
    """Give a digest of the weights that an engine loads, as hexadecimal text.

    Args:
        name: Of the model, for people.
        place: From `model_place`.
        load_format: The engine's name of how it reads them.
        mend: What the user is to set where files do not tell.

    Raises:
        Unsupported: They are not known by files in one folder; the text ends with `mend`.
    """
    if load_format not in LOAD_FORMATS:
        raise Unsupported(
            f"load_format {load_format!r} does not tell what the weights of {name} are: {mend}"
        )
    if place is None:
        raise Unsupported(f"the files of {name} are not on this host: {mend}")
    try:
        return files_digest(place)
    except OSError as error:
        raise Unsupported(f"the weights in {place} are not known: {error}: {mend}") from error


def model_place(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Find the model's folder, or its one file; None if it is not on this host."""
    if Path(model).exists():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            model, "config.json", cache_dir=download_dir, revision=revision
        )
    except (ImportError, ValueError):  # ValueError: a path that is not there
        return None
    return Path(found).parent if isinstance(found, str) else None


def files_digest(where: Path) -> str:
    """Digest the weights in a folder, or one file of weights.

    Raises:
        OSError: There are none, or they cannot be read.
    """
    files = [where] if where.is_file() else sorted(where.iterdir())
    files = [file for file in files if file.suffix in SUFFIXES and file.is_file()]
    if not files:
        raise FileNotFoundError(f"no file {', '.join(sorted(SUFFIXES))}")
    total = blake2b(digest_size=32, person=b"kvd.vllm.weights")
    for file in files:
        total.update(f"{file.name} {file.stat().st_size} {_file_digest(file)}\n".encode())
    return total.hexdigest()


def _file_digest(file: Path) -> str:
    """Digest one file: by its name in Hugging Face's cache, from memory, or by reading it."""
    real = file.resolve()
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return f"sha256:{real.name}"
    state = real.stat()
    mark = f"{real} {state.st_size} {state.st_ino} {state.st_mtime_ns} {state.st_ctime_ns}"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvd" / "weights"
    note = caches / blake2b(mark.encode(), digest_size=16).hexdigest()
    try:
        caches.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (caches / f"{note.name}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = note.read_text(encoding="ascii") if note.is_file() else ""
            if _SHA256.fullmatch(known):
                return f"blake2b:{known}"
            digest = _read(real)
            _remember(note, digest)
    except OSError:
        digest = _read(real)  # nothing can be remembered here
    return f"blake2b:{digest}"


def _read(file: Path) -> str:
    """Read a file whole; 32 bytes of BLAKE2b as text."""
    digest = blake2b(digest_size=32)
    buffer = memoryview(bytearray(READ_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _remember(note: Path, digest: str) -> None:
    """Write a note so that it is there whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False, encoding="ascii") as part:
        part.write(digest)
    Path(part.name).rename(note)
