"""Load or compute: how long each takes, and from which length on loading wins. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.plan.shape import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.plan.shape import Shape

TOKENS_MAX: Final = 1 << 20
"""Longest prefix that is looked at."""
FORMS: Final = {"raw": 1.0, "lossless": 1.47, "fp8": 2.0}
"""How much smaller KV in bfloat16 becomes; measured on a real model for lossless."""


class Prefill:
    """How long an engine computes, from measured points; straight lines between them."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """Take (tokens, seconds), both rising; beyond the last its slope goes on.

        Raises:
            PlanError: They do not rise.
        """
        self._tokens = [0, *(tokens for tokens, _ in points)]
        self._seconds = [0.0, *(seconds for _, seconds in points)]
        rising = all(
            a < b and x < y
            for a, b, x, y in zip(
                self._tokens, self._tokens[1:], self._seconds, self._seconds[1:], strict=False
            )
        )
        if len(points) < 1 or not rising:
            raise PlanError("prefill: give points whose tokens and times both rise, as 1024:32ms")

    @classmethod
    def at_rate(cls, tokens_s: float) -> Prefill:
        """Compute at the same rate whatever the length."""
        if not tokens_s > 0:
            raise PlanError("prefill: give the tokens a second, more than 0")
        return cls([(1 << 20, (1 << 20) / tokens_s)])

    def seconds(self, tokens: int) -> float:
        """Return how long computing so many tokens takes."""
        at = min(max(1, bisect_left(self._tokens, tokens)), len(self._tokens) - 1)
        (a, b), (x, y) = self._tokens[at - 1 : at + 1], self._seconds[at - 1 : at + 1]
        return x + (y - x) * (tokens - a) / (b - a)


@dataclass(frozen=True, slots=True)
class Source:
    """A tier to load from.

    Attributes:
        name: As in `kvd stat`.
        bytes_s: What it gives, to all loads together.
        latency_s: Before the first byte.
        smaller: How much smaller what it reads is than the KV.
    """

    name: str
    bytes_s: float
    latency_s: float = 0.0
    smaller: float = 1.0

    def seconds(self, load_bytes: int, ahead: int = 0) -> float:
        """Return how long a load takes behind `ahead` equal ones."""
        return self.latency_s + (ahead + 1) * load_bytes / self.smaller / self.bytes_s


class Answer(NamedTuple):
    """From which length on loading is faster than computing.

    Attributes:
        tokens: The shortest such length; None for none up to the longest looked at.
        until: From this length on it is not any more; None for never.
    """

    tokens: int | None
    until: int | None


def break_even(
    shape: Shape, prefill: Prefill, source: Source, *, step: int, ahead: int = 0
) -> Answer:
    """Find where loading begins to win, and where it ends to, in steps of a chunk."""

    def wins(tokens: int) -> bool:
        return source.seconds(shape.load_bytes(tokens), ahead) < prefill.seconds(tokens)

    first = None
    tokens = step
    while tokens <= TOKENS_MAX:
        if wins(tokens):
            if first is None:
                first = tokens
        elif first is not None:
            return Answer(first, tokens)
        tokens += max(step, tokens // 256 // step * step)  # finer than half a per cent
    return Answer(first, None)


def needed_bytes_s(shape: Shape, prefill: Prefill, tokens: int) -> float:
    """Return the rate at which loading a prefix takes as long as computing it."""
    return shape.load_bytes(tokens) / prefill.seconds(tokens)


class ChunkChoice(NamedTuple):
    """What a chunk size costs.

    Attributes:
        tokens: Of a chunk.
        object_bytes: KV of one chunk and rank.
        lost_tokens: Computed again, on average, because a prompt's last part is no whole chunk.
        reads: Of the lower tier for the given prefix.
        hashes_bytes: Of the look-up's message.
        metadata_bytes: In the daemon for the given prefix.
        padding_share: Of NVMe lost to whole pages and headers, once in its form.
        read_ms: To read one chunk there, alone.
    """

    tokens: int
    object_bytes: int
    lost_tokens: float
    reads: int
    hashes_bytes: int
    metadata_bytes: int
    padding_share: float
    read_ms: float


CHUNK_BYTES: Final = 700
"""A chunk's record in the daemon."""
INDEX_BYTES: Final = 200
"""A chunk's row in the index on disk."""
PAGE_BYTES: Final = 4096


def chunk_choices(
    shape: Shape, source: Source, tokens: int, sizes: Sequence[int], ranks: int = 1
) -> list[ChunkChoice]:
    """Compare chunk sizes for a prefix of so many tokens."""
    found = []
    for size in sizes:
        chunks = -(-tokens // size)
        whole = size * shape.token_bytes / source.smaller
        padding = PAGE_BYTES * (1 + ranks / 2)  # the record's head, and half a page an object
        found.append(
            ChunkChoice(
                size,
                size * shape.token_bytes // ranks,
                size / 2,
                chunks,
                chunks * 32,
                chunks * CHUNK_BYTES,
                padding / (whole + padding),
                source.seconds(size * shape.token_bytes) * 1e3,
            )
        )
    return found
