"""`KvdHiCache` under SGLang's own storage contract: its factory, pools, hashes and loops.

Needs SGLang's package (`make test-engines` installs it where only these tests see it).
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import queue
import random
import signal
import threading
import time
from typing import Any

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-engines", allow_module_level=True)

import torch

from tests.engines import sglang_kit as kit
from tests.engines.sglang_kit import (
    LAYOUTS,
    PAGE,
    backend,
    contents,
    contract,
    fill,
    fill_target,
    page_keys,
    pool,
    reach,
    storage_config,
    take,
    transfers,
)

pytestmark = pytest.mark.timeout(180)  # the first compiles the copying kernel, on a busy machine
KV, SWA, INDEXER = contract.PoolName.KV, contract.PoolName.SWA, contract.PoolName.INDEXER


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("allocator", ["default", "shm"])
def test_the_contract_holds(daemon: Any, layout: str, allocator: str) -> None:
    """Set, look up, a hole, get: right bytes in the pages asked for, and no other byte changed."""
    host = pool(layout, allocator)
    made = backend(daemon, host, allocator=allocator)
    keys, source, target = page_keys(6), take(host, 6), take(host, 6)
    fill(host)
    want = contents(host, source)
    assert made.batch_exists(keys) == 0
    assert made.batch_get_v1(keys, target) == [False] * 6
    assert made.batch_set_v1(keys[:3], source[: 3 * PAGE]) == [True] * 3
    assert made.batch_set_v1(keys[4:], source[4 * PAGE :]) == [True] * 2
    assert made.batch_exists(keys) == 3, "there is a hole"
    assert made.batch_exists(keys[4:]) == 2, "SGLang has the rest and asks for these"
    before = contents(host, target)
    assert made.batch_get_v1(keys, target) == [True] * 3 + [False] * 3
    assert contents(host, target)[:3] == want[:3]
    assert contents(host, target)[3:] == before[3:]
    assert made.batch_set_v1(keys, source) == [True] * 6, "what is there already counts as stored"
    assert made.batch_exists([*keys, "no page's key"]) == 6
    fill(host, seed=1)
    rest = host.kv_buffer.view(torch.uint8).clone()
    assert made.batch_get_v1(keys, target) == [True] * 6
    assert contents(host, target) == want
    fill(host, seed=1)
    assert torch.equal(rest, host.kv_buffer.view(torch.uint8)), "the same pattern as before"
    if allocator == "shm":
        size = host.kv_buffer.numel() * host.kv_buffer.element_size()
        with mmap.mmap(host.fd, size, prot=mmap.PROT_READ) as seen:
            whole = host.kv_buffer.view(torch.uint8).numpy().tobytes()
            assert seen[:] == whole, "it is a pool in a memfd that was read and written"
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_byte_outside_the_pages_is_written(daemon: Any, layout: str) -> None:
    """A read changes the pages it was asked for and nothing else in the pool."""
    host = pool(layout)
    made = backend(daemon, host)
    keys, source, target = page_keys(5), take(host, 5), take(host, 5)
    fill(host)
    made.batch_set_v1(keys, source)
    want = contents(host, source)
    fill(host, seed=1)
    other = pool(layout)
    other.kv_buffer.copy_(host.kv_buffer)
    assert made.batch_get_v1(keys, target) == [True] * 5
    inside = other.get_page_buffer_meta(target)
    for address, size, content in zip(*inside, host.get_page_buffer_meta(target)[0], strict=True):
        ctypes.memmove(address, content, size)
    assert torch.equal(other.kv_buffer.view(torch.uint8), host.kv_buffer.view(torch.uint8))
    assert contents(host, target) == want
    made.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_engine_reads_what_the_first_stored(daemon: Any, layout: str) -> None:
    """Another engine of the same model, with a pool of its own, finds the same bytes."""
    one, two = pool(layout), pool(layout, "shm")
    first, second = backend(daemon, one), backend(daemon, two)
    keys, source = page_keys(100), None
    source = take(one, 60)
    fill(one)
    assert first.batch_set_v1(keys[:60], source) == [True] * 60
    first.close()
    take(two, 1)  # other places
    target = take(two, 60)
    assert second.batch_exists(keys) == 60
    assert second.batch_get_v1(keys[:60], target) == [True] * 60
    assert contents(two, target) == contents(one, source)
    second.close()


def test_other_engines_never_hit(daemon: Any, tmp_path: Any) -> None:
    """Weights, dtype, layout, page, shape, ranks, salt, a draft, a cleared storage: each parts."""
    salt = tmp_path / "salt"
    salt.write_bytes(b"s" * 32)
    host = pool()
    made = backend(daemon, host)
    keys = page_keys(4)
    made.batch_set_v1(keys, take(host, 4))
    assert made.batch_exists(keys) == 4
    others: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({}, {}, {"weights": "other"}),
        ({}, {}, {"salt_file": str(salt)}),
        ({}, {}, {"draft_weights": "some"}),
        ({"dtype": torch.float16}, {}, {}),
        ({"dtype": torch.float8_e4m3fn, "heads": 8}, {}, {}),
        ({"layout": "page_head"}, {}, {}),
        ({"layout": "page_first_direct"}, {}, {}),
        ({"page": 32}, {}, {}),
        ({"layers": 8, "heads": 2}, {}, {}),
        ({}, {"pp_size": 2}, {}),
        ({}, {"attn_cp_size": 2}, {}),
        ({}, {"tp_size": 2}, {}),
    ]
    for shape, ranks, options in others:
        other = backend(daemon, pool(**shape), config=storage_config(**ranks), **options)
        assert other.batch_exists(keys) == 0, (shape, ranks, options)
        other.close()
    same = backend(daemon, pool())
    assert same.batch_exists(keys) == 4
    same.clear()
    assert same.batch_exists(keys) == 0, "its weights were updated"
    same.batch_set_v1(keys, take(host, 4))
    assert made.batch_exists(keys) == 4
    for each in (made, same):
        each.close()


def test_ranks_are_folded(daemon: Any) -> None:
    """A page counts once both ranks' shards are there, and each rank reads its own."""
    hosts = [pool(), pool()]
    ranks = [
        backend(daemon, host, config=storage_config(tp_size=2, tp_rank=rank))
        for rank, host in enumerate(hosts)
    ]
    keys = page_keys(5)
    places = [take(host, 5) for host in hosts]
    for seed, host in enumerate(hosts):
        fill(host, seed)
    ranks[0].batch_set_v1(keys, places[0])
    assert [each.batch_exists(keys) for each in ranks] == [0, 0]
    ranks[1].batch_set_v1(keys[:3], places[1][: 3 * PAGE])
    assert [each.batch_exists(keys) for each in ranks] == [3, 3]
    for host, each, place in zip(hosts, ranks, places, strict=True):
        target = take(host, 5)
        assert each.batch_get_v1(keys, target) == [True] * 3 + [False] * 2
        assert contents(host, target)[:3] == contents(host, place)[:3]
        each.close()


