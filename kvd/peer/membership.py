"""Who is in the fleet: a record a host, renewed by its heartbeat, gone without it. Pure.

A host that restarts is a new *life*: it has another epoch, and with it another number. Entries of
the directory name numbers, so that those of an earlier life mean nobody from the moment on at which
the new record is read, whatever is left of them in the directory.

M1. Of a host, the life last read counts, and no other number means it.
M2. This host is never among its own peers, in none of its lives.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgpack

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
RECORD_BYTES_MAX = 512
TEXT_MAX = 255
MISSED_MAX = 3
"""Heartbeats that may fail to come before a host is gone."""
READS_PER_S = 50.0
"""Of members' records, what a host reads at most: its part of a directory that all of them ask."""
HOSTS_MAX = 10_000
"""More than anyone has; what comes after is not read."""
UNKNOWN_MAX = 4096
_NUMBER_MAX = (1 << 63) - 1
_TEXT = re.compile(r"[!-~]*")


class Member(NamedTuple):
    """A host in one of its lives.

    Attributes:
        host: Its name, unique in the fleet.
        epoch: Of the life.
        address: Where its daemon is reached, HOST:PORT; empty if it is not.
        domain: What fails together with it.
        number: Names this life in the directory's entries; positive, 63 bits.
    """

    host: str
    epoch: int
    address: str
    domain: str
    number: int


def number_of(cluster: str, host: str, epoch: int) -> int:
    """Return the number of a host's life."""
    text = msgpack.packb([cluster, host, epoch])
    digest = blake2b(text, digest_size=8, person=b"kvd.peer.number").digest()
    return int.from_bytes(digest, "big") & _NUMBER_MAX


def member(cluster: str, host: str, epoch: int, address: str, domain: str) -> Member:
    """Make the record of a life."""
    return Member(host, epoch, address, domain, number_of(cluster, host, epoch))


def pack(one: Member) -> bytes:
    """Return a record as it is stored."""
    packed: bytes = msgpack.packb([VERSION, one.host, one.epoch, one.address, one.domain])
    assert len(packed) <= RECORD_BYTES_MAX
    return packed


def unpack(cluster: str, record: object) -> Member | None:
    """Check a record that was read; None for what is none of this version."""
    if not isinstance(record, bytes) or not 0 < len(record) <= RECORD_BYTES_MAX:
        return None
    try:
        fields = msgpack.unpackb(record, max_ext_len=0, max_map_len=0, max_array_len=8)
    except (ValueError, msgpack.UnpackException):
        return None
    match fields:
        case [1, str(host), int(epoch), str(address), str(domain)]:
            texts = (host, address, domain)
        case _:
            return None
    if isinstance(epoch, bool) or not 0 <= epoch <= _NUMBER_MAX or not host or not domain:
        return None
    if any(len(text) > TEXT_MAX or not _TEXT.fullmatch(text) for text in texts):
        return None
    return member(cluster, host, epoch, address, domain)


def host_key(cluster: str, host: str) -> str:
    """Return the key of a host's record: all of a fleet in one slot of a Redis Cluster."""
    return f"kvd:{{{cluster}}}:host:{host}"


def hosts_key(cluster: str) -> str:
    """Return the key of the set of all hosts' names."""
    return f"kvd:{{{cluster}}}:hosts"


def refresh_s(heartbeat_s: float, hosts: int) -> float:
    """Return how long to wait between two reads of all records: longer in a large fleet."""
    return max(heartbeat_s, hosts / READS_PER_S)


class Members:
    """The other hosts, as last read."""

    def __init__(self, me: Member) -> None:
        """Know nobody yet."""
        self.me = me
        self.by_number: dict[int, Member] = {}
        self.by_host: dict[str, Member] = {}
        self.strange = 0
        """Records read that are none; they count for nobody."""
        self.unknown: set[int] = set()
        """Numbers met in entries since the last read that nobody has: look again soon."""
        self.dead: set[int] = set()
        """Numbers that nobody had when it was looked again: lives that are over."""

    def learn(self, members: Iterable[Member | None]) -> tuple[list[Member], list[Member]]:
        """Take in all that is in the directory now; return who has come and who has gone."""
        by_host: dict[str, Member] = {}
        for one in members:
            if one is None:
                self.strange += 1
            elif one.host != self.me.host:  # M2
                by_host[one.host] = one
        before = set(self.by_host.values())
        after = set(by_host.values())
        self.by_host = by_host
        self.by_number = {one.number: one for one in after}  # M1
        if len(self.dead) > UNKNOWN_MAX:
            self.dead.clear()
        self.dead = (self.dead | self.unknown) - self.by_number.keys()
        self.unknown.clear()
        return sorted(after - before), sorted(before - after)

    def holders(self, numbers: Iterable[int]) -> tuple[Member, ...]:
        """Return who is meant by numbers in an entry: nobody by those of lives that are over."""
        found = []
        if len(self.unknown) > UNKNOWN_MAX:
            self.unknown.clear()
        for number in numbers:
            one = self.by_number.get(number)
            if one is not None:
                found.append(one)
            elif number != self.me.number and number not in self.dead:
                self.unknown.add(number)
        return tuple(found)


def domains(holders: Iterable[Member]) -> int:
    """Count what would have to fail for all of these copies to be lost."""
    return len({one.domain for one in holders})


def adds_safety(me: Member, holders: Iterable[Member], copies: int = 2) -> bool:
    """Tell whether a copy here is one more that does not fail with the others, and is wanted.

    Args:
        me: This host.
        holders: Who else holds the chunk.
        copies: Failure domains that should hold it.
    """
    held = {one.domain for one in holders}
    return me.domain not in held and len(held) < copies
