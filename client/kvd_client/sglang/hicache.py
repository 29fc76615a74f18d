"""`KvdHiCache`: kvd as the storage backend of SGLang's HiCache, one object a rank.

SGLang calls it from threads of its own: look-ups, reads, writes. None raises, and none waits beyond
its bound; what cannot be done is told as pages that are not there, or were not stored.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

from kvd_client.salt import read_salt
from kvd_client.sglang.identity import chunk_hash, chunk_hashes, describe, read_model
from kvd_client.sglang.options import read_options
from kvd_client.sglang.pool import PoolStore, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
log: Final = logging.getLogger(__name__)
KV: Final = str(PoolName.KV)


class KvdHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps HiCache's pages in kvd."""

    def __init__(self, storage_config: Any, factory_kwargs: object = None) -> None:
        """Read the configuration; sessions are opened as pools are registered.

        Raises:
            ValueError: An option is wrong, or what the engine runs is not known; SGLang does not
                start, with the text in its log.
        """
        self._config = storage_config
        self._options = read_options(storage_config.extra_config or {})
        self._salt = read_salt(self._options.salt_file)
        self._model = read_model(
            str(storage_config.model_name or ""),
            _server(),
            self._options,
            str(sglang.__version__),
        )
        self._stores: dict[str, PoolStore] = {}
        self._life = ""
        self._lock = threading.Lock()
        self.registered_pools: dict[Any, Any] = {}

    # ---------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool that the v1 calls speak of."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take one pool more, for the v2 calls; the first one comes by this way, too."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._stores:
            self._open(str(host_pool_name), host_pool)

    def _open(self, name: str, pool: Any) -> None:
        """Open a pool's session, in the place of an earlier one."""
        shape = shape_of(pool, name)
        identity = describe(
            self._model, shape, self._config, self._salt, options=self._options, life=self._life
        )
        store = PoolStore(
            pool,
            shape,
            identity,
            socket=self._options.socket,
            wait_s=self._options.wait_s,
            load_wait_s=self._options.load_wait_s,
        )
        with self._lock:
            before = self._stores.get(name)
            self._stores[name] = store
        if before is not None:
            before.close()
        log.info(
            "kvd keeps pool %s: pages of %d tokens, %d bytes, layout %s",
            name,
            shape.page_tokens,
            shape.page_bytes,
            shape.order,
        )

    def _store(self, name: object) -> PoolStore | None:
        return self._stores.get(str(name))

    # ---------------------------------------------------------------- v1: one pool

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Return how many pages are there, from the first on."""
        store = self._store(KV)
        return self._safely(lambda: store.count(chunk_hashes(keys)) if store else 0, 0)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: object = None,
    ) -> list[bool]:
        """Read pages into the pool."""
        return self._get(KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: Any,
        extra_info: object = None,
    ) -> list[bool]:
        """Store pages out of the pool."""
        return self._set(KV, keys, host_indices, extra_info)

    # ---------------------------------------------------------------- v2: several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: object = None,
    ) -> Any:
        """Say at which lengths every pool can restore the prefix."""
        pages = self.batch_exists(keys, extra_info)
        hits = {KV: pages} if pages else {}
        lengths = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not lengths:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # its own verdict only, and kvd has none
            none: set[int] = set()
            legal = self._safely(partial(self._legal, transfer, keys[:pages]), none)
            if legal:
                hits[transfer.name] = max(legal)
            lengths &= legal
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def _legal(self, transfer: Any, keys: list[str]) -> set[int]:
        """Return the lengths at which one more pool has what its policy asks for."""
        store = self._store(transfer.name)
        if store is None:
            return set()
        hashes = chunk_hashes(keys)
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            return set(range(1, store.count(hashes) + 1))
        trailing = max(1, len(transfer.keys or ()))
        there = store.present(hashes)
        return {
            length
            for length in range(1, len(keys) + 1)
            if all(there[max(0, length - trailing) : length])
        }

    def batch_get_v2(
        self,
        transfers: Sequence[Any],
        extra_info: object = None,
    ) -> dict[Any, list[bool]]:
        """Read pages of several pools."""
        return {
            each.name: self._get(each.name, each.keys or [], each.host_indices)
            for each in transfers
        }

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: object = None
    ) -> dict[Any, list[bool]]:
        """Store pages of several pools."""
        return {
            each.name: self._set(each.name, each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    # ---------------------------------------------------------------- what both come to

    def _get(self, name: object, keys: list[str], indices: Any) -> list[bool]:
        store = self._store(name)
        none = [False] * len(keys)
        if store is None or not keys:
            return none
        return self._safely(lambda: store.read(chunk_hashes(keys), indices), none)

    def _set(
        self,
        name: object,
        keys: list[str],
        indices: Any,
        extra_info: object,
    ) -> list[bool]:
        store = self._store(name)
        none = [False] * len(keys)
        if store is None or not keys:
            return none
        prefix = getattr(extra_info, "prefix_keys", None)
        before = chunk_hash(prefix[-1]) if prefix else None
        return self._safely(lambda: store.write(chunk_hashes(keys), indices, before), none)

    def _safely(self, do: Callable[[], T], miss: T) -> T:
        """Make whatever goes wrong a miss: a storage thread that dies takes prefetching with it."""
        try:
            return do()
        except Exception:
            log.exception("kvd: a call failed and is a miss")
            return miss

    # ---------------------------------------------------------------- the rest of the contract

    def exists(self, key: str) -> bool:
        """Tell whether one page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Find nothing: pages are read in place, by `batch_get_v1`."""
        return

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> list[None]:
        """Find nothing, as `get`."""
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store nothing, as `get`."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store nothing, as `get`."""
        return False

    def clear(self) -> None:
        """Part this engine from all that was stored so far, by it and by others.

        SGLang asks for it when weights were updated under a running engine. Nothing is deleted:
        other engines may be using it.
        """
        self._life = os.urandom(16).hex()
        for name, store in list(self._stores.items()):
            self._open(name, store.pool)

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            store.close()


def _server() -> Any:
    """Return the server's arguments; None where SGLang does not tell them."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, ValueError, AttributeError, RuntimeError, AssertionError):
        return None
