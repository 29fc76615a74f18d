"""A mover whose device fails where nobody expects it; `test_mover` has what fails in a copy."""

from __future__ import annotations

import time

import pytest

from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.mover import Mover
from kvd_client.cuda.transfer import State
from tests.gpu.test_mover import Bench


def test_kernels_that_do_not_compile_are_known_before_the_first_transfer() -> None:
    """The thread compiles as it begins: no transfer waits for that, and then none is taken."""
    bench = Bench()

    def fail() -> None:
        raise DeviceError("no compiler")

    bench.device.prepare = fail  # type: ignore[method-assign]
    bench.mover.start()
    deadline = time.monotonic() + 20
    while not bench.mover.broken:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert bench.mover.broken == "no compiler"
    assert bench.transfer("gather", [0, 1]).state is State.FAILED
    assert bench.mover.close(20.0)


def test_memory_of_a_mover_that_cannot_begin_is_given_back() -> None:
    """The stages are large, and the engine goes on without kvd."""
    bench = Bench()
    left = bench.device.left_bytes

    def fail() -> int:
        raise DeviceError("no more streams")

    bench.device.make_stream = fail  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="streams"):
        Mover(bench.device, bench.pages)
    assert bench.device.left_bytes == left


def test_what_is_refused_while_a_graph_is_recorded_takes_no_event() -> None:
    """Asked in every step of a recording, it would take one each."""
    bench = Bench()
    bench.device.recording = True
    events = len(bench.device.events)
    with pytest.raises(DeviceError, match="graph"):
        bench.mover.record_after()
    assert len(bench.device.events) == events


def test_an_error_that_no_one_foresaw_ends_the_transfer_not_the_thread() -> None:
    """Nobody knows what is under way: it is lost, and the next one refused."""
    bench = Bench()

    def fail(*_: object) -> None:
        raise TypeError("an integer is required")

    bench.device.launch = fail  # type: ignore[method-assign, assignment]
    lost = bench.transfer("gather", [0, 1])
    bench.mover.turn()
    assert lost.state is State.LOST
    assert bench.mover.broken == "an integer is required"
    assert bench.transfer("gather", [0, 1]).state is State.FAILED
