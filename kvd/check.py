"""`kvd check`: is every bundle on NVMe whole? Offline: the daemon must not be running.

Without `--repair` nothing is changed. What is checked: the file `store`; the index, page by page,
without opening it (a damaged one can end the process that does); each row against its region; each
record's header, identity and checksums; and what the regions hold that the index does not name.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvd.errors import StartError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvd.tiers.disk import Disk
    from kvd.tiers.extents import Extents
    from kvd.tiers.index import Index
    from kvd.tiers.region import Space
    from kvd.tiers.rows import Row
    from kvd.tiers.storefiles import Identity

EPILOG: Final = """\
examples:
  kvd check /var/lib/kvd/nvme
  kvd check /var/lib/kvd/nvme --repair
  kvd check /var/lib/kvd/nvme --json

Stop the daemon first. Nothing is changed without --repair.

exit codes:
  0  all is whole, or was repaired
  1  something is damaged
  2  wrong option, no NVMe tier there, or a daemon uses it; stderr says what to change
"""
EXIT_GOOD: Final = 0
EXIT_BAD: Final = 1
PROBLEMS_SHOWN: Final = 20
MAP_BYTES: Final = 256 << 30
THREADS: Final = 4
BATCH: Final = 4096
"""Records read at a time; bounds what is in memory."""


@dataclass(slots=True)
class Finding:
    """The result of a check.

    Attributes:
        directory: What was checked.
        index: `whole`, `missing` or `damaged`.
        clean: Whether the index is as the last clean stop left it.
        regions: Region files.
        regions_bad: Of them, with an unreadable header or of another length.
        entries: Rows in the index.
        entries_bad: Rows that name no whole record, whatever the reason.
        bytes_read: Stored bytes verified.
        unnamed: Whole records that the index does not name: deleted, replaced, or not committed.
        repaired: What was done, empty for nothing.
        seconds: How long it took.
        problems: The first of them, in words.
    """

    directory: str
    index: str = "whole"
    clean: bool = False
    regions: int = 0
    regions_bad: int = 0
    entries: int = 0
    entries_bad: int = 0
    bytes_read: int = 0
    unnamed: int = 0
    repaired: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a problem to be shown."""
        if len(self.problems) < PROBLEMS_SHOWN:
            self.problems.append(text)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.index == "whole" and not self.regions_bad and not self.entries_bad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvd check`."""
    parser.add_argument("directory", type=Path, help="of the NVMe store: [nvme] directory")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="delete what is damaged from the index; rebuild an index that cannot be used",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check a store and print what was found.

    Returns:
        0 when all is whole (or was repaired), 1 when something is damaged. A region with a bad
        header stays as it is: the daemon uses what is in it, and mends it when it is empty.

    Raises:
        StartError: There is no store, it is in use, or of another format.
    """
    finding = check(args.directory, repair=args.repair)
    if args.json:
        sys.stdout.write(json.dumps(asdict(finding) | {"good": finding.good}) + "\n")
    else:
        sys.stdout.write(describe(finding))
    return EXIT_GOOD if finding.good or finding.repaired else EXIT_BAD


def describe(finding: Finding) -> str:
    """Put a finding into lines for people."""
    verdict = "whole" if finding.good else "repaired" if finding.repaired else "DAMAGED"
    lines = [
        f"{finding.directory}: {verdict}",
        f"  index     {finding.index}, {'clean' if finding.clean else 'not stopped cleanly'}",
        f"  regions   {finding.regions}, {finding.regions_bad} with a bad header or length",
        f"  bundles   {finding.entries}, {finding.entries_bad} damaged",
        f"  verified  {finding.bytes_read / 1e9:.2f} GB in {finding.seconds:.1f} s",
        f"  unnamed   {finding.unnamed} whole records that nothing names (garbage)",
        *(f"  problem   {text}" for text in finding.problems),
    ]
    if finding.repaired:
        lines.append(f"  repaired  {finding.repaired}")
    return "\n".join(lines) + "\n"


def check(directory: Path, *, repair: bool = False) -> Finding:
    """Check a store, and mend its index if told to; StartError as in `run`."""
    from kvd.tiers.disk import RealDisk
    from kvd.tiers.extents import Extents
    from kvd.tiers.recover import Report, open_regions
    from kvd.tiers.storefiles import read_clean, read_identity, take

    began = time.monotonic()
    disk = RealDisk()
    if "store" not in disk.names(directory):
        raise StartError(f"there is no NVMe store in {directory}")
    lock = take(disk, directory)
    finding = Finding(str(directory))
    try:
        identity = read_identity(disk, directory)
        assert identity is not None  # it is among the names, and we hold the lock
        extents = Extents(2, identity.region_bytes, 0)
        report = Report(direct=False)
        open_regions(disk, directory, extents, identity.uuid, report, remove=False)
        finding.regions, finding.regions_bad = report.regions, report.regions_bad
        for number, region in extents.regions.items():
            if region.handle >= 0 and region.incarnation is None:
                finding.note(f"region {number}: unreadable header")
        mark = read_clean(disk, directory, identity.uuid)
        _Check(disk, directory, identity, extents, finding).run(mark, repair=repair)
        for region in extents.regions.values():
            if region.handle >= 0:
                disk.close(region.handle)
    except OSError as error:
        raise StartError(f"the NVMe store in {directory}: {error.strerror}") from error
    finally:
        disk.close(lock)
        finding.seconds = time.monotonic() - began
    return finding


class _Check:
    """One check under way."""

    def __init__(
        self, disk: Disk, directory: Path, identity: Identity, extents: Extents, finding: Finding
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.identity = identity
        self.extents = extents
        self.finding = finding
        self.bad: list[bytes] = []
        self.named: set[tuple[int, int]] = set()

    def run(self, mark: bytes, *, repair: bool) -> None:
        """Check everything; mend if told to."""
        from kvd.tiers.index import IndexBroken, file_mark

        path = self.directory / "index.mdb"
        if path.name not in self.disk.names(self.directory):
            self.finding.index = "missing"
            self.finding.note("index: there is none")
        else:
            self.finding.clean = bool(mark) and mark == file_mark(self.disk, path)
            self._pages(path)
        if self.finding.index == "whole":
            try:
                self._copied_rows(path)
            except IndexBroken as error:
                self.finding.index = "damaged"
                self.finding.note(str(error))
        self._unnamed()
        if repair and not self.finding.good:
            self._repair()

    def _pages(self, path: Path) -> None:
        """Check the index's pages without LMDB."""
        from lmdb import verify

        try:
            errors = verify.verify(str(path), subdir=False)  # type: ignore[no-untyped-call]
        except verify.VerifyError as error:
            errors = [str(error)]
        for text in errors:
            self.finding.note(f"index: {text}")
        if errors:
            self.finding.index = "damaged"

    def _copied_rows(self, path: Path) -> None:
        """Check the rows of a copy, so that nothing is changed; by a child, as at a start."""
        from kvd.tiers.index import LmdbPlace

        with tempfile.TemporaryDirectory(prefix="kvd-check-") as folder:
            shutil.copyfile(path, Path(folder) / "index.mdb")
            index = LmdbPlace(self.disk, Path(folder), MAP_BYTES).open(b"")
            assert index is not None
            try:
                self._rows(index)
            finally:
                index.close()

    def _rows(self, index: Index) -> None:
        from kvd.tiers.recover import life_of, sift_rows

        spaces, batches = sift_rows(index, self.extents, life_of(index, self.identity.uuid))
        with ThreadPoolExecutor(THREADS, thread_name_prefix="check") as pool:
            for good, bad in batches:
                self.finding.entries += len(good) + len(bad)
                for key in bad:
                    self._damaged(key, "the row cannot be right")
                for first in range(0, len(good), BATCH):
                    rows = good[first : first + BATCH]
                    results = pool.map(lambda row: self._record(row, spaces), rows)
                    for row, problem in zip(rows, results, strict=True):
                        if problem:
                            self._damaged(row.key, problem)
                        else:
                            self.named.add((row.region, row.offset_bytes))
                            self.finding.bytes_read += row.stored_bytes

    def _damaged(self, key: bytes, problem: str) -> None:
        self.finding.entries_bad += 1
        self.finding.note(f"bundle {key[-6:].hex()}: {problem}")
        self.bad.append(key)

    def _record(self, row: Row, spaces: dict[bytes, Space]) -> str:
        """Verify a record in full; return what is wrong with it."""
        from kvd.tiers import region as fmt
        from kvd.tiers.transfer import read_header, verify_record

        region = self.extents.regions[row.region]
        try:
            end = row.offset_bytes + row.length_bytes
            record = read_header(self.disk, region.handle, row.offset_bytes, end)
            incarnation = region.incarnation
            if incarnation is None:
                incarnation = record.origin.incarnation
            origin = fmt.Origin(self.identity.uuid, row.region, incarnation, row.generation)
            fmt.check_place(record, origin, row.length_bytes)
            fmt.check_identity(record, spaces[row.space_key], row.chunk, row.parent)
            if record.mask != row.mask:
                return "record: other columns than the index says"
            verify_record(self.disk, region.handle, row.offset_bytes, record)
        except fmt.BadRecord as error:
            return str(error)
        except OSError as error:
            return f"read failed: {error.strerror}"
        return ""

    def _unnamed(self) -> None:
        for region, offset in self._walk():
            self.finding.unnamed += (region, offset) not in self.named

    def _walk(self) -> Iterator[tuple[int, int]]:
        from kvd.tiers.rebuild import walk

        for region in list(self.extents.regions.values()):
            if region.handle < 0 or region.incarnation is None:
                continue
            try:
                for offset, _ in walk(
                    self.disk, region, self.extents.region_bytes, self.identity.uuid
                ):
                    yield region.id, offset
            except OSError as error:
                self.finding.note(f"region {region.id}: read failed: {error.strerror}")

    def _repair(self) -> None:
        """Delete what is damaged from the index, or make it anew."""
        from kvd.tiers.index import Change, Changes, LmdbPlace
        from kvd.tiers.rebuild import rebuild

        place = LmdbPlace(self.disk, self.directory, MAP_BYTES)
        self.disk.unlink(self.directory / "clean")
        done = []
        if self.finding.index != "whole":
            rebuild(self.disk, place, self.identity.uuid, self.extents, 0)[0].close()
            done.append("the index was rebuilt from the regions")
            self.bad.clear()  # a scan takes records as whole: verify what it found
            self.finding.entries = self.finding.entries_bad = 0
            self._copied_rows(self.directory / "index.mdb")
        if self.bad:
            index = place.open(b"")
            assert index is not None
            index.commit(Changes([Change(key, None) for key in self.bad]))
            index.close()
            done.append(f"{len(self.bad)} damaged bundles were deleted from the index")
        self.finding.repaired = "; ".join(done)
