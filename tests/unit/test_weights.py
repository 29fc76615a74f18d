"""What an engine's files say of it: a digest of its weights, and the salt."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvd_client import weights
from kvd_client.errors import Unsupported
from kvd_client.salt import read_salt

if TYPE_CHECKING:
    from pathlib import Path


def test_weights_are_told_apart_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another byte is another digest, at equal size and time; the second look reads nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.safetensors"
    file.write_bytes(b"one")
    first = weights.files_digest(folder)
    monkeypatch.setattr(weights, "_read", lambda _: pytest.fail("read again"))
    assert weights.files_digest(folder) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert weights.files_digest(folder) != first


def test_a_cached_models_blobs_name_their_content(tmp_path: Path) -> None:
    """In Hugging Face's cache the file is not read: it may be unreadable, and large."""
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob)
    first = weights.files_digest(snapshot)
    other = blob.rename(blob.with_name("b" * 64))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other)
    assert weights.files_digest(snapshot) != first


@pytest.mark.parametrize(
    ("load_format", "there", "words"),
    [
        ("dummy", True, "'dummy' does not tell what the weights of toy are: MEND"),
        ("auto", False, "the files of toy are not on this host: MEND"),
        ("auto", True, "are not known: no file .*safetensors.*: MEND"),
    ],
)
def test_what_files_do_not_tell_is_refused(
    load_format: str, words: str, tmp_path: Path, *, there: bool
) -> None:
    """Random, missing or unknown weights: the text ends with what to do."""
    place = weights.model_place(str(tmp_path if there else tmp_path / "none"), None, None)
    with pytest.raises(Unsupported, match=words):
        weights.weights_digest("toy", place, load_format, "MEND")


def test_a_salt_must_be_long_enough(tmp_path: Path) -> None:
    """Fewer than 16 bytes, or no file, end the start; a good one is read as it is."""
    file = tmp_path / "salt"
    with pytest.raises(Unsupported, match=f"salt_file {file}: .*No such file"):
        read_salt(str(file))
    file.write_bytes(b"short")
    with pytest.raises(Unsupported, match="16 to 64 bytes"):
        read_salt(str(file))
    file.write_bytes(b"s" * 32)
    assert read_salt(str(file)) == b"s" * 32
    assert read_salt("") == b""
