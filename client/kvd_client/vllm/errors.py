"""What goes wrong in a worker, and what is said about mistakes of kvd's own."""

from __future__ import annotations

from kvd_client.errors import KvdError


class Lost(KvdError):
    """A GPU failed in the middle of a copy: what it still reads or writes, nobody knows."""


def log_fault(what: str) -> None:
    """Log the exception being handled, which is a mistake in kvd's client."""
    import logging

    text = "%s failed by a mistake in kvd; the engine goes on without it"
    logging.getLogger("kvd_client").error(text, what, exc_info=True)  # noqa: LOG014
