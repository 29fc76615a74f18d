"""Loading and storing prefixes of prompts, for Hugging Face transformers.

Invariants:

T1. A loaded cache holds whole chunks of its rows, or a part that every row has, and at most all but
    one of a prompt's tokens: `generate` given a cache as long as the prompt runs, and answers
    wrongly.
T2. What is loaded was stored for this model in this state (`hf_model.describe_model`); a client
    used with another model, or after a weight update, raises instead.
T3. Nothing kvd does makes the engine fail: no daemon, no room, a lost lease are misses.
T4. No tensor that borrows the daemon's memory outlives the lease or reservation it came from.
T5. What was loaded from a lossy copy, and what was computed after it, is never stored as if it had
    been computed: in its own namespace it is stored as lossy, in another not at all.

Batches may be padded on the left. Any thread, one at a time for one client.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import kvd_client
from kvd_client.errors import KvdError
from kvd_client.hf_cache import check_filled
from kvd_client.hf_model import (
    WrongModel,
    check_mode,
    describe_model,
    plan_model,
    weights_mark,
)
from kvd_client.hf_move import ORIGIN, Ask, Known, Origin, fetch, lacks_past, source_of, write
from kvd_client.hf_rows import Row, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import Cache

    from kvd_client import Client
    from kvd_client.hf_move import Source

LOAD_WAIT_S: Final = 5.0
"""Longest wait for a prefix that is there but may have to come up from NVMe."""
FIRST_ANSWER_S: Final = 1.0
"""Shortest wait for the daemon's greeting, which comes before any request."""
REPORT_TOKENS_MIN: Final = 128
"""Fewer computed tokens are not reported: they take what a step takes, and tell of no rate."""

_MEDIA: Final = "the prompt holds images or sound, which its token ids do not tell apart"


class Prefix(NamedTuple):
    """What `load_prefix` found; token counts are sums over the rows of a batch.

    Attributes:
        cache: For one call of `generate`, which changes it; None for a miss.
        tokens: Of the prompts, in the cache.
        bytes: Loaded.
        seconds: From the call to its end.
        note: Why it is a miss, or less than kvd holds.
        lossy: Some of it went through a lossy form (`connect_model(lossy=True)` only): the answer
            may differ from the one computed.
        found: Tokens of the prompts that kvd holds, whether or not they were worth loading.
    """

    cache: Cache | None
    tokens: int
    bytes: int
    seconds: float
    note: str = ""
    lossy: bool = False
    found: int = 0


class Stored(NamedTuple):
    """What `store_prefix` did; token counts are sums over the rows of a batch.

    Attributes:
        tokens: Of the prompts, in kvd now, whoever stored them.
        bytes: Written by this call.
        seconds: From the call to its end.
        note: Why it is not all, if more than a part of a chunk a row is missing.
        lossy: The cache began with a lossy copy, so what was computed after it is not exact either;
            it was stored as lossy.
    """

    tokens: int
    bytes: int
    seconds: float
    note: str = ""
    lossy: bool = False


_known: weakref.WeakKeyDictionary[Client, Known] = weakref.WeakKeyDictionary()


def connect_model(
    model: Any,  # noqa: ANN401 - any decoder model
    socket: str | os.PathLike[str] | None = None,
    *,
    chunk_tokens: int = 64,
    revision: str = "",
    adapter: str = "",
    salt: bytes = b"",
    identity: str = "",
    lossy: bool = False,
    answer_s: float = 0.25,
) -> Client:
    """Connect to the daemon for this model, in the state it is in.

    Runs the model on one token and reads all its weights for their digest: a second for a
    gigabyte or less. Connect again after a change of weights, adapter or device.

    Args:
        model: A decoder model in eval mode, whole on this host.
        socket: The daemon's socket; None for the usual place.
        chunk_tokens: Tokens a chunk. Smaller finds a little more, with more objects.
        revision: Told apart from others even with equal weights (a training epoch, say).
        adapter: Digest or name of an adapter that is not seen in the model's own weights.
        salt: 16 to 64 secret bytes; only clients with the same salt share.
        identity: A digest of the weights, if there is one already; else they are read.
        lossy: Let colder tiers keep FP8 copies, a quarter to a half of the bytes; each load says
            whether it got one. A namespace of its own: exact and lossy clients do not share.
        answer_s: Longest wait for the daemon's answer to anything but a load from NVMe.

    Returns:
        The client, also when no daemon answers or it takes nobody in for now: then all is a miss
        until it does.

    Raises:
        UnsupportedModel, UnsupportedCache: kvd cannot keep this model's KV safely.
        Refused: The daemon refuses this session until something is changed; the text says what.
        ValueError: An argument breaks a rule of `kvd_client.Namespace` or `Layout`.
    """
    plan = plan_model(model)
    namespace = describe_model(model, revision, adapter, salt, identity, lossy=lossy)
    layout = plan.layout(chunk_tokens)
    path = None if socket is None else os.fspath(socket)
    client = kvd_client.connect(
        path,
        namespace=namespace,
        layout=layout,
        timeout_s=max(FIRST_ANSWER_S, answer_s),
        wait_s=answer_s,
    )
    sizes = tuple(group.object_bytes for group in layout.groups)
    _known[client] = Known(weakref.ref(model), plan, weights_mark(model), chunk_tokens, sizes)
    return client


