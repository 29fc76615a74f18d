"""Threads that show whether they turn: idle, busy, waiting for a disk, hanging, dead."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvd.pulse import TURN_S, Pulse
from kvd.tiers.threads import Watch, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 10.0


def until(what: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def hold() -> Iterator[threading.Event]:
    """Hold calls up until the test ends."""
    event = threading.Event()
    yield event
    event.set()


def test_who_has_nothing_to_do_turns() -> None:
    """Before the first call, between calls and after them."""
    workers = Workers(2, "test")
    before = time.monotonic()
    for _ in range(3):
        before = time.monotonic()
        assert workers.turned_s() >= before
        assert workers.submit(int, "7").result(LIMIT_S) == 7
    workers.shutdown()
    assert workers.turned_s() >= before, "they have ended as they should"


def test_a_call_that_does_not_end_is_seen(hold: threading.Event) -> None:
    """From then on no turn is told; each end of another call is one."""
    workers = Workers(2, "test")
    begun = time.monotonic()
    workers.submit(hold.wait)
    time.sleep(0.05)
    assert begun <= workers.turned_s() < time.monotonic() - 0.04
    between = time.monotonic()
    workers.submit(int).result(LIMIT_S)
    until(lambda: workers.turned_s() >= between)
    last = workers.turned_s()
    workers.submit(hold.wait)
    waiting = workers.submit(int)
    time.sleep(0.05)
    assert workers.turned_s() == last
    workers.turn()
    assert workers.turned_s() > last
    hold.set()
    waiting.result(LIMIT_S)
    workers.shutdown()


def test_who_waits_for_a_disk_counts_as_turning(hold: threading.Event) -> None:
    """That is the disk's affair; as soon as the call is out of it, time counts again."""
    watch, inside, out = Watch(), threading.Event(), threading.Event()
    workers = Workers(1, "test", watch)

    def call() -> None:
        with watch:
            inside.wait(LIMIT_S)
        out.set()
        hold.wait(LIMIT_S)

    workers.submit(call)
    until(lambda: watch.oldest_s() > 0)
    now = time.monotonic()
    assert workers.turned_s() >= now
    inside.set()
    assert out.wait(LIMIT_S)
    last = workers.turned_s()
    time.sleep(0.05)
    assert workers.turned_s() == last
    hold.set()
    workers.shutdown()


def test_a_cancelled_call_is_not_waited_for(hold: threading.Event) -> None:
    """What has left the queue counts for nothing."""
    workers = Workers(1, "test")
    workers.submit(hold.wait)
    assert workers.submit(int).cancel()
    hold.set()
    workers.submit(int).result(LIMIT_S)
    now = time.monotonic()
    until(lambda: workers.turned_s() >= now)
    workers.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_died_is_late_at_once() -> None:
    """Although the other one goes on, and nothing is to be done."""
    workers, threads = Workers(2, "test"), []
    pulse = Pulse()
    barrier = threading.Barrier(2)

    def who() -> None:
        threads.append(threading.current_thread())
        barrier.wait(LIMIT_S)

    for future in [workers.submit(who), workers.submit(who)]:
        future.result(LIMIT_S)
    now_ns = time.monotonic_ns()
    pulse.beat("pool", int(workers.turned_s() * 1e9), TURN_S)
    assert pulse.late(now_ns) == []
    victim = threads[0]
    assert victim.ident is not None
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit)
    )
    assert raised == 1
    while victim.is_alive():  # it dies as it takes its next call
        workers.submit(int)
        time.sleep(0.005)
    assert workers.turned_s() == 0.0
    pulse.beat("pool", int(workers.turned_s() * 1e9), TURN_S)
    assert pulse.late(time.monotonic_ns()) == ["pool"]
    workers.shutdown(wait=False)


def test_no_call_after_the_end() -> None:
    """It is refused, and not counted."""
    workers = Workers(1, "test")
    workers.shutdown()
    with pytest.raises(RuntimeError):
        workers.submit(int)
    now = time.monotonic()
    assert workers.turned_s() >= now
