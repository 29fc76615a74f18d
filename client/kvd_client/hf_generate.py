"""`model.generate` with kvd in it, for as long as a `with` block lasts.

Invariants:

H1. The answer is plain `generate`'s: the same method runs, with a cache that is partly filled.
H2. What kvd cannot take on runs as it would without it, and is told (`Generation.note`); what kvd
    does wrong is a miss. Only `strict=True` raises, and only for the former.
H3. After the `with` block the model is as it was before.
"""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from kvd_client.hf_cache import Unsupported, new_cache
from kvd_client.hf_model import WrongModel
from kvd_client.hf_prefix import (
    LOAD_WAIT_S,
    Prefix,
    Stored,
    connect_model,
    load_prefix,
    recall,
    report_computed,
    store_rows,
)
from kvd_client.hf_request import Request, read_call
from kvd_client.hf_rows import Row, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Cache

    from kvd_client import Client

_NOTHING = Prefix(None, 0, 0, 0.0)
_NOT_STORED = Stored(0, 0, 0.0)


class Generation(NamedTuple):
    """What kvd did for one call of `generate`.

    Attributes:
        prefix: What was loaded.
        stored: What was stored.
        note: Why kvd took no part in it; empty if it did.
    """

    prefix: Prefix = _NOTHING
    stored: Stored = _NOT_STORED
    note: str = ""


