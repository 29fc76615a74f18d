"""kvd for vLLM: `KvdConnector`, a KV connector (V1) that nothing in vLLM has to be patched for.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_client.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

    options      what a user may set in kv_connector_extra_config
    identity     what makes this engine's KV the same as another's
    plans        what to do for one request: a state machine, pure
    saving       which chunks to save when, and which blocks are taken again; pure
    scheduler    the half in vLLM's scheduler process: asks kvd, without torch
    worker       the half in each worker process: has the memory
    mover        the worker's thread that copies
    pages        where the engine's pages lie
    announce     which chunks to tell vLLM's event stream; pure
    telemetry    counts for vLLM's log and metrics
    connector    the class that vLLM loads, which only hands on

Importing this package imports neither vLLM nor torch; its attribute `KvdConnector` does.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvdConnector"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute
    """Load the connector when vLLM asks for it."""
    if name == "KvdConnector":
        from kvd_client.vllm.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