def load_prefix(
    client: Client,
    model: Any,  # noqa: ANN401 - any decoder model
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    wait_s: float = LOAD_WAIT_S,
    static_tokens: int = 0,
) -> Prefix:
    """Build a cache that holds the stored prefix of a prompt, as far as it is worth loading.

    The bytes are copied once, into new tensors of the cache's own; sliding-window layers get only
    the chunks that their window still reaches. What lies on NVMe is brought up first, unless
    computing it is known to be faster (`store_prefix(seconds=...)` tells kvd how fast that is).

    A cache has one length for all rows of a batch: it ends where the row ends that has least,
    padding counted. Rows of about one length, or with one beginning, gain most.

    Args:
        client: From `connect_model(model)`.
        model: The model that will run.
        input_ids: The whole prompts, `[rows, tokens]` or `[tokens]`.
        attention_mask: Their mask, of the same shape, if there is padding: on the left only.
        wait_s: Longest wait for what has to come up from NVMe; later is a miss. A daemon that does
            not answer costs the client's own, much shorter wait: the look-up comes first.
        static_tokens: Build a `StaticCache` with room for so many tokens, prompt and answer,
            instead of a dynamic one.

    Returns:
        The prefix; give `generate` the *whole* `input_ids` beside its cache.

    Raises:
        UnsupportedInput: Padding on the right, or no token ids.
        WrongModel: See `connect_model`.
        ValueError: `static_tokens` has no room for the prompt.
    """
    started = time.perf_counter()
    known = recall(client, model)
    rows = rows_of(known.plan, input_ids, attention_mask)
    if static_tokens and static_tokens < input_ids.shape[-1]:
        msg = f"static_tokens ({static_tokens}) must hold the prompt of {input_ids.shape[-1]}"
        raise ValueError(msg)
    note, found = "kvd holds no prefix of this prompt", 0
    try:
        if any(not known.plan.media_tokens.isdisjoint(row.tokens) for row in rows):
            note = _MEDIA
        else:
            chains, found, dear = _look_up(client, known, rows)
            if dear:
                note = "computing this prompt is faster than loading what kvd holds of it"
            if any(chains):
                ask = Ask(rows, chains, wait_s, static_tokens)
                got = fetch(client, known, model, ask)
                note = got.note
                if got.cache is not None:
                    count = sum(max(0, got.slots - row.pad) for row in rows)
                    seconds = time.perf_counter() - started
                    return Prefix(got.cache, count, got.bytes, seconds, note, got.lossy, found)
    except KvdError as error:  # T3: the lease or the session ended while it was read
        note = f"kvd was lost while the prefix was read: {error}"
    if not client.connected:
        note = "kvd does not answer"
    return Prefix(None, 0, 0, time.perf_counter() - started, note, found=found)


