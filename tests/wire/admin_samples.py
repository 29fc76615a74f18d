"""Golden bytes of the admin channel's messages, and the rules of their fields."""

from __future__ import annotations

from typing import Any, Final

from kvd_client import wire

ADMIN_SAMPLES: Final[list[tuple[str, Any, str]]] = [
    ("TO_DAEMON", wire.AdminHello(1, "kvd ls"), "934601a66b7664206c73"),
    ("TO_DAEMON", wire.ListSpaces(1, 24), "93470118"),
    (
        "TO_DAEMON",
        wire.ListChunks(2, b"\x66" * 32, 3, 64),
        "95" + "48" + "02" + "c420" + "66" * 32 + "03" + "40",
    ),
    ("TO_DAEMON", wire.Drain(3), "924903"),
    (
        "TO_DAEMON",
        wire.Pin(4, b"\x66" * 32, b"\x77" * 32, 1 << 20, 3600, "why"),
        "97" + "4a" + "04" + "c420" + "66" * 32 + "c420" + "77" * 32 + "ce00100000cd0e10a3776879",
    ),
    ("TO_DAEMON", wire.Unpin(5, 9), "934b0509"),
    ("TO_DAEMON", wire.ListPins(6, 0), "934c0600"),
    (
        "TO_DAEMON",
        wire.Evict(7, b"\x66" * 32, 60, 1, 0, 2),
        "97" + "4d" + "07" + "c420" + "66" * 32 + "3c010002",
    ),
    (
        "TO_DAEMON",
        wire.Warm(8, b"\x66" * 32, 1 << 20, 2),
        "95" + "4e" + "08" + "c420" + "66" * 32 + "ce0010000002",
    ),
    (
        "TO_DAEMON",
        wire.Record(9, bytes(32), 3),
        "94" + "4f" + "09" + "c420" + "00" * 32 + "03",
    ),
    ("TO_CLIENT", wire.AdminWelcome(1, 9, 77, "search"), "954601094da6736561726368"),
    ("TO_CLIENT", wire.AdminPage(2, 0, [[b"\1", "a"]]), "944702009192c40101a161"),
    ("TO_CLIENT", wire.AdminDenied(2, "no"), "934802a26e6f"),
]
ADMIN_KINDS: Final[dict[str, str]] = {
    "AdminHello": "u32 text",
    "ListSpaces": "u64 u64",
    "ListChunks": "u64 hash u32 u64",
    "Drain": "u64",
    "Pin": "u64 hash hash u64 u32 text",
    "Unpin": "u64 u64",
    "ListPins": "u64 u64",
    "Evict": "u64 hash u32 u1 u1 u64",
    "Warm": "u64 hash u64 u64",
    "Record": "u64 hash u64",
    "AdminWelcome": "u32 u64 u32 text",
    "AdminPage": "u64 u64 list",
    "AdminDenied": "u64 long-text",
}
