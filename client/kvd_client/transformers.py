"""Prefix reuse for Hugging Face transformers, through kvd.

    client = connect_model(model)                          # once a process
    prefix = load_prefix(client, model, input_ids)         # milliseconds; a miss is .cache None
    cache = prefix.cache or new_cache(model)
    output = model.generate(input_ids, past_key_values=cache, ...)
    store_prefix(client, model, cache, input_ids)

Invariants:

T1. A loaded cache holds whole chunks and at most all but one of the prompt's tokens: `generate`
    given a cache as long as the prompt runs, and answers wrongly.
T2. What is loaded was stored for this model in this state (`hf_model.describe_model`); a client
    used with another model, or after a weight update, raises instead.
T3. Nothing kvd does makes the engine fail: no daemon, no room, a lost lease are misses.
T4. No tensor that borrows the daemon's memory outlives the lease or reservation it came from.
T5. What was loaded from a lossy copy is never stored as if it had been computed: not again in its
    own namespace, and nothing that began with it in another.

One prompt at a time (batch of 1), without padding. Any thread, one at a time for one client.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

import kvd_client
from kvd_client.errors import HandleClosed, KvdError
from kvd_client.hf_model import (
    LayerGroup,
    ModelPlan,
    Unsupported,
    UnsupportedCache,
    UnsupportedInput,
    UnsupportedModel,
    WrongModel,
    check_filled,
    describe_model,
    first_complete,
    loaded_cache,
    new_cache,
    plan_model,
    prompt_tokens,
    weights_digest,
    weights_mark,
)
from kvd_client.wire import Status

if TYPE_CHECKING:
    from transformers import Cache, DynamicCache

    from kvd_client import Client, Lease

__all__ = [
    "Prefix",
    "Stored",
    "Unsupported",
    "UnsupportedCache",
    "UnsupportedInput",
    "UnsupportedModel",
    "WrongModel",
    "connect_model",
    "load_prefix",
    "new_cache",
    "store_prefix",
    "weights_digest",
]

BATCH_BYTES: Final = 64 << 20
"""Reserved, filled and published at a time: bounds what a dead engine leaves half-filled."""
LOAD_WAIT_S: Final = 5.0
"""Longest wait for a prefix that is there but may have to come up from NVMe."""
REPORT_TOKENS_MIN: Final = 128
"""Fewer computed tokens are not reported: they take what a step takes, and tell of no rate."""

ORIGIN: Final = "kvd_origin"
"""Attribute of a loaded cache: what it was loaded from. Copies of the cache keep it."""
_MEDIA: Final = "the prompt holds images or sound, which its token ids do not tell apart"


class Prefix(NamedTuple):
    """What `load_prefix` found.

    Attributes:
        cache: For one call of `generate`, which changes it; None for a miss.
        tokens: Of the prompt, in the cache.
        bytes: Loaded.
        seconds: From the call to its end.
        note: Why it is a miss, or less than kvd holds.
        lossy: Some of it went through a lossy form (`connect_model(lossy=True)` only): the answer
            may differ from the one computed.
        found: Tokens of the prompt that kvd holds, whether or not they were worth loading.
    """

    cache: DynamicCache | None
    tokens: int
    bytes: int
    seconds: float
    note: str = ""
    lossy: bool = False
    found: int = 0


class Stored(NamedTuple):
    """What `store_prefix` did.

    Attributes:
        tokens: Of the prompt, in kvd now, whoever stored them.
        bytes: Written by this call.
        seconds: From the call to its end.
        note: Why it is not the whole prompt, if more than a part of a chunk is missing.
        lossy: The cache began with a lossy copy, so what was computed after it is not exact either.
    """

    tokens: int
    bytes: int
    seconds: float
    note: str = ""
    lossy: bool = False


_State = tuple[torch.Tensor, torch.Tensor]


class _Origin(NamedTuple):
    """What a cache was loaded from."""

    namespace_id: bytes = b""
    chain: tuple[bytes, ...] = ()
    lossy: bool = False

    def loaded(self, hashes: list[bytes]) -> int:
        """Count the chunks of a prompt that were loaded."""
        return sum(a == b for a, b in zip(self.chain, hashes, strict=False))  # a chain: no gaps


class _Fetched(NamedTuple):
    """A prefix copied out of kvd; without chunks, `note` says why."""

    chunks: int
    states: dict[int, _State]
    bytes: int
    lossy: bool
    note: str


class _Known(NamedTuple):
    """What a client was connected for."""

    model: weakref.ref[Any]
    plan: ModelPlan
    mark: int
    chunk_tokens: int
    object_bytes: tuple[int, ...]
    """Of each group's objects."""


class _Wanted(NamedTuple):
    """A batch to store: chunks `at` to `end` - 1 in some groups."""

    at: int
    end: int
    groups: tuple[int, ...]


_known: weakref.WeakKeyDictionary[Client, _Known] = weakref.WeakKeyDictionary()


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
    client = kvd_client.connect(path, namespace=namespace, layout=layout)
    sizes = tuple(group.object_bytes for group in layout.groups)
    _known[client] = _Known(weakref.ref(model), plan, weights_mark(model), chunk_tokens, sizes)
    return client


