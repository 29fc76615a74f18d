"""Slabs that movers map before they are asked of: of whom, how many; and a real fleet's maps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bench._fleet import wait_for
from kvd.peer import ahead
from kvd.peer import source as source_module
from kvd.peer.ahead import next_slab
from kvd.tiers.slab import SlabPool
from kvd.types import OwnerId, SlabId, Tenant
from tests.daemon_fixture import store
from tests.peer.test_fleet import prefix

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Process:
    """A source process, played: what it was told, and whether it was killed."""

    def __init__(self, *_: object, **hooks: Any) -> None:
        """Take the hooks."""
        self.hooks = hooks
        self.slabs: set[SlabId] = set()
        self.process = SimpleNamespace(pid=1)

    def give(self, slab: SlabId, *_: object, **__: object) -> None:
        """Note a slab."""
        self.slabs.add(slab)

    def kill(self) -> None:
        """End at once."""
        self.hooks["on_gone"]()


def test_a_source_that_was_asked_of_too_much_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that no longer fits a message ends the process; the next begins with no slab."""
    made: list[Process] = []
    later: list[Callable[[], None]] = []

    def process(*arguments: object, **hooks: Any) -> Process:
        made.append(Process(*arguments, **hooks))
        return made[-1]

    monkeypatch.setattr(source_module, "MoverProcess", process)
    loop: Any = SimpleNamespace(time=lambda: 1.0, call_later=lambda _, do: later.append(do))
    catalog: Any = SimpleNamespace(pool=pool(ONE))
    slabs: Any = SimpleNamespace(fd=lambda slab: slab)
    source = source_module.Source(
        loop,
        catalog,
        slabs,
        None,
        transport="tcp",
        devices=(),
        tenants=[ONE],
        on_taken=lambda *_: None,
    )
    source.start()
    say = made[0].hooks["on_message"]
    say(["up", "name"])
    for _ in range(SLABS + 1):
        source.tick()
    assert made[0].slabs == set(range(SLABS)), "one a tick, while nothing is asked of it"
    say(["mapped", 0, 1 << 30, 1, bytes(source_module.METADATA_MOST)])
    assert source.pid == 1
    say(["mapped", 1, 2 << 30, 2, bytes(source_module.METADATA_MOST + 1)])
    assert source.pid == 0
    (again,) = later
    again()
    assert len(made) == 2
    assert made[1].slabs == set()


def maps(pid: int) -> int:
    """Count the slabs that a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvd-slab")
