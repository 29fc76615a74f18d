"""The directory's decisions: names, queue, pace, gate, hints."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.peer.directory import (
    BACKOFF_S,
    FLEET_PER_S,
    FOUND_NS,
    GROUP_CHUNKS,
    HEADS_MAX,
    NOBODY_NS,
    PROBE_CHUNKS,
    SLOW_MAX,
    Gate,
    Heads,
    Hints,
    Outbox,
    Pace,
    S,
    entry_key,
    numbers_of,
    parts_to_ask,
    rate_of,
    realm_of,
    tag_of,
    to_ask,
)
from tests.unit.test_catalog import PAGE, ROOT, TENANT, Host, chain, layout_of

if TYPE_CHECKING:
    from kvd.entry import Chunk

REALM = realm_of("kvd", TENANT, ROOT, b"l" * 32)


# ------------------------------------------------------------------------------------- names


def test_realms_keep_apart_what_may_not_be_shared() -> None:
    """Another fleet, tenant, namespace or layout is another realm, wherever a name is cut."""
    parts = [("f", "t", b"n", b"l"), ("ft", "", b"n", b"l"), ("f", "tn", b"", b"l")]
    parts += [("g", "t", b"n", b"l"), ("f", "t", b"nl", b""), ("f", "t", b"n", b"m")]
    assert len({realm_of(*one) for one in parts}) == len(parts)


def test_entries_are_named_by_realm_and_chunk() -> None:
    """Keys differ by chunk and by realm, are printable, and have one hash tag."""
    hashes = chain("x", 4)
    keys = {entry_key(r, hashes[0], h) for r in (REALM, b"o" * 32) for h in hashes}
    assert len(keys) == 8
    for key in keys:
        assert key.decode().isprintable()
        assert key.startswith(b"kvd:{")
        assert key.count(b"{") == key.count(b"}") == 1


def test_a_group_is_one_slot_and_prompts_are_not() -> None:
    """Chunks of a group share a tag; other groups and other prompts have others."""
    tags = [tag_of(entry_key(REALM, head, b"c" * 32)) for head in chain("heads", 200)]
    assert len(set(tags)) > 195
    assert tag_of(entry_key(REALM, b"h" * 32, b"a" * 32)) == tag_of(
        entry_key(REALM, b"h" * 32, b"b" * 32)
    )


def tree_of(length: int) -> list[Chunk]:
    """A chain in a catalog."""
    host = Host(1, places=length)
    space = host.enter(layout_of(PAGE))
    hashes = chain("deep", length)
    host.reserve(space, hashes)
    return [space.chunks[key] for key in hashes]


@given(st.randoms(use_true_random=False))
def test_who_stores_and_who_asks_find_the_same_group(chance: random.Random) -> None:
    """The head found by walking up, in any order, is the chain's at the group's first index."""
    chunks = TREE
    heads = Heads()
    order = list(range(len(chunks)))
    chance.shuffle(order)
    for index in order:
        assert heads.head(chunks[index]) == chunks[index - index % GROUP_CHUNKS].hash


TREE = tree_of(3 * GROUP_CHUNKS + 5)


def test_heads_take_bounded_room() -> None:
    """What is remembered of chains is bounded, and being forgotten changes no answer."""
    heads = Heads()
    for _ in range(2 * HEADS_MAX // len(TREE)):
        chunks = tree_of(70)
        assert [heads.head(c) for c in chunks] == [chunks[i - i % 32].hash for i in range(70)]
    assert len(heads._known) <= HEADS_MAX


# ------------------------------------------------------------------------------------- telling


def test_the_outbox_has_a_bound_and_says_what_it_dropped() -> None:
    """What is in it may change again; what finds no room is counted and asks for a sweep (Y1)."""
    outbox: Outbox[int] = Outbox(3)
    for item in (1, 2, 3, 2, 1):
        outbox.put(item)
    assert (len(outbox), outbox.dropped, outbox.missed) == (3, 0, False)
    outbox.put(4)
    assert (len(outbox), outbox.dropped, outbox.missed) == (3, 1, True)
    assert outbox.take(2) == [1, 2]
    assert outbox.take(9) == [3]
    assert outbox.take(9) == []


@given(st.lists(st.tuples(st.integers(0, 2 * S), st.integers(0, 500)), max_size=60))
def test_the_pace_is_kept_in_every_second(steps: list[tuple[int, int]]) -> None:
    """However calls fall, no second has more than the rate and what may be saved up (Y4)."""
    pace = Pace(100)
    now, told = S, []
    for wait, wish in steps:
        now += wait
        count = min(wish, pace.allowed(now))
        pace.spend(count)
        told.append((now, count))
    for begin, _ in told:
        assert sum(count for at, count in told if begin <= at < begin + S) <= 110


def test_a_pace_is_reached() -> None:
    """Whoever takes what is allowed gets the whole rate."""
    pace = Pace(2000)
    total = 0
    for step in range(201):
        count = pace.allowed(S + step * S // 20)
        pace.spend(count)
        total += count
    assert 19_900 <= total <= 20_100


def test_a_fleet_shares_what_a_server_carries() -> None:
    """Alone, a host has its own limit; a thousand together stay below the server's."""
    assert rate_of(2000, 1) == 2000
    assert rate_of(2000, 1000) == FLEET_PER_S / 1000
    assert rate_of(2000, 1000, servers=10) == FLEET_PER_S / 100
    assert rate_of(5, 100_000_000) == 1.0


