"""The catalog's changes as vLLM's KV events, gathered between two sendings. Pure.

    BlockStored      chunks that a tier has whole now: a piece of one chain, with the hash before it
    BlockRemoved     chunks that a tier no longer has whole
    AllBlocksCleared forget everything: what follows is told from the beginning

J1. Who takes in every event in order, from an AllBlocksCleared on, knows for each tier exactly the
    chunks that are whole there, up to what `take` has not yet given out.
J2. What waits is bounded. When it would be more, everything that waits is dropped, and the journal
    tells all of the catalog anew, a part with each `take`: that is also how it begins.

A block is a chunk of kvd's. Token ids are never told, since the daemon does not know them; salts,
which an engine's own events carry in `extra_keys`, are not told either. Only the loop calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

from kvd.changes import tiers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.catalog import Catalog
    from kvd.changes import Tier
    from kvd.entry import Chunk, Space

HashForm = Literal["int", "bytes"]

MEDIUM: Final[dict[str, str]] = {"gpu": "GPU", "host": "CPU", "nvme": "STORAGE"}
"""A tier as vLLM names it."""
WAITING_MAX: Final = 65_536
"""Most hashes that wait for `take`."""
RUN_MAX: Final = 256
"""Most hashes in one event."""
_LOW_64: Final = (1 << 64) - 1


class Journal:
    """An observer of the catalog."""

    def __init__(self, catalog: Catalog, form: HashForm) -> None:
        """Listen from now on, and tell first what is there already.

        Args:
            catalog: Observed, and asked for everything when all is told anew.
            form: A hash as vLLM sends it by default, its low 64 bits as a number; or all of it.
        """
        self._catalog = catalog
        self._form = form
        self._events: list[dict[str, Any]] = []
        self._count = 0
        self._rest: Iterator[Chunk] | None = None
        self._space: Space | None = None
        self._tail = b""
        self.retellings = 0
        """How often all was told from the beginning; one at the start."""
        self.tell_all()
        catalog.changes.watch(self)

    @property
    def waiting(self) -> int:
        """Hashes that wait for `take`."""
        return self._count

    @property
    def retelling(self) -> bool:
        """Whether a part of the catalog is still to be told."""
        return self._rest is not None

    # ---------------------------------------------------------------- heard from the catalog

    def stored(self, space: Space, chunk: Chunk, tier: Tier) -> None:
        """Take note of a chunk that a tier has whole now."""
        above = chunk.parent.hash if chunk.parent else b""
        last = self._last("BlockStored", space, tier)
        if last is None or self._tail != above:
            last = {
                "type": "BlockStored",
                "block_hashes": [],
                "parent_block_hash": self._written(above) if above else None,
                "token_ids": [],
                "block_size": space.layout.chunk_tokens,
                "lora_id": None,
                "medium": MEDIUM[tier],
                "lora_name": None,
                "kvd_tenant": space.tenant,
                "kvd_label": space.label,
            }
            self._events.append(last)
        self._add(last, space, chunk)

    def removed(self, space: Space, chunk: Chunk, tier: Tier, reason: str) -> None:  # noqa: ARG002
        """Take note of a chunk that a tier no longer has whole."""
        last = self._last("BlockRemoved", space, tier)
        if last is None:
            last = {"type": "BlockRemoved", "block_hashes": [], "medium": MEDIUM[tier]}
            last |= {"kvd_tenant": space.tenant, "kvd_label": space.label}
            self._events.append(last)
        self._add(last, space, chunk)

    def _last(self, kind: str, space: Space, tier: Tier) -> dict[str, Any] | None:
        """Return the last event if it can take one more of the same."""
        last = self._events[-1] if self._events else None
        if last is None or last["type"] != kind or self._space is not space:
            return None
        fits = last["medium"] == MEDIUM[tier] and len(last["block_hashes"]) < RUN_MAX
        return last if fits else None

    def _add(self, event: dict[str, Any], space: Space, chunk: Chunk) -> None:
        event["block_hashes"].append(self._written(chunk.hash))
        self._space, self._tail = space, chunk.hash
        self._count += 1
        if self._count > WAITING_MAX:
            self.tell_all()  # J2

    def _written(self, key: bytes) -> int | bytes:
        return int.from_bytes(key, "big") & _LOW_64 if self._form == "int" else key

    # ---------------------------------------------------------------- given out

    def tell_all(self) -> None:
        """Drop what waits, and tell the whole catalog from the beginning (J2)."""
        self._events = [{"type": "AllBlocksCleared"}]
        self._count, self._space, self._tail = 0, None, b""
        self._rest = self._everything()
        self.retellings += 1

    def _everything(self) -> Iterator[Chunk]:
        """Yield every chunk; what changes meanwhile is told by itself, before or after."""
        for space in list(self._catalog.spaces.values()):
            yield from list(space.chunks.values())

    def take(self, most: int) -> list[dict[str, Any]]:
        """Return the events that wait; while all is told anew, up to `most` hashes more of it."""
        if self._rest is not None and self._count < most:
            for chunk in self._rest:
                for tier in tiers_of(chunk):
                    self.stored(chunk.space, chunk, tier)
                if self._count >= most:
                    break
            else:
                self._rest = None
        events, self._events = self._events, []
        self._count, self._space, self._tail = 0, None, b""
        return events
