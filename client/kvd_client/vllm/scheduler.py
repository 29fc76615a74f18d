"""The half of the connector in vLLM's scheduler process: looks up, holds, says what to move.

Neither torch nor a device is touched here. A call waits for kvd `SOON_S` at most, and only for an
answer that a healthy daemon gives in a tenth of that; an answer that is not there by then is asked
for again in the next step, until the plan gives it up (`plans.py`).

Invariants:

H1. A lease of this half lasts from its answer until the worker half has reported the load, the
    engine has chosen not to load, the request is gone, or its time is over.
H2. A request with anything in it that block hashes do not tell apart is neither loaded nor saved.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvd_client.client import Client
from kvd_client.errors import KvdError
from kvd_client.link import warn
from kvd_client.salt import read_salt
from kvd_client.vllm import saving
from kvd_client.vllm.announce import Announcer, Chunk, chunk_of
from kvd_client.vllm.identity import adapter_hash
from kvd_client.vllm.messages import Load, Save, Step
from kvd_client.vllm.plans import Action, Plan, Stage
from kvd_client.vllm.stats import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd_client.handles import Found, Lease, Ticket
    from kvd_client.vllm.messages import Identity
    from kvd_client.vllm.options import Options

SOON_S: Final = 0.001
"""How long a step waits for an answer before it goes on without."""
SPIN_S: Final = 0.0002
"""Of that, how long it looks without sleeping."""
GREET_S: Final = 1.0
LEASE_S: Final = 30.0
"""For how long a lease's token is good, if this process dies; the daemon may shorten it."""


class _Tracked(NamedTuple):
    """What is known of a request of the engine."""

    plan: Plan
    chain: list[bytes]
    """Chunk hashes so far."""
    request: Any
    """vLLM's, whose hashes grow."""


