"""The peer protocol against everything at once: loss, partitions, crashes, stops, wrong bytes.

`sim.py` checks while it runs: a hit is always the key's value, every fetch ends by its deadline, no
place is lost or used twice, and after the faults have ended all comes to rest.
"""

from __future__ import annotations

import os

import pytest

from kvd.peer.asker import Asker
from kvd.peer.protocol import AskerAction, GiveBack, Quarantine
from tests.peer.sim import World, Wrong

SEEDS = int(os.environ.get("KVD_PEER_SEEDS", "2000"))
BATCHES = 8


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_seed_has_a_wrong_history(batch: int) -> None:
    """Whatever happens between three to seven hosts, no hit is wrong and nothing waits or leaks."""
    counts: dict[str, int] = {}
    for seed in range(batch, SEEDS, BATCHES):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        for name, count in world.counts.items():
            counts[name] = counts.get(name, 0) + count
    assert all(counts.values()), counts  # it had something to do: hits, fetches, fences


def test_same_seed_same_history() -> None:
    """A seed says all: twice the same one gives the same history, another one another."""
    assert World(7).run() == World(7).run() != World(8).run()


class GivesUpTooSoon(Asker):
    """Frees slots at the deadline, as if releasing a transfer stopped it."""

    def _quarantine(self, now_ns: int, number: int) -> list[AskerAction]:
        actions = super()._quarantine(now_ns, number)
        read = self.reads.pop(number)
        self.quarantined_bytes -= read.size_bytes
        return [GiveBack(a.read) if isinstance(a, Quarantine) else a for a in actions]


class BelievesAll(Asker):
    """Does not look at the seals."""

    @staticmethod
    def _believes(*_: object) -> bool:
        return True


class NeverFences(Asker):
    """Lets the quarantine grow old."""

    def _fence(self, now_ns: int) -> list[AskerAction]:
        assert now_ns
        return []


class WaitsForEver(Asker):
    """Does not hear that nothing is said."""

    def tick(self, now_ns: int) -> list[AskerAction]:
        assert now_ns
        return []


@pytest.mark.parametrize(
    ("asker", "rules"),
    [
        (GivesUpTooSoon, {}),
        (BelievesAll, {}),
        (WaitsForEver, {}),
        (Asker, {"fence": False}),
    ],
    ids=["no quarantine", "no checksum", "no deadline", "killed but not dead"],
)
def test_a_broken_rule_is_found(asker: type[Asker], rules: dict[str, bool]) -> None:
    """The simulation sees each rule that is broken on purpose, within a few hundred seeds."""
    for seed in range(400):
        try:
            World(seed, asker, **rules).run()
        except Wrong:
            return
    pytest.fail("nothing was noticed")


def test_quarantine_that_is_never_fenced_stays() -> None:
    """Without the fence a slot whose source hangs for long stays in quarantine for as long."""
    fenced = sum(_fences(World(seed)) for seed in range(40))
    never = sum(_fences(World(seed, NeverFences)) for seed in range(40))
    assert fenced > never == 0


def _fences(world: World) -> int:
    world.run()
    return world.counts["fenced"]
