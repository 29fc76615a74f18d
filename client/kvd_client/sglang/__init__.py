"""kvd for SGLang: `KvdHiCache`, a storage backend of HiCache, with nothing in SGLang patched.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvd", "interface_v1": 1,
        "module_path": "kvd_client.sglang", "class_name": "KvdHiCache",
        "hicache_storage_pass_prefix_keys": true}'

    options      what a user may set beside these
    identity     what makes this engine's KV the same as another's
    pool         one host pool's pages: where they lie, and moving them
    hicache      the class that SGLang loads, which only hands on

Importing this package imports neither SGLang nor torch; its attribute `KvdHiCache` does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvdHiCache"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    """Load the backend when SGLang asks for it."""
    if name == "KvdHiCache":
        from kvd_client.sglang.hicache import KvdHiCache

        return KvdHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
