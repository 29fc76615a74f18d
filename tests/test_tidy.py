"""Rules of style that no linter knows; CONTRIBUTING.md lists them.

Each rule is a function from a parsed file to the lines that break it. The second half of this
file breaks every rule once, so that none can pass because it looks at nothing.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Rule = Callable[[ast.Module, str], Iterator[tuple[int, str]]]

ROOT: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("kvd", "client/kvd_client")
CHECKS: Final = ("tests", "bench")

FILE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 70

TEXT_SUFFIXES: Final = frozenset(
    {".py", ".pyi", ".md", ".toml", ".txt", ".json", ".service", ".socket", ".conf", ".cu", ""}
)
SKIPPED_FOLDERS: Final = frozenset({"build", "dist", "__pycache__"})

MACHINE_PATH: Final = re.compile(r"(?<![\w.$}>-])/(?:work|home|root|Users)/[\w.]")

EXCEPTIONS: Final[dict[tuple[str, str], str]] = {
    ("clock", "kvd/clock.py"): "the one place that may ask for the wall clock",
}
"""(rule, file): reason. This list may only shrink."""


def sources(folders: tuple[str, ...]) -> list[Path]:
    """Python files under these folders of the tree."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def texts() -> list[Path]:
    """Every text file of the project, wherever it lies."""
    found: list[Path] = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [
            name
            for name in inner
            if name not in SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
            and (name == ".ci" or not name.startswith("."))
        ]
        found.extend(
            Path(folder, n) for n in names if Path(n).suffix in TEXT_SUFFIXES and n != ".git"
        )
    return sorted(found)


def dotted(node: ast.expr) -> str:
    """Name of a called thing as it is written: `a.b.c`, calls inside shown as `()`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
        case ast.Call(func=func):
            return f"{dotted(func)}()"
        case _:
            return "?"


def calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and written name of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, dotted(node.func)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{a.name}") for a in node.names)


def long_file(_tree: ast.Module, text: str) -> Iterator[tuple[int, str]]:
    """A file has at most 500 lines."""
    lines = text.count("\n")
    if lines > FILE_LINES_MAX:
        yield lines, f"file of {lines} lines, at most {FILE_LINES_MAX}"


def long_function(tree: ast.Module, _text: str) -> Iterator[tuple[int, str]]:
    """A function has at most 70 lines, its docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def code_from_bytes(tree: ast.Module, _text: str) -> Iterator[tuple[int, str]]:
    """Bytes from outside never become code: no pickle in any dress, no eval."""
    modules = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for line, name in imports(tree):
        if name.split(".")[0] in modules or name == "torch.load":
            yield line, f"imports {name}"
    for line, name in calls(tree):
        if name in {"eval", "exec", "torch.load"}:
            yield line, f"calls {name}"


def wall_clock(tree: ast.Module, _text: str) -> Iterator[tuple[int, str]]:
    """Deadlines and ages come from the monotonic clock; the wall clock may jump."""
    for line, name in imports(tree):
        if name in {"time.time", "time.time_ns"}:
            yield line, f"imports {name}"
    for line, name in calls(tree):
        if name in {"time.time", "time.time_ns"}:
            yield line, f"calls {name}"


def lost_task(tree: ast.Module, _text: str) -> Iterator[tuple[int, str]]:
    """A task is born in a task group, which waits for it and sees its failure."""
    for line, name in imports(tree):
        if name in {"asyncio.create_task", "asyncio.ensure_future"}:
            yield line, f"imports {name}"
    for line, name in calls(tree):
        owner, _, call = name.rpartition(".")
        on_a_loop = owner == "asyncio" or owner.endswith(("loop", "loop()"))
        if call == "ensure_future" or (call == "create_task" and on_a_loop):
            yield line, f"calls {name}"


RULES: Final[dict[str, tuple[Rule, tuple[str, ...]]]] = {
    "file length": (long_file, PRODUCT + CHECKS),
    "function length": (long_function, PRODUCT + CHECKS),
    "code from bytes": (code_from_bytes, PRODUCT + CHECKS),
    "clock": (wall_clock, PRODUCT),
    "task": (lost_task, PRODUCT),
}


def broken(rule: str, path: Path) -> list[str]:
    """Lines of `path` that break `rule`, exceptions not yet considered."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    check, _ = RULES[rule]
    return [f"{name}:{line}: {what}" for line, what in check(ast.parse(text), text)]


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds_in_every_file(rule: str) -> None:
    """No file breaks the rule, but for the exceptions with a reason."""
    _, folders = RULES[rule]
    paths = sources(folders)
    names = {path.relative_to(ROOT).as_posix() for path in paths}
    for package in PRODUCT:
        assert f"{package}/__init__.py" in names, f"looked at nothing in {package}"
    excepted = {name for excepted_rule, name in EXCEPTIONS if excepted_rule == rule}
    problems = [
        problem
        for path in paths
        if path.relative_to(ROOT).as_posix() not in excepted
        for problem in broken(rule, path)
    ]
    assert not problems, "\n".join([str(RULES[rule][0].__doc__), *problems])


def test_no_machine_path_in_any_text() -> None:
    """Nothing names a folder of the machine it was written on."""
    paths = texts()
    names = {path.relative_to(ROOT).as_posix() for path in paths}
    assert {"Makefile", "pyproject.toml", ".ci/run", "tests/test_tidy.py"} <= names
    problems = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not problems, "\n".join(problems)


BREAKING: Final[dict[str, tuple[str, ...]]] = {
    "file length": ("x = 1\n" * (FILE_LINES_MAX + 1),),
    "function length": (
        "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX,
        "class A:\n    async def f(self):\n" + "        x = 1\n" * FUNCTION_LINES_MAX,
    ),
    "code from bytes": (
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "def f():\n    return eval('1')",
        "exec('1')",
    ),
    "clock": ("import time\ntime.time()", "from time import time", "import time\ntime.time_ns()"),
    "task": (
        "import asyncio\nasyncio.create_task(f())",
        "from asyncio import create_task",
        "asyncio.get_running_loop().create_task(f())",
        "self.loop.create_task(f())",
        "asyncio.ensure_future(f())",
    ),
}
KEEPING: Final[dict[str, tuple[str, ...]]] = {
    "file length": ("x = 1\n" * FILE_LINES_MAX,),
    "function length": ("def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1),),
    "code from bytes": ("import ast\nast.literal_eval('1')", "model.eval()", "msgpack.load(f)"),
    "clock": ("import time\ntime.monotonic()", "clock.time()"),
    "task": ("group.create_task(f())", "self.tasks.create_task(f())"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_sees_what_breaks_it(rule: str) -> None:
    """Each rule finds code that breaks it and leaves alone code that only looks like it."""
    check, _ = RULES[rule]
    for text in BREAKING[rule]:
        assert list(check(ast.parse(text), text)), text
    for text in KEEPING[rule]:
        assert not list(check(ast.parse(text), text)), text


@pytest.mark.parametrize("folder", ["work", "home", "root", "Users"])
def test_machine_path_is_seen(folder: str) -> None:
    """A path of the machine is found; parts of other paths and URLs are not."""
    assert MACHINE_PATH.search(f"see /{folder}/someone/file")
    assert not MACHINE_PATH.search(f"see docs/{folder}/file and $TREE/{folder}/file")


def test_exceptions_are_still_needed() -> None:
    """An exception whose file exists and no longer breaks the rule has to go."""
    idle = [
        (rule, name)
        for rule, name in EXCEPTIONS
        if (ROOT / name).exists() and not broken(rule, ROOT / name)
    ]
    assert not idle
