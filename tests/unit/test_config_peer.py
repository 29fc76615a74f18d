"""The [peer] table: what is read, and what is refused with which mend."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from kvd import config
from kvd.config_transfer import TransferKnobs
from kvd.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def load(tmp_path: Path, table: str) -> config.Config:
    """Load a configuration with this [peer] table."""
    path = tmp_path / "kvd.toml"
    path.write_text(
        f'socket = "/run/kvd/kvd.sock"\n[host]\nbytes = "64MiB"\n[peer]\n{table}\n',
        encoding="utf-8",
    )
    return config.load(str(path), {})


def test_a_table_written_out_loads_as_the_same(tmp_path: Path) -> None:
    """What `--check` prints is what was read, with the defaults filled in."""
    loaded = load(
        tmp_path,
        'host = "a7"\naddress = "[fd00::7]:7600"\ndomain = "rack-3"\n'
        'directory = "rediss://kvd@cache.example:6379/2"\ndirectory_mode = "cluster"\n'
        'directory_password_file = "/etc/kvd/redis"\nlookup_ms = 5',
    )
    again = tmp_path / "again.toml"
    again.write_text(config.dump(loaded), encoding="utf-8")
    assert config.load(str(again), {}) == loaded
    assert loaded.peer.domain == "rack-3"
    assert loaded.peer.lookup_ms == 5


def test_whose_memory_movers_may_map() -> None:
    """That of tenants that share something with the host in question."""
    knobs = TransferKnobs(shared=("one", "two/public-*"), shared_with=("rack-*",))
    assert knobs.tenants_of("rack-7") == {"one", "two"}
    assert knobs.tenants_of("lab-1") == set()


def test_a_host_is_its_own_domain(tmp_path: Path) -> None:
    """Unless told otherwise, a host fails alone."""
    assert load(tmp_path, 'host = "a7"').peer.domain == "a7"


def test_a_host_without_a_usable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine name that cannot be part of a key is in the way only of who uses the table."""
    monkeypatch.setattr(socket, "gethostname", lambda: "my host")
    assert not load(tmp_path, "").peer.host
    with pytest.raises(ConfigError, match=r"host is needed: this machine's own name cannot"):
        load(tmp_path, 'directory = "redis://h:1/0"')


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ('host = "a b"', 'peer.host = "a b": write a name of 1 to 64 letters'),
        ("cluster = 3", "peer.cluster = 3: write a name of 1 to 64 letters"),
        ('domain = "{x}"', "write a name of 1 to 64 letters"),
        ('address = "10.0.0.7"', 'write host and port, as in "10.0.0.7:7600"'),
        ('address = "h:70000"', 'write host and port, as in "10.0.0.7:7600"'),
        ('directory = "10.0.0.5:6379"', "write a URL, as in"),
        ('directory = "redis://h:port/0"', "write a URL, as in"),
        ('directory = "http://h/"', "write a URL, as in"),
        ('directory = "unix://"', "write a URL, as in"),
        (
            'directory = "unix:///run/r.sock"\ndirectory_mode = "cluster"',
            "a cluster is not reached by a unix socket",
        ),
        ('directory_password_file = "redis.pw"', "write an absolute path"),
        ("lookup_ms = 0", "write a number from 1 to 1000"),
        ("heartbeat = 3", "did you mean heartbeat_s?"),
    ],
)
def test_refused_with_a_mend(tmp_path: Path, table: str, text: str) -> None:
    """Bad values are refused in one line that names the key and what to write."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, table)
    assert text in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_password_in_the_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    """Neither the file that is printed nor the error shows a password."""
    with pytest.raises(ConfigError, match="put it in a file") as caught:
        load(tmp_path, 'directory = "redis://kvd:hunter2@h:6379/0"')
    assert "hunter2" not in str(caught.value)
