"""`kvd record`: write a trace of what engines ask for, for `kvd replay`."""

from __future__ import annotations

import gzip
import json
import sys
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final

from kvd.commands._shared import add_json, add_socket, connected, dump, say, time_s
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    import argparse

    from kvd.admin.client import Admin

EPILOG: Final = """\
examples:
  kvd record trace.jsonl --for 1h
  kvd record trace.jsonl.gz --namespace llama-3-8b@main --requests 100000
  kvd replay trace.jsonl --block-tokens 256 --capacity 4096

A line a request, as Mooncake's traces have it: time, tokens, and the chain's chunks as numbers, in
the order of their first use. No text, no token and no hash is written. One block size a trace: that
of the namespace, or of the first request seen. Ctrl-C ends it; what was written is whole.

exit codes:
  0  recorded
  1  no daemon, or it ended meanwhile; what was written is whole
  2  wrong option, no such namespace, the file cannot be written, or another recording is under way
"""
POLL_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("trace", metavar="TRACE", help="file to write; gzip if it ends in .gz")
    parser.add_argument("--namespace", metavar="NAMESPACE", help="only this one, by label or id")
    parser.add_argument(
        "--for", dest="limit_s", metavar="TIME", type=time_s, help="how long, as in 30m"
    )
    parser.add_argument("--requests", metavar="COUNT", type=int, help="most requests to record")
    add_socket(parser)
    add_json(parser)


class Writer:
    """Turns rows into lines; hashes into numbers."""

    def __init__(self, file: IO[str], block_tokens: int) -> None:
        """Begin; 0 tokens: as many as the first request's chunks have."""
        self._file = file
        self._numbers: dict[bytes, int] = {}
        self._chain: list[bytes] = []
        self.block_tokens = block_tokens
        self.requests = self.skipped = self.lost = 0

    @property
    def blocks(self) -> int:
        """Different blocks so far."""
        return len(self._numbers)

    def take(self, rows: list[list[Any]]) -> None:
        """Write what a page has."""
        self.lost = rows[0][0]
        for at_ms, chunk_tokens, count, first, joined in rows[1:]:
            if first == 0:
                self._chain = []
            self._chain += [joined[at : at + 32] for at in range(0, len(joined), 32)]
            if len(self._chain) < count:
                continue  # the rest is in the next row
            self.block_tokens = self.block_tokens or chunk_tokens
            if chunk_tokens != self.block_tokens:
                self.skipped += 1
                continue
            numbers = self._numbers
            line = {
                "timestamp": at_ms,
                "input_length": count * chunk_tokens,
                "output_length": None,
                "hash_ids": [numbers.setdefault(key, len(numbers)) for key in self._chain],
            }
            self._file.write(json.dumps(line) + "\n")
            self.requests += 1


def run(options: argparse.Namespace) -> int:
    """Record until told to stop; raises KvdError."""
    from kvd.admin import names

    if options.requests is not None and options.requests < 1:
        raise KvdError("--requests: write a whole number from 1 on")
    with connected(options) as admin:
        space, tokens = bytes(32), 0
        if options.namespace is not None:
            row = names.find_one(names.spaces(admin), options.namespace)
            space, tokens = row.space, row.chunk_tokens
        try:
            with _opened(options.trace) as file:
                writer = Writer(file, tokens)
                code = _record(admin, writer, space, options)
        except OSError as error:
            raise KvdError(f"{options.trace}: {error.strerror}; name another file") from error
    _show(writer, options)
    return code


def _opened(path: str) -> IO[str]:
    if path.endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8")
    return open(path, "w", encoding="utf-8")  # noqa: PTH123 - the user's path, as it is


def _record(admin: Admin, writer: Writer, space: bytes, options: argparse.Namespace) -> int:
    from kvd.admin.client import NoDaemon
    from kvd_client import wire

    end_s = time.monotonic() + (float("inf") if options.limit_s is None else options.limit_s)
    after = 0
    with suppress(KeyboardInterrupt):
        while time.monotonic() < end_s:
            try:
                after, rows = admin.ask(wire.Record, space, after)
            except NoDaemon as error:
                if not after:
                    raise
                sys.stderr.write(f"kvd: {error}\n")
                return 1
            writer.take(rows)
            if options.requests is not None and writer.requests >= options.requests:
                break
            if len(rows) == 1:
                time.sleep(min(POLL_S, max(0.0, end_s - time.monotonic())))
    return 0


def _show(writer: Writer, options: argparse.Namespace) -> None:
    if options.json:
        names = ("requests", "blocks", "block_tokens", "lost", "skipped")
        dump({"trace": options.trace, **{name: getattr(writer, name) for name in names}})
        return
    say([f"{writer.requests:,} requests over {writer.blocks:,} blocks in {options.trace}"])
    if writer.lost:
        say([f"{writer.lost:,} requests came too fast and are not in it"])
    if writer.skipped:
        say([f"{writer.skipped:,} requests of other chunk sizes are not: name a --namespace"])
    if writer.requests:
        tokens = writer.block_tokens
        say([f"try: kvd replay {options.trace} --block-tokens {tokens} --capacity BLOCKS"])