def test_replicated_pages_are_stored_once(daemon: Any) -> None:
    """Where all ranks hold the same (latent attention) one writes and every rank reads."""
    hosts = [pool(), pool()]
    ranks = [
        backend(daemon, host, config=storage_config(tp_size=2, tp_rank=rank, is_mla_model=True))
        for rank, host in enumerate(hosts)
    ]
    keys, source, target = page_keys(5), take(hosts[0], 5), take(hosts[1], 5)
    fill(hosts[0])
    assert ranks[0].batch_set_v1(keys, source) == [True] * 5
    assert ranks[1].batch_exists(keys) == 5
    assert ranks[1].batch_get_v1(keys, target) == [True] * 5
    assert contents(hosts[1], target) == contents(hosts[0], source)
    for each in ranks:
        each.close()


def test_sglang_s_own_loops_run_on_it(daemon: Any) -> None:
    """The controller's back-up, hit query and prefetch, 128 pages a call, keep every byte."""
    host = pool("page_first", "shm", page=2)
    made = backend(daemon, host, hicache_storage_pass_prefix_keys=True)
    controller = object.__new__(kit.HiCacheController)
    controller.storage_backend = made
    controller.page_size = 2
    controller.page_get_func = controller._page_get_zero_copy
    controller.page_set_func = controller._page_set_zero_copy
    controller.prefetch_sync_queue = queue.Queue()
    tokens = list(range(400))
    keys = page_keys(200, page=2)
    assert keys == page_keys(200, page=2)
    source, target = take(host, 200), take(host, 200)
    fill(host)
    want = contents(host, source)
    for first, last in ((0, 150), (150, 200)):  # two nodes of the tree, the second below the first
        operation = kit.StorageOperation(
            source[first * 2 : last * 2],
            tokens[first * 2 : last * 2],
            hash_value=keys[first:last],
            prefix_keys=keys[:first],
        )
        controller._page_backup(operation)
        assert operation.completed_tokens == (last - first) * 2
    operation = kit.PrefetchOperation("request", tokens, None, [])
    operation.hash_value, count = controller._storage_hit_query(operation)
    assert count == 400
    operation.host_indices = target
    assert controller._page_transfer(operation) == 200
    assert contents(host, target) == want
    made.close()