def load_prefix(
    client: Client,
    model: Any,  # noqa: ANN401 - any decoder model
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    wait_s: float = LOAD_WAIT_S,
) -> Prefix:
    """Build a cache that holds the stored prefix of a prompt, as far as it is worth loading.

    The bytes are copied once, into new tensors of the cache's own; sliding-window layers get only
    the chunks that their window still reaches. What lies on NVMe is brought up first, unless
    computing it is known to be faster (`store_prefix(seconds=...)` tells kvd how fast that is).

    Args:
        client: From `connect_model(model)`.
        model: The model that will run.
        input_ids: The whole prompt, `[1, tokens]` or `[tokens]`.
        attention_mask: The prompt's mask, if it has one: checked to be all ones.
        wait_s: Longest wait for what has to come up from NVMe; later is a miss. A daemon that does
            not answer costs the client's own, much shorter wait: the look-up comes first.

    Returns:
        The prefix; give `generate` the *whole* `input_ids` beside its cache.

    Raises:
        UnsupportedInput: More than one prompt, or padding.
        WrongModel: See `connect_model`.
    """
    started = time.perf_counter()
    known = _recall(client, model)
    tokens = prompt_tokens(input_ids, attention_mask)
    note, found = "kvd holds no prefix of this prompt", 0
    try:
        if not known.plan.media_tokens.isdisjoint(tokens):
            note = _MEDIA
        elif hashes := client.chunk_hashes(tokens[:-1]):  # T1
            there = client.lookup(hashes)
            found = there.tokens
            if there.chunks and not there.worth:
                note = "computing this prompt is faster than loading what kvd holds of it"
            if there.worth:
                chain = hashes[: there.worth]
                chunks, states, size, lossy, note = _fetch(client, known, chain, wait_s)
                if chunks:
                    length = chunks * known.chunk_tokens
                    origin = _Origin(client.namespace_id, tuple(chain[:chunks]), lossy)
                    cache = loaded_cache(model, states, length)
                    setattr(cache, ORIGIN, origin)
                    seconds = time.perf_counter() - started
                    return Prefix(cache, length, size, seconds, note, lossy, found)
    except KvdError as error:  # T3: the lease or the session ended while it was read
        note = f"kvd was lost while the prefix was read: {error}"
    if not client.connected:
        note = "kvd does not answer"
    return Prefix(None, 0, 0, time.perf_counter() - started, note, found=found)


