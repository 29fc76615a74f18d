"""A long bench step by step, with results kept in a file: a run that was cut goes on from there."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Steps:
    """Runs steps by name, in their order, each once."""

    def __init__(self, bench: str, path: Path | None, settings: dict[str, object]) -> None:
        """Take in what an earlier run with the same settings left in the file.

        Args:
            bench: Name, for progress.
            path: The file; None to keep nothing.
            settings: What the results depend on.
        """
        self._bench = bench
        self._path = path
        self._began = time.perf_counter()
        self._kept: dict[str, Any] = {"settings": settings, "steps": {}, "seconds": 0.0}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found.get("settings") == json.loads(json.dumps(settings)):
                self._kept = found
                self.say(f"going on after {len(found['steps'])} steps of {path}")
        self._earlier_s: float = self._kept["seconds"]

    @property
    def seconds(self) -> float:
        """How long all steps took, those of earlier runs included."""
        return self._earlier_s + time.perf_counter() - self._began

    def say(self, text: str) -> None:
        """Tell how far it is."""
        print(f"{self._bench}: {text}", file=sys.stderr, flush=True)

    def run(self, name: str, step: Callable[[], Any]) -> Any:  # noqa: ANN401 - as JSON has it
        """Return a step's result, which JSON can hold; kept, or made now."""
        steps = self._kept["steps"]
        if name not in steps:
            self.say(f"{name}, {self.seconds:.0f} s in")
            steps[name] = step()
            self._kept["seconds"] = self.seconds
            if self._path is not None:
                fresh = self._path.with_suffix(".new")
                fresh.write_text(json.dumps(self._kept))
                fresh.replace(self._path)
        return steps[name]
