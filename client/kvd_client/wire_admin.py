"""The messages of admin connections; their opcodes and rules are in `wire.py`. Pure."""

from __future__ import annotations

from typing import NamedTuple


class AdminHello(NamedTuple):
    """Socket, an operator's first: a session that asks and steers, without rings or KV."""

    protocol: int
    client: str


class AdminWelcome(NamedTuple):
    """Socket: the session is open; `tenant` is empty for one that sees all tenants."""

    protocol: int
    epoch: int
    pid: int
    tenant: str


class AdminPage(NamedTuple):
    """Socket: rows of an answer; `more` is what to ask with for the next, 0 after the last."""

    request: int
    more: int
    rows: list[list[object]]


class AdminDenied(NamedTuple):
    """Socket: the request is not carried out, and why, for people."""

    request: int
    text: str


class ListSpaces(NamedTuple):
    """Admin: the namespaces, one row each."""

    request: int
    after: int


class ListChunks(NamedTuple):
    """Admin: the chunks of a namespace that are in one of the tiers of the mask."""

    request: int
    space: bytes
    tiers: int
    after: int


class Drain(NamedTuple):
    """Admin: stop taking in, write down what is only in memory, and end."""

    request: int


class Pin(NamedTuple):
    """Admin: keep a chain, or with a chunk of zeros a whole namespace, in host memory."""

    request: int
    space: bytes
    chunk: bytes
    budget_bytes: int
    ttl_s: int
    note: str


class Unpin(NamedTuple):
    """Admin: this pin ends."""

    request: int
    pin: int


class ListPins(NamedTuple):
    """Admin: the pins, one row each."""

    request: int
    after: int


class Evict(NamedTuple):
    """Admin: give up chunks of a namespace that were not used for so long; one step of it."""

    request: int
    space: bytes
    older_s: int
    host_only: int
    dry: int
    after: int


class Warm(NamedTuple):
    """Admin: bring up from NVMe what was used last in a namespace; one step of it."""

    request: int
    space: bytes
    budget_bytes: int
    after: int


class Record(NamedTuple):
    """Admin: what engines have asked for since the last one; the first begins a recording."""

    request: int
    space: bytes
    after: int