class Cached:
    """What `cached` gives.

    Attributes:
        client: The client in use.
        last: What kvd did for the last call of `generate`.
        calls: Calls of `generate` so far.
        tokens: Of their prompts, those that kvd took on.
        tokens_loaded: Of these.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - any decoder model
        client: Client,
        *,
        wait_s: float,
        store: bool,
        strict: bool,
    ) -> None:
        """Patch nothing yet; see `cached` for the arguments."""
        self.client = client
        self.last = Generation()
        self.calls = self.tokens = self.tokens_loaded = 0
        self._model = model
        self._plain: Callable[..., Any] = model.generate
        self._wait_s = wait_s
        self._store = store
        self._strict = strict
        self._told: set[str] = set()
        self._kind: str | None = model.generation_config.cache_implementation

    def enter(self) -> None:
        """Put this object's `generate` in the place of the model's.

        The model's own `cache_implementation` would forbid the cache that a call brings.
        """
        self._model.generate = self.generate
        self._model.generation_config.cache_implementation = None

    def leave(self) -> None:
        """Leave the model as it was (H3)."""
        del self._model.generate  # the class's own is seen again
        if self._model.generation_config.cache_implementation is None:
            self._model.generation_config.cache_implementation = self._kind

    def generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as `generate`'s
        """Generate as the model does, from what kvd has and for kvd to have."""
        self.calls += 1
        self.last = Generation()
        try:
            known = recall(self.client, self._model)
            request = read_call(self._model, args, kwargs, self._kind)
            rows = rows_of(known.plan, request.input_ids, request.attention_mask)
        except (Unsupported, WrongModel) as reason:
            if self._strict:
                raise
            self._tell(str(reason))
            if self._kind is not None and "past_key_values" not in kwargs:
                kwargs.setdefault("cache_implementation", self._kind)
            return self._plain(*args, **kwargs)  # Q2
        prefix = self._load(request)
        output, cache, prefill_s = self._run(request, prefix.cache)
        prefix = prefix._replace(cache=None)
        self.tokens += (count := sum(len(row.tokens) for row in rows))
        self.tokens_loaded += prefix.tokens
        if len(rows) == 1:
            report_computed(self.client, count - prefix.tokens, prefill_s)
        self.last = Generation(prefix)
        if self._store:
            self.last = Generation(prefix, self._keep(request, rows, cache, output))
        return output

    def _load(self, request: Request) -> Prefix:
        """Load what kvd has, once for each of a prompt's sequences; count it once."""
        input_ids, mask, count = request.input_ids, request.attention_mask, request.sequences
        if count > 1:
            input_ids = input_ids.repeat_interleave(count, dim=0)
            mask = None if mask is None else mask.repeat_interleave(count, dim=0)
        prefix = load_prefix(
            self.client,
            self._model,
            input_ids,
            attention_mask=mask,
            wait_s=self._wait_s,
            static_tokens=request.static_tokens,
        )
        return prefix._replace(tokens=prefix.tokens // count, found=prefix.found // count)

    def _run(self, request: Request, cache: Cache | None) -> tuple[Any, Cache, float]:
        """Generate; return the output, the cache it left and the seconds to the first token."""
        if cache is None:
            cache = new_cache(self._model, request.static_tokens)
        first = _FirstStep()
        given = request.kwargs.get("logits_processor")
        output = self._plain(
            **{
                **request.kwargs,
                "logits_processor": LogitsProcessorList([*(given or ()), first]),
                "past_key_values": cache,
            }
        )
        return output, cache, first.seconds

    def _keep(
        self,
        request: Request,
        rows: list[Row],
        cache: Cache,
        output: Any,  # noqa: ANN401 - a tensor, or what holds one
    ) -> Stored:
        """Store the prompts, and the answers where each prompt has one."""
        if request.sequences == 1:
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            ends = _end_tokens(self._model, request.kwargs)
            answers: list[list[int]] = sequences[:, request.input_ids.shape[1] :].tolist()
            rows = [
                Row(row.tokens + _up_to(answer, ends), row.pad)
                for row, answer in zip(rows, answers, strict=True)
            ]
        try:
            return store_rows(self.client, self._model, cache, rows, every=request.sequences)
        except (Unsupported, WrongModel) as reason:  # it has changed while it ran
            return _NOT_STORED._replace(note=str(reason))

    def _tell(self, note: str) -> None:
        """Keep why kvd takes no part; warn of it the first time."""
        self.last = Generation(note=note)
        if note not in self._told:
            self._told.add(note)
            warnings.warn(f"kvd takes no part in this call of generate(): {note}", stacklevel=3)


@contextmanager
def cached(
    model: Any,  # noqa: ANN401 - any decoder model
    client: Client | None = None,
    *,
    wait_s: float = LOAD_WAIT_S,
    store: bool = True,
    strict: bool = False,
    **options: Any,  # noqa: ANN401 - connect_model's
) -> Iterator[Cached]:
    """Let `model.generate` load prefixes from kvd and store what it computes.

        with kvd_client.transformers.cached(model) as kvd:
            output = model.generate(**inputs)
            print(kvd.last.prefix.tokens, "tokens of the prompt were loaded")

    Batches, left padding, sampling, beams, several answers a prompt, streamers, static caches and
    pipelines over this model work. Assisted decoding, images, embeddings and caches of your own do
    not: such a call runs as it would without kvd, with one warning.

    Args:
        model: A decoder model in eval mode.
        client: From `connect_model(model)`; by default made here, and closed at the end.
        wait_s: Longest wait for what has to come up from NVMe.
        store: False to load only.
        strict: Raise `Unsupported` or `WrongModel` where kvd can take no part.
        options: For `connect_model`, if there is no client.

    Raises:
        UnsupportedModel, UnsupportedCache, Refused, ValueError: As `connect_model`.
        ValueError: The model is under another `cached`, or both a client and options are given.
    """
    if "generate" in vars(model):
        msg = "model.generate is replaced already: leave the other `cached` block first"
        raise ValueError(msg)
    if client is not None and options:
        msg = f"{', '.join(options)}: give them to connect_model, which made the client"
        raise ValueError(msg)
    own = connect_model(model, **options) if client is None else None
    using = client if own is None else own
    assert using is not None
    try:
        state = Cached(model, using, wait_s=wait_s, store=store, strict=strict)
        state.enter()
        try:
            yield state
        finally:
            state.leave()
    finally:
        if own is not None:
            own.close()


class _FirstStep(LogitsProcessor):
    """Notes when the first logits are there: the prompt has been computed then."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seconds = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the scores as they are."""
        if not self.seconds:
            if scores.device.type == "cuda":
                torch.cuda.synchronize(scores.device)
            self.seconds = time.perf_counter() - self._began
        return scores


def _end_tokens(model: Any, kwargs: dict[str, Any]) -> frozenset[int]:  # noqa: ANN401
    """Return the ids that end an answer."""
    for holder in (kwargs.get("eos_token_id"), kwargs.get("generation_config"), None):
        found = getattr(holder, "eos_token_id", holder)
        if found is not None:
            break
    else:
        found = model.generation_config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(torch.as_tensor(found).reshape(-1).tolist())


def _up_to(answer: list[int], ends: frozenset[int]) -> list[int]:
    """Cut an answer after its end: what follows in a batch is padding."""
    for index, token in enumerate(answer):
        if token in ends:
            return answer[: index + 1]
    return answer
