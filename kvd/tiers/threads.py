"""Calls into threads that never let go of a buffer early, and how long they take.

Invariants:

K1. `Calls.run` returns or raises only when its thread is done with the call, also when its task is
    cancelled: what the call may touch is the caller's again from then on, not before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import aiofiles.os  # type: ignore[import-untyped]

from kvd.failpoints import maybe_hang

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

P = ParamSpec("P")
T = TypeVar("T")


class _Once:
    """An executor for one call, which keeps the thread's own future."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self.future: Future[object] | None = None

    def submit(self, call: Callable[..., object], /, *arguments: object) -> Future[object]:
        future = self.future = self._pool.submit(call, *arguments)
        return future


async def settled(
    loop: asyncio.AbstractEventLoop,
    future: Future[T],
    on_cancel: Callable[[], None] = lambda: None,
) -> T:
    """Wait for a thread's future, whatever happens to the waiting task (K1).

    Args:
        loop: The running loop.
        future: Of a call that the thread will finish, or that cannot be cancelled.
        on_cancel: Called when the task is cancelled; the wait goes on.

    Raises:
        asyncio.CancelledError: The task was cancelled; the thread is done all the same.
    """
    done = asyncio.Event()
    future.add_done_callback(lambda _: _wake(loop, done))
    cancelled: asyncio.CancelledError | None = None
    while not done.is_set():
        try:
            await done.wait()
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled
    return future.result()


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


class Watch:
    """How long calls have been running in threads; a context manager around each. Any thread."""

    def __init__(self) -> None:
        """Begin idle."""
        self._since: dict[int, float] = {}

    def __enter__(self) -> None:
        self._since[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since.pop(threading.get_ident(), None)

    def oldest_s(self) -> float:
        """Return how long the oldest call has been running; 0 when none is."""
        return time.monotonic() - min(self._since.copy().values(), default=time.monotonic())


class Workers(ThreadPoolExecutor):
    """Threads of one name that show whether they still turn.

    They do while a call ends now and then, or none is to be done. A call that waits for a disk
    counts as well (`watch`): that the disk hangs is for `health.py` to say, and a new start would
    not mend it. What is left is a thread that has died, or hangs in what is ours.
    """

    def __init__(self, threads: int, name: str, watch: Watch | None = None) -> None:
        """Start none yet."""
        super().__init__(threads, thread_name_prefix=name, initializer=self._begin)
        self._watch = watch
        self._seen: list[threading.Thread] = []
        self._guard = threading.Lock()
        self._given = 0
        self._turned_s = 0.0
        self._over = False

    def _begin(self) -> None:
        self._seen.append(threading.current_thread())

    def submit(self, call: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Give them a call; any thread."""
        with self._guard:
            if not self._given:
                self.turn()
            self._given += 1
        try:
            future = super().submit(call, *arguments, **named)
        except RuntimeError:
            self._end(None)
            raise
        future.add_done_callback(self._end)
        return future

    def _end(self, _: object) -> None:
        with self._guard:
            self._given -= 1
            self.turn()

    def turn(self) -> None:
        """Note that a long call gets on; any thread."""
        self._turned_s = time.monotonic()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the library's
        """End them; from then on they may die."""
        self._over = True
        super().shutdown(wait, cancel_futures=cancel_futures)

    def turned_s(self) -> float:
        """Return when they last turned, on the monotonic clock; 0 when one of them has died."""
        if not self._over and not all(thread.is_alive() for thread in self._seen):
            return 0.0
        if not self._given or (self._watch is not None and self._watch.oldest_s() > 0):
            self.turn()
        return self._turned_s


class Inflight:
    """How many calls are under way, and how fast they move bytes.

    The loop is the only caller.
    """

    def __init__(self) -> None:
        """Begin idle."""
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self._windows: deque[tuple[float, int]] = deque(maxlen=8)
        self.depth = 0
        self.deepest = 0

    def begin(self, now: float) -> None:
        """Note a call."""
        if not self.depth:
            self._busy_since = now
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)

    def end(self, now: float, size_bytes: int) -> None:
        """Note that a call is done, and the bytes it moved; 0 for one that failed."""
        assert self.depth > 0
        self.depth -= 1
        self._bytes += size_bytes
        if not self.depth:
            self._busy_s += now - self._busy_since

    def turn(self, now: float) -> None:
        """Close a window of measurement."""
        if self.depth:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        if self._bytes:
            self._windows.append((self._busy_s, self._bytes))
            self._busy_s, self._bytes = 0.0, 0

    @property
    def rate(self) -> float:
        """Bytes a second while anything was under way, over the last windows; 0: not known."""
        busy_s = sum(window[0] for window in self._windows)
        return sum(window[1] for window in self._windows) / busy_s if busy_s > 0 else 0.0


class Calls:
    """Runs blocking calls in a pool, watched."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Executor, watch: Watch) -> None:
        """Use a pool that somebody else closes."""
        self._loop = loop
        self._pool = pool
        self._watch = watch

    def _watched(self, function: Callable[..., T], *arguments: object) -> T:
        maybe_hang("nvme.call")
        with self._watch:
            return function(*arguments)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a blocking function in a thread (K1)."""
        once = _Once(self._pool)
        call = aiofiles.os.wrap(self._watched)
        try:
            result: T = await call(function, *arguments, loop=self._loop, executor=once)
        except asyncio.CancelledError:
            if once.future is not None and not once.future.cancelled():
                await settled(self._loop, once.future)
            raise
        return result

    def submit(self, function: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Call in a thread, and `then` on the loop with the finished future; nobody waits."""
        future = self._pool.submit(self._watched, function)
        future.add_done_callback(partial(self.deliver, then))

    def deliver(self, then: Callable[[Future[T]], None], done: Future[T]) -> None:
        """Hand a finished future to the loop; any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(then, done)
