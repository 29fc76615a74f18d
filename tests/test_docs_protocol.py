"""The documentation says what the code says.

Every message, field, rule, status and limit; every configuration key and statistics field; every
invariant named, every link, and the README's program, which runs here against a real daemon.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import kvd_client
from kvd import config, statpage
from kvd.metrics import Counters
from kvd_client import identity, ring, wire
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import namespace, small_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

ROOT: Final = Path(__file__).resolve().parent.parent
PROTOCOL: Final = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
OPERATIONS: Final = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
ARCHITECTURE: Final = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
NAMING: Final = [f"docs/{name}.md" for name in ("architecture", "operations", "protocol", "states")]
BASES: Final = (ROOT, ROOT / "kvd", ROOT / "client", ROOT / "client/kvd_client")
PAGES: Final = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

TABLES: Final[dict[str, wire.Table]] = {
    "Messages on the socket to the daemon": wire.TO_DAEMON,
    "Messages on the socket to the client": wire.TO_CLIENT,
    "Requests": wire.REQUESTS,
    "Replies": wire.REPLIES,
}
ADR_SECTIONS: Final = (
    "Context",
    "Options",
    "Choice",
    "Consequence",
    "How we would notice that it was wrong",
)


def sections(text: str, level: int) -> dict[str, str]:
    """Each heading of a level, with the text to the next of this level or above."""
    heading = rf"^{'#' * level} (.+)\n((?:(?!#{{1,{level}}} ).*\n)*)"
    return dict(re.findall(heading, text, re.MULTILINE))


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows in a text, heads and rules left out, code marks taken off."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {index - 1 for index, line in enumerate(lines) if line.startswith("| ---")}
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for index, line in enumerate(lines)
        if index not in heads and not line.startswith("| ---")
    ]
    return [[cell.replace("`", "") for cell in row] for row in found]


def named(text: str) -> set[str]:
    """Everything in code marks."""
    return set(re.findall(r"`([^`\n]+)`", text))


@pytest.fixture(scope="module")
def types() -> dict[str, str]:
    """What each type of the protocol page means, in the words of `wire.Rule`."""
    return {row[0]: row[1] for row in rows(sections(PROTOCOL, 3)["Types"])}


@pytest.mark.parametrize("title", TABLES)
def test_every_message_is_documented(title: str, types: dict[str, str]) -> None:
    """Each opcode's name, fields in order, and rules stand in the page, and nothing else does."""
    part = sections(PROTOCOL, 2)[title]
    parts = {name: body for name, body in sections(part, 3).items() if name != "Place"}
    said = {
        heading: [(row[0], types[row[1]]) for row in rows(body) if row[1] in types]
        for heading, body in parts.items()
    }
    table = TABLES[title]
    true = {
        f"{code} {kind.__name__}": [
            (name, rule.words) for name, rule in zip(kind._fields, rules, strict=True)
        ]
        for code, (kind, rules) in table.items()
    }
    assert said == true


def test_no_type_of_the_protocol_page_is_stale(types: dict[str, str]) -> None:
    """Each type is the rule of some field."""
    words = {
        rule.words for table in TABLES.values() for _, rules in table.values() for rule in rules
    }
    assert set(types.values()) == words


def test_places_are_documented() -> None:
    """The record's fields and their sizes, in order."""
    part = sections(sections(PROTOCOL, 2)["Replies"], 3)["Place"]
    sizes = {"H": 2, "I": 4, "Q": 8}
    true = [
        [name, str(sizes[letter])]
        for name, letter in zip(wire.Place._fields, wire.OBJECT.format[1:], strict=True)
    ]
    assert [row[:2] for row in rows(part)] == true
    assert f"record of {wire.OBJECT.size} bytes" in part


@pytest.mark.parametrize(
    ("title", "codes"), [("Statuses", wire.Status), ("Refusals", wire.Refusal)]
)
def test_every_code_is_documented(title: str, codes: Any) -> None:
    """Each status and refusal with its number, and no other."""
    said = [(row[0], row[1]) for row in rows(sections(PROTOCOL, 2)[title])]
    assert said == [(str(code.value), code.name) for code in codes]


def test_limits_are_documented() -> None:
    """Numbers of the protocol page are those of the code."""
    for name, value, _ in rows(sections(PROTOCOL, 3)["Limits"]):
        owner = next(module for module in (wire, ring, identity) if hasattr(module, name))
        assert getattr(owner, name) == int(value), name
    assert f"Version {wire.PROTOCOL}." in PROTOCOL