def _fetch(client: Client, known: _Known, chain: list[bytes], wait_s: float) -> _Fetched:
    """Hold a prefix, bring it up, copy it out; KvdError when the session ends meanwhile."""
    epoch = client.epoch
    began = time.perf_counter()
    with client.wait(client.begin_acquire(chain), wait_s) as lease:
        waited_s = time.perf_counter() - began
        chunks, lossy = lease.chunks, lease.lossy
        assert chunks <= len(chain)
        states, size = _read(known, lease, chunks)
        client.poll()
        if client.epoch != epoch:  # nobody held the objects while they were copied
            return _Fetched(0, {}, 0, lossy, "kvd was restarted while the prefix was read")
    note = ""
    if chunks < len(chain):
        late = not chunks and waited_s >= wait_s
        why = f"not within {wait_s:g} s" if late else "no room, or NVMe failed: see kvd stat"
        note = f"kvd brought up {chunks} of {len(chain)} chunks that it holds ({why})"
    return _Fetched(chunks, states, size, lossy, note)


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
        input_ids: `[1, tokens]` or `[tokens]`: the prompt, or prompt and answer.
        attention_mask: As in `load_prefix`.
        seconds: How long the model took for those of `input_ids` that `load_prefix` did not bring,
            in one pass (time to the first new token, say); None if that was not measured. It is
            what loading has to beat.

    Raises:
        UnsupportedCache: A cache of another kind, of more than one sequence, or not this model's.
        UnsupportedInput, WrongModel: As in `load_prefix`.
    """
    started = time.perf_counter()
    known = _recall(client, model)
    tokens = prompt_tokens(input_ids, attention_mask)
    length = check_filled(known.plan, cache)
    origin: _Origin = getattr(cache, ORIGIN, _Origin())
    note, chunks, size = "", 0, 0
    first = [first_complete(group, cache, known.chunk_tokens) for group in known.plan.groups]
    whole = min(length, len(tokens)) // known.chunk_tokens
    if not known.plan.media_tokens.isdisjoint(tokens):
        note = _MEDIA
    elif origin.lossy and origin.namespace_id != client.namespace_id:  # T5
        note = "the cache began with a lossy copy from another namespace"
    elif any(
        start > group.first_needed(whole, known.chunk_tokens)
        for group, start in zip(known.plan.groups, first, strict=True)
    ):
        note = "sliding-window layers have dropped their past: prefill with new_cache(model)"
    else:
        try:
            hashes = client.chunk_hashes(tokens[: whole * known.chunk_tokens])
            loaded = origin.loaded(hashes)
            computed = len(tokens) - loaded * known.chunk_tokens
            if seconds is not None and computed >= REPORT_TOKENS_MIN:
                client.report_prefill(computed, seconds)
            at = loaded if origin.lossy else 0  # T5
            chunks, size = _write(client, known, cache, hashes, at=at, complete=max(first))
        except KvdError as error:  # T3
            note = f"kvd was lost while the prefix was stored: {error}"
        if chunks < whole and not note:
            note = "kvd had no room for all of it" if client.connected else "kvd does not answer"
    elapsed_s = time.perf_counter() - started
    return Stored(chunks * known.chunk_tokens, size, elapsed_s, note, origin.lossy)


def _recall(client: Client, model: Any) -> _Known:  # noqa: ANN401 - any decoder model
    """Return what the client was connected for, if that is this model as it is now (T2)."""
    known = _known.get(client)
    if known is None or known.model() is not model:
        msg = "the client was not made for this model: use connect_model(model)"
        raise WrongModel(msg)
    if known.mark != weights_mark(model):
        msg = "the model's weights, adapters or device changed: call connect_model(model) again"
        raise WrongModel(msg)
    return known


def _read(known: _Known, lease: Lease, chunks: int) -> tuple[dict[int, _State], int]:
    """Copy the leased prefix out.

    Returns:
        For each layer K and V as `[1, heads, tokens, size]`, owned by the caller, and the bytes.

    Raises:
        HandleClosed: The lease lacks an object it should hold.
    """
    states: dict[int, _State] = {}
    size = 0
    for index, group in enumerate(known.plan.groups if chunks else ()):
        wanted = range(group.first_needed(chunks, known.chunk_tokens), chunks)
        if not all(lease.has(chunk, index) for chunk in wanted):
            msg = "the lease lacks an object of the prefix"
            raise HandleClosed(msg)
        views = [lease.view(chunk, index) for chunk in wanted]
        size += len(views) * known.object_bytes[index]
        device = known.plan.devices[group.layers[0]]
        pieces = [
            group.split(_borrow(view, known, index).to(device), known.chunk_tokens)
            for view in views
        ]
        for place, layer in enumerate(group.layers):
            # The one copy: cat makes the layer's tensors straight from the daemon's slots.
            keys = torch.cat([piece[2 * place] for piece in pieces], dim=1)
            values = torch.cat([piece[2 * place + 1] for piece in pieces], dim=1)
            home = known.plan.devices[layer]
            states[layer] = (keys.to(home).unsqueeze(0), values.to(home).unsqueeze(0))
    return states, size


def _borrow(view: memoryview, known: _Known, group: int) -> torch.Tensor:
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


def _write(
    client: Client, known: _Known, cache: Cache, hashes: list[bytes], *, at: int, complete: int
) -> tuple[int, int]:
    """Reserve, fill and publish a chain, from chunk `at` on, batch by batch.

    Before chunk `complete` the sliding-window groups lack tokens, so only the others are offered:
    a usable prefix needs a window's last chunks and no more.

    Returns:
        The chunks from the first on that kvd holds now, and the bytes written.
    """
    groups = known.plan.groups
    everywhere = range(len(groups))
    lasting = [index for index in everywhere if not groups[index].shape.window]
    step = max(1, BATCH_BYTES // sum(known.object_bytes))
    size = 0
    while at < len(hashes):
        end = min(at + step, len(hashes), complete if at < complete else len(hashes))
        offered = lasting if at < complete else everywhere
        if offered:
            held, written = _write_batch(
                client, known, cache, hashes, _Wanted(at, end, tuple(offered))
            )
            size += written
            if held < end:
                return held, size
        at = end
    return at, size


def _write_batch(
    client: Client, known: _Known, cache: Cache, chain: list[bytes], wanted: _Wanted
) -> tuple[int, int]:
    """Offer one batch of a chain.

    Returns:
        The chunks of the chain, from the first on, that kvd holds now in all these groups, if
        those before the batch are there; and the bytes written.
    """
    at, end, offered = wanted
    size = 0
    with client.reserve(chain[:end], first=at, groups=offered) as reservation:
        placed = reservation.placed
        for slot in placed:
            assert slot.buffer is not None
            begin = slot.chunk * known.chunk_tokens
            _fill(known, cache, known.plan.groups[slot.group], begin, slot.buffer)
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
def _fill(known: _Known, cache: Cache, group: LayerGroup, begin: int, buffer: memoryview) -> None:
    """Copy one chunk's K and V of a group into a slot; `begin` is its first token's place."""
    sources = []
    for index in group.layers:
        layer: Any = cache.layers[index]
        low = begin - (layer.get_seq_length() - layer.keys.shape[-2])
        assert 0 <= low <= layer.keys.shape[-2] - known.chunk_tokens
        part = slice(low, low + known.chunk_tokens)
        sources += [layer.keys[0, :, part], layer.values[0, :, part]]
    targets = group.split(torch.frombuffer(buffer, dtype=known.plan.dtype), known.chunk_tokens)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
