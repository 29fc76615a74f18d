"""`kvd doctor` about other hosts: which transport would be used and why, and who is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd import config, doctor
from kvd.doctor import peer
from kvd.doctor.base import Finding, Host, Level
from kvd.peer.nixl_agent import load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)


def findings(tmp_path: Path, name: str, table: str) -> list[Finding]:
    """Run a check on a host with a [peer] table."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 2)
    file = tmp_path / "kvd.toml"
    file.write_text(
        f'socket = "{tmp_path}/s"\n[host]\nbytes = "64MiB"\n[peer]\nhost = "a"\n'
        f'directory = "redis://127.0.0.1:1/0"\n{table.replace("KEY", str(key))}'
    )
    host = Host(root=tmp_path, config=config.load(str(file), {}))
    return [result.finding for result in doctor.examine(host, [doctor.checks()[name]], 150)]


USED = 'address = "127.0.0.1:7600"\nshared = ["default"]\nkey_file = "KEY"\n'


@pytest.mark.parametrize("name", ["ucx", "peer-trust"])
def test_a_host_of_its_own_needs_nothing(tmp_path: Path, name: str) -> None:
    """Without [peer] there is nothing to look at, and that is fine."""
    (found,) = findings(tmp_path, name, "")
    assert found.level is Level.OK
    assert "not used" in found.text


def test_it_names_the_transport_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real transfer through NIXL: its lane, that it was told so, its rate, its idle CPU."""
    try:
        load()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(peer, "SELFTEST_S", 120.0)
    (found,) = findings(tmp_path, "ucx", USED)
    assert found.level is Level.OK, found
    assert 'tcp/lo, because transport = "tcp" and the device of address: lo' in found.text
    assert "GB/s" in found.text


def test_rdma_without_a_card_is_said(tmp_path: Path) -> None:
    """No device, or none with an active port: it fails, and says which."""
    (found,) = findings(tmp_path, "ucx", 'transport = "rdma"\n' + USED)
    assert found.level is Level.FAIL
    assert "no RDMA device" in found.text
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (found,) = findings(tmp_path, "ucx", 'transport = "rdma"\n' + USED)
    assert "no active port" in found.text


def test_trust_is_judged(tmp_path: Path) -> None:
    """A key is said to be weak; a missing certificate fails with its name."""
    (found,) = findings(tmp_path, "peer-trust", USED)
    assert found.level is Level.WARN
    tls = "".join(f'tls_{k} = "{tmp_path}/{k}.pem"\n' for k in ("cert", "key", "ca"))
    (found,) = findings(tmp_path, "peer-trust", USED.replace('key_file = "KEY"\n', tls))
    assert found.level is Level.FAIL
    assert "cert.pem" in found.text
