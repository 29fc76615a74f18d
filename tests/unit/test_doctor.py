"""`kvd doctor`: each check on a host made of files, the command around them, and its exit codes."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

import pytest

from kvd import cli, config, doctor, rates
from kvd.commands import doctor as command
from kvd.doctor import measure
from kvd.doctor.base import Check, Finding, Host, Level, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """Make a host of files under a root of its own; keyword arguments are configuration."""
    monkeypatch.delenv("KVD_CONFIG", raising=False)
    monkeypatch.setattr(config, "SYSTEM_FILE", "/nowhere/kvd.toml")

    def make(files: dict[str, str] | None = None, **overrides: object) -> Host:
        for name, text in (files or {}).items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        keys = {name.replace("__", "."): value for name, value in overrides.items()}
        keys = {"host.bytes": "64MiB", "socket": "/run/k.sock", **keys}
        return Host(root=tmp_path, config=config.load(None, keys))

    return make


def look(name: str, host: Host) -> list[Finding]:
    """Run one check."""
    return [result.finding for result in doctor.examine(host, [doctor.checks()[name]])]


HUGE = "/sys/kernel/mm/hugepages/hugepages-2048kB"
CLOCKS = "/sys/devices/system/clocksource/clocksource0"
NODES = "/sys/devices/system/node"


@pytest.mark.parametrize(
    ("name", "files", "level", "says"),
    [
        ("kernel", {"/proc/sys/kernel/osrelease": "5.10.0-8"}, FAIL, "5.14"),
        ("kernel", {"/proc/sys/kernel/osrelease": "6.1.0"}, WARN, "while it connects"),
        ("kernel", {"/proc/sys/kernel/osrelease": "6.12.1"}, OK, "Linux 6.12.1"),
        ("kernel", {"/proc/sys/kernel/osrelease": "odd"}, FAIL, "odd"),
        ("clock", {f"{CLOCKS}/current_clocksource": "tsc"}, OK, "tsc"),
        ("clock", {f"{CLOCKS}/current_clocksource": "hpet"}, WARN, "microsecond"),
        ("memory", {"/proc/meminfo": "MemAvailable:    9999999 kB"}, OK, "9.54 GiB available"),
        ("memory", {"/proc/meminfo": "MemAvailable:    1024 kB"}, FAIL, "takes 64.0 MiB"),
        ("memory", {}, WARN, "says nothing"),
        ("swap", {"/proc/meminfo": "SwapTotal:   0 kB"}, OK, "none"),
        ("huge-pages", {f"{HUGE}/free_hugepages": "32", f"{HUGE}/nr_hugepages": "40"}, OK, "32 of"),
        ("huge-pages", {f"{HUGE}/free_hugepages": "8", f"{HUGE}/nr_hugepages": "9"}, WARN, "8 of"),
        ("huge-pages", {}, OK, "none"),
        ("numa", {f"{NODES}/node0/x": ""}, OK, "one node"),
        (
            "numa",
            {
                f"{NODES}/node0/x": "",
                f"{NODES}/node1/x": "",
                "/proc/sys/kernel/numa_balancing": "1",
            },
            WARN,
            "balancing",
        ),
        ("cgroup", {}, OK, "no unified"),
        ("cgroup", {"/proc/self/cgroup": "0::/a/b"}, OK, "unlimited"),
        ("shm", {}, FAIL, "not there"),
        ("shm", {"/dev/shm/x": ""}, OK, "free"),
        ("file-system", {}, OK, "no NVMe tier"),
        ("direct-io", {}, OK, "no NVMe tier"),
    ],
)
def test_what_a_check_says(
    host: Callable[..., Host], name: str, files: dict[str, str], level: Level, says: str
) -> None:
    """Each finds what it is about in the files of a host, and says how bad it is."""
    found = look(name, host(files))[0]
    assert (found.level, says in found.text) == (level, True), found
    assert bool(found.mend) == (level is not OK)


def test_huge_pages_say_how_many_to_reserve(host: Callable[..., Host]) -> None:
    """The command keeps what others have reserved, and a required lack is a failure."""
    files = {f"{HUGE}/free_hugepages": "8", f"{HUGE}/nr_hugepages": "20"}
    (found,) = look("huge-pages", host(files))
    assert found.mend == f"sysctl vm.nr_hugepages={20 - 8 + 32}"


def test_the_tightest_control_group_counts(host: Callable[..., Host]) -> None:
    """A limit further up binds as well; near the limit is a warning."""
    files = {
        "/proc/self/cgroup": "0::/slice/kvd.service",
        "/sys/fs/cgroup/slice/kvd.service/memory.max": "max",
        "/sys/fs/cgroup/slice/memory.max": str(32 << 20),
    }
    (found,) = look("cgroup", host(files))
    assert found.level is FAIL
    assert "/sys/fs/cgroup/slice allows 32.0 MiB" in found.text
    files["/sys/fs/cgroup/slice/memory.max"] = str(70 << 20)
    assert look("cgroup", host(files))[0].level is WARN
    files["/sys/fs/cgroup/slice/memory.max"] = str(700 << 20)
    assert look("cgroup", host(files))[0].level is OK


def test_the_disk_under_the_tier_is_looked_at(host: Callable[..., Host], tmp_path: Path) -> None:
    """A tier in memory, on a network, or larger than its disk is told; O_DIRECT is tried."""
    place = tmp_path / "nvme"
    place.mkdir()
    made = host(nvme__bytes="1GiB", nvme__directory="/nvme")
    for kind, level in (("tmpfs", FAIL), ("nfs4", WARN), ("overlay", WARN), ("ext4", OK)):
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        mounts = f"proc /proc proc rw 0 0\ndev {os.path.realpath(tmp_path)} {kind} rw 0 0\n"
        (tmp_path / "proc/self/mounts").write_text(mounts)
        assert look("file-system", made)[0].level is level, kind
    assert look("file-system", host(nvme__bytes="900TiB", nvme__directory="/nvme"))[1].level is FAIL
    (found,) = look("direct-io", made)
    assert found.level in {OK, WARN}
    assert list(place.iterdir()) == [], "the try left something behind"


def test_stale_state_is_seen(host: Callable[..., Host], tmp_path: Path) -> None:
    """A state directory open to others, and a file in the socket's place."""
    made = host({"/run/k.sock": "no socket"}, state_dir="/state")
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state").chmod(0o777)
    found = look("state", made)
    assert [each.level for each in found] == [WARN, FAIL]
    assert found[0].mend == "chmod go-w /state"
    assert found[1].mend == "rm /run/k.sock"