def _look_up(
    client: Client, known: Known, rows: Sequence[Row]
) -> tuple[list[list[bytes]], int, bool]:
    """Ask what kvd holds of each row that is of use to the whole batch.

    Returns:
        For each row the hashes worth loading; the tokens kvd holds of all rows; whether there is
        something, but none of it worth loading.
    """
    chains: list[list[bytes]] = []
    found, dear = 0, False
    reach = min(row.pad + len(row.tokens) for row in rows)
    for row in rows:
        hashes = client.chunk_hashes(row.tokens[:-1])  # T1
        there = client.lookup(hashes) if hashes else kvd_client.Found(0, 0, 0)
        found += there.tokens
        dear |= bool(there.chunks) and not there.worth
        chains.append(hashes[: there.worth])
        reach = min(reach, row.pad + there.worth * known.chunk_tokens)
    # What lies beyond the shortest row's end is of no use: neither held nor brought up.
    for row, chain in zip(rows, chains, strict=True):
        del chain[-(-max(0, reach - row.pad) // known.chunk_tokens) :]
    return chains, found, dear


def store_prefix(
    client: Client,
    model: Any,  # noqa: ANN401 - any decoder model
    cache: Cache,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    seconds: float | None = None,
) -> Stored:
    """Store the whole chunks of a cache; what kvd holds already is not written again.

    Args:
        client: From `connect_model(model)`.
        model: The model that filled the cache.
        cache: Filled from the first of `input_ids` on; may hold more (generated) tokens. Is read
            only. For models with sliding windows it must come from `new_cache` or `load_prefix`.
        input_ids: `[rows, tokens]` or `[tokens]`: the prompts, or prompts and answers.
        attention_mask: As in `load_prefix`.
        seconds: How long the model took for those of `input_ids` that `load_prefix` did not bring,
            in one pass (time to the first new token, say); None if that was not measured. It is
            what loading has to beat. Of no use for a batch, whose rows share the time.

    Raises:
        UnsupportedCache: A cache of another kind, of another number of sequences, or not this
            model's.
        UnsupportedInput, WrongModel: As in `load_prefix`.
    """
    known = recall(client, model)
    rows = rows_of(known.plan, input_ids, attention_mask)
    return store_rows(client, model, cache, rows, seconds=seconds)


def store_rows(
    client: Client,
    model: Any,  # noqa: ANN401 - any decoder model
    cache: Cache,
    rows: Sequence[Row],
    *,
    every: int = 1,
    seconds: float | None = None,
) -> Stored:
    """Store rows whose ends need not be the same; otherwise as `store_prefix`.

    Args:
        client: See there.
        model: See there.
        cache: See there.
        rows: Of which row n is the cache's sequence n * `every`.
        every: Sequences of the cache for each row.
        seconds: See there; for the part of the prompt that was not loaded, of a single row.
    """
    started = time.perf_counter()
    known = recall(client, model)
    slots = check_filled(known.plan, cache, len(rows) * every)
    origin: Origin = getattr(cache, ORIGIN, Origin())
    tokens, size, note = 0, 0, ""
    if any(not known.plan.media_tokens.isdisjoint(row.tokens) for row in rows):
        note = _MEDIA
    elif origin.lossy and origin.namespace_id != client.namespace_id:  # T5
        note = "the cache began with a lossy copy from another namespace"
    else:
        try:
            if seconds is not None and len(rows) == 1:
                loaded = max(0, origin.slots - rows[0].pad)
                report_computed(client, len(rows[0].tokens) - loaded, seconds)
            for number, row in enumerate(rows):
                source = source_of(known, cache, number * every, row.pad)
                chunks, written, why = _store_row(client, known, row, source, slots)
                tokens += chunks * known.chunk_tokens
                size += written
                note = note or why
        except KvdError as error:  # T3
            note = f"kvd was lost while the prefix was stored: {error}"
    return Stored(tokens, size, time.perf_counter() - started, note, origin.lossy)


def report_computed(client: Client, tokens: int, seconds: float) -> None:
    """Tell kvd how fast the model computes, if it computed enough to know."""
    if tokens >= REPORT_TOKENS_MIN:
        client.report_prefill(tokens, seconds)


def _store_row(
    client: Client, known: Known, row: Row, source: Source, slots: int
) -> tuple[int, int, str]:
    """Store one row; return the chunks kvd has of it now, the bytes written, and what is amiss."""
    count = min(slots - row.pad, len(row.tokens))
    whole = max(0, count) // known.chunk_tokens
    hashes = client.chunk_hashes(row.tokens[: whole * known.chunk_tokens])
    if lacks_past(known, source, whole):
        there = client.lookup(hashes).chunks  # all of it, if the cache was loaded and not added to
        note = "sliding-window layers have dropped their past: prefill with new_cache(model)"
        return there, 0, "" if there == whole else note
    chunks, size = write(client, known, source, hashes)
    if chunks == whole:
        return chunks, size, ""
    why = "kvd had no room for all of it" if client.connected else "kvd does not answer"
    return chunks, size, why


def recall(client: Client, model: Any) -> Known:  # noqa: ANN401 - any decoder model
    """Return what the client was connected for, if that is this model as it is now (T2).

    Raises:
        WrongModel: It is another, or has changed since.
        UnsupportedModel: It is in training mode, or autocast is on.
    """
    check_mode(model)
    known = _known.get(client)
    if known is None or known.model() is not model:
        msg = "the client was not made for this model: use connect_model(model)"
        raise WrongModel(msg)
    if known.mark != weights_mark(model):
        msg = "the model's weights, adapters or device changed: call connect_model(model) again"
        raise WrongModel(msg)
    return known
