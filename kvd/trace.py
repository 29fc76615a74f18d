"""Traces of requests: what `kvd replay` reads.

A trace is a file of JSON lines as Mooncake published them, plain or compressed with gzip:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds, lengths are in tokens (`output_length` may be null or missing),
`hash_ids` name the prompt's blocks, each together with all that is before it; the last one may be
partly filled, or left out if it is.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvd.policies import Request
from kvd_client.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MS_NS: Final = 10**6
BLOCK_TOKENS: Final = 512
"""Of the published traces."""
_SHOWN: Final = 40
"""Characters of a bad value that an error repeats."""


class TraceError(KvdError):
    """A trace cannot be read; the text says where, and what to change."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a trace, and how many tokens its prompt has."""

    request: Request[int]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time.

    Attributes:
        entries: The requests.
        block_tokens: Tokens of a full block.
    """

    entries: tuple[Entry, ...]
    block_tokens: int

    def whole_blocks(self) -> Trace:
        """Return the trace without partly filled last blocks, as a tier of whole chunks sees it."""
        return self._mapped(lambda r: (r.chain[: len(r.chain) - r.partial], r.output_tokens, False))

    def without_output(self) -> Trace:
        """Return the trace as where nobody says how long answers are."""
        return self._mapped(lambda r: (r.chain, None, r.partial))

    def head(self, count: int) -> Trace:
        """Return the first requests only."""
        return Trace(self.entries[:count], self.block_tokens)

    def _mapped(
        self, facts: Callable[[Request[int]], tuple[Sequence[int], int | None, bool]]
    ) -> Trace:
        return Trace(
            tuple(
                Entry(Request(entry.request.now_ns, *facts(entry.request)), entry.input_tokens)
                for entry in self.entries
            ),
            self.block_tokens,
        )


def read_trace(path: str, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: The file, or a line of it, cannot be used.
    """
    entries: list[Entry] = []
    parents: dict[int, int | None] = {}
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the user's path, as it is
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else open(path, "rb") as lines:  # noqa: PTH123
            for number, line in enumerate(lines, 1):
                where = f"{path}:{number}"
                if line.strip():
                    entry = _entry(where, line, block_tokens)
                    _check_order(where, entry.request, entries, parents)
                    entries.append(entry)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            f"{path}: broken gzip file ({error}); fetch or compress it anew"
        ) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; name a readable file") from error
    if not entries:
        raise TraceError(f"{path}: no request in it; name a trace with at least one line")
    return Trace(tuple(entries), block_tokens)


def _entry(where: str, line: bytes, block_tokens: int) -> Entry:
    """Read and check one line."""
    try:
        fields = json.loads(line.strip())
    except json.JSONDecodeError as error:
        found = f"{error.msg} at column {error.colno}"
        raise TraceError(f"{where}: no JSON ({found}); write one object a line") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: no JSON ({error}); write one object a line") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {_shown(fields)} is no object; write one object a line")
    timestamp_ms = _whole(where, fields, "timestamp")
    input_tokens = _whole(where, fields, "input_length")
    output_tokens = None
    if fields.get("output_length") is not None:
        output_tokens = _whole(where, fields, "output_length")
    chain = fields.get("hash_ids")
    if not isinstance(chain, list) or not all(type(block) is int for block in chain):
        raise TraceError(f'{where}: write "hash_ids" as a list of whole numbers')
    full, rest = divmod(input_tokens, block_tokens)
    if len(chain) not in {full, full + bool(rest)}:
        raise TraceError(
            f"{where}: {input_tokens} input tokens make {full + bool(rest)} blocks of"
            f" {block_tokens}, but hash_ids has {len(chain)}; give the trace's own --block-tokens"
        )
    request = Request(timestamp_ms * MS_NS, tuple(chain), output_tokens, partial=len(chain) > full)
    return Entry(request, input_tokens)


def _whole(where: str, fields: dict[str, object], name: str) -> int:
    """Return a field that must be a whole number, not negative."""
    value = fields.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        found = _shown(value) if name in fields else "missing"
        raise TraceError(f'{where}: "{name}" is {found}; write a whole number from 0 on')
    return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_order(
    where: str, request: Request[int], before: Sequence[Entry], parents: dict[int, int | None]
) -> None:
    """Check that time goes on and that a block's name stands for all before it."""
    if before and request.now_ns < before[-1].request.now_ns:
        raise TraceError(f"{where}: earlier than the line before; sort the trace by timestamp")
    above: int | None = None
    seen: set[int] = set()
    for block in request.chain:
        if block in seen:
            raise TraceError(f"{where}: block {block} twice in hash_ids; name each once")
        seen.add(block)
        if parents.setdefault(block, above) != above:
            raise TraceError(
                f"{where}: block {block} follows {_named(above)} here but"
                f" {_named(parents[block])} before; an id must stand for the whole prefix"
            )
        above = block


def _named(block: int | None) -> str:
    return "nothing" if block is None else f"block {block}"
