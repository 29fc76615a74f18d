"""Who may import whom.

    kvd_client  <-  pure modules  <-  tiers | ipc | peer  <-  daemon.py

- The client never imports the daemon.
- Pure modules decide and do nothing: they import each other, the client's pure modules, and the
  standard library's data modules.
- `tiers`, `ipc` and `peer` never import one another, and only `daemon.py` sees more than one.
- Heavy libraries are imported where they are used, so that a client, the command line and a
  daemon without a device start in milliseconds.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvd.commands import COMMANDS

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = {"kvd": ROOT / "kvd", "kvd_client": ROOT / "client" / "kvd_client"}

PURE: Final = frozenset(
    {
        "kvd.admission",
        "kvd.ages",
        "kvd.audit",
        "kvd.catalog",
        "kvd.changes",
        "kvd.cost",
        "kvd.durations",
        "kvd.entry",
        "kvd.errors",
        "kvd.eviction",
        "kvd.events.journal",
        "kvd.filling",
        "kvd.health",
        "kvd.http.catalogue",
        "kvd.http.catalogue_fleet",
        "kvd.http.catalogue_gpu",
        "kvd.http.figures",
        "kvd.http.history",
        "kvd.hits",
        "kvd.identity",
        "kvd.keepsake",
        "kvd.lease",
        "kvd.measures",
        "kvd.metrics",
        "kvd.peer.asker",
        "kvd.peer.breaker",
        "kvd.peer.directory",
        "kvd.peer.holder",
        "kvd.peer.messages",
        "kvd.peer.membership",
        "kvd.peer.protocol",
        "kvd.places",
        "kvd.plan",
        "kvd.plan.capacity",
        "kvd.plan.loading",
        "kvd.plan.shape",
        "kvd.policies",
        "kvd.policies.admission",
        "kvd.policies.base",
        "kvd.policies.hazard",
        "kvd.policies.lifetable",
        "kvd.policies.lru",
        "kvd.policies.s3fifo",
        "kvd.policy",
        "kvd.prefix",
        "kvd.pulse",
        "kvd.quota",
        "kvd.tables",
        "kvd.tiers.slab",
        "kvd.trees",
        "kvd.twins",
        "kvd.types",
        "kvd.verifying",
        "kvd_client.errors",
        "kvd_client.identity",
        "kvd_client.sglang.options",
        "kvd_client.vllm.announce",
        "kvd_client.vllm.messages",
        "kvd_client.vllm.options",
        "kvd_client.vllm.plans",
        "kvd_client.vllm.saving",
        "kvd_client.wire",
        "kvd_client.wire_admin",
        "kvd_client.wire_gpu",
        "kvd_client.wire_rules",
    }
)
DATA_MODULES: Final = frozenset(
    {
        "__future__",
        "array",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "operator",
        "struct",
        "types",
        "typing",
        "zlib",
    }
)
ALSO_PURE: Final = {
    "kvd.durations": frozenset({"re"}),
    "kvd.identity": frozenset({"msgpack", "numpy"}),
    "kvd.keepsake": frozenset({"msgpack"}),
    "kvd.peer.messages": frozenset({"msgpack"}),
    "kvd.peer.directory": frozenset({"base64"}),
    "kvd.peer.membership": frozenset({"msgpack", "re"}),
    "kvd_client.identity": frozenset({"msgpack"}),
    "kvd_client.wire": frozenset({"msgpack"}),
}
BRANCHES: Final = ("kvd.tiers", "kvd.ipc", "kvd.peer")
DEVICE_LIBRARIES: Final = frozenset({"torch", "cupy", "transformers"})
MAY_USE_DEVICE_LIBRARIES: Final = ("kvd.tiers.gpu", "kvd.codec", "kvd.demo")

HEAVY: Final = frozenset(
    {"torch", "cupy", "transformers", "numpy", "lmdb", "zstandard", "multiprocessing"}
)
NOT_IN_CLIENT: Final = HEAVY | {"kvd", "aiofiles", "asyncio"}


def module_name(package: str, path: Path) -> str:
    """Dotted name of a file of `package`."""
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


def imported(tree: ast.Module, module: str, *, is_package: bool) -> set[str]:
    """Dotted names that a file imports anywhere; `from a import b` gives `a.b`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                around = module.split(".")[: len(module.split(".")) - up]
                base = ".".join([*around, base] if base else around)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def is_in(name: str, module: str) -> bool:
    """Whether a dotted name is this module or something in it."""
    return name == module or name.startswith(f"{module}.")


