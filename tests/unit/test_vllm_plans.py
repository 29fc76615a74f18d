"""What kvd does for one request of a vLLM engine: each stage, and any order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client.vllm.plans import AGAIN_S, HOLD_S, Action, Plan, Stage

LOOKUP_S = 0.25
PROMOTE_S = 5.0


def plan() -> Plan:
    """Return a plan of a request that was just seen."""
    return Plan(lookup_s=LOOKUP_S, promote_s=PROMOTE_S)


def held(chunks: int = 8, first: int = 0) -> Plan:
    """Return a plan that holds chunks `first` to `chunks` - 1 at time 0."""
    made = plan()
    assert made.next(0.0, first, chunks) is Action.ASK
    made.asked(0.0)
    made.found(0.0, chunks, chunks)
    assert made.next(0.0, first, chunks) is Action.HOLD
    made.holding(0.0)
    made.held(0.0, chunks)
    return made


def test_what_is_there_is_held_before_it_is_promised() -> None:
    """A look-up and a hold come before an answer, and the answer names what is held."""
    made = held(8)
    assert made.next(0.0, 0, 8) is Action.LOAD
    assert (made.first, made.chunks, made.saved) == (0, 8, 8)


def test_nothing_is_asked_for_what_the_engine_has() -> None:
    """With all whole chunks computed, no look-up is made."""
    made = plan()
    assert made.next(0.0, 4, 4) is Action.MISS
    assert made.stage is Stage.FRESH


def test_what_is_not_worth_loading_is_neither_held_nor_saved_again() -> None:
    """The gate's answer, none, is a miss; chunks that kvd has are known to be saved."""
    made = plan()
    made.next(0.0, 0, 8)
    made.asked(0.0)
    made.found(0.0, 6, 0)
    assert made.next(0.0, 0, 8) is Action.MISS
    assert made.saved == 6


@pytest.mark.parametrize(("got", "saved"), [(8, 8), (5, 5), (3, 3), (0, 3)])
def test_what_was_found_and_cannot_be_had_is_saved_again(got: int, saved: int) -> None:
    """A disk lost it, say: of the request's chunks only those held count as kvd's."""
    made = plan()
    made.next(0.0, 3, 8)
    made.asked(0.0)
    made.found(0.0, 8, 8)
    made.next(0.0, 3, 8)
    made.holding(0.0)
    made.held(0.0, got)
    assert made.saved == saved


def test_a_wait_has_an_end() -> None:
    """A look-up and a promotion that take too long are given up, and the request runs."""
    made = plan()
    made.next(0.0, 0, 8)
    made.asked(0.0)
    assert made.next(LOOKUP_S / 2, 0, 8) is Action.WAIT
    assert made.next(LOOKUP_S, 0, 8) is Action.DROP
    made.dropped(LOOKUP_S)
    assert made.next(LOOKUP_S, 0, 8) is Action.MISS
    made = plan()
    made.next(0.0, 0, 8)
    made.asked(0.0)
    made.found(0.0, 8, 8)
    made.next(0.0, 0, 8)
    made.holding(0.0)
    assert made.next(PROMOTE_S - 0.1, 0, 8) is Action.WAIT
    assert made.next(PROMOTE_S, 0, 8) is Action.DROP
    made.dropped(PROMOTE_S)
    assert made.next(PROMOTE_S, 0, 8) is Action.MISS


def test_a_lease_that_waited_too_long_is_taken_anew() -> None:
    """An engine without room gets another look-up, not a lease that may have ended."""
    made = held(8)
    assert made.next(HOLD_S, 0, 8) is Action.DROP
    made.dropped(HOLD_S)
    assert made.next(HOLD_S, 0, 8) is Action.ASK


def test_a_lease_that_begins_too_late_is_let_go() -> None:
    """When the engine has lost what it had before the first held chunk, the lease is no use."""
    made = held(8, first=3)
    assert made.next(0.0, 2, 8) is Action.DROP
    made.dropped(0.0)
    assert made.next(0.0, 2, 8) is Action.MISS


def test_a_failed_load_is_not_tried_again_at_once() -> None:
    """After a load the request is computed; a while later, or preempted, it is looked up again."""
    made = held(8)
    made.allocated(load=True)
    made.loaded(1.0)
    assert made.next(1.0, 0, 8) is Action.MISS
    assert made.next(1.0 + AGAIN_S, 0, 8) is Action.ASK


def test_a_preempted_request_is_asked_for_anew() -> None:
    """Once it ran, a request that comes back is looked up again."""
    made = held(8)
    made.allocated(load=False)
    assert made.next(0.0, 0, 8) is Action.ASK


def consider(made: Plan, now: float, first: int, limit: int, data: st.DataObject) -> Action:
    """Let the engine consider a request once; kvd answers anything, or nothing."""
    for _ in range(6):
        action = made.next(now, first, limit)
        if action is Action.ASK:
            made.asked(now)
        elif action is Action.HOLD:
            assert made.first < made.chunks <= limit
            made.holding(now)
        elif action is Action.DROP:
            made.dropped(now)
        elif action is not Action.WAIT or data.draw(st.booleans()):
            return action
        elif made.stage is Stage.ASKED:
            chunks = data.draw(st.integers(0, limit))
            made.found(now, chunks, data.draw(st.integers(0, chunks)))
        else:
            made.held(now, data.draw(st.integers(made.first, made.chunks)))
    raise AssertionError("the plan does not come to an answer")


@given(st.data())
def test_any_order_of_events_ends_and_promises_only_what_is_held(data: st.DataObject) -> None:
    """Whatever kvd answers and the engine does, an answer names held chunks short of the limit."""
    made, now, limit = plan(), 0.0, data.draw(st.integers(0, 9))
    for _ in range(60):
        now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 6.0]))
        first = data.draw(st.integers(0, limit))
        if consider(made, now, first, limit, data) is Action.LOAD:
            assert made.stage is Stage.HELD
            assert made.first <= first < made.chunks <= limit
            if data.draw(st.booleans()):
                made.allocated(load=True)
                made.loaded(now)
