"""Copy an index that nobody vouches for into a fresh file. Run as a process of its own.

LMDB trusts the pages it maps: a damaged file can end the process that opens it by a signal, at any
later time. So after anything but a clean stop the daemon never opens the old file. This child
does, reads every entry, and appends them to a new file, which refuses a key out of order. It can
be killed by what it reads; the daemon then rebuilds the index from the regions.

Usage: python -I _index_copy.py SOURCE TARGET MAP_BYTES DATABASE...; exit status 0 and the number of
entries on stdout, or anything else.
"""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Final

import lmdb

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW_BYTES: Final = 168
"""rows.ROW_BYTES; a copy, since importing kvd would take longer than the work."""


def fixed(items: Iterator[tuple[bytes, bytes]], size: int) -> Iterator[tuple[bytes, bytes]]:
    """Pass on what is read; end the process if a row has another length than rows have."""
    if not size:
        yield from items
    for item in items:
        if len(item[0]) + len(item[1]) != size:
            raise SystemExit("a row of another length")
        yield item


def main(source: str, target: str, map_bytes: int, names: list[str]) -> int:
    """Copy the named databases; return how many entries there were."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    total = 0
    with (
        lmdb.open(
            source,
            map_size=map_bytes,
            subdir=False,
            lock=False,
            max_dbs=len(names),
            readonly=True,
        ) as old,
        lmdb.open(
            target, map_size=map_bytes, subdir=False, lock=False, max_dbs=len(names), mode=0o600
        ) as new,
    ):
        for name in names:
            read_from = old.open_db(name.encode(), create=False)
            write_to = new.open_db(name.encode())
            with old.begin(read_from) as reader, new.begin(write_to, write=True) as writer:
                entries = reader.stat(read_from)["entries"]
                items = fixed(reader.cursor().iternext(), ROW_BYTES if name == "rows" else 0)
                consumed, added = writer.cursor().putmulti(items, append=True)
                if not consumed == added == entries:
                    msg = f"{name}: {entries} entries, {consumed} read, {added} in order"
                    raise SystemExit(msg)
                total += added
        new.sync(True)  # noqa: FBT003 - positional only in the library
    return total


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])}\n")
