"""Which chunks kvd has taken from all ranks, for vLLM's event stream. Pure.

A chunk is told once, when as many ranks as write it have reported it; what is not complete after
`PENDING_MAX` others is forgotten, which costs a router a hint.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PENDING_MAX: Final = 8192


class Chunk(NamedTuple):
    """What an event says of a chunk.

    Attributes:
        blocks: The engine's block hashes of the chunk, in order.
        parent: The block hash before them, if any.
        tokens: Token ids of the chunk.
        adapter: LoRA name and number, if any.
    """

    blocks: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    adapter: tuple[str, int] | None


class Announcer:
    """Counts reports. One thread."""

    def __init__(self, writers: int) -> None:
        """Know how many ranks write each chunk."""
        assert writers > 0
        self._writers = writers
        self._pending: OrderedDict[bytes, tuple[Chunk, int]] = OrderedDict()

    def expect(self, key: bytes, chunk: Chunk) -> None:
        """Take in that the ranks were asked to save a chunk."""
        if key not in self._pending:
            self._pending[key] = (chunk, 0)
            if len(self._pending) > PENDING_MAX:
                self._pending.popitem(last=False)

    def reported(self, kept: Mapping[bytes, int]) -> Iterator[Chunk]:
        """Take in how many ranks report each chunk; yield those that are complete."""
        for key, count in kept.items():
            chunk, before = self._pending.get(key, (None, 0))
            if chunk is None:
                continue
            if before + count >= self._writers:
                del self._pending[key]
                yield chunk
            else:
                self._pending[key] = (chunk, before + count)


def chunk_of(
    hashes: Sequence[bytes],
    tokens: Sequence[int],
    adapter: tuple[str, int] | None,
    number: int,
    *,
    hash_tokens: int,
    chunk_tokens: int,
) -> Chunk:
    """Describe chunk `number` of a request with these block hashes and tokens."""
    step = chunk_tokens // hash_tokens
    start = number * step
    return Chunk(
        tuple(bytes(h) for h in hashes[start : start + step]),
        bytes(hashes[start - 1]) if start else None,
        tuple(tokens[number * chunk_tokens : (number + 1) * chunk_tokens]),
        adapter,
    )
