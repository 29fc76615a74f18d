"""What verified host memory costs: `[host] verify` off, sampled and always, in turn.

    python -m bench.verify [--json] [--rounds 12]

Three daemons at once, one a mode, and in each round every step with each of them, in an order that
turns. What is timed:

    store     four objects of 32 MiB: reserve, gather from a paged pool, publish; one copying thread
    load      acquire, scatter, release, once what was stored has its sums
    at_once   the same, right behind the store: the acquire waits for the first sums
    view      acquire and a byte of each of 8 objects of 1 MiB, in place
    acquire   acquire and release of 128 objects of 4 KiB
    lookup    a look-up of the same 128

`MODE_STEP_over_off` is the median of the ratios to `off` in the same round, and with `_best` the
ratio of the best rounds, which no neighbour delayed; `STEP_us_MODE` is the median time. Sums and
copies share the machine's cores: on two of them they are in each other's way.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import kvd_client
from bench import ipc
from bench._daemon import running_daemon
from bench._table import report
from bench.host import (
    CHUNK_TOKENS,
    LAYERS,
    OBJECT_BYTES,
    Engine,
    layout_of,
    namespace,
    paged_pool,
    seconds,
    view_s,
)
from kvd import statpage
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    import torch

MODES: Final = ("off", "sampled", "always")
STEPS: Final = ("store", "load", "at_once", "view", "acquire", "lookup")
HOST_BYTES: Final = 1 << 30
VIEWS: Final = 8
SMALL: Final = 128
REPEATS: Final = 20
"""Of the short steps, in one round."""
WARM_ROUNDS: Final = 5
"""Not counted: they touch all of the memory."""


class Subject:
    """One daemon with its clients."""

    def __init__(
        self, stack: contextlib.ExitStack, verify: str, planes: list[torch.Tensor]
    ) -> None:
        """Start it, and store what is only read."""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-"))
        config = Path(folder) / "kvd.toml"
        config.write_text(f'[host]\nverify = "{verify}"\n')
        self.socket = stack.enter_context(running_daemon(HOST_BYTES, ["--config", str(config)]))
        large, middle, small = (
            stack.enter_context(
                kvd_client.connect(self.socket, namespace=namespace(), layout=layout, required=True)
            )
            for layout in (
                layout_of(LAYERS, OBJECT_BYTES),
                layout_of(1, OBJECT_BYTES // LAYERS),
                ipc.bench_layout(),
            )
        )
        self.engine = Engine(large, planes)
        self._middle, self._small = middle, small
        self._views = middle.chunk_hashes(range(VIEWS * CHUNK_TOKENS))
        self._chain = small.chunk_hashes(range(SMALL * CHUNK_TOKENS))
        for client, hashes in ((middle, self._views), (small, self._chain)):
            with client.reserve(hashes) as reservation:
                client.publish(reservation)

    def settle(self) -> None:
        """Wait until nothing is to be summed, in a page written from now on."""
        begun = time.monotonic()
        while True:
            page = statpage.read(stat_page_name(self.socket))
            fresh = time.monotonic() - page.age_s > begun
            if fresh and not page.stats["host"].get("verifying", 0):
                return
            time.sleep(0.01)

    def differed(self) -> int:
        """Return how many objects were not what they were."""
        found = statpage.read(stat_page_name(self.socket)).stats["host"].get("differed", 0)
        assert isinstance(found, int)
        return found

    def round(self) -> dict[str, float]:
        """Time each step once, in seconds."""
        engine = self.engine
        first, second = engine.prefix(), engine.prefix()
        tables, others = engine.tables(), engine.tables()
        took = {"store": seconds(lambda: engine.store(1, first, tables))}
        self.settle()
        took["load"] = seconds(lambda: engine.load(1, first, others))
        engine.store(1, second, tables)
        took["at_once"] = seconds(lambda: engine.load(1, second, others))
        self.settle()
        took["view"] = statistics.median(view_s(self._middle, self._views) for _ in range(REPEATS))
        took["acquire"] = statistics.median(seconds(self._acquire) for _ in range(REPEATS))
        took["lookup"] = statistics.median(seconds(self._look_up) for _ in range(REPEATS))
        return took

    def _acquire(self) -> None:
        with self._small.acquire(self._chain) as lease:
            if lease.chunks != SMALL:
                raise RuntimeError(f"hit {lease.chunks} of {SMALL} chunks")

    def _look_up(self) -> None:
        if self._small.lookup(self._chain).chunks != SMALL:
            raise RuntimeError("what was stored is not found")


def run(rounds: int) -> dict[str, object]:
    """Measure."""
    times: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        planes = paged_pool()
        subjects = {mode: Subject(stack, mode, planes) for mode in MODES}
        for turn in range(-WARM_ROUNDS, rounds):
            at = turn % len(MODES)
            for mode in MODES[at:] + MODES[:at]:
                for step, took_s in subjects[mode].round().items():
                    if turn >= 0:
                        times.setdefault((mode, step), []).append(took_s)
        if any(subject.differed() for subject in subjects.values()):
            raise RuntimeError("an object was found to differ, and nobody has touched it")
    figures: dict[str, object] = {"rounds": rounds}
    for step in STEPS:
        usual = times["off", step]
        for mode in MODES[1:]:
            ratios = [a / b for a, b in zip(times[mode, step], usual, strict=True)]
            figures[f"{mode}_{step}_over_off"] = statistics.median(ratios)
            figures[f"{mode}_{step}_over_off_best"] = min(times[mode, step]) / min(usual)
    for (mode, step), took in times.items():
        figures[f"{step}_us_{mode}"] = statistics.median(took) * 1e6
    return figures


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=12, help="counted rounds")
    options = parser.parse_args()
    report("bench.verify", run(options.rounds), as_json=options.json)


if __name__ == "__main__":
    main()
