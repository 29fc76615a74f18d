"""Moving KV between a Hugging Face cache and kvd's slots: one copy each way."""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from kvd_client.errors import HandleClosed
from kvd_client.hf_cache import Opening, kept, new_cache, open_layer
from kvd_client.wire import Status

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from transformers import Cache

    from kvd_client import Client, Lease
    from kvd_client.hf_cache import Kept, ModelPlan
    from kvd_client.hf_rows import Row

BATCH_BYTES: Final = 64 << 20
"""Reserved, filled and published at a time: bounds what a dead engine leaves half-filled."""

ORIGIN: Final = "kvd_origin"
"""Attribute of a loaded cache: what it was loaded from. Copies of the cache keep it."""


class Known(NamedTuple):
    """What a client was connected for."""

    model: weakref.ref[Any]
    plan: ModelPlan
    mark: int
    chunk_tokens: int
    object_bytes: tuple[int, ...]
    """Of each group's objects."""


class Origin(NamedTuple):
    """What a cache was loaded from.

    Attributes:
        namespace_id: Whose copies.
        slots: That were loaded.
        lossy: Some went through a lossy form.
        whole: For each group the slot from which on every row has its tokens; rows of a batch may
            change places, so it is one number for all.
    """

    namespace_id: bytes = b""
    slots: int = 0
    lossy: bool = False
    whole: tuple[int, ...] = ()


class Fetched(NamedTuple):
    """A prefix copied out of kvd; without a cache, `note` says why."""

    cache: Cache | None = None
    slots: int = 0
    bytes: int = 0
    lossy: bool = False
    note: str = ""


class Ask(NamedTuple):
    """What is to be loaded.

    Attributes:
        rows: The prompts.
        chains: For each row the hashes worth loading, at most all but one token's.
        wait_s: Longest wait for what has to come up from NVMe, for all rows together.
        static_tokens: As for `new_cache`.
    """

    rows: Sequence[Row]
    chains: Sequence[list[bytes]]
    wait_s: float
    static_tokens: int


class _Held(NamedTuple):
    """One row while it is loaded: its lease, and for each group the chunks that it needs."""

    row: Row
    lease: Lease
    parts: tuple[range, ...]


def fetch(client: Client, known: Known, model: Any, ask: Ask) -> Fetched:  # noqa: ANN401 - any model
    """Hold the prefixes of a batch, bring them up, copy out as many slots as every row has.

    Raises:
        KvdError: The session ended meanwhile, or a lease lacks what it should hold.
    """
    with ExitStack() as stack:
        leases, note = _hold(client, ask, stack)
        reached = [
            row.pad + lease.chunks * known.chunk_tokens
            for row, lease in zip(ask.rows, leases, strict=True)
        ]
        end = min(reached)
        if end <= min(row.pad for row in ask.rows):
            return Fetched(note=note or "kvd holds no prefix of this prompt")
        rows = [
            _Held(row, lease, _parts(known, end - row.pad))
            for row, lease in zip(ask.rows, leases, strict=True)
        ]
        if not all(map(_complete, rows)):
            return Fetched(note="kvd lacks a part of a sliding window where this batch is cut")
        cache = new_cache(model, ask.static_tokens)
        size, whole = _read(known, cache, rows, end)
        lossy = any(lease.lossy for lease in leases)
        if not all(lease.still_held() for lease in leases if lease):
            return Fetched(note="the session with kvd ended while the prefix was read")
    setattr(cache, ORIGIN, Origin(client.namespace_id, end, lossy, whole))
    return Fetched(cache, end, size, lossy, note)


def _hold(client: Client, ask: Ask, stack: ExitStack) -> tuple[list[Lease], str]:
    """Acquire each row's chain, one after the other: a ring holds few long ones.

    Returns:
        The leases, which `stack` releases, and why they hold less than was asked for.
    """
    began = time.perf_counter()
    leases: list[Lease] = []
    for chain in ask.chains:
        left_s = max(0.0, ask.wait_s - (time.perf_counter() - began))
        lease = client.wait(client.begin_acquire(chain), left_s)
        leases.append(stack.enter_context(lease))
    waited_s = time.perf_counter() - began
    asked, got = sum(map(len, ask.chains)), sum(lease.chunks for lease in leases)
    if got == asked:
        return leases, ""
    late = not got and waited_s >= ask.wait_s
    why = f"not within {ask.wait_s:g} s" if late else "no room, or NVMe failed: see kvd stat"
    return leases, f"kvd brought up {got} of {asked} chunks that it holds ({why})"


