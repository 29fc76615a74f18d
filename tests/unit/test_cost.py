"""Load or recompute: rates, the time a load takes, and a gate that does not flip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cost import (
    KEEP_BELOW,
    LOAD_BELOW,
    WEIGHT,
    Gate,
    Load,
    Rate,
    Rates,
    load_s,
    sooner_by_peer,
)

TOKENS = 1000
FREE = Rates(0.0, 0.0, 0.0, 0)
DISK = Rates(0.0, 1e6, 0.0, 0)
"""A megabyte a second, nothing else."""


def gate_of(tokens_s: float) -> Gate:
    """Make a gate of an engine that computes so many tokens a second."""
    gate = Gate()
    gate.prefill.observe(tokens_s, 1.0)
    return gate


def offer(seconds: float, tokens: int = TOKENS) -> Load:
    """Make a load that takes so long from DISK."""
    return Load(tokens, 0, int(seconds * 1e6))


# ---------------------------------------------------------------------------------- rates


def test_a_rate_without_samples_is_not_known() -> None:
    """Nothing is known, and nothing is divided by zero."""
    rate = Rate()
    assert (rate.per_s, rate.seconds, rate.samples) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("units", "seconds"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_a_sample_that_says_nothing_is_no_sample(units: float, seconds: float) -> None:
    """No work, or no time, tells nothing about a rate."""
    rate = Rate()
    rate.observe(units, seconds)
    assert (rate.per_s, rate.samples) == (0.0, 0)


def test_the_first_sample_is_the_rate() -> None:
    """It is not mixed with a nothing before it."""
    rate = Rate()
    rate.observe(500, 2)
    assert rate.per_s == pytest.approx(250)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=50))
def test_a_rate_stays_within_its_samples(samples: list[tuple[float, float]]) -> None:
    """A mean, weighted by size, never leaves the range of what it has seen."""
    rate = Rate()
    for units, seconds in samples:
        rate.observe(units, seconds)
    each = [units / seconds for units, seconds in samples]
    assert min(each) * 0.999 <= rate.per_s <= max(each) * 1.001
    assert rate.samples == len(samples)


def test_a_large_sample_counts_for_more_than_a_small_one() -> None:
    """A tiny read that took long for its size says little about the rate of large ones."""
    rate = Rate()
    for _ in range(20):
        rate.observe(1_000_000, 1.0)
    rate.observe(100, 0.01)
    assert rate.per_s > 990_000


def test_a_rate_forgets() -> None:
    """After a change of speed, a dozen samples are enough to be near the new one."""
    rate = Rate()
    for _ in range(50):
        rate.observe(100, 1.0)
    for _ in range(12):
        rate.observe(100, 0.1)
    assert rate.per_s == pytest.approx(1000, rel=0.35)
    assert 0 < WEIGHT < 1


def test_the_seconds_of_a_rate_are_those_of_one_sample() -> None:
    """What one read takes is what was observed, from the first on: it is a latency."""
    rate = Rate()
    for _ in range(5):
        rate.observe(1, 0.2)
        assert rate.seconds == pytest.approx(0.2)


# ---------------------------------------------------------------------------------- a load


def test_what_a_load_takes() -> None:
    """Its bytes at their tiers' rates, behind what is queued, and one latency."""
    rates = Rates(host_bytes_s=100.0, cold_bytes_s=10.0, cold_latency_s=3.0, cold_queued_bytes=40)
    assert load_s(Load(1, 200, 60), rates) == pytest.approx(2.0 + 3.0 + 10.0)
    assert load_s(Load(1, 200, 0), rates) == pytest.approx(2.0), (
        "nothing cold: no latency, no queue"
    )
    assert load_s(Load(1, 0, 0), rates) == 0.0


def test_what_is_not_known_costs_nothing() -> None:
    """Rates of 0 are unknown; they are no reason not to load."""
    assert load_s(Load(1, 1 << 40, 1 << 40), FREE) == 0.0
    rates = FREE._replace(cold_latency_s=0.5)
    assert load_s(Load(1, 1 << 40, 1), rates) == 0.5


# ---------------------------------------------------------------------------------- the gate


def test_without_a_report_all_is_worth_loading() -> None:
    """Until the engine says how fast it computes, nothing is held back, however slow the disk."""
    gate = Gate()
    assert gate.worth([(1, offer(1e6)), (9, offer(1e9))], DISK) == 9
    assert gate.loading
    assert gate.why == "no prefill rate reported yet: loads all"


