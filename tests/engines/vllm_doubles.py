"""Connectors for tests: kvd's own, made slow, cut off at the worst moment, or before a fake GPU.

vLLM loads them by module path, in its own environment.
"""

from __future__ import annotations

import time
from typing import Any

from kvd_client.vllm import pages
from kvd_client.vllm import worker as worker_half
from kvd_client.vllm.connector import KvdConnector
from kvd_client.vllm.pages import Pages
from kvd_client.vllm.stopwatch import Stopwatch
from tests.gpu.fake_device import FakeDevice


class CutOffConnector(KvdConnector):
    """Every promised load fails: the worker's session ends before it."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Close the worker's session, then go on as ever."""
        worker = self._worker
        assert worker is not None
        assert worker._client is not None
        if self._get_connector_metadata().step.loads:
            worker._client.close()
        super().start_load_kv(forward_context, **kwargs)


class SlowConnector(KvdConnector):
    """Every copy takes `slow_s` longer: before, between and after its bytes are moved."""

    slow_s = 1.5  # more than a step, so that saves fall behind and their blocks are taken again

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register, then put a brake on the copies."""
        super().register_kv_caches(kv_caches)
        worker = self._worker
        assert worker is not None
        assert isinstance(worker._pages, Pages)
        copier = worker._pages._copier
        copy = copier.copy

        def slowly(target: Any, source: Any, page_bytes: int) -> None:
            half = len(target) // 2
            time.sleep(self.slow_s / 3)
            copy(target[:half], source[:half], page_bytes)
            time.sleep(self.slow_s / 3)
            copy(target[half:], source[half:], page_bytes)
            time.sleep(self.slow_s / 3)

        copier.copy = slowly  # type: ignore[method-assign]


class VerySlowConnector(SlowConnector):
    """Long enough to be killed in the middle."""

    slow_s = 20.0


class FakeGpuConnector(KvdConnector):
    """Takes the engine's memory for that of a GPU, whose streams move in random order."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register with the fake GPU in place of host memory."""
        device = FakeDevice(seed=11)
        device.begin_life()
        pages.open_device = lambda _: device  # type: ignore[assignment]
        vars(worker_half)["stopwatch"] = lambda **_: Stopwatch()  # no events to time it by
        super().register_kv_caches(kv_caches)
        worker = self._worker
        assert worker is not None
        assert not isinstance(worker._pages, Pages)


class StatelessConnector(KvdConnector):
    """Loads everything but recurrent states: what is computed after it must be wrong."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Leave the states' blocks as they are."""
        del forward_context, kwargs
        worker = self._worker
        assert worker is not None
        assert worker.identity is not None
        step = self._get_connector_metadata().step
        kinds = [group.kind for group in worker.identity.layout.groups]
        loads = tuple(
            load._replace(
                blocks=tuple(
                    (0,) * len(ids) if kind == "recurrent" else ids
                    for ids, kind in zip(load.blocks, kinds, strict=True)
                )
            )
            for load in step.loads
        )
        assert all("recurrent" in kinds for _ in loads)
        worker.load(step._replace(loads=loads))