def _parts(known: Known, tokens: int) -> tuple[range, ...]:
    """Name the chunks of each group that so many tokens of one row need."""
    last = -(-max(0, tokens) // known.chunk_tokens)
    return tuple(
        range(group.first_needed(tokens, known.chunk_tokens), last) for group in known.plan.groups
    )


def _complete(held: _Held) -> bool:
    """Whether the lease has all the row needs.

    It has what a prefix of whole chunks needs; a row that is cut within a chunk, because another
    row of the batch has less, may need a window that begins a chunk earlier.
    """
    return all(
        held.lease.has(chunk, group) for group, part in enumerate(held.parts) for chunk in part
    )


def _read(
    known: Known, cache: Cache, rows: Sequence[_Held], end: int
) -> tuple[int, tuple[int, ...]]:
    """Copy the leased prefixes into an empty cache, up to slot `end`.

    Returns:
        The bytes of the objects read, and `Origin.whole`.

    Raises:
        HandleClosed: A lease lacks an object it should hold.
    """
    size, whole = 0, []
    for index, group in enumerate(known.plan.groups):
        starts = [
            held.row.pad + held.parts[index].start * known.chunk_tokens
            for held in rows
            if held.parts[index]
        ]
        clear = len(rows) > 1 or rows[0].row.pad > 0
        seen = group.shape.window - 1 if group.shape.window else end  # by the next token
        opening = Opening(len(rows), min(*starts, max(0, end - seen)), end, clear)
        targets = [open_layer(known.plan, group, layer, cache, opening) for layer in group.layers]
        whole.append(max([*starts, *(target.start for target in targets)]))
        for number, held in enumerate(rows):
            views = [held.lease.view(chunk, index) for chunk in held.parts[index]]
            size += len(views) * known.object_bytes[index]
            pieces = [
                group.split(_borrow(view, known, index), known.chunk_tokens) for view in views
            ]
            begin = held.row.pad + held.parts[index].start * known.chunk_tokens
            for place, target in enumerate(targets):
                for tensor, offset in ((target.keys, 0), (target.values, 1)):
                    parts = [piece[2 * place + offset] for piece in pieces]
                    _lay(tensor[number], target.start, parts, begin, end)
    return size, tuple(whole)


def _lay(
    target: torch.Tensor, start: int, pieces: list[torch.Tensor], begin: int, end: int
) -> None:
    """Copy one row's pieces, which begin at slot `begin`, to where they belong.

    Args:
        target: `[heads, slots, size]`; its first slot is `start`, its last `end` - 1.
        start: See there.
        pieces: In order, each `[heads, chunk_tokens, size]`, borrowed (T4).
        begin: Slot of the first piece's first token; may be before `start`.
        end: Slots from here on are left out.
    """
    step = pieces[0].shape[1] if pieces else 0
    while pieces and begin + step <= start:
        pieces, begin = pieces[1:], begin + step
    if not pieces:
        return  # this row has nothing here but padding
    early = max(0, start - begin)
    if over := begin + len(pieces) * step - end:
        pieces[-1] = pieces[-1][:, : step - over]
    if early:
        pieces[0] = pieces[0][:, early:]
    place = target[:, begin + early - start :]
    if target.device.type == "cpu":
        torch.cat(pieces, dim=1, out=place)  # the one copy, straight from the daemon's slots
    else:
        place.copy_(torch.cat(pieces, dim=1))


def _borrow(view: memoryview, known: Known, group: int) -> torch.Tensor:
    """Read-only memory as a 1-D tensor that must be neither written nor kept (T4).

    torch.frombuffer warns of read-only memory and its warning can only be filtered for the whole
    process, so it is given the address instead. Nothing here keeps `view` alive: the caller does.

    Raises:
        HandleClosed: The object has another size than this layout's.
    """
    if view.nbytes != known.object_bytes[group]:
        msg = "an object of the prefix has another size than the layout says"
        raise HandleClosed(msg)
    address = np.frombuffer(view, np.uint8).ctypes.data
    memory = (ctypes.c_char * view.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=known.plan.dtype)


class Source(NamedTuple):
    """One row of a filled cache, to be stored.

    Attributes:
        layers: What each layer holds, of all rows.
        number: Of the row.
        pad: Of the row.
        lossy: The cache began with a lossy copy.
        whole: For each group the first chunk of this row of which it has every token.
    """

    layers: Sequence[Kept]
    number: int
    pad: int
    lossy: bool
    whole: tuple[int, ...]


def source_of(known: Known, cache: Cache, number: int, pad: int) -> Source:
    """Say what may be stored of one row of a filled cache.

    Args:
        known: What the client was connected for.
        cache: Checked by `check_filled`.
        number: Of the row among the cache's sequences.
        pad: Its padding.
    """
    origin: Origin = getattr(cache, ORIGIN, Origin())
    layers = [kept(layer) for layer in cache.layers]
    begins = [max(layers[layer].start for layer in group.layers) for group in known.plan.groups]
    if origin.whole:
        begins = [max(pair) for pair in zip(begins, origin.whole, strict=True)]
    whole = tuple(-(-max(0, begin - pad) // known.chunk_tokens) for begin in begins)
    return Source(layers, number, pad, origin.lossy, whole)


def lacks_past(known: Known, source: Source, chunks: int) -> bool:
    """Whether a group has dropped what a prefix of so many chunks needs of it."""
    tokens = chunks * known.chunk_tokens
    return any(
        start > group.first_needed(tokens, known.chunk_tokens)
        for group, start in zip(known.plan.groups, source.whole, strict=True)
    )


class _Wanted(NamedTuple):
    """A batch to store: chunks `at` to `end` - 1 in some groups."""

    at: int
    end: int
    groups: tuple[int, ...]


def write(client: Client, known: Known, source: Source, hashes: list[bytes]) -> tuple[int, int]:
    """Reserve, fill and publish one row's chain, batch by batch.

    Where the sliding-window groups lack tokens only the others are offered: a usable prefix needs
    a window's last chunks and no more.

    Returns:
        The chunks from the first on that kvd holds now, and the bytes written.
    """
    groups = known.plan.groups
    everywhere = range(len(groups))
    lasting = [index for index in everywhere if not groups[index].shape.window]
    step = max(1, BATCH_BYTES // sum(known.object_bytes))
    complete = max(source.whole)
    at = size = 0
    while at < len(hashes):
        end = min(at + step, len(hashes), complete if at < complete else len(hashes))
        offered = lasting if at < complete else everywhere
        if offered:
            wanted = _Wanted(at, end, tuple(offered))
            held, written = _write_batch(client, known, source, hashes, wanted)
            size += written
            if held < end:
                return held, size
        at = end
    return at, size


def _write_batch(
    client: Client, known: Known, source: Source, chain: list[bytes], wanted: _Wanted
) -> tuple[int, int]:
    """Offer one batch of a chain.

    Returns:
        The chunks of the chain, from the first on, that kvd holds now in all these groups, if
        those before the batch are there; and the bytes written.
    """
    at, end, offered = wanted
    size = 0
    with client.reserve(chain[:end], first=at, groups=offered, lossy=source.lossy) as reservation:
        placed = reservation.placed
        for slot in placed:
            assert slot.buffer is not None
            _fill(known, source, slot.group, slot.chunk, slot.buffer)
        states = {(slot.chunk, slot.group): slot.status for slot in reservation.slots}
        for slot, status in zip(placed, client.publish(reservation, placed), strict=True):
            states[slot.chunk, slot.group] = status
            size += known.object_bytes[slot.group] if status == Status.OK else 0
    if any(status == Status.ORPHAN for status in states.values()):
        return 0, size  # what comes before the batch is gone
    held = at
    while held < end and all(
        states.get((held, group)) in {Status.OK, Status.EXISTS} for group in offered
    ):
        held += 1
    return held, size


@torch.no_grad()
def _fill(known: Known, source: Source, index: int, chunk: int, buffer: memoryview) -> None:
    """Copy one chunk's K and V of a group into a slot."""
    group = known.plan.groups[index]
    assert chunk >= source.whole[index]
    found = []
    for layer in group.layers:
        held = source.layers[layer]
        low = source.pad + chunk * known.chunk_tokens - held.start
        assert 0 <= low <= held.keys.shape[-2] - known.chunk_tokens
        part = slice(low, low + known.chunk_tokens)
        found += [held.keys[source.number, :, part], held.values[source.number, :, part]]
    targets = group.split(torch.frombuffer(buffer, dtype=known.plan.dtype), known.chunk_tokens)
    for target, held_part in zip(targets, found, strict=True):
        target.copy_(held_part)
