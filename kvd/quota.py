"""Who is using how much: charges a tenant and resource, checked before they are made. Pure.

Q1. No charge goes below zero or over its limit; a refused charge changes nothing.
Q2. A tenant whose owners are all gone is charged nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.types import Tenant


class Resource(Enum):
    """What is charged."""

    SESSIONS = "sessions"
    LEASES = "leases"
    PINNED_BYTES = "pinned_bytes"
    """Bytes under lease, each counted once."""
    FILLING_BYTES = "filling_bytes"
    """Bytes reserved or quarantined."""


class Quota:
    """The charges of all tenants."""

    def __init__(self, limits: Mapping[Tenant, Mapping[Resource, int]]) -> None:
        """Start with no charges."""
        self._limits = limits
        self._used = {tenant: dict.fromkeys(Resource, 0) for tenant in limits}

    def charge(self, tenant: Tenant, resource: Resource, amount: int) -> bool:
        """Charge `amount`; False, and nothing charged, when that is over the limit."""
        assert amount >= 0
        used = self._used[tenant]
        if used[resource] + amount > self._limits[tenant][resource]:
            return False
        used[resource] += amount
        return True

    def discharge(self, tenant: Tenant, resource: Resource, amount: int) -> None:
        """Take back a charge."""
        used = self._used[tenant]
        assert 0 <= amount <= used[resource]  # Q1
        used[resource] -= amount

    def left(self, tenant: Tenant, resource: Resource) -> int:
        """Return how much may still be charged."""
        return self._limits[tenant][resource] - self._used[tenant][resource]

    def used(self, tenant: Tenant, resource: Resource) -> int:
        """Return what is charged."""
        return self._used[tenant][resource]
