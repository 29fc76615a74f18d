"""What the daemon raises on purpose.

    KvdError (kvd_client.errors)
    +-- ConfigError      the configuration cannot be used; the text says where and what to change
    +-- StartError       the daemon cannot start here; the text says what to change
    +-- RefusedSession   a client is refused or its session ended; carries the wire code
    +-- InvariantError   a bug: the history of the object is in the text

Everything else is a bug too and ends the daemon; nothing below `daemon.py` catches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from kvd_client.wire import Refusal


class ConfigError(KvdError):
    """The configuration cannot be used."""


class StartError(KvdError):
    """The daemon cannot start on this host as it is."""


class RefusedSession(KvdError):
    """A client's session does not start, or ends here."""

    def __init__(self, code: Refusal, text: str) -> None:
        """Keep the wire code beside the text for the client."""
        super().__init__(text)
        self.code = code


class InvariantError(KvdError):
    """An illegal transition: a bug of kvd, never of a client."""
