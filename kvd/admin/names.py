"""Namespaces as the command line names them: by the id that `kvd ls` shows, or by label."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd_client import wire
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.admin.client import Admin

ID_CHARS: Final = 12
ID_CHARS_MIN: Final = 4
SHOWN_MAX: Final = 8


class SpaceRow(NamedTuple):
    """One namespace of one tenant with one layout, as the daemon tells it.

    Attributes:
        space: 32-byte id on the channel.
        tenant: Whose.
        label: Model and revision, for people.
        layout: 32-byte id of the layout.
        chunk_tokens: Tokens a chunk.
        ranks: Ranks a chunk has objects of.
        chunks: In all tiers.
        host_chunks: Of them with something in host memory.
        host_bytes: Their bytes there.
        nvme_chunks: With a copy on NVMe.
        nvme_bytes: Bytes of those records.
        sessions: Live ones.
        lossy: Whether it allows a lossy form.
        age_s: Since its last use; None for none since the daemon's start.
    """

    space: bytes
    tenant: str
    label: str
    layout: bytes
    chunk_tokens: int
    ranks: int
    chunks: int
    host_chunks: int
    host_bytes: int
    nvme_chunks: int
    nvme_bytes: int
    sessions: int
    lossy: int
    age_s: int | None

    @property
    def id(self) -> str:
        """What people type."""
        return self.space.hex()[:ID_CHARS]

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return self._asdict() | {
            "space": self.space.hex(),
            "layout": self.layout.hex(),
            "id": self.id,
            "lossy": bool(self.lossy),
        }


def spaces(admin: Admin) -> list[SpaceRow]:
    """Ask for all namespaces that this user may see."""
    return [SpaceRow._make(row) for rows in admin.pages(wire.ListSpaces) for row in rows]


def find(known: Iterable[SpaceRow], word: str) -> list[SpaceRow]:
    """Return the namespaces that a word names.

    Args:
        known: Those there are.
        word: An id or the beginning of one, a label, or a pattern of labels as in "llama*".

    Raises:
        KvdError: None; the text lists those there are.
    """
    known = list(known)
    exact = [row for row in known if row.label == word]
    if exact:
        return exact
    hexadecimal = len(word) >= ID_CHARS_MIN and not word.strip("0123456789abcdef")
    if hexadecimal and (found := [row for row in known if row.space.hex().startswith(word)]):
        return found
    if found := [row for row in known if fnmatchcase(row.label, word)]:
        return found
    there = ", ".join(f"{row.id} ({row.label})" for row in known[:SHOWN_MAX]) or "none"
    raise KvdError(f"no namespace {word!r} here; there are: {there}")


def find_one(known: Iterable[SpaceRow], word: str) -> SpaceRow:
    """Return the one namespace that a word names; raises KvdError for none or several."""
    found = find(known, word)
    if len(found) > 1:
        several = ", ".join(f"{row.id} (tenant {row.tenant})" for row in found[:SHOWN_MAX])
        raise KvdError(f"{word!r} names several namespaces: say which, by id: {several}")
    return found[0]
