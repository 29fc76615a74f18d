"""Errors that an engine may see.

    KvdError
    +-- DaemonUnavailable   nobody answers at the socket (only from ``connect(required=True)``)
    +-- Refused             the daemon answered and said no; ``code`` and ``text`` say why
    +-- WireError           bytes that break the protocol; ``field`` names the broken one
    +-- RingError           a ring whose indexes or checksums cannot be right
    +-- HandleClosed        a lease or reservation used after its end
    +-- Unsupported         an engine whose KV cannot be cached safely (only when it starts)

Engine calls (`lookup`, `acquire`, `reserve`, `publish`) raise none of these because of the
daemon: no daemon, a full tier or a lost session is a miss.
"""

from __future__ import annotations


class KvdError(Exception):
    """Root of every error kvd raises on purpose."""


class DaemonUnavailable(KvdError):
    """No daemon answers at the socket."""


class Refused(KvdError):
    """The daemon refused the greeting; the text says what to change."""

    def __init__(self, code: int, text: str) -> None:
        """Keep the wire code beside the daemon's text."""
        super().__init__(text)
        self.code = code
        self.text = text


class WireError(KvdError):
    """A message that breaks a rule of the protocol."""

    def __init__(self, field: str, rule: str) -> None:
        """Name the field and the rule it breaks, never the value: it may be a secret."""
        super().__init__(f"{field}: {rule}")
        self.field = field
        self.rule = rule


class RingError(KvdError):
    """A ring whose indexes, lengths or checksums cannot be right."""


class HandleClosed(KvdError):
    """A lease or reservation used after it was released, published or lost."""


class Unsupported(KvdError, ValueError):
    """This engine's KV cannot be cached safely; the text says why and what would change it."""
