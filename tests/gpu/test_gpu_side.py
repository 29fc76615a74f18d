"""Copies up to the GPU of objects that are verified: told to readers only when they were right."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from kvd.config_gpu import GpuKnobs
from kvd.entry import SlotState
from kvd.gpu import GpuSide
from kvd.tiers.gpu import Outcome
from kvd.types import SlabId
from kvd.verifying import take_out
from kvd_client.wire_gpu import GPU_SLABS
from tests.cold_kit import NAMES, World, turns
from tests.unit.test_checking import Judge

if TYPE_CHECKING:
    from kvd.tiers.gpu import Copy
    from kvd.tiers.host import HostTier
    from kvd.verifier import Verifier

SIZE = 2 << 20


@pytest.mark.parametrize("same", [True, False])
def test_a_twin_of_what_differs_is_told_to_nobody(same: bool) -> None:  # noqa: FBT001
    """The host slot is checked behind the copy; while that lasts its chunk stays where it is."""

    async def main() -> None:
        world, judge, copies = World(), Judge(), list["Copy"]()
        knobs = GpuKnobs(size_bytes=SIZE, slab_bytes=SIZE)
        side = GpuSide(
            world.catalog,
            knobs,
            cast("HostTier", world.memory),
            1 << 20,
            epoch=1,
            loop=asyncio.get_running_loop(),
            verifier=cast("Verifier", judge),
        )
        side.twins.pool.add_blank(SlabId(GPU_SLABS))
        side.tier.submit = copies.append  # type: ignore[method-assign, assignment]
        space = world.enter()
        world.put(space, NAMES[:1])
        chunk = space.chunks[NAMES[0]]
        slot = chunk.slots[0]
        slot.watched = True
        side._wanted(slot)
        side._wanted(slot)
        (copy,) = copies
        copy.done(Outcome.OK)
        await turns(3)
        (check,) = judge.checks
        assert not side.twins.readable(slot)
        assert chunk.moves == 1
        if not same:
            take_out(world.catalog, slot)
        judge.end(check)
        assert side.twins.readable(slot) == same
        assert not chunk.moves
        side.twins.check()
        world.catalog.check()
        if same:  # and found to differ later, with readers of the twin about
            world.catalog.pin([chunk])
            take_out(world.catalog, slot)
            assert slot.state is SlotState.QUARANTINED
            assert slot.twin is not None, "it is read where it is"
            side.twins.check()
            world.catalog.unpin([chunk])
            world.catalog.check()
        else:
            assert slot.twin is None

    asyncio.run(main())