def test_unknown_disk_rates_load() -> None:
    """Nor is anything held back until the disk has been measured."""
    assert gate_of(1e9).worth([(9, offer(100.0))], FREE) == 9


def test_a_load_must_be_clearly_faster_to_be_offered_again() -> None:
    """From loading to not and back, the border is another one each way."""
    gate = gate_of(TOKENS)  # computing takes one second
    just_under, between, just_over = LOAD_BELOW - 0.01, 1.0, KEEP_BELOW + 0.01
    course = (just_under, between, just_over, between, just_under, between)
    seen = [gate.worth([(9, offer(seconds))], DISK) == 9 for seconds in course]
    assert seen == [True, True, False, False, True, True]


@given(st.lists(st.floats(LOAD_BELOW + 0.001, KEEP_BELOW - 0.001), max_size=50), st.booleans())
def test_noise_does_not_flip_the_gate(noise: list[float], loading: bool) -> None:  # noqa: FBT001
    """Between the two borders the answer is the last one, whatever is measured."""
    gate = gate_of(TOKENS)
    gate.loading = loading
    assert all((gate.worth([(9, offer(s))], DISK) == 9) == loading for s in noise)


def test_the_longest_is_not_always_the_best() -> None:
    """A cold tail that takes longer than computing it is left out; the warm head is offered."""
    gate = gate_of(TOKENS)
    head, whole = Load(TOKENS, 0, 0), Load(2 * TOKENS, 0, 30_000_000)
    assert gate.worth([(4, head), (8, whole)], DISK) == 4
    assert not gate.loading
    assert "load 30000.0 ms" in gate.why
    assert "2000 tokens: compute 2000.0 ms" in gate.why


def test_of_two_the_one_that_saves_more_is_offered() -> None:
    """A cold tail that takes less than computing it is worth its bytes."""
    gate = gate_of(TOKENS)
    head, whole = Load(TOKENS, 0, 0), Load(2 * TOKENS, 0, 300_000)
    assert gate.worth([(4, head), (8, whole)], DISK) == 8
    assert gate.loading


def test_nothing_is_offered_when_nothing_saves() -> None:
    """Everything takes longer than computing: load nothing."""
    gate = gate_of(1e9)
    assert gate.worth([(4, offer(1.0)), (8, offer(2.0))], DISK) == 0


@given(
    st.floats(1, 1e6),
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 10**9)), min_size=1, max_size=6),
    st.booleans(),
)
def test_the_offer_is_the_one_that_saves_most(
    tokens_s: float,
    steps: list[tuple[int, int]],
    loading: bool,  # noqa: FBT001 - drawn
) -> None:
    """Against a naive look at every offer: the greatest saving, none without one."""
    gate = gate_of(tokens_s)
    gate.loading = loading
    share = KEEP_BELOW if loading else LOAD_BELOW
    offers, tokens, cold = [], 0, 0
    for count, (more, size) in enumerate(steps, 1):
        tokens, cold = tokens + more, cold + size
        offers.append((count, Load(tokens, 0, cold)))
    saved = {n: share * load.tokens / tokens_s - load.cold_bytes / 1e6 for n, load in offers}
    found = gate.worth(offers, DISK)
    best = max(saved.values())
    assert saved.get(found, 0.0) == pytest.approx(max(0.0, best))
    assert (found == 0) == (best <= 0)
    assert gate.loading == (found == len(offers))


def test_another_host_may_be_sooner_than_the_own_disk() -> None:
    """What lies below is fetched instead where the link is clearly faster, queues included."""
    rates = Rates(0.0, 1e9, 0.001, 0, 4e9, 0.001, 0.0)
    assert sooner_by_peer(1 << 30, 1 << 30, rates)
    assert not sooner_by_peer(1 << 30, 1 << 30, rates._replace(peer_queued_bytes=4e9))
    assert not sooner_by_peer(1 << 28, 1 << 30, rates), "packed to a quarter below"
    assert not sooner_by_peer(1 << 30, 1 << 30, rates._replace(peer_bytes_s=0.0))
    assert not sooner_by_peer(1 << 30, 1 << 30, rates._replace(cold_bytes_s=0.0))


def test_what_others_have_costs_its_link() -> None:
    """A load from another host takes its latency, what is asked for there, and its bytes."""
    rates = Rates(0.0, 0.0, 0.0, 0, 1e9, 0.25, 5e8)
    assert load_s(Load(256, 0, 0, 10**9), rates) == pytest.approx(0.25 + 1.5)
    assert load_s(Load(256, 0, 0, 0), rates) == 0
