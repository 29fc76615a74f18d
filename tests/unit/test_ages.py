"""Ages of uses from notes of the tick: never too old, close enough, in bounded room."""

from __future__ import annotations

from kvd.ages import NOTES_MAX, Ages

S = 10**9


def test_a_use_is_as_old_as_its_note() -> None:
    """To a second while notes are fresh; what came after the last note is new."""
    ages = Ages(100 * S)
    for second in range(1, 50):
        ages.note(10 * second, (100 + second) * S)
    now_ns = 160 * S
    assert ages.age_s(0, now_ns) is None
    assert ages.age_s(1, now_ns) == 59
    assert ages.age_s(10, now_ns) == 59
    assert ages.age_s(11, now_ns) == 58
    assert ages.age_s(490, now_ns) == 11
    assert ages.age_s(491, now_ns) == 0


def test_notes_close_together_are_one() -> None:
    """Five notes a second cost one place, and no use is told older than it is."""
    ages = Ages(0)
    for fifth in range(1, 5001):
        ages.note(fifth, fifth * S // 5)
    assert len(ages._ticks) <= 1300
    for fifth in range(1, 5001, 7):
        age_s, true_s = ages.age_s(fifth, 2000 * S), 2000 - fifth / 5
        assert age_s is not None
        assert true_s - 2.1 <= age_s <= true_s


def test_room_is_bounded_and_old_notes_grow_coarse() -> None:
    """After any time the list has its bound, in order; late ages stay exact, none is too old."""
    ages = Ages(0)
    for second in range(1, 200_001):
        ages.note(second, second * S)
    assert len(ages._ticks) == len(ages._times_ns) <= NOTES_MAX
    assert ages._ticks == sorted(set(ages._ticks))
    now_ns = 200_000 * S
    assert ages.age_s(200_000 - 60, now_ns) == 60
    for tick in (1, 10, 1000, 50_000, 150_000):
        age_s = ages.age_s(tick, now_ns)
        assert age_s is not None
        assert age_s <= 200_000 - tick
    assert 200_000 - 1000 - (ages.age_s(1000, now_ns) or 0) < 200_000


def test_silence_costs_nothing() -> None:
    """A tick that does not move is not noted again, and its time stays that of its use."""
    ages = Ages(0)
    ages.note(5, 10 * S)
    for second in range(11, 10_000):
        ages.note(5, second * S)
    assert len(ages._ticks) == 2
    assert ages.age_s(5, 10_000 * S) == 9_990
