"""Who asks: what the dispatcher knows of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.entry import Space
    from kvd.types import OwnerId, Tenant


class Caller:
    """Who asks: a session's place in the world, from its greeting.

    Attributes:
        owner: The session.
        tenant: Its tenant, by uid.
        space: What it sees.
        rank: Whose shards it reads and writes.
    """

    __slots__ = ("gone", "last_asked", "on_gpu", "owner", "rank", "served", "space", "tenant")

    def __init__(self, owner: OwnerId, tenant: Tenant, space: Space, rank: int) -> None:
        """Keep the four."""
        self.owner = owner
        self.tenant = tenant
        self.space = space
        self.rank = rank
        self.gone = False
        self.on_gpu = False
        self.last_asked = b""
        self.served = False

    def asks(self, hashes: list[bytes]) -> bool:
        """Tell whether this is another chain than the last one: an engine may ask twice."""
        last, self.last_asked = self.last_asked, hashes[-1] if hashes else b""
        return bool(hashes) and last != self.last_asked