def test_a_bad_configuration_is_a_finding() -> None:
    """The other checks run all the same, on the defaults."""
    host = Host(config_error="kvd.toml:3: [host] bytes = 1: too small")
    (found,) = look("configuration", host)
    assert (found.level, "kvd.toml:3" in found.text) == (FAIL, True)
    assert look("state", host)[0].level is OK
    assert look("daemon", host)[0].level is OK


def test_a_check_that_fails_or_hangs_is_told() -> None:
    """An exception and a hang are each a finding, and the next check runs."""
    over = threading.Event()

    def breaks(_: Host) -> Finding:
        raise ZeroDivisionError("of a kind")

    def hangs(_: Host) -> Iterator[Finding]:
        yield ok("so far")
        over.wait(30)

    tried = [Check("a", "host", "", breaks), Check("b", "host", "", hangs)]
    tried.append(Check("c", "host", "", lambda _: ok("fine")))
    found = [each.finding for each in doctor.examine(Host(), tried, limit_s=3)]
    over.set()
    assert "failed: ZeroDivisionError: of a kind" in found[0].text
    assert "no answer within" in found[-2].text
    assert found[-1] == ok("fine")


def test_every_check_of_this_host_ends_with_a_finding() -> None:
    """All of them, on the real host: none hangs, none is at fault, each warning has its mend."""
    known = doctor.checks()
    results = list(doctor.examine(Host(), list(known.values())))
    assert {result.check.name for result in results} == set(known)
    for result in results:
        assert "the check itself failed" not in result.finding.text, result
        assert bool(result.finding.mend) == (result.finding.level is not OK), result
        assert "\n" not in result.finding.text


@pytest.mark.parametrize(
    ("finding", "code"), [(ok("x"), 0), (warn("x", "m"), 0), (fail("x", "m"), 1)]
)
def test_the_exit_code_tells_of_failures(
    finding: Finding, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 unless something fails; the JSON says the same as the lines."""
    only = {"one": Check("one", "host", "about", lambda _: finding)}
    monkeypatch.setattr(doctor, "checks", lambda: only)
    monkeypatch.setenv("KVD_CONFIG", "/nowhere")
    assert cli.main(["doctor"]) == code
    out = capsys.readouterr().out
    assert finding.level.value in out
    assert ("mend: m" in out) == bool(finding.mend)
    assert cli.main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["level"] == finding.level.value
    assert sum(told[level.value] for level in Level) == 1


def test_a_check_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """--only runs those that are named, and names those there are when it does not know one."""
    assert cli.main(["doctor", "--only", "kernel", "--json"]) in {0, 1}
    assert [f["check"] for f in json.loads(capsys.readouterr().out)["findings"]] == ["kernel"]
    assert cli.main(["doctor", "--only", "colonel"]) == 2
    err = capsys.readouterr().err
    assert "no such check; use one of kernel, " in err
    assert cli.main(["doctor", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in doctor.checks())
    assert command.EPILOG.count("kvd doctor") >= 3


def test_rates_are_measured_and_stored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--measure stores what it printed where the daemon reads it, and leaves nothing else."""
    monkeypatch.setattr(measure, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(measure, "COPY_BYTES", 16 << 20)
    monkeypatch.setattr(measure, "READS", 4)
    file = tmp_path / "kvd.toml"
    file.write_text(f'state_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/s"\n')
    ask = ["doctor", "--config", str(file), "--only", "kernel", "--measure"]
    assert cli.main([*ask, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["measured"]
    stored = rates.read(tmp_path / "state")
    assert min(stored) > 0
    assert told == {**stored._asdict(), "stored": f"{tmp_path}/state/rates.json"}
    assert os.listdir(tmp_path / "state") == ["rates.json"]  # noqa: PTH208 - names, not paths
    assert not [name for name in os.listdir(tmp_path) if "measure" in name]  # noqa: PTH208
    assert cli.main(ask) == 0
    out = capsys.readouterr().out
    assert "reads at" in out
    assert "rates.json" in out
