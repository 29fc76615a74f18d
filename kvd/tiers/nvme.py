"""The NVMe store: bundles written once, durable when acknowledged, verified when read.

THIS IS THE INTERFACE; bodies follow.

Order (C5): record written -> fdatasync of its region -> (directory synced, for a new file) -> index
commit -> `write` returns. Reclaim: keys deleted and committed -> the region is reused, under a new
incarnation.

All methods are for the loop's thread, but for `open`, which blocks and comes before the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvd.tiers.disk import Corrupt, NoSpace, TierBusy, TierError, TierFailed
from kvd.tiers.region import FORM_RAW, Bundle, Part, Ref, Space

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from _typeshed import WriteableBuffer

__all__ = ["FORM_RAW", "Bundle", "Corrupt", "NoSpace", "NvmeConfig", "NvmeStore", "Part", "Ref",
           "Space", "TierBusy", "TierError", "TierFailed"]

EntryRow = tuple[bytes, bytes, bytes, bytes, int, int, int, int, int, int, int]
"""Of `Opened.entries`, in this order:
(space_key 16 B, chunk 32 B, parent 32 B, mask 32 B little-endian bit set of columns,
 region, form or FORM_MIXED, offset_bytes, length_bytes, generation, stored_bytes, hint).
Ref(row[4], row[6], row[7], row[8]) is its place."""


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """What an operator may choose; defaults are meant to be right."""

    directory: Path
    capacity_bytes: int
    region_bytes: int = 256 << 20
    threads: int = 4
    index_bytes: int = 0          # LMDB map, fixed; 0: from the capacity
    writes_max: int = 64          # in flight; more is TierBusy
    reads_max: int = 256
    slow_s: float = 1.0           # an operation older than this makes the tier slow
    probe_s: float = 2.0          # between two attempts to open a closed tier
    spare_regions: int = 1        # only for rewrites before a reclaim
    direct: bool = True           # O_DIRECT where the file system has it


class Opened(NamedTuple):
    """What `open` found."""

    spaces: dict[bytes, Space]            # by 16-byte key
    entries: Iterator[EntryRow]           # once, before the first other call
    report: object                        # RecoveryReport: counts, how, seconds, notes


class Loaded(NamedTuple):
    """One object read and verified."""

    form: int
    raw_bytes: int
    stored: memoryview                    # the caller's buffer, trimmed, or memory of its own


class Victim(NamedTuple):
    """A region that may be reclaimed; sorted by what reclaiming it costs."""

    region: int
    live_bytes: int
    live_count: int
    garbage_bytes: int


class LiveKey(NamedTuple):
    space_key: bytes
    chunk: bytes
    ref: Ref


class NvmeStore:
    """See above."""

    def __init__(self, config: NvmeConfig, loop: asyncio.AbstractEventLoop, *, disk: object = None) -> None: ...

    def open(self) -> Opened:
        """Recover and open; blocks. StartError: in use, another format, unusable directory."""

    async def write(self, bundle: Bundle, *, rewrite: bool = False) -> Ref:
        """Durable when it returns; an existing key is replaced (old place becomes garbage).

        `rewrite` may use the spare region (for saving hot keys before a reclaim).
        The parts' buffers belong to the store until this returns or raises, also when cancelled:
        a cancelled call returns only after the thread has let go. Whether a cancelled or failed
        write is in the index is not known; delete it if it must not be.
        Raises TierBusy, NoSpace, TierFailed; the key's earlier bundle, if any, is then still good.
        """

    async def read(self, ref: Ref, space: Space, chunk: bytes, parent: bytes,
                   into: Mapping[int, WriteableBuffer | None]) -> dict[int, Loaded]:
        """Read and verify the columns named in `into`.

        A raw object (form FORM_RAW) goes straight into its buffer if one is given (page-aligned
        for O_DIRECT, else by a bounce buffer; at least raw_bytes long, or ValueError); all else
        comes back in memory of its own. On any error the given buffers hold rubbish.
        Raises Corrupt, TierBusy, TierFailed. Buffers: as in `write`.
        """

    async def delete(self, keys: Iterable[tuple[bytes, bytes, int]]) -> int:
        """Retract (space_key, chunk, generation) durably; 0 as generation: whichever is there."""

    def reclaim_candidates(self) -> list[Victim]: ...

    async def live_keys(self, region: int) -> list[LiveKey]: ...

    async def reclaim(self, region: int) -> list[LiveKey]:
        """Delete what still lives there, commit, free the region; returns what was deleted."""

    def tick(self) -> None:
        """Call every 0.2 s or so: stall watchdog, probe that reopens, rates."""

    async def close(self) -> None:
        """Refuse new work, wait for what is in flight, commit, clean mark, let go."""

    # state: "open" | "slow: ..." | "closed: reason"; writable: bool; free_regions; used_bytes;
    # live_bytes; garbage_bytes; counters; stats() -> dict for the page
