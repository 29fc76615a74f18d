"""Why kvd stays out of an engine, and what is said about mistakes of its own."""

from __future__ import annotations

from kvd_client.errors import KvdError


class Unsupported(KvdError):
    """This engine's KV cannot be cached safely; the text says why and what would change it."""


def log_fault(what: str) -> None:
    """Log the exception being handled, which is a mistake in kvd's client."""
    import logging

    text = "%s failed by a mistake in kvd; the engine goes on without it"
    logging.getLogger("kvd_client").error(text, what, exc_info=True)  # noqa: LOG014