# ------------------------------------------------------------------------------------- asking


def gate_at(now_ns: int) -> Gate:
    """An open gate."""
    gate = Gate(lambda: 0.5)
    assert gate.probe_due(now_ns)
    gate.probed(now_ns)
    assert gate.open
    return gate


def test_a_failure_shuts_the_gate_at_once() -> None:
    """After one failure nobody waits (Y3); a probe is due after a pause."""
    gate = gate_at(S)
    gate.failed(S, "gone")
    assert not gate.open
    assert gate.trips == 1
    assert not gate.probe_due(S)
    pause_ns = int(BACKOFF_S[0] * S)
    assert gate.probe_due(S + pause_ns)
    assert gate.wait_s(S) == pytest.approx(BACKOFF_S[0])
    gate.probed(2 * S)
    assert gate.open


def test_some_late_answers_in_a_row_shut_the_gate() -> None:
    """One in time between them starts the count anew."""
    gate = gate_at(S)
    for _ in range(SLOW_MAX - 1):
        gate.late(S)
    gate.answered()
    for _ in range(SLOW_MAX - 1):
        gate.late(S)
        assert gate.open
    gate.late(S)
    assert not gate.open
    assert gate.why == "slow"


def test_probes_that_fail_come_ever_later() -> None:
    """The pause doubles up to its longest, and starts small again after success."""
    gate = gate_at(S)
    now = S
    gate.failed(now, "gone")
    pauses = []
    for _ in range(8):
        now += int(gate.wait_s(now) * S)
        gate.probed(now, "still gone")
        pauses.append(gate.wait_s(now))
    assert pauses[:3] == pytest.approx([0.4, 0.8, 1.6])
    assert pauses[-1] == pytest.approx(BACKOFF_S[1])
    gate.probed(now)
    gate.failed(now, "gone again")
    assert gate.wait_s(now) == pytest.approx(BACKOFF_S[0])


def test_hosts_do_not_probe_in_step() -> None:
    """Each host's pause is drawn: between half and one and a half of it."""
    chance = random.Random(7)
    waits = []
    for _ in range(200):
        gate = Gate(chance.random)
        gate.probed(S)
        gate.failed(S, "gone")
        waits.append(gate.wait_s(S))
    assert min(waits) < 0.6 * BACKOFF_S[0]
    assert max(waits) > 1.4 * BACKOFF_S[0]


def test_hints_end() -> None:
    """An answer is believed for seconds, nobody for less; the oldest goes when there is no room."""
    hints = Hints(2)
    name, other, third = ((REALM, key) for key in chain("h", 3))
    hints.put(name, (5, 6), S)
    hints.put(other, (), S)
    assert hints.get(name, S + FOUND_NS - 1) == (5, 6)
    assert hints.get(name, S + FOUND_NS) is None
    assert hints.get(other, S + NOBODY_NS - 1) == ()
    assert hints.get(other, S + NOBODY_NS) is None
    hints.forget(name, 5)
    assert hints.get(name, S) == (6,)
    hints.put(third, (1,), S)
    assert len(hints) == 2
    assert hints.get(name, S) is None


def test_only_what_can_be_of_use_is_asked_for() -> None:
    """Known chunks are not asked for, nor what comes after one that nobody has."""
    assert to_ask([None, (1,), None, (), None]) == [0, 2]
    assert to_ask([(), None]) == []
    assert to_ask([(1,), (2,)]) == []


@given(st.integers(0, 300))
def test_the_probe_and_the_rest_are_all(count: int) -> None:
    """Nothing is lost by cutting; a long chain is probed by its beginning first."""
    first, rest = parts_to_ask(range(count))
    assert [*first, *rest] == list(range(count))
    assert (len(first) == PROBE_CHUNKS) if rest else (count <= 2 * PROBE_CHUNKS)


@pytest.mark.parametrize(
    ("reply", "numbers"),
    [
        ([], ()),
        ([b"5", b"9223372036854775807"], (5, 9223372036854775807)),
        (None, None),
        (RuntimeError("WRONGTYPE"), None),
        ([b"5", b"x"], None),
        ([b"-5"], None),
        ([5], None),
        ([b"1" * 20], None),
        ([b"1"] * 5, None),
        (b"5", None),
    ],
)
def test_what_an_entry_says_is_checked(reply: object, numbers: tuple[int, ...] | None) -> None:
    """Only a short list of numbers is one."""
    assert numbers_of(reply) == numbers
