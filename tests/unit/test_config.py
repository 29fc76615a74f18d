"""The configuration: what is read, what it becomes, and where an error says it is."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from kvd import config, memory_limit
from kvd.config import HostConfig, auto_slab_bytes
from kvd.config_source import FILE_BYTES_MAX
from kvd.errors import ConfigError
from kvd.memory_limit import Memory
from kvd.sizes import GIB, MIB, TIB

SAMPLE = Path(__file__).resolve().parents[2] / "systemd" / "kvd.toml"


@pytest.fixture(autouse=True)
def _plain_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root on a large host, with nothing configured."""
    for name in ("KVD_CONFIG", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config, "SYSTEM_FILE", "/nowhere/kvd.toml")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        memory_limit, "available", lambda **_: Memory(4 * TIB, "available on this host")
    )


def written(tmp_path: Path, text: str) -> str:
    """Write a file and return its path."""
    path = tmp_path / "kvd.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(tmp_path: Path, text: str, **overrides: object) -> str:
    """The error for a file, with the file's folder taken off; it is one plain line."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load(path, {name.replace("__", "."): value for name, value in overrides.items()})
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message.replace(str(tmp_path) + "/", "")


# -------------------------------------------------------------------------------------- defaults


def test_defaults_of_root() -> None:
    """Without any file, root gets a small safe daemon at the system's places."""
    loaded = config.load(None, {})
    assert loaded.socket == "/run/kvd/kvd.sock"
    assert loaded.state_dir == "/var/lib/kvd"
    assert loaded.socket_mode == 0o660
    assert loaded.host.size_bytes == GIB
    assert loaded.host.slab_count == 16
    assert loaded.host.fault_threads >= 1
    assert [(t.name, t.uids, t.host_share) for t in loaded.tenants] == [("default", (0,), 1.0)]
    assert loaded.limits == config.Limits()


def test_defaults_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's daemon keeps to the user's own folders and serves that user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    monkeypatch.setenv("HOME", "/somewhere/me")
    loaded = config.load(None, {})
    assert loaded.socket == "/run/user/1000/kvd/kvd.sock"
    assert loaded.state_dir == "/somewhere/me/.local/state/kvd"
    assert loaded.tenants[0].uids == (1000,)
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere/state")
    assert config.load(None, {}).state_dir == "/somewhere/state/kvd"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError, match="--socket"):
        config.load(None, {})
    assert config.load(None, {"socket": "/tmp/k.sock"}).socket == "/tmp/k.sock"


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The named file wins over $KVD_CONFIG, which wins over the system's."""
    files = {}
    for name in ("named", "variable", "system"):
        files[name] = str(tmp_path / name)
        (tmp_path / name).write_text(f'socket = "/{name}"')
    assert config.load(None, {}).socket == "/run/kvd/kvd.sock"
    monkeypatch.setattr(config, "SYSTEM_FILE", files["system"])
    assert config.load(None, {}).socket == "/system"
    monkeypatch.setenv("KVD_CONFIG", files["variable"])
    assert config.load(None, {}).socket == "/variable"
    assert config.load(files["named"], {}).socket == "/named"


def test_sample_equals_the_defaults() -> None:
    """The sample file changes nothing, and names every knob."""
    assert config.load(str(SAMPLE), {}) == config.load(None, {})
    text = SAMPLE.read_text(encoding="utf-8")
    shown = tomllib.loads(text)
    for table in ("", "host", "limits"):
        assert set(config._KNOWN[table]) - {"tenants"} == set(shown[table] if table else shown)
    tenants = "".join(re.findall(r"^# (\[tenants.*\n|uids.*\n|host_share.*\n)", text, re.MULTILINE))
    tenants = tenants.replace('"alice"', "7").replace('"bob"', "8")
    again = config.load(None, {"tenants": tomllib.loads(tenants)["tenants"]}).tenants
    assert [(t.name, t.host_share) for t in again] == [("search", 0.5), ("chat", 0.5)]


def test_options_win(tmp_path: Path) -> None:
    """An option replaces the file's value; None does not."""
    path = written(tmp_path, 'socket = "/a"\n[host]\nbytes = "4GiB"\nlock = "off"\n')
    loaded = config.load(path, {"socket": None, "host.bytes": "2GiB", "state_dir": "/s"})
    assert (loaded.socket, loaded.state_dir) == ("/a", "/s")
    assert (loaded.host.size_bytes, loaded.host.lock) == (2 * GIB, "off")