# ------------------------------------------------------------------------------ several pools


def test_legal_lengths_are_those_of_sglang_s_file_backend(
    daemon: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random pages of three pools stored, both backends name the same legal lengths."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    reference = kit.StorageBackendFactory.create_backend("file", storage_config(), pool())
    made = backend(daemon, pool())
    hosts = {KV: pool(), SWA: pool("layer_first"), INDEXER: pool(layers=1)}
    for name, host in hosts.items():
        fill(host)
        made.register_mem_host_pool_v2(host, name)
        reference.register_mem_host_pool_v2(host, name)
    policies = contract.PoolHitPolicy
    chance = random.Random(5)
    for seed in range(12):
        keys = page_keys(8, seed=seed)
        for name, host in hosts.items():
            chosen = [n for n in range(8) if chance.random() < (0.95 if name == KV else 0.8)]
            indices = take(host, 8)
            for number in chosen:
                part = indices[number * PAGE : number * PAGE + PAGE]
                stored = [contract.PoolTransfer(name=name, host_indices=part, keys=[keys[number]])]
                assert made.batch_set_v2(stored) == {name: [True]}
                reference.batch_set_v2(stored)
            host.free(indices)
        for kinds in (
            {},
            {INDEXER: policies.ALL_PAGES},
            {SWA: policies.TRAILING_PAGES},
            {SWA: policies.TRAILING_PAGES, INDEXER: policies.ALL_PAGES},
        ):
            asked = transfers(kinds, chance.choice([1, 2, 3]))
            expected = reference.batch_exists_v2(keys, asked)
            found = made.batch_exists_v2(keys, asked)
            assert found == expected, (seed, kinds)
    made.close()


def test_pools_do_not_meet(daemon: Any) -> None:
    """Pages of one key in two pools of one shape are two pages, read back to where they belong."""
    made = backend(daemon, pool())
    hosts = {SWA: pool(), INDEXER: pool()}
    keys = page_keys(3)
    asked = []
    for seed, (name, host) in enumerate(hosts.items()):
        made.register_mem_host_pool_v2(host, name)
        fill(host, seed)
        asked.append(contract.PoolTransfer(name=name, host_indices=take(host, 3), keys=keys))
    assert made.batch_set_v2(asked[:1]) == {SWA: [True] * 3}
    assert made.batch_get_v2(asked[1:]) == {INDEXER: [False] * 3}
    made.batch_set_v2(asked)
    want = [contents(hosts[each.name], each.host_indices) for each in asked]
    for host in hosts.values():
        fill(host, seed=9)
    assert made.batch_get_v2(asked) == {SWA: [True] * 3, INDEXER: [True] * 3}
    assert [contents(hosts[each.name], each.host_indices) for each in asked] == want
    assert want[0] != want[1]
    made.close()


# ------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_holds_under_sglang_s_failure_injector(
    daemon: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SGLang's own random failures and delays, in three threads: never a wrong page."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.003")
    host = pool(layout)
    made = backend(daemon, host)
    assert type(made).__name__ == "HiCacheStorageFailureInjector"
    fill(host)
    source = take(host, 8)
    want = contents(host, source)
    wrong: list[str] = []
    read = [0]

    def work(seed: int, target: Any) -> None:
        chance, until, turns = random.Random(seed), time.monotonic() + 60, 0
        while turns < 40 or (read[0] <= 20 and time.monotonic() < until):
            turns += 1
            keys = page_keys(8, seed=chance.randrange(4))
            count = chance.randint(1, 8)
            action = chance.randrange(3)
            if action == 0:
                made.batch_set_v1(keys[:count], source[: count * PAGE])
            elif action == 1 and made.batch_exists(keys[:count]) > count:
                wrong.append("more pages than asked for")
            else:
                got = made.batch_get_v1(keys[:count], target[: count * PAGE])
                found = contents(host, target)
                for number, ok in enumerate(got):
                    read[0] += ok
                    if ok and found[number] != want[number]:
                        wrong.append(f"page {number}")

    threads = [threading.Thread(target=work, args=(n, take(host, 8))) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made._backend.close()
    assert not wrong
    assert read[0] > 20, "nothing was read: the test shows nothing"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_calls_are_bounded_when_the_daemon_dies_under_them(
    make_daemon: Any, how: signal.Signals
) -> None:
    """Killed or stopped in the middle of calls: each ends in time, none lies, none raises."""
    daemon = make_daemon()
    daemon.start()
    host = pool("layer_first")
    made = backend(daemon, host, wait_s=0.5, load_wait_s=1.0)
    fill(host)
    source, target = take(host, 16), take(host, 16)
    want = contents(host, source)
    made.batch_set_v1(page_keys(16), source)  # the first compiles the copying kernel
    made.batch_get_v1(page_keys(16), target)
    stop, wrong, longest, calls = threading.Event(), [], [0.0], [0]

    def work() -> None:
        seed, got = 0, list[bool]()
        while not stop.is_set():
            seed += 1
            keys = page_keys(16, seed=seed % 3)
            for call in (
                lambda keys=keys: made.batch_set_v1(keys, source),
                lambda keys=keys: [made.batch_exists(keys) <= 16] * 16,
                lambda keys=keys: made.batch_get_v1(keys, target),
            ):
                began = time.monotonic()
                fill_target(target, host)
                got = call()
                longest[0] = max(longest[0], time.monotonic() - began)
                calls[0] += 1
                if len(got) != 16:
                    wrong.append("not a verdict a page")
            found = contents(host, target)
            wrong.extend(f"page {n}" for n, ok in enumerate(got) if ok and found[n] != want[n])

    thread = threading.Thread(target=work)
    thread.start()
    reach(calls, 21)
    os.kill(daemon.pid, how)
    time.sleep(2.5)
    reach(calls, 42)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    if how == signal.SIGSTOP:
        os.kill(daemon.pid, signal.SIGCONT)
    assert not wrong
    assert longest[0] < 10, "bounds of 0.5 and 1 s, and a busy machine"
    made.close()


def test_single_look_ups_share_one_bound(make_daemon: Any) -> None:
    """Asked for 600 pages one by one, a stopped daemon costs one wait and not 600."""
    daemon = make_daemon()
    daemon.start()
    made = backend(daemon, pool(), wait_s=0.5)
    store = made._stores["kv"]
    keys = [bytes.fromhex(key) for key in page_keys(600)]
    assert store.present(keys) == [False] * 600
    os.kill(daemon.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert store.present(keys) == [False] * 600
    assert time.monotonic() - began < 10
    os.kill(daemon.pid, signal.SIGCONT)
    made.close()


def test_it_begins_again_with_a_new_daemon(make_daemon: Any) -> None:
    """No daemon at the start: all is a miss; one that comes is used; so is the next one."""
    daemon = make_daemon()
    host = pool()
    made = backend(daemon, host)
    keys, source = page_keys(3), take(host, 3)
    assert made.batch_set_v1(keys, source) == [False] * 3
    assert (made.batch_exists(keys), made.batch_get_v1(keys, source)) == (0, [False] * 3)
    for _ in range(2):
        daemon.start()
        deadline = time.monotonic() + 60
        while made.batch_set_v1(keys, source) != [True] * 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert made.batch_exists(keys) == 3
        daemon.kill()
        assert made.batch_exists(keys) == 0
    made.close()


def test_a_full_host_tier_refuses_and_says_so(make_daemon: Any) -> None:
    """Where there is no room pages are told as not stored, and what was stored is still right."""
    daemon = make_daemon(host_bytes=8 << 20)
    daemon.start()
    host = pool("layer_first")
    made = backend(daemon, host)
    fill(host)
    source, target = take(host, 30), take(host, 30)
    want = contents(host, source)
    for seed in range(6):
        made.batch_set_v1(page_keys(30, seed=seed), source)
    for seed in range(6):
        keys = page_keys(30, seed=seed)
        found = made.batch_exists(keys)
        got = made.batch_get_v1(keys, target)
        assert got == [True] * found + [False] * (30 - found)
        assert contents(host, target)[:found] == want[:found]
    made.close()


@pytest.mark.parametrize("lossy", [False, True])
def test_pages_come_back_from_nvme(make_daemon: Any, tmp_path: Any, *, lossy: bool) -> None:
    """After a restart pages come from disk: the same bytes or, if allowed, as near as FP8 is."""
    config = tmp_path / "kvd.toml"
    config.write_text("[nvme]\nslow_s = 30\n")
    daemon = make_daemon(arguments=["--nvme-bytes", "1GiB", "--config", str(config)])
    daemon.start()
    host = pool("layer_first")
    made = backend(daemon, host, lossy=lossy)
    for each in host.k_data_refs + host.v_data_refs:
        each.normal_(generator=torch.Generator().manual_seed(1))
    keys, source, target = page_keys(20), take(host, 20), take(host, 20)
    want = contents(host, source)
    assert made.batch_set_v1(keys, source) == [True] * 20
    made.close()
    assert daemon.stop(60) == 0
    daemon.start()
    made = backend(daemon, host, lossy=lossy)
    deadline = time.monotonic() + 60
    while not all(made.batch_get_v1(keys, target)):
        assert time.monotonic() < deadline
    store = made._stores["kv"]
    assert store.lossy is lossy
    if not lossy:
        assert contents(host, target) == want
    pairs = zip(contents(host, target), want, strict=True)
    near = [
        torch.frombuffer(bytearray(page), dtype=torch.bfloat16) for pair in pairs for page in pair
    ]
    for got, exact in zip(near[::2], near[1::2], strict=True):
        assert torch.allclose(got.float(), exact.float(), rtol=0.07, atol=0.02)
    more = page_keys(22)
    assert made.batch_set_v1(more[20:], source[: 2 * PAGE]) == [True] * 2
    with store.client.acquire([bytes.fromhex(key) for key in more[20:]]) as lease:
        assert (lease.chunks, lease.lossy) == (2, lossy), "computed after a lossy load, it may be"
    made.close()
