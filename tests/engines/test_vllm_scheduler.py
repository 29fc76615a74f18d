"""The vLLM connector's scheduler half against a real daemon, with requests like vLLM's."""

from __future__ import annotations

import os
import signal
import time
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kvd_client
from kvd_client.vllm.messages import Identity
from kvd_client.vllm.options import read_options
from kvd_client.vllm.scheduler import Scheduler
from tests.daemon_fixture import namespace, store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

BLOCK = 16
CHUNK = 32
GROUP = kvd_client.Group("full", 2, 2, 64, 64 << 10)
LAYOUT = kvd_client.Layout(CHUNK, BLOCK, "float32", (GROUP,))
IDENTITY = Identity(namespace(), LAYOUT, (BLOCK,), BLOCK)


def request(name: str, tokens: int, seed: int = 0, **changes: Any) -> Any:
    """Make what the half reads of vLLM's Request; equal seeds share their prefix."""
    hashes = [
        sha256(bytes([seed, block % 251, block // 251])).digest()
        for block in range(tokens // BLOCK)
    ]
    fields = {
        "request_id": name,
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "block_hashes": hashes,
        "all_token_ids": list(range(tokens)),
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
        "sampling_params": object(),
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**{**fields, **changes})


def chain(made: Any) -> list[bytes]:
    """Return its chunk hashes."""
    hashes: list[bytes] = made.block_hashes
    return hashes[1::2]


def output(
    made: Any = None, scheduled: int = 0, computed: int = 0, *, offers: Any = None, groups: int = 1
) -> Any:
    """Make a step in which one request computes so many tokens."""
    table = (list(range(1, 1 + -(-(computed + scheduled) // BLOCK))),) * groups
    new = []
    if made is not None:
        new = [
            SimpleNamespace(req_id=made.request_id, block_ids=table, num_computed_tokens=computed)
        ]
    return SimpleNamespace(
        kv_cache_block_copies=None,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={made.request_id: scheduled} if made is not None else {},
        total_num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda _: table, boundary_state_offloads=offers or {}
        ),
    )


def answer(half: Scheduler, made: Any, computed: int = 0) -> tuple[int | None, bool]:
    """Ask as the engine does, step after step, until there is an answer."""
    until = time.monotonic() + 30
    while (found := half.matched(made, computed))[0] is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    return found


def ended(client: kvd_client.Client, token: bytes) -> bool:
    """Tell whether a lease ends: its release is on the way, in another session."""
    until = time.monotonic() + 30
    while lease := client.attach(token):
        lease.release()
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def make_half(daemon: DaemonProcess) -> Iterator[Callable[..., Scheduler]]:
    """Make attached halves; all are closed at the end."""
    made: list[Scheduler] = []

    def make(identity: Identity = IDENTITY, **extra: Any) -> Scheduler:
        half = Scheduler(read_options({"socket": daemon.socket, "wait_s": 5, **extra}))
        half.attach(identity)
        made.append(half)
        return half

    yield make
    for half in made:
        half.close()


def test_what_kvd_holds_is_promised_held_and_loaded(
    make_half: Callable[..., Scheduler], connect: Callable[..., kvd_client.Client]
) -> None:
    """Whole chunks but the last token's; the load names blocks, a token to attach, and its end."""
    client = connect(layout=LAYOUT)
    made = request("a", 4 * CHUNK)
    assert store(client, chain(made)) == 4
    half = make_half()
    assert answer(half, made, BLOCK) == (3 * CHUNK - BLOCK, True)
    half.allocated(made, (list(range(1, 9)),), 3 * CHUNK - BLOCK)
    step = half.step(output())
    (load,) = step.loads
    assert (load.request, load.first, load.blocks) == ("a", 0, ((0, 2, 3, 4, 5, 6),))
    assert step.reused == (2, 3, 4, 5, 6)
    with client.attach(load.token) as lease:
        assert lease.chunks == 3
    half.loaded({"a"})
    half.allocated(made, (list(range(1, 9)),), 0)
    assert half.step(output()).loads == ()
    assert ended(client, load.token)


def test_a_step_saves_what_it_completes_and_nothing_twice(
    make_half: Callable[..., Scheduler],
) -> None:
    """Chunk by chunk as tokens are computed, each with its parent."""
    half, made = make_half(), request("a", 3 * CHUNK + 1)
    assert answer(half, made) == (0, False)
    half.allocated(made, (list(range(1, 8)),), 0)
    (save,) = half.step(output(made, 2 * CHUNK + 5)).saves
    assert (save.parent, list(save.hashes)) == (b"", chain(made)[:2])
    assert save.blocks == ((1, 2, 3, 4),)
    assert half.step(output(made, 4, 2 * CHUNK + 5)).saves == ()
    (save,) = half.step(output(made, CHUNK, 2 * CHUNK + 9)).saves
    assert (save.parent, list(save.hashes)) == (chain(made)[1], chain(made)[2:3])
    half.finished("a")
    assert half.step(output(made, CHUNK)).saves == ()


def test_a_state_is_saved_when_the_engine_offers_it(make_half: Callable[..., Scheduler]) -> None:
    """With its chunk's pages, or after them; never what else lies in the table."""
    state = kvd_client.Group("recurrent", 2, 0, 0, 4096)
    layout = LAYOUT._replace(groups=(GROUP, state))
    half = make_half(Identity(namespace(), layout, (BLOCK, BLOCK), BLOCK))
    made = request("a", 4 * CHUNK + 1)
    assert answer(half, made) == (0, False)
    half.allocated(made, (list(range(1, 10)),) * 2, 0)
    offers = {"a": [(1, 70, 2 * CHUNK)]}
    (save,) = half.step(output(made, 2 * CHUNK, offers=offers, groups=2)).saves
    assert save.blocks == ((1, 2, 3, 4), (0, 70))
    (save,) = half.step(output(made, CHUNK, 2 * CHUNK, groups=2)).saves
    assert save.blocks == ((5, 6), (0,))
    offers = {"a": [(1, 71, 3 * CHUNK), (1, 72, 4 * CHUNK + BLOCK)]}
    (save,) = half.step(output(made, 1, 3 * CHUNK, offers=offers, groups=2)).saves
    assert (save.parent, list(save.hashes)) == (chain(made)[1], chain(made)[2:3])
    assert save.blocks == ((0, 0), (71,))


def test_pages_that_the_engine_shares_in_part_are_not_written(
    make_half: Callable[..., Scheduler], connect: Callable[..., kvd_client.Client]
) -> None:
    """What the engine has ends inside a page: it may be another request's, too."""
    made = request("a", 4 * CHUNK)
    store(connect(layout=LAYOUT), chain(made))
    half = make_half()
    assert half.matched(made, BLOCK // 2) == (0, False)
    assert answer(half, made, BLOCK)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": SimpleNamespace(lora_name="other", lora_int_id=1)},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"sampling_params": None},
    ],
    ids=str,
)
def test_what_hashes_do_not_tell_apart_is_left_alone(
    changes: dict[str, Any],
    make_half: Callable[..., Scheduler],
    connect: Callable[..., kvd_client.Client],
) -> None:
    """Neither loaded, although the hashes are there, nor saved."""
    made = request("a", 4 * CHUNK, **changes)
    store(connect(layout=LAYOUT), chain(made))
    half = make_half(adapters={"known": "1f"})
    assert half.matched(made, 0) == (0, False)
    half.allocated(made, ([1, 2],), 0)
    assert half.step(output(made, 4 * CHUNK)).saves == ()


def test_an_adapter_has_a_domain_of_its_own(
    make_half: Callable[..., Scheduler], connect: Callable[..., kvd_client.Client]
) -> None:
    """With a digest its requests are saved, but under other names than the base model's."""
    made = request("a", 4 * CHUNK, lora_request=SimpleNamespace(lora_name="x", lora_int_id=1))
    store(connect(layout=LAYOUT), chain(made))
    half = make_half(adapters={"x": "1f"})
    assert answer(half, made) == (0, False)
    (save,) = half.step(output(made, 4 * CHUNK)).saves
    assert not set(save.hashes) & set(chain(made))


def test_after_a_reset_nothing_old_is_found(
    make_half: Callable[..., Scheduler], connect: Callable[..., kvd_client.Client]
) -> None:
    """The engine's weights may have changed; its workers are told of the new namespace."""
    made = request("a", 4 * CHUNK)
    store(connect(layout=LAYOUT), chain(made))
    half = make_half()
    assert answer(half, made)[0]
    half.reset()
    assert answer(half, request("b", 4 * CHUNK)) == (0, False)
    assert half.step(output()).generation
    assert make_half().step(output()).generation == ""


def test_a_stopped_daemon_delays_one_request_and_no_step(
    make_half: Callable[..., Scheduler], daemon: DaemonProcess
) -> None:
    """Each call ends in milliseconds; the first request runs after `wait_s`, the next at once."""
    half = make_half(wait_s=0.3)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert half.matched(request("a", 4 * CHUNK), 0) == (None, False)
        assert answer(half, request("a", 4 * CHUNK)) == (0, False)
        assert time.monotonic() - began < 15
        assert half.matched(request("b", 4 * CHUNK), 0) == (0, False)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert half.counts.take()["given_up"] == 1


def test_a_request_that_goes_gives_its_lease_back(
    make_half: Callable[..., Scheduler], connect: Callable[..., kvd_client.Client]
) -> None:
    """Finished before it was loaded, or run without: nothing stays held."""
    client = connect(layout=LAYOUT)
    made = request("a", 4 * CHUNK)
    store(client, chain(made))
    half = make_half()
    ends: list[Callable[[], None]] = [
        lambda: half.finished("a"),
        lambda: half.allocated(made, ([1],), 0),
    ]
    for end in ends:
        assert answer(half, made)[0]
        (lease,) = half._leases.values()
        token = lease.token
        end()
        assert ended(client, token)