def test_layout_parts_are_documented() -> None:
    """The greeting's layout is described in the order it has on the wire."""
    said = re.findall(r"`\[([a-z_, ]+)\]`", " ".join(PROTOCOL.split()))
    assert ", ".join(identity.Layout._fields) in said
    assert ", ".join(identity.Group._fields) in said


def test_every_configuration_key_is_documented() -> None:
    """Each key with its table, and no other; limits with their defaults."""
    part = sections(OPERATIONS, 2)["Configuration"]
    true = {
        f"[{table}] {key}" if table else key
        for table, keys in config._KNOWN.items()
        for key in keys
        if table
        or key not in {"events", "gpu", "host", "http", "nvme", "peer", "tenants", "limits"}
    }
    said = {row[0]: row[1] for row in rows(part)}
    assert set(said) == true
    usual = config.Limits()
    for field in fields(config.Limits):
        assert float(said[f"[limits] {field.name}"]) == getattr(usual, field.name), field.name


def test_every_counter_is_documented() -> None:
    """Each counter has its row, and no other has."""
    part = sections(OPERATIONS, 2)["Statistics"]
    table = part[part.index("| counter |") :]
    assert [row[0] for row in rows(table)] == list(Counters().page())


def leaves(stats: Any) -> Iterator[str]:
    """Every key of a nested map, lists included."""
    for key, value in stats.items() if isinstance(stats, dict) else ():
        yield key
        if key != "evictions":
            yield from leaves(value)
    for value in stats if isinstance(stats, list) else ():
        yield from leaves(value)


def test_every_statistics_field_is_documented(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """What a real daemon with a session and both tiers says is explained, field by field."""
    path = tmp_path / "kvd.toml"
    text = '[nvme]\nslow_s = 30\nbytes = "16MiB"\nregion_bytes = "4MiB"\n'
    path.write_text(text, encoding="utf-8")
    daemon = make_daemon(arguments=["--config", str(path)])
    daemon.start()
    stats: dict[str, Any] = {}
    with kvd_client.connect(
        daemon.socket, namespace=namespace(), layout=small_layout(), required=True
    ):
        while not stats.get("sessions") or not stats.get("spaces"):
            stats = statpage.read(stat_page_name(daemon.socket)).stats
    assert stats["nvme"]
    parts = sections(OPERATIONS, 2)
    words = named(parts["Statistics"]) | named(parts["Events for routers"])
    assert not set(leaves(stats)) - words


def test_invariants_in_the_architecture_page_exist() -> None:
    """Each is named in the docstring of the module it is said to be in."""
    module = ""
    seen = 0
    for path, name, *_ in rows(sections(ARCHITECTURE, 2)["Invariants"]):
        module = path or module
        text = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8"))) or ""
        assert re.search(rf"^\s*{name}\.?\s", text, re.MULTILINE), f"{module} has no {name}"
        seen += 1
    assert seen > 30


def test_make_targets_in_the_readme_exist() -> None:
    """The table has each target that `make` lists."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    true = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)) - {"help"}
    said = {row[0] for row in rows(sections(README, 2)["Make targets"])}
    assert said == {f"make {target}" for target in true}


def test_the_readmes_program_runs(daemon: DaemonProcess) -> None:
    """As it is, in a process of its own, against a real daemon."""
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 11
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "KVD_SOCKET": daemon.socket},
    )
    assert done.stderr == ""
    assert done.stdout == f"4 chunks, {4 * (256 << 10)} bytes\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of the tree."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "README.md", "SECURITY.md", *NAMING])
def test_files_that_are_named_exist(name: str) -> None:
    """A path in code marks is one of the tree, of the daemon's package or of the client's."""
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = {
        word for word in named(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(\.(py|md|toml)|/)", word)
    }
    gone = {path for path in paths if not any((base / path).exists() for base in BASES)}
    assert not gone - {"regions/"}


def test_every_bench_has_a_table() -> None:
    """docs/benchmarks.md has a section a bench, with the same columns in each."""
    parts = sections((ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"), 2)
    benches = {f"bench.{path.stem}" for path in (ROOT / "bench").glob("[a-z]*.py")}
    assert benches <= set(parts)
    head = "| figure | target | reached | machine | commit |"
    assert all(part.count(head) == 1 for part in parts.values())


@pytest.mark.parametrize("page", sorted((ROOT / "docs/adr").glob("*.md")), ids=lambda p: p.name)
def test_decisions_have_their_parts(page: Path) -> None:
    """A decision's number is its file's, and it says what CONTRIBUTING asks for."""
    text = page.read_text(encoding="utf-8")
    assert re.match(r"\d{4}-[a-z0-9-]+\.md$", page.name)
    assert text.startswith(f"# {int(page.name[:4])}. ")
    assert tuple(sections(text, 2)) == ADR_SECTIONS
