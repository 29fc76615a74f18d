"""The checks of `bench.gpu_check` in which an engine or the daemon dies in the middle of copies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import _gpu
from kvd_client.cuda.transfer import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from bench._daemon import DaemonProcess
    from bench._gpu_place import Place

SLACK_BYTES: Final = 16 << 20
"""What free GPU memory may differ by; one context takes some hundred MiB."""
CHILD_START_S: Final = 60.0
"""For what imports torch and CuPy and makes a context, with others beside it."""
ROOT: Final = Path(__file__).resolve().parent.parent


class Victim:
    """An engine process that copies until it is killed."""

    def __init__(self, socket: str, number: int) -> None:
        """Start it; `ready` waits for it."""
        self.number = number
        own = [str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_check", "--child", socket, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": ":".join(filter(None, own))},
        )

    def hear(self, timeout_s: float) -> list[str]:
        """Give the words of its next line; none if it says nothing in time, or has ended."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return []
        return self.process.stdout.readline().decode().split()

    def kill(self, after_s: float) -> None:
        """Let it copy for a moment, and kill it."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        if self.hear(_gpu.WAIT_S) != ["copying"]:
            raise AssertionError(f"engine {self.number} does not copy")
        time.sleep(after_s)
        self.process.send_signal(signal.SIGKILL)
        if self.process.wait(_gpu.WAIT_S) != -signal.SIGKILL:
            raise AssertionError(f"engine {self.number} had ended before it was killed")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, whatever happened."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


def total(layers: Sequence[Any]) -> int:
    """Add up what lies in pages, to compare it with another process."""
    import torch

    return sum(int(layer.view(torch.int16).long().sum()) for layer in layers)


def free_bytes(place: Place) -> int:
    """Ask how much GPU memory is free, without what torch holds back for itself."""
    import torch

    torch.cuda.empty_cache()
    return place.device.free_bytes()


@contextlib.contextmanager
def victims(socket: str, numbers: range, wanted: list[str]) -> Iterator[list[Victim]]:
    """Start engines to kill side by side; each has read the first prompt from the GPU tier."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Victim(socket, number)) for number in numbers]
        for victim in made:
            said = victim.hear(CHILD_START_S)
            if said != wanted:
                raise AssertionError(f"engine {victim.number} says {said}, not {wanted}")
        yield made


def engines_killed(place: Place) -> None:
    """Kill an engine mid-copy again and again: the other's bytes stay, and so does free memory."""
    with place.daemon() as running, place.engine(running.socket, place.busy) as engine:
        blocks, others, hashes = engine.blocks(1), engine.blocks(2), engine.hashes(1)
        engine.stored(hashes, blocks)
        expected = engine.content(blocks)
        held = engine.client.acquire(hashes)  # what the others store must not push it out

        def look(kill: int) -> None:
            engine.wipe(others)
            engine.load(hashes, others)
            if not _gpu.same(engine.content(others), expected):
                raise AssertionError(f"other bytes after kill {kill}")

        wanted = ["ready", str(total(expected)), "gpu"]
        look(0)  # what torch and CUDA take at the first use of something is taken by now
        whole = free_bytes(place)
        for first in range(1, place.kills + 1, place.together):
            numbers = range(first, min(first + place.together, place.kills + 1))
            with victims(running.socket, numbers, wanted) as made:
                low = free_bytes(place)
                for gone, victim in enumerate(made, start=1):
                    victim.kill(0.02 * (victim.number % 7))
                    least = low + (whole - low) * gone // len(made) - SLACK_BYTES
                    _gpu.until(
                        lambda least=least: free_bytes(place) >= least,  # type: ignore[misc]
                        f"GPU memory is missing 1 s after kill {victim.number}: {least} bytes"
                        " should be free",
                        timeout_s=1.0,
                    )
                    look(victim.number)
        held.release()


