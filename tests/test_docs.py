"""The docs say what the code does: each state table in docs/states.md is the code's.

    python -m tests.test_docs

writes the tables anew; the words around them are people's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kvd.entry import TRANSITIONS, SlotEvent, SlotState
from kvd.lease import Lease, LeaseBook, LeaseState
from kvd.types import LeaseId, OwnerId, Tenant

if TYPE_CHECKING:
    from collections.abc import Callable

STATES: Final = Path(__file__).resolve().parent.parent / "docs" / "states.md"
MARKED: Final = r"(<!-- table: {name} -->\n).*?(<!-- end -->)"
ILLEGAL: Final = "-"


def rendered(head: list[str], rows: list[list[str]]) -> str:
    """Draw a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def slot_table() -> str:
    """States down, events across: where each leads, as `entry.TRANSITIONS` has it."""
    rows = []
    for state in SlotState:
        targets = [TRANSITIONS.get((state, event)) for event in SlotEvent]
        rows.append([state.value, *(target.value if target else ILLEGAL for target in targets)])
    return rendered(["slot", *(event.value for event in SlotEvent)], rows)


ME: Final = OwnerId(1)


def release(book: LeaseBook, lease: Lease) -> None:
    """The holder says that it is done, if the book still knows the lease as its own."""
    if (held := book.of(lease.id, ME)) is not None:
        book.end(held)


LEASE_EVENTS: Final[dict[str, Callable[[LeaseBook, Lease], object]]] = {
    "release": release,
    "deadline": lambda book, _: book.sweep(1),
    "session lost": lambda book, _: book.leave(ME, dead=False),
    "holder dead": lambda book, _: book.leave(ME, dead=True),
}
LEASES: Final[dict[str, tuple[bool, list[str]]]] = {
    "active, not reading": (False, []),
    "active, reading": (True, []),
    "overdue (reading)": (True, ["deadline"]),
    "ended": (True, ["release"]),
}
"""State to (whether it reads, the events that lead there)."""


def lease_after(events: list[str], *, reading: bool) -> Lease:
    """Drive a real lease through events."""
    lease = Lease(
        LeaseId(1),
        b"t" * 16,
        owner=ME,
        tenant=Tenant("a"),
        chunks=(),
        first=0,
        reading=reading,
        deadline_ns=1,
    )
    book = LeaseBook()
    book.add(lease)
    for event in events:
        LEASE_EVENTS[event](book, lease)
    return lease


def lease_table() -> str:
    """States down, events across: where each leads, found by doing it to a real lease book."""
    rows = []
    for name, (reading, before) in LEASES.items():
        state = lease_after(before, reading=reading).state
        row = [name]
        for event in LEASE_EVENTS:
            after = lease_after([*before, event], reading=reading).state
            row.append(ILLEGAL if after is state else after.value)
        rows.append(row)
    return rendered(["lease", *LEASE_EVENTS], rows)


TABLES: Final[dict[str, Callable[[], str]]] = {"slot": slot_table, "lease": lease_table}


def with_tables(text: str) -> str:
    """Replace each marked table by the code's."""
    for name, table in TABLES.items():
        pattern = re.compile(MARKED.format(name=name), re.DOTALL)
        fresh = table()
        text, count = pattern.subn(lambda m, t=fresh: m[1] + t + m[2], text)  # type: ignore[misc]
        assert count == 1, f"no place, or more than one, for the table of {name}"
    return text


@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_states_is_the_code_s(name: str) -> None:
    """docs/states.md shows exactly the transitions of the code; the module says how to renew it."""
    assert TABLES[name]() in STATES.read_text(encoding="utf-8")


def test_every_state_is_in_a_table() -> None:
    """No state of the code is missing from the docs' tables, and none is only there."""
    assert with_tables(STATES.read_text(encoding="utf-8")) == STATES.read_text(encoding="utf-8")
    reached = {lease_after(events, reading=reads).state for reads, events in LEASES.values()}
    assert reached == set(LeaseState)


if __name__ == "__main__":
    STATES.write_text(with_tables(STATES.read_text(encoding="utf-8")), encoding="utf-8")