@pytest.mark.parametrize("value", ["0o640", '"0640"', '"640"', "416"])
def test_socket_mode_forms(tmp_path: Path, value: str) -> None:
    """Permissions may be written as TOML's octal number or as octal text."""
    assert config.load(written(tmp_path, f"socket_mode = {value}"), {}).socket_mode == 0o640


@given(
    size=st.integers(MIB, 4 * TIB),
    shares=st.lists(st.floats(0.01, 0.2), max_size=4),
    drain_s=st.floats(0, 600),
)
def test_dump_loads_as_the_same(size: int, shares: list[float], drain_s: float) -> None:
    """What --check prints is a file that means the same."""
    tenants = {
        f"t {n} \"\\'é": {"uids": [n, n + 100], "host_share": s} for n, s in enumerate(shares)
    }
    try:
        loaded = config.load(
            None, {"host.bytes": size, "limits.drain_s": drain_s, "tenants": tenants}
        )
    except ConfigError as error:
        assert "less than one slab" in str(error)  # noqa: PT017 - tiny tier, tiny share
        reject()
    assert config.load(None, tomllib.loads(config.dump(loaded))) == loaded


# ----------------------------------------------------------------------------------------- slabs


@pytest.mark.parametrize(
    ("size", "slab"),
    [
        (MIB, MIB),
        (7 * MIB, MIB),
        (8 * MIB, 2 * MIB),
        (64 * MIB, 16 * MIB),
        (100 * MIB, 20 * MIB),
        (256 * MIB, 64 * MIB),
        (16 * GIB - MIB, 64 * MIB),
        (16 * GIB, 256 * MIB),
        (TIB, 256 * MIB),
    ],
)
def test_auto_slab(size: int, slab: int) -> None:
    """The slab suits the tier, and none of a small tier is wasted when that can be."""
    assert auto_slab_bytes(size) == slab
    assert HostConfig(size_bytes=size).slab_bytes == slab


@given(st.integers(MIB, 2 * TIB), st.floats(0.001, 1))
def test_auto_slab_rules(size: int, share: float) -> None:
    """A slab is 1 MiB or whole huge pages, and the smallest tenant gets four where possible."""
    slab = auto_slab_bytes(size, share)
    assert slab == MIB or slab % (2 * MIB) == 0
    assert slab <= min(size, 256 * MIB)
    if size * share >= 8 * MIB + 1:
        assert size * share / slab >= 3.999


def test_small_share_makes_small_slabs() -> None:
    """With slabs left to kvd, a tenant with a small share still gets some."""
    tenants = {"a": {"uids": [1], "host_share": 0.05}, "b": {"uids": [2]}}
    host = config.load(None, {"tenants": tenants, "host.bytes": "1GiB"}).host
    assert int(host.slab_count * 0.05) >= 4
    assert host.slab_count * host.slab_bytes == host.size_bytes


# --------------------------------------------------------------------------------------- tenants


def test_tenants_divide_what_is_left(tmp_path: Path) -> None:
    """Tenants without a share get equal parts of what the others leave; names become uids."""
    text = """
        [tenants.a]
        uids = [1, 2, 2]
        host_share = 0.5
        [tenants.b]
        uids = ["root"]
        [tenants."c d"]
        uids = [4]
    """
    tenants = config.load(written(tmp_path, text), {}).tenants
    assert [(t.name, t.uids, t.host_share) for t in tenants] == [
        ("a", (1, 2), 0.5),
        ("b", (0,), 0.25),
        ("c d", (4,), 0.25),
    ]


# ---------------------------------------------------------------------------------------- errors

