"""Which chunks are written down at all, a tenant. Pure; the ways to decide are `kvd.policies`'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.policies import Admission, LifeTable, Request, make_admission

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.entry import Chunk
    from kvd.types import Tenant

STAY_STEP = 0.25
"""Of a new sample in the mean time that a region's chunks stay."""
REMEMBERED = 1 << 16
"""Chunks whose uses are remembered for `second-touch`, a tenant."""


class Admissions:
    """One admission a tenant, told of every request."""

    def __init__(self, name: str, threshold: float) -> None:
        """Start knowing nothing; `name` is one of `kvd.policies.ADMISSIONS`."""
        self._name = name
        self._threshold = threshold
        self._of_tenant: dict[Tenant, Admission[bytes]] = {}
        self._lower: dict[Tenant, LifeTable[bytes]] = {}
        self._born_ns: dict[int, int] = {}

    def _of(self, tenant: Tenant) -> Admission[bytes]:
        found = self._of_tenant.get(tenant)
        if found is None:
            lower = self._lower[tenant] = LifeTable()
            found = self._of_tenant[tenant] = make_admission(
                self._name, lower, remembered=REMEMBERED, threshold=self._threshold
            )
        return found

    def admits(self, chunk: Chunk) -> bool:
        """Whether a chunk is worth a write; what something written depends on always is."""
        if any(child.cold_bytes or child.moves for child in chunk.children()):
            return True
        return self._of(chunk.space.tenant).admits(chunk.hash)

    def touched(self, tenant: Tenant, hashes: Sequence[bytes], now_ns: int) -> None:
        """Hear of a request's chain, once a request."""
        if self._name == "all":
            return
        request = Request(now_ns, hashes)
        self._of(tenant).touched(request)
        if self._name == "predicted":
            self._lower[tenant].touched(request)

    def served(self, tenant: Tenant, key: bytes) -> None:
        """Hear that another host takes a copy of a chunk."""
        if tenant in self._lower:
            self._lower[tenant].served(key)

    def entered(self, region: int, now_ns: int) -> None:
        """Hear that a chunk was written to a region."""
        self._born_ns.setdefault(region, now_ns)

    def left(self, region: int, now_ns: int) -> None:
        """Hear that a region was given up: that is how long what is written stays."""
        born_ns = self._born_ns.pop(region, None)
        if born_ns is not None:
            for lower in self._lower.values():
                lower.stay_ns += STAY_STEP * (now_ns - born_ns - lower.stay_ns)
