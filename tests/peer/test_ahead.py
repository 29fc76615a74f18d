"""Slabs that movers map before they are asked of: of whom, how many; and a real fleet's maps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench._fleet import wait_for
from kvd.peer import ahead
from kvd.peer.ahead import next_slab
from kvd.tiers.slab import SlabPool
from kvd.types import OwnerId, SlabId, Tenant
from tests.daemon_fixture import store
from tests.peer.test_fleet import prefix

if TYPE_CHECKING:
    from bench._fleet import Fleet
    from tests.peer.test_fleet import Connect

PAGE, SLABS = 4096, 6
ONE, TWO = Tenant("one"), Tenant("two")


def pool(*tenants: Tenant) -> SlabPool:
    """Make a pool of six slabs, of which each tenant has one."""
    made = SlabPool(PAGE, dict.fromkeys(tenants, SLABS))
    for number in range(SLABS):
        made.add_blank(SlabId(number))
    for tenant in tenants:
        assert made.take(tenant, PAGE, OwnerId(1)) is not None
    return made


def given(made: SlabPool, *tenants: Tenant) -> set[SlabId]:
    """Return all that a process is given, one after the other."""
    known: set[SlabId] = set()
    while (slab := next_slab(made, tenants, known)) is not None:
        assert slab not in known
        known.add(slab)
    return known


def test_nothing_is_mapped_of_a_tenant_that_shares_nothing() -> None:
    """Nor what it could come to have; where all share, everything is."""
    made = pool(ONE, TWO)
    (own,) = (slab.id for slab in made.slabs_of(ONE))
    assert given(made, ONE) == {own}
    assert given(made) == set()
    assert given(made, ONE, TWO) == set(range(SLABS))
    assert given(pool(ONE), ONE) == set(range(SLABS))


def test_slabs_come_in_the_order_in_which_they_are_used() -> None:
    """A tenant's own first, then the blank one that is assigned next."""
    made = pool(ONE)
    known = {slab.id for slab in made.slabs_of(ONE)}
    slab = next_slab(made, [ONE], known)
    assert made.take(ONE, PAGE, OwnerId(1)) is not None
    assert slab in {slab.id for slab in made.slabs_of(ONE)}


def test_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beyond the bound is mapped when it is asked for."""
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 3 * PAGE)
    assert len(given(pool(ONE), ONE)) == 3
    monkeypatch.setattr(ahead, "AHEAD_SLABS", 2)
    assert len(given(pool(ONE), ONE)) == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_idle_movers_of_a_fleet_map_the_host_tier(fleet: Fleet, client: Connect, seed: int) -> None:
    """Before anything was fetched, source and sink have all slabs mapped; and only once."""
    host = fleet.hosts["b"]
    engine = client(host)
    assert store(engine, prefix(engine, seed, 1)) == 1
    page = host.stat()
    pids = [page["peer"]["source_pid"], host.peer("a")["mover_pid"]]
    slabs = (512 << 20) // (64 << 20)
    for pid in pids:
        wait_for(lambda p=pid: maps(p) == slabs, f"{slabs} slabs in {pid}", 60)  # type: ignore[misc]
    time.sleep(0.5)
    assert [maps(pid) for pid in pids] == [slabs, slabs]


def maps(pid: int) -> int:
    """Count the slabs that a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvd-slab")