REFUSED = {
    "unknown key": (
        '[host]\nhuge_page = "off"',
        "kvd.toml:2: host.huge_page is not known; did you mean huge_pages?",
    ),
    "unknown table": (
        "\n[hosts]\nbytes = 1",
        "kvd.toml:2: hosts is not known; did you mean host?",
    ),
    "unknown, nothing near": (
        "zzz = 1",
        "kvd.toml:1: zzz is not known; remove it",
    ),
    "wrong table": (
        '[host]\nlock = "off"\nsocket = "/a"',
        "kvd.toml:3: host.socket is not known there; move it to the top",
    ),
    "wrong table below": (
        "lease_s = 5\n",
        "kvd.toml:1: lease_s is not known there; move it into [limits]",
    ),
    "unknown in tenant": (
        "[tenants.a]\nuids = [1]\nshare = 1",
        "kvd.toml:3: tenants.a.share is not known; did you mean host_share?",
    ),
    "same name elsewhere": (
        '[tenants.bytes]\nuids = [1]\n[host]\nbytes = "x"',
        "kvd.toml:4: host.bytes",
    ),
    "key in a comment": (
        "# bytes = 0\n[host]\n# bytes = 1\nbytes = 3 # bytes = 4",
        "kvd.toml:4: host.bytes = 3: too small",
    ),
    "key in a text": (
        'state_dir = """/x\n[host]\nbytes = 1"""\n[host]\nbytes = 2',
        "kvd.toml:5: host.bytes = 2",
    ),
    "dotted key": (
        "\nhost.bytes = 2",
        "kvd.toml:2: host.bytes = 2",
    ),
    "inline table": (
        'host = {lock = "off",bytes = 2}',
        "kvd.toml:1: host.bytes = 2",
    ),
    "size unit": (
        '[host]\nbytes = "8G"',
        'kvd.toml:2: host.bytes = "8G" has the unknown unit G; write "8GiB"',
    ),
    "size type": (
        "[host]\nbytes = true",
        "kvd.toml:2: host.bytes = true: write a size",
    ),
    "size sign": (
        "[host]\nbytes = -5",
        "kvd.toml:2: host.bytes = -5: write a size",
    ),
    "slab unit": (
        '[host]\nslab_bytes = "3MiB"',
        'kvd.toml:2: host.slab_bytes = "3MiB": write 1MiB, a multiple of 2MiB',
    ),
    "slab too large": (
        '[host]\nbytes = "8MiB"\nslab_bytes = "16MiB"',
        (
            'kvd.toml:3: host.slab_bytes = "16MiB": larger than the whole tier; set it to '
            "8MiB or less"
        ),
    ),
    "slab does not divide": (
        '[host]\nslab_bytes = "300MiB"',
        "set bytes to 900MiB or 1200MiB",
    ),
    "huge pages of 1 MiB": (
        '[host]\nbytes="4MiB"\nslab_bytes = "1MiB"\nhuge_pages = "require"',
        "kvd.toml:4: host.huge_pages",
    ),
    "choice": (
        '[host]\nlock = "yes"',
        'kvd.toml:2: host.lock = "yes": write "auto" or "off" or "require"',
    ),
    "choice type": (
        "[host]\nlock = []",
        "kvd.toml:2: host.lock = []: write",
    ),
    "threads": (
        "[host]\nfault_threads = 65",
        "kvd.toml:2: host.fault_threads = 65: write a whole number from 0 to 64",
    ),
    "time with unit": (
        '[limits]\nlease_s = "10s"',
        'kvd.toml:2: limits.lease_s = "10s": write a number of seconds',
    ),
    "time range": (
        "[limits]\nlease_s = 0",
        "kvd.toml:2: limits.lease_s = 0: write a number of seconds from 0.01",
    ),
    "time nan": (
        "[limits]\nlease_s = nan",
        "kvd.toml:2: limits.lease_s",
    ),
    "bool is no number": (
        "[limits]\nsessions = true",
        "kvd.toml:2: limits.sessions = true",
    ),
    "float is no count": (
        "[limits]\nsessions = 2.0",
        "kvd.toml:2: limits.sessions = 2.0",
    ),
    "relative path": (
        'socket = "kvd.sock"',
        'kvd.toml:1: socket = "kvd.sock": write an absolute path',
    ),
    "long socket": (
        'socket = "/' + "x" * 107 + '"',
        "at most 107 bytes",
    ),
    "mode": (
        "socket_mode = 660",
        "kvd.toml:1: socket_mode = 660: write the permissions in octal, as in 0o660",
    ),
    "table as value": (
        "host = 5",
        "kvd.toml:1: host must be a table",
    ),
    "tenant as value": (
        "[tenants]\na = 5",
        "kvd.toml:2: tenants.a must be a table",
    ),
    "no uids": (
        "[tenants.a]\nhost_share = 1.0",
        "kvd.toml:1: tenants.a.uids list its users",
    ),
    "unknown user": (
        '[tenants.a]\n\nuids = ["no-such-user"]',
        (
            "kvd.toml:3: tenants.a.uids = ['no-such-user']: user \"no-such-user\" is not "
            "known on this host; create it, or write its number"
        ),
    ),
    "quoted uid": (
        '[tenants.a]\nuids = ["7"]',
        "write user 7 without quotes",
    ),
    "uid range": (
        "[tenants.a]\nuids = [-1]",
        "kvd.toml:2: tenants.a.uids",
    ),
    "uid twice": (
        "[tenants.a]\nuids=[1]\n[tenants.b]\nuids=[2,1]",
        'kvd.toml:4: tenants.b.uids = [2, 1]: user 1 is also in tenant "a"',
    ),
    "shares": (
        "[tenants.a]\nuids=[1]\nhost_share=0.7\n[tenants.b]\nuids=[2]\nhost_share=0.7",
        "kvd.toml:6: tenants.b.host_share = 0.7: the shares add up to 1.4",
    ),
    "share range": (
        "[tenants.a]\nuids=[1]\nhost_share=70",
        "kvd.toml:3: tenants.a.host_share = 70: write a number from 0.0001 to 1",
    ),
    "nothing left": (
        "[tenants.a]\nuids=[1]\nhost_share=1\n[tenants.b]\nuids=[2]",
        "kvd.toml:4: tenants.b gets nothing",
    ),
    "share below a slab": (
        '[host]\nslab_bytes="64MiB"\n[tenants.a]\nuids=[1]\nhost_share=0.01',
        "kvd.toml:5: tenants.a.host_share 0.01 of 1GiB is less than one slab of 64MiB",
    ),
    "syntax": (
        'socket = "/a"\nstate_dir = \n',
        "kvd.toml:2: not TOML: Invalid value",
    ),
    "syntax at the end": (
        'a = """\n\n',
        "kvd.toml:2: not TOML",
    ),
    "key twice": (
        "[host]\nlock='off'\nlock='off'\n",
        "kvd.toml:3: not TOML",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_its_line(tmp_path: Path, case: str) -> None:
    """A mistake stops the start with file, line and what to change."""
    text, expected = REFUSED[case]
    assert expected in refusal(tmp_path, text)


def test_refused_option() -> None:
    """A wrong option is named as it was typed; an unknown override is refused like a key."""
    with pytest.raises(ConfigError, match=r"^--host-bytes: host\.bytes"):
        config.load(None, {"host.bytes": "eight"})
    with pytest.raises(ConfigError, match="did you mean bytes"):
        config.load(None, {"host.byte": 1})


def test_refused_file(tmp_path: Path) -> None:
    """A file that is missing, a folder, too long or not UTF-8 is refused by name."""
    with pytest.raises(ConfigError, match=r"nothing\.toml: no such file.*--config"):
        config.load("/tmp/nothing.toml", {})
    with pytest.raises(ConfigError, match="is a directory"):
        config.load(str(tmp_path), {})
    path = tmp_path / "bytes"
    path.write_bytes(b"\n\n# caf\xe9\n")
    with pytest.raises(ConfigError, match="bytes:3: not UTF-8"):
        config.load(str(path), {})
    path.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="longer than"):
        config.load(str(path), {})


# ---------------------------------------------------------------------------------------- memory


def test_tier_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that cannot fit is refused with what there is and what to set."""
    limit = "left of this control group's memory limit"
    monkeypatch.setattr(memory_limit, "available", lambda **_: Memory(20 * GIB, limit))
    message = refusal(tmp_path, '[host]\nbytes = "64GiB"')
    assert message.startswith('kvd.toml:2: host.bytes = "64GiB": ')
    assert f"20.0 GiB of memory {limit}; set host.bytes to 17GiB or less" in message
    assert config.load(None, {"host.bytes": "17GiB"}).host.size_bytes == 17 * GIB
    monkeypatch.setattr(memory_limit, "available", lambda **_: None)
    assert config.load(None, {"host.bytes": "64GiB"}).host.size_bytes == 64 * GIB
