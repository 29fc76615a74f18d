"""Who is in the fleet: records, lives, domains."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.peer.membership import (
    RECORD_BYTES_MAX,
    UNKNOWN_MAX,
    Members,
    adds_safety,
    domains,
    host_key,
    hosts_key,
    member,
    number_of,
    pack,
    refresh_s,
    unpack,
)

ME = member("kvd", "a", 1, "10.0.0.1:7600", "rack-1")
B1 = member("kvd", "b", 1, "10.0.0.2:7600", "rack-1")
B2 = member("kvd", "b", 2, "10.0.0.2:7600", "rack-1")
C = member("kvd", "c", 9, "10.0.0.3:7600", "rack-2")


def test_a_record_comes_back_as_it_was() -> None:
    """What is packed is unpacked, its number from what it says."""
    for one in (ME, B1, C, member("kvd", "x" * 64, (1 << 63) - 1, "[fd00::1]:1", "d" * 64)):
        assert unpack("kvd", pack(one)) == one


def test_numbers_differ_by_fleet_host_and_life() -> None:
    """No two of them share a number, and all are positive and of 63 bits."""
    numbers = {number_of(f, h, e) for f in ("x", "y") for h in ("a", "b") for e in range(50)}
    assert len(numbers) == 200
    assert all(0 <= number < 1 << 63 for number in numbers)


@pytest.mark.parametrize(
    "record",
    [
        None,
        b"",
        "text",
        b"\xc1",
        b"x" * (RECORD_BYTES_MAX + 1),
        msgpack.packb([2, "b", 1, "", "r"]),
        msgpack.packb([1, "b", 1, ""]),
        msgpack.packb([1, "b", -1, "", "r"]),
        msgpack.packb([1, "b", 1 << 63, "", "r"]),
        msgpack.packb([1, "b", True, "", "r"]),
        msgpack.packb([1, "b", "1", "", "r"]),
        msgpack.packb([1, "", 1, "", "r"]),
        msgpack.packb([1, "b", 1, "", ""]),
        msgpack.packb([1, "b\n", 1, "", "r"]),
        msgpack.packb([1, "b", 1, "x" * 256, "r"]),
        msgpack.packb({"host": "b"}),
    ],
)
def test_what_is_no_record_counts_for_nobody(record: object) -> None:
    """Whatever lies at a host's key, only a whole record of this version is believed."""
    assert unpack("kvd", record) is None


@given(st.binary(max_size=RECORD_BYTES_MAX + 8))
def test_any_bytes_are_a_record_or_none(record: bytes) -> None:
    """No bytes make the reader raise."""
    found = unpack("kvd", record)
    assert found is None or found.host


def test_another_life_makes_the_old_entries_void() -> None:
    """After a restart the new number means the host, and the old one nobody (M1)."""
    members = Members(ME)
    assert members.learn([B1, ME]) == ([B1], [])
    assert members.holders([B1.number]) == (B1,)
    assert members.learn([B2, C]) == ([B2, C], [B1])
    assert members.holders([B1.number, B2.number, C.number]) == (B2, C)


def test_this_host_is_never_its_own_peer() -> None:
    """Neither its number, nor an earlier life's, nor a twin's record makes it a holder (M2)."""
    members = Members(ME)
    earlier = member("kvd", "a", 0, "10.0.0.1:7600", "rack-1")
    members.learn([ME, earlier])
    assert members.holders([ME.number, earlier.number]) == ()
    assert members.unknown == {earlier.number}


def test_a_number_is_looked_up_once() -> None:
    """A number nobody has asks for a read, and after it is known to be dead, unless it came."""
    members = Members(ME)
    members.holders([B1.number, C.number])
    assert members.unknown == {B1.number, C.number}
    members.learn([C])
    assert (members.unknown, members.dead) == (set(), {B1.number})
    members.holders([B1.number])
    assert not members.unknown
    members.learn([C, B1])
    assert not members.dead
    assert members.holders([B1.number]) == (B1,)


def test_numbers_of_nobody_take_bounded_room() -> None:
    """A directory full of strange numbers costs a bounded memory."""
    members = Members(ME)
    for start in range(0, 40_000, 4):
        members.holders(range(start, start + 4))
        if start % 4000 == 0:
            members.learn([])
        assert len(members.unknown) <= UNKNOWN_MAX + 4
        assert len(members.dead) <= 2 * UNKNOWN_MAX + 4


def test_strange_records_are_counted() -> None:
    """A record that is none leaves the others as they are."""
    members = Members(ME)
    members.learn([None, C, None])
    assert members.strange == 2
    assert list(members.by_host) == ["c"]


def test_copies_are_counted_by_what_fails_together() -> None:
    """Two hosts of a rack are one copy; a third in it adds no safety, one elsewhere does."""
    assert domains([B1, ME, C]) == 2
    assert not adds_safety(ME, [B1])
    assert adds_safety(ME, [C])
    assert adds_safety(C, [B1, ME])
    assert not adds_safety(member("kvd", "d", 1, "", "rack-3"), [B1, C])
    assert adds_safety(member("kvd", "d", 1, "", "rack-3"), [B1, C], copies=3)


def test_a_large_fleet_reads_itself_less_often() -> None:
    """What all hosts together read of each other grows with the fleet, not with its square."""
    assert refresh_s(5.0, 4) == 5.0
    assert refresh_s(5.0, 1000) == 20.0
    for hosts in (250, 1000, 4000):
        assert hosts * hosts / refresh_s(5.0, hosts) <= 50 * hosts


def test_keys_of_a_fleet_share_a_slot() -> None:
    """Records and the list of hosts have one hash tag, so that one call reads them."""
    assert host_key("kvd", "a").count("{kvd}") == hosts_key("kvd").count("{kvd}") == 1
