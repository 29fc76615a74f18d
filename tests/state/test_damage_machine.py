"""What differs is taken out at any moment: leases, writers, moves and orders go on as before."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvd.verifying import take_out
from tests.state.test_catalog_machine import CatalogMachine, picks

DAMAGED: Final = 3
"""Most objects found to differ; each costs a place for good."""


class DamageMachine(CatalogMachine):
    """Sessions, and objects that are found to differ."""

    @precondition(lambda self: self.model.published and len(self.model.damaged) < DAMAGED)
    @rule(pick=picks)
    def damage(self, pick: int) -> None:
        """An object is gone, whoever holds or needs its chunk; those who were told of it keep its
        place, and nobody else ever gets that.
        """
        known = sorted(self.model.published)
        key = known[pick % len(known)]
        chunk = self.chunk(key.world, key.path)
        assert chunk is not None
        take_out(self.catalog, chunk.slots[key.column])
        self.model.damaged.append((key.world.tenant, self.model.published[key]))
        self.model.remove({key})


@pytest.mark.timeout(300)
def test_damage() -> None:
    """Whatever is taken out, catalog and leases agree with the model; bytes stay what they are."""
    run_state_machine_as_test(DamageMachine)
