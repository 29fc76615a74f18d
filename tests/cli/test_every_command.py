"""Every command against a real daemon: its JSON against a schema, exit codes, wrong arguments, Tab.

A command that is new, or that has `--json` and no schema here, fails the first test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvd import cli
from kvd.commands import COMMANDS
from kvd.statview import EXIT_SILENT
from tests.daemon_fixture import join, store, tokens
from tests.docs.test_commands_page import parser_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import kvd_client
    from bench._daemon import DaemonProcess

# A schema is a type, a tuple of them, a list of one schema for all items, or a map of schemas by
# key: exactly these keys, but for those that end in "?", which may be missing.
NUMBER: Final = (int, float)
SPACE: Final = {
    **dict.fromkeys(("space", "id", "tenant", "label", "layout"), str),
    **dict.fromkeys(("chunk_tokens", "ranks", "chunks", "sessions"), int),
    **dict.fromkeys(("host_chunks", "host_bytes", "nvme_chunks", "nvme_bytes"), int),
    "lossy": bool,
    "age_s": (int, type(None)),
}
CHUNK: Final = {
    **dict.fromkeys(("chunk", "parent", "state"), str),
    **dict.fromkeys(("host_bytes", "nvme_bytes", "pins"), int),
    "tiers": [str],
    "lossy": bool,
    "age_s": (int, type(None)),
}
PIN: Final = {
    **dict.fromkeys(("space", "tenant", "label", "chunk", "note"), str),
    **dict.fromkeys(("pin", "uid", "budget_bytes", "held_bytes", "chunks", "left_s"), int),
    "operator": bool,
}
FINDING: Final = dict.fromkeys(("check", "group", "level", "text", "mend"), str)
STAT: Final = {
    **dict.fromkeys(("version", "state", "socket"), str),
    **dict.fromkeys(("epoch", "session_count", "chunks", "leases"), int),
    **dict.fromkeys(("uptime_s", "loop_lag_ms"), NUMBER),
    **{key: [dict] for key in ("sessions", "spaces", "tenants")},
    **dict.fromkeys(("host", "nvme", "counters", "events"), dict),
    "page": {"age_s": float, "pid": int, "alive": bool, "stopped": bool},
    "*": object,
}
EVENT: Final = {
    "type": str,
    "sequence": int,
    "block_hashes?": [str],
    "parent_block_hash?": (str, type(None)),
    "token_ids?": [int],
    "block_size?": int,
    **dict.fromkeys(("medium?", "kvd_tenant?", "kvd_label?"), str),
    **dict.fromkeys(("lora_id?", "lora_name?"), type(None)),
}
INSTALL: Final = {"dry_run": bool, "command": str, "files": [{"path": str, "action": str}]}
CONFIG: Final = {
    **dict.fromkeys(("socket", "state_dir"), str),
    "socket_mode": int,
    **dict.fromkeys(("host", "nvme", "peer", "gpu", "http", "events", "tenants", "limits"), dict),
}
PLAN: Final = {
    "model": dict,
    "sources": [dict],
    "loads?": [dict],
    "break_even?": [dict],
    "chunks?": [dict],
    "capacity?": dict,
    "traffic?": dict,
    "plot?": str,
}

RUNS: Final[dict[str, list[tuple[list[str], Any]]]] = {
    "ls": [
        (["--json"], {"spaces": [SPACE]}),
        (["model@1", "--json"], {"space": SPACE, "chunks": [CHUNK], "more": bool}),
    ],
    "pin": [(["model@1", "--json"], {"pins": [PIN]}), (["--json"], {"pins": [PIN]})],
    "unpin": [(["--all", "--json"], {"pins": [PIN]})],
    "warm": [
        (
            ["model@1", "--json"],
            {"chunks": int, "host_bytes": int, "failed": int, "full": bool, "space": str},
        )
    ],
    "record": [
        (
            ["TRACE", "--for", "0.1s", "--json"],
            {
                "trace": str,
                **dict.fromkeys(("requests", "blocks", "block_tokens", "lost", "skipped"), int),
            },
        )
    ],
    "stat": [(["--json"], STAT)],
    "doctor": [
        (
            ["--only", "kernel", "--json"],
            {"findings": [FINDING], "ok": int, "warn": int, "fail": int, "measured?": dict},
        ),
        (["--list", "--json"], {"checks": [dict.fromkeys(("name", "group", "about"), str)]}),
    ],
    "plan": [
        (["--layers", "32", "--kv-heads", "8", "--head-size", "128", "--json"], PLAN),
    ],
    "evict": [
        (
            ["model@1", "--wait", "20s", "--json"],  # some may be on their way to NVMe
            {
                "dry_run": bool,
                **dict.fromkeys(("chunks", "host_bytes", "nvme_bytes", "held", "undeleted"), int),
                "namespaces": [str],
            },
        )
    ],
    "events": [(["--replay", "--count", "3", "--json"], EVENT)],
    "drain": [(["--json"], {"pid": int, "ended": bool, "seconds": NUMBER})],
    "check": [(["NVME", "--json"], {"directory": str, "good": bool, "*": object})],
    "replay": [
        (
            ["SAMPLE", "--capacity", "9", "--json"],
            {"policy": str, "capacity": int, "block_hit_ratio": NUMBER, "token_savings": NUMBER},
        )
    ],
    "version": [(["--json"], {"version": str, "protocol": int})],
    "install-service": [
        (["--root", "ROOT", "--dry-run", "--json"], INSTALL),
        (["--root", "ROOT", "--json"], INSTALL),
    ],
    "serve": [(["--config", "CONFIG", "--check", "--json"], CONFIG)],
}
"""Commands in the order in which they are driven; what each prints with --json."""
ELSEWHERE: Final = {
    "demo": "tests/engines/test_demo.py drives it: it takes a minute",
    "http": "a test of its own below: it does not end by itself",
    "completion": "a test of its own below: what it prints is for a shell",
}
ON_A_DAEMON: Final = ("ls", "pin", "unpin", "warm", "record", "stat", "evict", "events", "drain")


def misfits(found: Any, schema: Any, at: str = "") -> Iterator[str]:
    """Yield where a value does not have the form that a schema says."""
    if isinstance(schema, list):
        items = found if isinstance(found, list) else [f"no list: {found!r}"]
        for index, item in enumerate(items):
            yield from misfits(item, schema[0], f"{at}[{index}]")
    elif isinstance(schema, dict):
        if not isinstance(found, dict):
            yield f"{at}: no object: {found!r}"
            return
        known = {key.rstrip("?"): part for key, part in schema.items()}
        needed = {key for key in schema if not key.endswith(("?", "*"))}
        yield from (f"{at}.{key}: missing" for key in needed - set(found))
        if "*" not in schema:
            yield from (f"{at}.{key}: not in the schema" for key in set(found) - set(known))
        for key in set(found) & set(known):
            yield from misfits(found[key], known[key], f"{at}.{key}")
    elif not isinstance(found, schema) or (schema is int and isinstance(found, bool)):
        yield f"{at}: {found!r}"


def options_of(name: str) -> set[str]:
    """The long options of a command."""
    actions = parser_of(name)._actions
    return {option for action in actions for option in action.option_strings}


def test_every_command_with_json_has_a_schema() -> None:
    """None is left out, none is here that is not a command."""
    assert set(RUNS) | set(ELSEWHERE) == set(COMMANDS)
    assert not set(RUNS) & set(ELSEWHERE)
    without = {name for name in COMMANDS if "--json" not in options_of(name)}
    assert without == {"completion"}


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command; return its code and what it wrote. `stat` again where the page is old."""
    deadline = time.monotonic() + 30
    while True:
        code = cli.main(list(words))
        out, err = capsys.readouterr()
        starved = words[0] == "stat" and code == EXIT_SILENT
        if not starved or time.monotonic() > deadline:
            return code, out, err
        time.sleep(0.1)


