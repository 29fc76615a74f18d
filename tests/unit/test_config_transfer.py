"""[peer], what concerns transfers: mistakes say what to change; who may have what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd import config
from kvd.config_transfer import TransferKnobs
from kvd.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = """
[tenants.search]
uids = [0]
[peer]
host = "a"
address = "10.0.0.7:7600"
directory = "redis://10.0.0.5:6379/0"
shared = ["search/llama*"]
tls_cert = "/etc/kvd/a.pem"
tls_key = "/etc/kvd/a.key"
tls_ca = "/etc/kvd/ca.pem"
"""


def loaded(tmp_path: Path, text: str) -> config.Config:
    """Load a configuration file."""
    file = tmp_path / "kvd.toml"
    file.write_text(text)
    return config.load(str(file), {"socket": "/run/x.sock", "host.bytes": "64MiB"})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A whole table is taken over, and its dump loads as the same."""
    found = loaded(tmp_path, WHOLE)
    assert found.transfer.shared == ("search/llama*",)
    assert found.transfer.transport == "tcp"
    again = tmp_path / "again.toml"
    again.write_text(config.dump(found))
    assert config.load(str(again), {}) == found


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('shared = ["search/llama*"]', 'shared = ["chat"]', "names no tenant"),
        ('shared = ["search/llama*"]', "shared = 5", "list of texts"),
        ('tls_ca = "/etc/kvd/ca.pem"', "", "set tls_cert, tls_key and tls_ca"),
        ('host = "a"', 'host = "a"\ntransport = "shm"', "rdma"),
        ('host = "a"', 'host = "a"\nkey_file = "/etc/kvd/key"', "not both"),
        ('host = "a"', 'host = "a"\nquarantine_bytes = "much"', "quarantine_bytes"),
    ],
)
def test_a_mistake_says_what_to_change(tmp_path: Path, old: str, new: str, says: str) -> None:
    """Each mistake stops the start with one line that names the mend."""
    assert old in WHOLE
    with pytest.raises(ConfigError, match=says):
        loaded(tmp_path, WHOLE.replace(old, new))


def test_a_key_is_for_loopback(tmp_path: Path) -> None:
    """A pre-shared key with another address than loopback stops the start."""
    keyed = WHOLE[: WHOLE.index("tls_cert")] + 'key_file = "/etc/kvd/key"\n'
    with pytest.raises(ConfigError, match="loopback"):
        loaded(tmp_path, keyed)
    assert loaded(tmp_path, keyed.replace("10.0.0.7", "127.0.0.1")).transfer.key_file


@pytest.mark.parametrize(
    ("host", "tenant", "label", "may"),
    [
        ("a1", "search", "llama@1", True),
        ("a1", "search", "qwen@1", False),
        ("a1", "chat", "anything", True),
        ("b1", "chat", "anything", False),
        ("a1", "other", "llama@1", False),
    ],
)
def test_who_may_have_what(host: str, tenant: str, label: str, may: bool) -> None:  # noqa: FBT001
    """A host has a tenant's label if both are allowed."""
    knobs = TransferKnobs(shared=("search/llama*", "chat"), shared_with=("a*",))
    assert knobs.shares(host, tenant, label) == may
