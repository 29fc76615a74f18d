"""Leases: tokens and owners, what time ends and what it may not."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.lease import Lease, LeaseBook, LeaseState
from kvd.types import LeaseId, OwnerId, Tenant

A: Final = Tenant("a")
B: Final = Tenant("b")
ME: Final = OwnerId(1)
OTHER: Final = OwnerId(2)


def lease_of(
    number: int, *, owner: OwnerId = ME, reading: bool = True, deadline: int = 10
) -> Lease:
    """Make a lease without chunks."""
    return Lease(
        LeaseId(number),
        number.to_bytes(16, "big"),
        owner=owner,
        tenant=A,
        chunks=(),
        first=0,
        reading=reading,
        deadline_ns=deadline,
    )


def book_of(*leases: Lease) -> LeaseBook:
    """Make a book with these leases."""
    book = LeaseBook()
    for lease in leases:
        book.add(lease)
    return book


def test_a_token_is_good_for_its_tenant_only() -> None:
    """The token finds the lease for the same tenant, and for nobody else (L3)."""
    lease = lease_of(1)
    book = book_of(lease)
    assert book.by_token(lease.token, A) is lease
    assert book.by_token(lease.token, B) is None
    assert book.by_token(b"\0" * 16, A) is None


def test_a_lease_is_its_owner_s() -> None:
    """Another session cannot name it, even with its number."""
    lease = lease_of(1)
    book = book_of(lease)
    assert book.of(lease.id, ME) is lease
    assert book.of(lease.id, OTHER) is None
    assert book.of(LeaseId(2), ME) is None


def test_time_takes_a_reader_s_token_and_no_more() -> None:
    """Past its deadline a lease that reads is overdue: no token, all else stays (L1)."""
    lease = lease_of(1)
    book = book_of(lease)
    assert book.sweep(9) == []
    assert book.overdue_count() == 0
    assert book.sweep(10) == book.sweep(10**9) == []
    assert lease.state is LeaseState.OVERDUE
    assert book.by_token(lease.token, A) is None
    assert book.of(lease.id, ME) is lease
    assert (len(book), book.overdue_count(), book.count(ME)) == (1, 1, 1)
    book.end(lease)
    assert (len(book), book.overdue_count(), book.count(ME)) == (0, 0, 0)


def test_time_ends_what_does_not_read() -> None:
    """A lease without a reader ends at its deadline and is returned for its pins (L2)."""
    early, late = lease_of(1, reading=False, deadline=5), lease_of(2, reading=False)
    book = book_of(late, early)
    assert book.sweep(4) == []
    assert book.sweep(5) == [early]
    assert early.state is LeaseState.ENDED
    assert book.by_token(early.token, A) is None
    assert book.sweep(11) == [late]
    assert book.all() == []


@pytest.mark.parametrize("dead", [True, False])
def test_leaving(dead: bool) -> None:  # noqa: FBT001 - parametrised
    """A dead owner's leases all end; of one that may live, only those that do not read."""
    reads, waits = lease_of(1), lease_of(2, reading=False)
    stays = lease_of(3, owner=OTHER)
    book = book_of(reads, waits, stays)
    assert set(book.leave(ME, dead=dead)) == ({reads, waits} if dead else {waits})
    assert reads.state is (LeaseState.ENDED if dead else LeaseState.OVERDUE)
    assert book.by_token(reads.token, A) is None
    assert stays.state is LeaseState.ACTIVE
    assert book.leave(ME, dead=True) == ([] if dead else [reads])
    assert book.count(ME) == 0
    assert book.all() == [stays]


def test_an_ended_lease_ends_once() -> None:
    """Ending twice would unpin twice: it is a bug that is seen."""
    lease = lease_of(1)
    book = book_of(lease)
    book.end(lease)
    with pytest.raises(AssertionError):
        book.end(lease)


def test_numbers_and_tokens_are_taken_once() -> None:
    """Two leases never share a number or a token."""
    book = book_of(lease_of(1))
    with pytest.raises(AssertionError):
        book.add(lease_of(1))
    double = lease_of(2)
    double.token = lease_of(1).token
    with pytest.raises(AssertionError):
        book.add(double)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 3)), max_size=60))
def test_the_book_is_a_list(steps: list[tuple[int, bool, int]]) -> None:
    """With deadlines forgotten and rebuilt at every chance, the sweep ends what a list would."""
    book = LeaseBook()
    book.SLACK = 0  # rebuild at once
    live: list[Lease] = []
    now = 0
    for number, (ttl, reading, what) in enumerate(steps, 1):
        if what == 0 and live:
            book.end(live.pop(ttl % len(live)))
        elif what == 1:
            now += ttl
            due = {le for le in live if le.deadline_ns <= now and not le.reading}
            assert set(book.sweep(now)) == due
            live = [le for le in live if le not in due]
        else:
            live.append(lease_of(number, reading=reading, deadline=now + ttl))
            book.add(live[-1])
        assert book.all() == live
        assert len(book._deadlines) <= 2 * len(live) + 1 + len(steps)
    ended = book.sweep(10**9)
    assert set(ended) == {le for le in live if not le.reading}
    assert book.overdue_count() == len(book) == sum(le.reading for le in live)


def test_deadlines_of_ended_leases_are_forgotten() -> None:
    """A million short leases leave no million deadlines behind."""
    book = LeaseBook()
    for number in range(1, 5 * LeaseBook.SLACK):
        lease = lease_of(number, deadline=10**9)
        book.add(lease)
        book.end(lease)
    assert len(book._deadlines) <= LeaseBook.SLACK + 2
