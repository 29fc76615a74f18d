"""SGLang's real parts for its tests: storage factory, host pools, page hashes, controller loops.

SGLang's own package runs without a GPU as far as these go; what it imports on the way and never
uses here (GPU compilers, image libraries) is stood in for where it is not installed.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import time
import types
import warnings
from typing import Any, Final

import torch

LAYERS: Final = 4
HEADS: Final = 4
DIM: Final = 64
PAGE: Final = 16
TOKENS: Final = 1024
LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")


class _StandIn(types.ModuleType):
    """A module that is imported but must not be used: decorators in it do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {})  # a class, as its name says
        return sys.modules.get(f"{self.__name__}.{name}", _nothing)


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _nothing


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for packages that are not installed, and for all their modules."""

    def __init__(self, *packages: str) -> None:
        """Stand in for those of `packages` that are missing."""
        self.packages = {name for name in packages if importlib.util.find_spec(name) is None}

    def find_spec(self, fullname: str, *_: object) -> Any:
        """Find a module of one of the packages."""
        if fullname.split(".", maxsplit=1)[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make an empty one."""
        module = _StandIn(spec.name)
        module.__dict__["__version__"] = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang's imports, not ours
    # Before the stand-ins: these ask whether torchvision and triton are there.
    import torch._dynamo.backends.debugging
    import torch._inductor.codecache
    import torch.utils.flop_counter
    from transformers import AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer

    _USED = (AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer)
    sys.meta_path.append(_StandInFinder("triton", "torchvision"))
    from sglang.srt.managers.cache_controller import (
        HiCacheController,
        PrefetchOperation,
        StorageOperation,
    )
    from sglang.srt.mem_cache import hicache_storage as contract
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MambaStateBufferInfo,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.runtime_context import get_context

__all__ = [
    "HiCacheController",
    "PrefetchOperation",
    "StorageBackendFactory",
    "StorageOperation",
    "contract",
]


def pool(
    layout: str = "page_first",
    allocator: str = "default",
    *,
    dtype: Any = torch.bfloat16,
    page: int = PAGE,
    heads: int = HEADS,
    layers: int = LAYERS,
) -> Any:
    """Make one of SGLang's host pools, over a device pool that lies on the CPU."""
    k, v = (tuple(torch.zeros(TOKENS, heads, DIM, dtype=dtype) for _ in range(layers)),) * 2
    pointers = torch.tensor([each.data_ptr() for each in k], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
        ),
        page_size=page,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        allocator_type=allocator,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=TOKENS,
    )


LATENT: Final = (512, 64)
"""Of an MLA row: the compressed part, and the rotated one."""


def mla_pool(layout: str = "page_first", page: int = PAGE) -> Any:
    """Make a host pool of latent rows."""
    rank, rope = LATENT
    rows = tuple(torch.zeros(TOKENS, 1, rank + rope, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=torch.tensor([each.data_ptr() for each in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=TOKENS,
    )


def mamba_pool(state: Any = torch.float32, layout: str = "page_first") -> Any:
    """Make a host pool of recurrent states, one a slot."""
    slots = 32
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, slots, 4, 16, 8, dtype=state),
        conv=(torch.zeros(LAYERS, slots, 64, 3, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


def storage_config(**changes: Any) -> Any:
    """SGLang's storage configuration of one rank."""
    usual: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "toy",
    }
    return contract.HiCacheStorageConfig(**{**usual, **changes})


get_context()._server_args = types.SimpleNamespace(
    model_path="toy", load_format="auto", dtype="bfloat16"
)
"""As a server that has started tells of itself."""


def backend(daemon: Any, host: Any, *, config: Any = None, **options: Any) -> Any:
    """Make the backend as SGLang does, and register a pool with it as SGLang does."""
    extra = {
        "backend_name": "kvd",
        "module_path": "kvd_client.sglang",
        "class_name": "KvdHiCache",
        "interface_v1": 1,
        "weights": "digest-of-the-weights",
        "wait_s": 5.0,
        "load_wait_s": 10.0,
        **options,
    }
    if daemon is not None:
        extra["socket"] = str(daemon.socket)
    config = storage_config() if config is None else config
    config.extra_config = extra
    made = StorageBackendFactory.create_backend("dynamic", config, host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def page_keys(pages: int, seed: int = 0, page: int = PAGE) -> list[str]:
    """SGLang's keys of a sequence of tokens."""
    tokens = [seed * 100_003 + number for number in range(pages * page)]
    keys: list[str] = get_storage_hash_str(tokens, None, page_size=page)
    return keys


def fill(host: Any, seed: int = 0) -> None:
    """Put random bytes into a whole pool."""
    generator = torch.Generator().manual_seed(seed)
    whole = host.kv_buffer.view(torch.uint8)
    whole.copy_(torch.randint(0, 256, whole.shape, generator=generator, dtype=torch.uint8))


def take(host: Any, pages: int) -> Any:
    """Allocate pages of a pool: the indices of their tokens."""
    indices = host.alloc(pages * host.page_size)
    assert indices is not None
    return indices


def contents(host: Any, indices: Any) -> list[bytes]:
    """The bytes of each page at these indices."""
    pages = indices.view(-1, host.page_size)[:, 0].tolist()
    return [
        host.get_data_page(index).contiguous().view(torch.uint8).numpy().tobytes()
        for index in pages
    ]


def transfers(kinds: dict[Any, Any], trailing: int) -> list[Any]:
    """What SGLang asks about besides KV."""
    return [
        contract.PoolTransfer(
            name=name,
            hit_policy=policy,
            keys=["x"] * trailing if policy == contract.PoolHitPolicy.TRAILING_PAGES else None,
        )
        for name, policy in kinds.items()
    ]


def reach(calls: list[int], least: int) -> None:
    """Wait for so many calls."""
    deadline = time.monotonic() + 60
    while calls[0] < least:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fill_target(target: Any, host: Any) -> None:
    """Make stale bytes in the target visible as wrong ones."""
    for address, size in zip(*host.get_page_buffer_meta(target), strict=True):
        ctypes.memset(address, 0xA5, size)
