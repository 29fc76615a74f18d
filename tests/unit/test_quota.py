"""Quota: charges between zero and the limit, each tenant and resource for itself."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.quota import Quota, Resource
from kvd.types import Tenant

A: Final = Tenant("a")
B: Final = Tenant("b")
LIMITS: Final = {
    A: {resource: 10 + at for at, resource in enumerate(Resource)},
    B: dict.fromkeys(Resource, 7),
}


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.sampled_from(list(Resource)), st.integers(-12, 12)),
        max_size=40,
    )
)
def test_charges_are_a_sum(steps: list[tuple[Tenant, Resource, int]]) -> None:
    """A charge is taken exactly when it fits, a refused one changes nothing (Q1)."""
    quota = Quota(LIMITS)
    used = {(tenant, resource): 0 for tenant in LIMITS for resource in Resource}
    for tenant, resource, amount in steps:
        limit = LIMITS[tenant][resource]
        if amount >= 0:
            fits = used[tenant, resource] + amount <= limit
            assert quota.charge(tenant, resource, amount) == fits
            used[tenant, resource] += amount * fits
        elif -amount <= used[tenant, resource]:
            quota.discharge(tenant, resource, -amount)
            used[tenant, resource] += amount
        else:
            with pytest.raises(AssertionError):
                quota.discharge(tenant, resource, -amount)
        for (whose, what), sum_ in used.items():
            assert quota.used(whose, what) == sum_
            assert quota.left(whose, what) == LIMITS[whose][what] - sum_


def test_a_negative_charge_is_a_bug() -> None:
    """Neither a charge nor a discharge may be negative: each would be the other unseen."""
    quota = Quota(LIMITS)
    assert quota.charge(A, Resource.LEASES, 3)
    with pytest.raises(AssertionError):
        quota.charge(A, Resource.LEASES, -1)
    with pytest.raises(AssertionError):
        quota.discharge(A, Resource.LEASES, -1)
    assert quota.used(A, Resource.LEASES) == 3


def test_an_unknown_tenant_is_a_bug() -> None:
    """Who has no limits has no account either."""
    with pytest.raises(KeyError):
        Quota(LIMITS).charge(Tenant("c"), Resource.SESSIONS, 0)