def wrong_imports(module: str, names: set[str]) -> set[str]:
    """What of `names` the module must not import."""
    wrong: set[str] = set()
    if is_in(module, "kvd_client"):
        wrong |= {name for name in names if is_in(name, "kvd")}
    if module in PURE:
        extra = ALSO_PURE.get(module, frozenset())
        wrong |= {
            name
            for name in names
            if name.split(".")[0] not in DATA_MODULES | extra
            and not any(is_in(name, pure) for pure in PURE)
        }
    if is_in(module, "kvd"):
        wrong |= wrong_branches(module, names)
        if not any(module.startswith(prefix) for prefix in MAY_USE_DEVICE_LIBRARIES):
            wrong |= {name for name in names if name.split(".")[0] in DEVICE_LIBRARIES}
    return wrong


def wrong_branches(module: str, names: set[str]) -> set[str]:
    """Imports that join two of the daemon's three branches outside `daemon.py`."""
    if module == "kvd.daemon":
        return set()
    mine = {branch for branch in BRANCHES if is_in(module, branch)}
    used = {branch: {n for n in names if is_in(n, branch)} for branch in BRANCHES}
    if mine:
        return set().union(*(used[branch] for branch in BRANCHES if branch not in mine))
    touched = [branch for branch in BRANCHES if used[branch]]
    return set().union(*used.values()) if len(touched) > 1 else set()


def modules() -> dict[str, set[str]]:
    """Every module of both packages with what it imports."""
    found: dict[str, set[str]] = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            module = module_name(package, path)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found[module] = imported(tree, module, is_package=path.name == "__init__.py")
    return found


def test_every_import_goes_the_right_way() -> None:
    """No module imports what its place in the picture forbids."""
    found = modules()
    assert {"kvd", "kvd.cli", "kvd_client", "kvd_client.wire"} <= set(found)
    assert PURE.intersection(found), "no pure module was looked at"
    assert "kvd_client.errors.WireError" in found["kvd_client.wire"]
    wrong = [
        f"{module} imports {name}"
        for module, names in found.items()
        for name in sorted(wrong_imports(module, names))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("kvd_client.client", "import kvd", {"kvd"}),
        ("kvd_client.client", "def f():\n    from kvd.types import X", {"kvd.types.X"}),
        ("kvd_client.client", "from . import wire\nimport os", set()),
        ("kvd.catalog", "import time\nfrom kvd.entry import Entry", {"time"}),
        ("kvd.catalog", "from . import daemon", {"kvd.daemon"}),
        ("kvd.catalog", "from kvd_client.client import Client", {"kvd_client.client.Client"}),
        ("kvd.identity", "import numpy as np", set()),
        ("kvd.quota", "import numpy as np", {"numpy"}),
        ("kvd.tiers.host", "from kvd.ipc import ring", {"kvd.ipc.ring"}),
        ("kvd.tiers.host", "from ..ipc import ring", {"kvd.ipc.ring"}),
        ("kvd.tiers.host", "from kvd.tiers import slab\nimport os", set()),
        ("kvd.cli", "import torch", {"torch"}),
        ("kvd.tiers.gpu", "import cupy", set()),
        ("kvd.mover", "import kvd.tiers.host\nimport kvd.ipc", {"kvd.tiers.host", "kvd.ipc"}),
        ("kvd.mover", "import kvd.tiers.host", set()),
        ("kvd.daemon", "import kvd.tiers.host\nimport kvd.ipc", set()),
    ],
)
def test_wrong_ways_are_seen(module: str, source: str, wrong: set[str]) -> None:
    """The check finds each kind of wrong import, and only those."""
    names = imported(ast.parse(source), module, is_package=False)
    assert wrong_imports(module, names) == wrong


def loaded_by(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has after `statement`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",  # so that only what is installed is found
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(("module", "banned"), [("kvd_client", NOT_IN_CLIENT), ("kvd.cli", HEAVY)])
def test_import_stays_light(module: str, banned: frozenset[str]) -> None:
    """Importing the client or the command line pulls in none of the heavy libraries."""
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert not loaded.intersection(banned)


def test_a_daemon_needs_little() -> None:
    """Host and GPU memory alone need no library of what can be turned on beside them."""
    loaded = loaded_by("import kvd.daemon, kvd.gpu, kvd.tiers.gpu, kvd.tiers.host")
    assert "kvd.tiers.gpu" in loaded
    assert not loaded.intersection(
        {"zmq", "aiofiles", "lmdb", "numba", "prometheus_client", "redis", "zstandard", "nixl"}
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_is_heavy_before_it_runs(name: str) -> None:
    """The command's module, and so its --help, loads nothing that takes long."""
    loaded = loaded_by(f"import kvd.cli, {COMMANDS[name].module}")
    assert COMMANDS[name].module in loaded
    assert not loaded.intersection(HEAVY | {"numba", "asyncio", "kvd.daemon"})


def test_light_check_sees_a_heavy_import() -> None:
    """The check above would notice: asyncio, imported, is in the list."""
    assert "asyncio" in loaded_by("import asyncio")