def child(place: Place, socket: str, number: int) -> None:
    """Read what the first engine stored, say so, then copy until killed."""
    engine = place.engine(socket, place.busy, seed=number)
    first, blocks = engine.hashes(1), engine.blocks(2)
    lease = engine.client.acquire(first)
    on_gpu = all(lease.on_gpu(chunk) is not None for chunk in range(lease.chunks))
    lease.release()
    engine.load(first, blocks)
    found = total(engine.content(blocks))
    print("ready", found, "gpu" if on_gpu else "host", flush=True)
    sys.stdin.readline()
    seed = 1000 * number
    hashes = engine.hashes(seed)  # what the last one had reserved may be given back only now
    _gpu.until(
        lambda: engine.side.store(engine.client.reserve(hashes), engine.blocks(1)).wait(1.0),
        "nothing can be stored",
    )
    print("copying", flush=True)
    while True:
        seed += 1
        engine.side.store(engine.client.reserve(engine.hashes(seed)), engine.blocks(1))
        lease = engine.client.acquire(engine.hashes(seed - 1))
        pages = (lease.chunks - lease.first) * (engine.shape.chunk // engine.shape.page)
        engine.side.load(lease, blocks[:pages])


def daemon_killed(place: Place) -> None:
    """Kill daemons while engines copy, again and again: misses, and old handles are refused."""
    lanes = min(place.lanes, place.kills)
    with ThreadPoolExecutor(lanes) as pool:
        shares = [range(lane, place.kills, lanes) for lane in range(lanes)]
        for done in [pool.submit(_one_daemon_killed, place, share) for share in shares]:
            done.result()


def _one_daemon_killed(place: Place, numbers: range) -> None:
    with place.daemon() as running, place.engine(running.socket, place.busy) as engine:
        blocks, hashes = engine.blocks(1), engine.hashes(1)
        for number in numbers:
            engine.stored(hashes, blocks)
            lease = engine.client.acquire(hashes)
            epoch, old = engine.client.epoch, lease.on_gpu(0)
            lease.release()
            if old is None:
                raise AssertionError("what was stored is not in the GPU tier")
            _copy_while_killed(engine, running, number)
            engine.client.acquire(hashes).release()  # a miss, and no exception
            running.start()
            _gpu.until(engine.client.ping, "no session with the new daemon")
            _gpu.until_ready(running, place.check_bytes[1])
            engine.side.idle()
            if engine.side.imports.address(*old, place.busy.page_bytes, epoch) is not None:
                raise AssertionError("a handle of the old daemon was taken")


def _copy_while_killed(engine: _gpu.Engine, running: DaemonProcess, number: int) -> None:
    """Load and store until the daemon is dead; what began before it died ends well."""
    blocks, others, hashes = engine.blocks(1), engine.blocks(2), engine.hashes(1)
    expected = engine.content(blocks)
    lease = engine.client.acquire(hashes)
    first = [engine.side.load(lease, others)]
    first.append(engine.side.store(engine.client.reserve(engine.hashes(10_000)), blocks))
    killer = threading.Timer(0.002 * (number % 5), running.kill)
    killer.start()
    try:
        for copy in first:
            if not copy.wait(_gpu.WAIT_S):
                raise AssertionError(f"a copy failed with the daemon: {copy.state}")
        if not _gpu.same(engine.content(others), expected):
            raise AssertionError(f"loaded other bytes at kill {number + 1}")
        seed = 10_000
        while killer.is_alive():
            seed += 1
            lease = engine.client.acquire(hashes)
            pages = (lease.chunks - lease.first) * (engine.shape.chunk // engine.shape.page)
            load = engine.side.load(lease, others[:pages])
            store = engine.side.store(engine.client.reserve(engine.hashes(seed)), others)
            for copy in (load, store):
                copy.wait(_gpu.WAIT_S)
                if copy.state not in {State.DONE, State.FAILED}:  # failed: it never began, a miss
                    raise AssertionError(f"a copy failed with the daemon: {copy.state}")
    finally:
        killer.join()
