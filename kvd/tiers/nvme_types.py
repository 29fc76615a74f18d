"""What the NVMe store is told and tells: configuration, counters, small records. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvd.tiers.recover import Report
    from kvd.tiers.region import Ref, Space

Entry = tuple[bytes, bytes, bytes, bytes, int, int]
"""(chunk 32 B, parent 32 B, mask 32 B: a little-endian bit set of columns, place 20 B: region,
offset and generation as `kvd.entry.PLACE` has them, length, hint)."""


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """What an operator may choose; the defaults are meant to be right.

    Attributes:
        directory: Of this store alone.
        capacity_bytes: Of all regions; whole regions are used, two at least.
        region_bytes: Size of a region file, fixed for the life of a store.
        threads: For payload I/O.
        index_bytes: LMDB's map, fixed while running; 0: from the capacity.
        writes_max: Writes under way; one more is refused.
        reads_max: Reads under way; one more is refused.
        slow_s: A call older than this makes the tier slow.
        probe_s: Between two attempts to open a closed tier.
        spare_regions: Kept for rewrites.
        direct: O_DIRECT where the file system has it.
    """

    directory: Path
    capacity_bytes: int
    region_bytes: int = 256 << 20
    threads: int = 4
    index_bytes: int = 0
    writes_max: int = 64
    reads_max: int = 256
    slow_s: float = 1.0
    probe_s: float = 2.0
    spare_regions: int = 1
    direct: bool = True

    @property
    def regions(self) -> int:
        """How many regions the capacity is cut into."""
        return max(2, self.capacity_bytes // self.region_bytes)

    @property
    def map_bytes(self) -> int:
        """The size of LMDB's map: address space, not disk."""
        return self.index_bytes or max(256 << 20, min(self.capacity_bytes // 16, 256 << 30))


class Opened(NamedTuple):
    """What `open` found; `entries`, by space, can be gone through once, each before the next."""

    spaces: dict[bytes, Space]
    entries: Iterator[tuple[bytes, Iterator[Entry]]]
    report: Report


class Victim(NamedTuple):
    """A region that could be reclaimed."""

    region: int
    live_bytes: int
    live_count: int
    garbage_bytes: int


class LiveKey(NamedTuple):
    """A bundle that lies in a region."""

    space_key: bytes
    chunk: bytes
    ref: Ref


@dataclass(slots=True)
class NvmeCounters:
    """Counts that only rise, all since the start.

    Attributes:
        writes: Bundles made durable.
        write_bytes: Their records.
        reads: Reads that returned.
        read_bytes: Stored bytes they returned.
        corrupt: Reads that found something else, or something damaged.
        gone: Reads of a place that is no longer that bundle's.
        deletes: Keys deleted from the index.
        reclaims: Regions given up.
        refused_busy: Calls refused for too much under way, or a slow disk.
        refused_space: Writes refused for want of a region.
        refused_closed: Calls refused while closed.
        errors_write: Writes of records that failed.
        errors_read: Reads that the disk failed.
        errors_sync: Syncs of regions that failed.
        errors_index: Transactions that failed.
        closures: Times the tier closed.
        openings: Times it opened again.
        stalls: Times it became slow.
    """

    writes: int = 0
    write_bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    corrupt: int = 0
    gone: int = 0
    deletes: int = 0
    reclaims: int = 0
    refused_busy: int = 0
    refused_space: int = 0
    refused_closed: int = 0
    errors_write: int = 0
    errors_read: int = 0
    errors_sync: int = 0
    errors_index: int = 0
    closures: int = 0
    openings: int = 0
    stalls: int = 0