@pytest.mark.timeout(180)
def test_every_command_prints_what_its_schema_says(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other on one daemon, the drain last but for what needs a stopped one."""
    config = tmp_path / "kvd.toml"
    text = '[nvme]\nslow_s = 30\nbytes = "64MiB"\nregion_bytes = "4MiB"\n'
    text += f'[events]\nendpoint = "ipc://{tmp_path}/e"\nreplay_endpoint = "ipc://{tmp_path}/r"\n'
    config.write_text(text, encoding="utf-8")
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon.start()
    sample = tmp_path / "sample.jsonl"
    sample.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n')
    words = {
        "TRACE": str(tmp_path / "trace.jsonl"),
        "NVME": str(daemon.directory / "state" / "nvme"),
        "SAMPLE": str(sample),
        "CONFIG": str(config),
        "ROOT": str(tmp_path / "root"),
    }
    with join(daemon) as client:
        store(client, client.chunk_hashes(tokens(6)))
    for name, runs in RUNS.items():
        for arguments, schema in runs:
            given = [words.get(word, word) for word in arguments]
            at = ["--socket", daemon.socket] if name in ON_A_DAEMON else []
            code, out, err = said(name, *given, *at, capsys=capsys)
            assert (code, err) == (0, ""), (name, code, out, err)
            assert out.endswith("\n")
            for line in out.splitlines():
                wrong = list(misfits(json.loads(line), schema, name))
                assert not wrong, wrong
    assert (tmp_path / "root/etc/kvd/kvd.toml").is_file()


def test_http_prints_where_and_serves_what_its_schemas_say(
    daemon: DaemonProcess, connect: Callable[..., kvd_client.Client]
) -> None:
    """With --json a line says at which port; its documents are checked like other output."""
    connect()
    command = [sys.executable, "-m", "kvd", "http", "--socket", daemon.socket]
    command += ["--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert not list(misfits(told, {"url": str, "pid": int}))
            assert told["pid"] == process.pid
            got = {path: fetched(told["url"] + path) for path in ("stat.json", "health", "metrics")}
        finally:
            process.terminate()
            code = process.wait(40)
    assert code == 0
    stat = {**STAT, "nvme": type(None), "events": type(None)}
    assert not list(misfits(json.loads(got["stat.json"]), stat))
    health = json.loads(got["health"])
    assert not list(misfits(health, {"health": str, "why": [str]}))
    assert health["health"] == "ok"
    assert "\nkvd_up 1.0\n" in got["metrics"]


def fetched(url: str) -> str:
    """Return a document of this host, again where the daemon was starved (503)."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - the test's port
                text: str = answer.read().decode()
                return text
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.parametrize("name", ON_A_DAEMON)
def test_no_daemon_is_one_line_and_code_1(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command that needs one says how to start it."""
    arguments = {"unpin": ["1"], "warm": ["x"], "evict": ["x"], "record": [str(tmp_path / "t")]}
    given = [*arguments.get(name, []), "--socket", str(tmp_path / "none")]
    assert cli.main([name, *given]) == 1
    out, err = capsys.readouterr()
    assert "kvd serve" in err
    assert (out, err.count("\n")) == ("", 1)


def test_serve_has_json_for_its_configuration_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks a daemon to run with --json is told what it is for."""
    assert cli.main(["serve", "--json"]) == 2
    assert "--check" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_argument_is_one_line_and_code_2(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that no command has is refused before anything is done."""
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--no-such-option"])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_and_exit_codes(name: str) -> None:
    """What a command prints at the end of its help begins with examples and ends with codes."""
    epilog = parser_of(name).epilog or ""
    assert epilog.startswith(("example:", "examples:"))
    assert f"\n  kvd {name}" in epilog
    assert "\nexit code" in epilog
    assert max(map(len, epilog.splitlines())) <= 100


# ------------------------------------------------------------------------------------------- Tab


def completed(line: str, tmp_path: Path, **environment: str) -> set[str]:
    """What Tab offers at the end of a line."""
    answer = tmp_path / "answer"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        **environment,
    }
    answer.write_text("")
    subprocess.run(
        [sys.executable, "-m", "kvd"],
        env={**os.environ, **variables},
        check=True,
        timeout=60,
        capture_output=True,
    )
    return {word.strip() for word in answer.read_text().split("\n")} - {""}


@pytest.mark.timeout(180)
def test_tab_completes_commands_options_and_namespaces(
    daemon: DaemonProcess, connect: Callable[..., kvd_client.Client], tmp_path: Path
) -> None:
    """Commands by their beginning, a command's own options, labels of what is there."""
    pytest.importorskip("argcomplete")
    assert {"pin", "plan"} <= completed("kvd p", tmp_path)
    assert "--older-than" in completed("kvd evict --", tmp_path)
    connect()
    while "model@1" not in completed("kvd warm ", tmp_path, KVD_SOCKET=daemon.socket):
        time.sleep(0.05)  # until the page is written anew


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_set_up(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed names kvd; bash takes it."""
    pytest.importorskip("argcomplete")
    assert cli.main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "kvd" in out
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=out, text=True, check=True, timeout=60)
