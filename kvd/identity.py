"""The usable prefix: how many chunks of a chain an engine may load. Pure, vectorised.

A prefix of n chunks is *legal* when every shard of every group has what n needs:

- `full`, `mla`: chunks 0..n-1;
- `sliding`: the chunks that the window at n still reaches. The next token, at position
  n * chunk_tokens, sees the `window - 1` tokens before it, so that is the last
  ceil((window - 1) / chunk_tokens) chunks;
- `recurrent`: the state after exactly n chunks, which is the object of chunk n - 1.

The usable prefix is the longest legal one; 0 is always legal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvd_client.identity import Layout


class GroupRule(NamedTuple):
    """Columns `start` to `stop` - 1 of the presence table follow one rule.

    Attributes:
        kind: As in `kvd_client.identity.Group`.
        start: First column.
        stop: One past the last column.
        reach: Chunks a sliding window reaches back; 0 for the other kinds.
    """

    kind: str
    start: int
    stop: int
    reach: int


def rules_of(layout: Layout) -> tuple[GroupRule, ...]:
    """Return one rule a group, in the order of `Layout.column`."""
    rules = []
    start = 0
    for index, group in enumerate(layout.groups):
        stop = start + layout.shards(index)
        reach = -(-(group.window - 1) // layout.chunk_tokens) if group.kind == "sliding" else 0
        rules.append(GroupRule(group.kind, start, stop, reach))
        start = stop
    assert start == layout.columns
    return tuple(rules)


def legal_lengths(present: NDArray[np.bool_], rules: Sequence[GroupRule]) -> NDArray[np.bool_]:
    """Tell for each length from 0 to chunks whether the prefix of that length is legal.

    Args:
        present: (columns, chunks): whether the object is readable.
        rules: As from `rules_of`; they cover the columns.

    Returns:
        (chunks + 1,), the first always true.
    """
    chunks = present.shape[1]
    legal = np.ones(chunks + 1, dtype=np.bool_)
    for kind, start, stop, reach in rules:
        here = present[start:stop].all(axis=0)
        if kind == "recurrent":
            legal[1:] &= here
        elif kind == "sliding":
            missing = np.zeros(chunks + 1, dtype=np.int64)
            np.cumsum(~here, out=missing[1:])
            before = np.zeros_like(missing)
            before[reach:] = missing[: max(0, chunks + 1 - reach)]
            legal &= missing == before
        else:
            holes = np.flatnonzero(~here)
            if holes.size:
                legal[holes[0] + 1 :] = False
    return legal


def usable_prefix(present: NDArray[np.bool_], rules: Sequence[GroupRule]) -> int:
    """Return the longest legal length; `present` as for `legal_lengths`."""
    return int(np.flatnonzero(legal_lengths(present, rules))[-1])


def presence(masks: Sequence[int], columns: int) -> NDArray[np.bool_]:
    """Spread one bit mask a chunk into a table of (columns, chunks)."""
    width = -(-columns // 8)
    packed = b"".join([mask.to_bytes(width, "little") for mask in masks])
    bits = np.unpackbits(
        np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), width),
        axis=1,
        count=columns,
        bitorder="little",
    )
    return np.ascontiguousarray(bits.T).view(np.bool_)
