"""SGLang's other host pools with kvd: latent rows (MLA) and recurrent states (Mamba)."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-engines", allow_module_level=True)

import torch

from tests.engines.sglang_kit import (
    backend,
    contract,
    mamba_pool,
    mla_pool,
    page_keys,
    pool,
    storage_config,
)

pytestmark = pytest.mark.timeout(180)
MAMBA = contract.PoolName.MAMBA


def put(host: Any, indices: Any, seed: int) -> None:
    """Fill the pages at these indices with bytes of a seed."""
    generator = torch.Generator().manual_seed(seed)
    for address, size in zip(*host.get_page_buffer_meta(indices), strict=True):
        ctypes.memmove(address, bytes(torch.randint(256, (size,), generator=generator)), size)


def seen(host: Any, indices: Any) -> list[bytes]:
    """Read the runs of the pages at these indices."""
    runs = zip(*host.get_page_buffer_meta(indices), strict=True)
    return [ctypes.string_at(address, size) for address, size in runs]


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_latent_rows_come_back(daemon: Any, layout: str) -> None:
    """Rank 0 writes, the other rank reads the same pages; another layout's never meet."""
    hosts = [mla_pool(layout) for _ in range(2)]
    ranks = [
        backend(daemon, host, config=storage_config(tp_rank=rank, tp_size=2, is_mla_model=True))
        for rank, host in enumerate(hosts)
    ]
    keys = page_keys(5)
    source, target = hosts[0].alloc(80), hosts[1].alloc(160)[80:]
    put(hosts[0], source, 1)
    assert ranks[0].batch_set_v1(keys, source) == [True] * 5
    assert ranks[1].batch_exists(keys) == 5
    assert ranks[1].batch_get_v1(keys, target) == [True] * 5
    assert seen(hosts[1], target) == seen(hosts[0], source)
    other = backend(daemon, mla_pool(layout, page=32), config=storage_config(is_mla_model=True))
    assert other.batch_exists(keys) == 0
    for each in (*ranks, other):
        each.close()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_recurrent_states_come_back_where_they_were_kept(daemon: Any, layout: str) -> None:
    """A prefix is usable where KV is whole and a state was stored; the state's bytes return."""
    host, states = pool(), mamba_pool(layout=layout)
    made = backend(daemon, host)
    made.register_mem_host_pool_v2(states, MAMBA)
    keys, source = page_keys(6), host.alloc(96)
    assert made.batch_set_v1(keys, source) == [True] * 6
    slot = states.alloc(1)
    put(states, slot, 2)
    stored = contract.PoolTransfer(name=MAMBA, keys=[keys[3]], host_indices=slot)
    assert made.batch_set_v2([stored]) == {MAMBA: [True]}
    asked = contract.PoolTransfer(
        name=MAMBA, keys=[keys[-1]], hit_policy=contract.PoolHitPolicy.TRAILING_PAGES
    )
    found = made.batch_exists_v2(keys, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    into = states.alloc(2)[1:]
    wanted = contract.PoolTransfer(name=MAMBA, keys=[keys[3]], host_indices=into)
    assert made.batch_get_v2([wanted]) == {MAMBA: [True]}
    assert seen(states, into) == seen(states, slot)
    other = backend(daemon, host)
    other.register_mem_host_pool_v2(mamba_pool(torch.int32, layout), MAMBA)
    assert other.batch_exists_v2(keys, [asked]).restorable_prefix_pages == []
    for each in (made, other):
        each.close()