class Scheduler:
    """All of the scheduler half. One thread: the engine's."""

    def __init__(self, options: Options) -> None:
        """Be off until `attach`."""
        self._options = options
        self._identity: Identity | None = None
        self._client: Client | None = None
        self._requests: dict[str, _Tracked] = {}
        self._tickets: dict[str, Ticket[Any]] = {}
        self._leases: dict[str, Lease] = {}
        self._loads: list[Load] = []
        self._generation = ""
        self._announcer: Announcer | None = None
        self._news: list[Chunk] = []
        self.counts = Counts()

    def attach(self, identity: Identity, *, events: bool = False) -> None:
        """Begin, as what the workers say the engine is; a daemon that is not there may come later.

        Raises:
            Unsupported: The salt cannot be read.
        """
        self._client = self._connect(identity)
        self._identity = identity
        if events:
            layout = identity.layout
            alike = all(group.kind == "mla" for group in layout.groups)
            self._announcer = Announcer(layout.pp if alike else layout.ranks)

    @property
    def _asynchronous(self) -> bool:
        """With several groups vLLM can repair failed loads only if they are asynchronous."""
        groups = self._identity.layout.groups if self._identity is not None else ()
        return self._options.load == "async" or len(groups) > 1

    def _connect(self, identity: Identity) -> Client:
        namespace = identity.namespace
        client = Client(
            self._options.socket,
            namespace=namespace._replace(
                salt=read_salt(self._options.salt_file), extra=namespace.extra + self._generation
            ),
            layout=identity.layout,
            name="vllm scheduler",
        )
        try:
            client.greet(GREET_S)
        except KvdError as error:
            warn(f"{error}; every look-up is a miss until that changes")
        return client

    # ------------------------------------------------------------ loads

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Say how many tokens after `computed` can be loaded; None to be asked again."""
        tracked = self._track(request)
        if tracked is None or request.skip_reading_prefix_cache:
            return 0, False
        assert self._identity is not None
        if any(computed % tokens for tokens in self._identity.page_tokens):
            return 0, False  # a page that the engine shares in part is not to be written
        chunk = self._identity.layout.chunk_tokens
        limit = min(len(tracked.chain), (request.num_tokens - 1) // chunk)
        name = request.request_id
        while True:
            action = tracked.plan.next(time.monotonic(), computed // chunk, limit)
            if action is Action.MISS:
                return 0, False
            if action is Action.LOAD:
                return tracked.plan.chunks * chunk - computed, self._asynchronous
            if action is Action.WAIT and not self._soon(self._tickets[name]):
                self.counts.add("asked_again")
                return None, False
            self._act(name, tracked, action, limit)

    def _act(self, name: str, tracked: _Tracked, action: Action, limit: int) -> None:
        """Do what a plan asks for, and tell it what came of it."""
        client, plan, now = self._client, tracked.plan, time.monotonic()
        assert client is not None
        if action is Action.ASK:
            self._tickets[name] = client.begin_lookup(tracked.chain[:limit])
            plan.asked(now)
        elif action is Action.HOLD:
            self._tickets[name] = client.begin_acquire(
                tracked.chain[: plan.chunks], first=plan.first, read=False, ttl_s=LEASE_S
            )
            plan.holding(now)
        elif action is Action.DROP:
            self._let_go(name)
            self.counts.add("given_up")
            plan.dropped(now)
        elif plan.stage is Stage.ASKED:
            found: Found = self._tickets.pop(name).result
            self.counts.add("lookups")
            chunks = min(found.chunks, limit)  # an answer from outside must not end the engine
            plan.found(now, chunks, min(found.worth, chunks))
        else:
            lease: Lease = self._tickets.pop(name).result
            plan.held(now, min(lease.chunks, plan.chunks))
            if plan.stage is Stage.HELD:
                self._leases[name] = lease
            else:
                lease.release()

    def _soon(self, ticket: Ticket[Any]) -> bool:
        """Tell whether a ticket has ended, waiting a moment for it."""
        client = self._client
        assert client is not None
        began = time.monotonic()
        while not ticket.done:
            client.poll()
            waited = time.monotonic() - began
            if waited >= SOON_S:
                break
            if waited >= SPIN_S and (fd := client.fileno()) >= 0:
                select.select([fd], [], [], SOON_S - waited)
        return ticket.done

    def allocated(self, request: Any, table: saving.Table, tokens: int) -> None:  # noqa: ANN401
        """Take in a request's blocks; load `tokens` tokens into them if there are any."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            assert not tokens
            return
        name, plan = request.request_id, tracked.plan
        if not tokens:
            self._let_go(name)  # H1: the engine runs it without
            plan.allocated(load=False)
            return
        assert self._identity is not None
        chunk = self._identity.layout.chunk_tokens
        start = plan.chunks * chunk - tokens
        first = start // chunk
        lease = self._leases[name]
        assert lease.first <= first < plan.chunks  # P1
        blocks = saving.chunk_blocks(
            table,
            self._identity,
            first,
            plan.chunks,
            skip_tokens=start,
        )
        self._loads.append(Load(name, lease.token, first, blocks, not self._asynchronous))
        self.counts.add("loads_begun")
        plan.allocated(load=True)
        if not self._asynchronous:
            plan.loaded(time.monotonic())  # nobody tells; the lease lasts as its token does

    def loaded(self, names: set[str]) -> None:
        """Take in that loads have ended, whether or not they worked."""
        for name in names:
            self._let_go(name)
            tracked = self._requests.get(name)
            if tracked is not None:
                tracked.plan.loaded(time.monotonic())

    def finished(self, name: str) -> None:
        """Forget a request. What it saves goes on; a load's end is reported all the same."""
        self._let_go(name)
        self._requests.pop(name, None)

    def _let_go(self, name: str) -> None:
        """End the ticket and the lease of a request."""
        ticket = self._tickets.pop(name, None)
        if ticket is not None and self._client is not None and not ticket.done:
            self._client.wait(ticket, 0.0)
        if ticket is not None and ticket.done and hasattr(ticket.result, "release"):
            ticket.result.release()
        lease = self._leases.pop(name, None)
        if lease is not None:
            lease.release()

    # ------------------------------------------------------------ steps

    def step(self, output: Any) -> Step:  # noqa: ANN401 - vLLM's SchedulerOutput
        """Make a step's message, and forget what is in it."""
        loads, self._loads = tuple(self._loads), []
        if self._identity is None:
            return Step()
        reused = {copy.dst_block_id for copy in output.kv_cache_block_copies or ()}
        reused.update(block for load in loads for ids in load.blocks for block in ids if block)
        saves: list[Save] = []
        for name, table, computed, fresh in _scheduled(output):
            if table is not None:
                before = 0 if fresh else computed
                reused.update(saving.new_blocks(table, self._identity.page_tokens, before))
            saves.extend(self._saves(name, output, computed))
        return Step(
            self._generation, loads, tuple(saves), tuple(reused), output.total_num_scheduled_tokens
        )

    def _saves(self, name: str, output: Any, computed: int) -> Iterator[Save]:  # noqa: ANN401
        """Plan the saves of what a step completes of a request."""
        tracked = self._requests.get(name)
        state = output.kv_connector_block_state
        table = state.get_block_ids(name) if state is not None else None
        if tracked is None or table is None or self._options.save == "none":
            return
        assert self._identity is not None
        self._extend(tracked)
        chunk_tokens = self._identity.layout.chunk_tokens
        computed += output.num_scheduled_tokens[name]
        known = len(tracked.chain) * chunk_tokens
        if self._options.save == "prompt":
            known = min(known, tracked.request.num_prompt_tokens)
        stop = saving.whole_chunks(computed, known, chunk_tokens)
        offers = state.boundary_state_offloads.get(name, ())
        states = saving.whole_states(offers, self._identity, stop)
        start, tracked.plan.saved = tracked.plan.saved, max(stop, tracked.plan.saved)
        if start < stop:
            if self._announcer is not None:
                for number in range(start, stop):
                    self._announcer.expect(tracked.chain[number], self._describe(tracked, number))
            blocks = saving.chunk_blocks(table, self._identity, start, stop)
            blocks = saving.with_states(blocks, self._identity, start, states)
            yield saving.plan_save(name, tracked.chain, start, stop, blocks)
        for chunk in sorted(states):
            if chunk < start:  # its pages were saved before
                none = tuple((0,) * pages for pages in self._identity.pages)
                blocks = saving.with_states(none, self._identity, chunk, states)
                yield saving.plan_save(name, tracked.chain, chunk, chunk + 1, blocks)

    def _describe(self, tracked: _Tracked, number: int) -> Chunk:
        """Describe a chunk of a request, as events tell it."""
        assert self._identity is not None
        request = tracked.request
        lora = request.lora_request
        return chunk_of(
            request.block_hashes,
            request.all_token_ids,
            (lora.lora_name, lora.lora_int_id) if lora is not None else None,
            number,
            hash_tokens=self._identity.hash_tokens,
            chunk_tokens=self._identity.layout.chunk_tokens,
        )

    def kept(self, kept: Mapping[bytes, int]) -> None:
        """Take in how many ranks report chunks that kvd has taken."""
        if self._announcer is not None:
            self._news.extend(self._announcer.reported(kept))

    def take_news(self) -> list[Chunk]:
        """Return the chunks that kvd has taken whole since the last call."""
        news, self._news = self._news, []
        return news

    @property
    def hash_tokens(self) -> int:
        """Tokens that each block hash covers; 0 while off."""
        return self._identity.hash_tokens if self._identity is not None else 0

    def _track(self, request: Any) -> _Tracked | None:  # noqa: ANN401 - vLLM's Request
        """Return what is known of a request, its chain as long as its hashes; None for H2."""
        if self._identity is None:
            return None
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            if not self._cacheable(request):
                return None
            plan = Plan(lookup_s=self._options.wait_s, promote_s=self._options.load_wait_s)
            tracked = self._requests[request.request_id] = _Tracked(plan, [], request)
        self._extend(tracked)
        return tracked

    def _extend(self, tracked: _Tracked) -> None:
        """Bring a chain up to the request's hashes: the hash of a chunk's last block is its own."""
        assert self._identity is not None
        step = self._identity.layout.chunk_tokens // self._identity.hash_tokens
        request, chain = tracked.request, tracked.chain
        adapter = request.lora_request
        for end in range((len(chain) + 1) * step, len(request.block_hashes) + 1, step):
            key = bytes(request.block_hashes[end - 1])
            if adapter is not None:
                key = adapter_hash(self._options.adapters[adapter.lora_name], key)
            chain.append(key)

    def _cacheable(self, request: Any) -> bool:  # noqa: ANN401 - vLLM's Request
        """Tell whether the block hashes, and the adapters' digests, say all about a request."""
        adapter = request.lora_request
        return (
            (adapter is None or adapter.lora_name in self._options.adapters)
            and (not request.mm_features or self._options.media)
            and request.prompt_embeds is None
            and not request.resumable
            and request.sampling_params is not None
        )

    def reset(self) -> None:
        """Never again find what is stored now: the weights may have changed."""
        for name in list(self._requests):
            self._let_go(name)
        self._requests.clear()
        self._loads.clear()
        self._generation = f" reset {os.urandom(8).hex()}"
        if self._client is not None and self._identity is not None:
            self._client.close()
            self._client = self._connect(self._identity)

    def close(self) -> None:
        """End the session."""
        for name in list(self._requests):
            self._let_go(name)
        if self._client is not None:
            self._client.close()


def _scheduled(output: Any) -> Iterator[tuple[str, saving.Table | None, int, bool]]:  # noqa: ANN401
    """Yield each request of a step: name, blocks, tokens computed before, whether all are new."""
    for request in output.scheduled_new_reqs:
        yield request.req_id, request.block_ids, request.num_computed_tokens, False
    cached = output.scheduled_cached_reqs
    for name, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield name, blocks, computed, name not in cached.resumed_req_ids
