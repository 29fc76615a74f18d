"""Recording: each request once, bounded, and lines that `kvd replay` reads."""

from __future__ import annotations

import io
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvd.admin.recording import HELD_MAX, PAGE_HASHES, Recorder
from kvd.clock import SimClock
from kvd.commands.record import Writer
from kvd.entry import Space
from kvd.ipc.caller import Caller
from kvd.trace import read_trace
from kvd.types import OwnerId, Tenant
from kvd_client import wire
from kvd_client.identity import Group, Layout

if TYPE_CHECKING:
    from pathlib import Path

MS = 10**6
ME, OTHER = OwnerId(1), OwnerId(2)


def space(tenant: str = "a", chunk_tokens: int = 16) -> Space:
    """Make a space."""
    layout = Layout(chunk_tokens, chunk_tokens, "float16", (Group("full", 1, 1, 8, 4096),))
    return Space(Tenant(tenant), b"n" * 32, "label", layout, ())


def chain(name: str, length: int) -> list[bytes]:
    """Make the hashes of a chain: a prefix of a longer one of the same name."""
    return [blake2b(f"{name}/{at}".encode(), digest_size=32).digest() for at in range(length)]


def asks(
    recorder: Recorder, owner: OwnerId, here: Space, hashes: list[bytes], *, acquired: bool
) -> None:
    """Let the recorder hear of a request."""
    joined = b"".join(hashes)
    message = wire.Acquire(1, joined, 0, 1, 1) if acquired else wire.Lookup(1, joined)
    recorder.hear(Caller(owner, here.tenant, here, 0), message)


def everything(recorder: Recorder) -> list[list[Any]]:
    """Fetch page after page."""
    found: list[list[Any]] = []
    while rows := recorder.fetch():
        found += rows
    return found


def test_a_look_up_and_its_acquire_are_one_request() -> None:
    """Asked again it is the same request until it was acquired; another session's is another."""
    clock, here = SimClock(), space()
    recorder = Recorder(clock, tenant=None, space=None)
    clock.advance_ms(5)
    for acquired in (False, False, True, False, True, True):
        asks(recorder, ME, here, chain("a", 2), acquired=acquired)
    clock.advance_ms(1)
    asks(recorder, OTHER, here, chain("a", 2), acquired=False)
    asks(recorder, ME, here, [], acquired=False)
    assert [row[0] for row in everything(recorder)] == [5, 5, 5, 6]


def test_only_what_is_asked_for_is_noted() -> None:
    """Another tenant's, or another namespace's, requests are not."""
    mine, other = space("a"), space("b")
    by_tenant, by_space = (
        Recorder(SimClock(), tenant=Tenant("a"), space=None),
        Recorder(SimClock(), tenant=None, space=other),
    )
    for each in (mine, other):
        asks(by_tenant, ME, each, chain(each.tenant, 1), acquired=False)
        asks(by_space, ME, each, chain(each.tenant, 1), acquired=False)
    assert [row[4] for row in everything(by_tenant)] == chain("a", 1)
    assert [row[4] for row in everything(by_space)] == chain("b", 1)


def test_what_waits_is_bounded() -> None:
    """Beyond the bound requests are counted as lost; fetching makes room again."""
    recorder, here = Recorder(SimClock(), tenant=None, space=None), space()
    for number in range(2 * HELD_MAX // 4096):
        asks(recorder, ME, here, chain(str(number), 4096), acquired=True)
    assert recorder.lost == HELD_MAX // 4096
    rows = everything(recorder)
    assert sum(len(row[4]) // 32 for row in rows) == HELD_MAX
    asks(recorder, ME, here, chain("x", 4096), acquired=True)
    again = everything(recorder)
    assert [row[2] for row in again] == [4096] * len(again)
    assert recorder.lost == HELD_MAX // 4096


def test_a_page_fits_a_packet() -> None:
    """Rows and pages keep to their bounds, and a long chain goes on where it was cut."""
    recorder, here = Recorder(SimClock(), tenant=None, space=None), space()
    asks(recorder, ME, here, chain("a", 1000), acquired=True)
    pages = []
    while rows := recorder.fetch():
        pages.append(rows)
        assert sum(len(row[4]) for row in rows) <= 32 * PAGE_HASHES
    parts = [row for page in pages for row in page]
    assert b"".join(row[4] for row in parts) == b"".join(chain("a", 1000))
    assert parts[0][3] == 0


def test_the_lines_are_a_trace(tmp_path: Path) -> None:
    """Numbers in order of first use, shared prefixes, one chunk size; replay reads it."""
    clock, here, odd = SimClock(), space(), space("a", 32)
    recorder = Recorder(clock, tenant=None, space=None)
    asks(recorder, ME, here, chain("a", 600), acquired=True)
    asks(recorder, ME, odd, chain("odd", 3), acquired=True)
    clock.advance_ms(3)
    asks(recorder, ME, here, [*chain("a", 2), *chain("b", 1)], acquired=True)
    file = io.StringIO()
    writer = Writer(file, 0)
    while rows := recorder.fetch():
        writer.take([[7], *rows])
    assert (writer.requests, writer.skipped, writer.lost, writer.blocks) == (2, 1, 7, 601)
    path = tmp_path / "trace.jsonl"
    path.write_text(file.getvalue())
    first, second = read_trace(str(path), 16).entries
    assert first.request.chain == tuple(range(600))
    assert second.request.chain == (0, 1, 600)
    assert (second.request.now_ns, second.input_tokens) == (3 * MS, 48)
    assert not any(key.hex() in file.getvalue() for key in chain("a", 600))
