"""What is offered to other hosts: verified where it is watched, summed once, told with its sum."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from kvd.peer.source import Source
from kvd.verifying import take_out
from tests.cold_kit import NAMES, TWO_RANKS, World
from tests.unit.test_checking import Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.entry import Chunk
    from kvd.peer.process import MoverProcess
    from kvd.peer.protocol import Held

MASK = 3


class Process:
    """Stands for the source process: what it was asked, answered when the test says so."""

    def __init__(self) -> None:
        self.slabs: set[int] = set()
        self.sums: list[tuple[int, list[Any]]] = []

    def send(self, kind: str, *fields: Any, fds: Sequence[int] = ()) -> None:
        """Take note of what is to be summed."""
        assert not fds or kind == "slab"
        if kind == "sum":
            self.sums.append((fields[0], fields[1]))


class Slabs:
    """Stands for the host tier's descriptors."""

    def fd(self, slab: int) -> int:
        """Return one."""
        return slab


class Stage:
    """A source over a stored chunk of two objects, the first of them watched."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.world, self.judge, self.process = World(), Judge(), Process()
        self.told: list[tuple[int, Sequence[Held] | None]] = []
        space = self.world.enter(TWO_RANKS)
        for rank in (0, 1):
            assert self.world.put(space, NAMES[:1], rank=rank) == 1
        self.chunk: Chunk = space.chunks[NAMES[0]]
        self.chunk.slots[0].watched, self.chunk.slots[0].digest = True, b"w" * 16
        self.source = Source(
            loop,
            self.world.catalog,
            Slabs(),
            None,
            verifier=self.judge,
            transport="tcp",
            devices=(),
            tenants=(),
            on_taken=lambda ticket, _, held: self.told.append((ticket, held)),
        )
        self.source._process = cast("MoverProcess", self.process)
        self.source.up = True
        self.source._on_message(["mapped", self.chunk.slots[0].slab, 1 << 20, 1, b""])

    def digests(self) -> list[bytes]:
        """Return what the last offer said of its objects' bytes."""
        held = self.told[-1][1]
        return [each.digest for each in held or ()]


def staged(scene: Callable[[Stage], None]) -> None:
    """Run a scene on a loop."""

    async def main() -> None:
        stage = Stage(asyncio.get_running_loop())
        scene(stage)
        stage.world.catalog.check()

    asyncio.run(main())


def test_what_is_watched_is_checked_first_and_nothing_is_summed_twice() -> None:
    """The process sums what nobody has summed, once; the offer has the sums of the publish."""

    def scene(stage: Stage) -> None:
        stage.source.take(1, stage.chunk, MASK)
        (check,) = stage.judge.checks
        assert list(check.left) == [stage.chunk.slots[0]]
        assert not stage.process.sums
        stage.judge.end(check)
        ((ticket, objects),) = stage.process.sums
        assert [objects[0][1]] == [stage.chunk.slots[1].offset_bytes]
        stage.source._on_message(["summed", ticket, [b"p" * 16]])
        assert stage.digests() == [b"w" * 16, b"p" * 16]
        stage.source.drop(1)
        stage.source.take(2, stage.chunk, MASK)
        stage.judge.end(stage.judge.checks[-1])
        assert stage.digests() == [b"w" * 16, b"p" * 16]
        assert len(stage.process.sums) == 1
        stage.source.drop(2)

    staged(scene)


def test_what_differs_is_not_offered() -> None:
    """An object that was taken out by the check is not there for others either."""

    def scene(stage: Stage) -> None:
        stage.source.take(1, stage.chunk, 1)
        (check,) = stage.judge.checks
        take_out(stage.world.catalog, stage.chunk.slots[0])
        stage.judge.end(check)
        assert stage.told == [(1, ())]
        stage.source.drop(1)

    staged(scene)


def test_who_lets_go_while_it_is_checked_is_told_nothing() -> None:
    """The pin goes, and the check is left."""

    def scene(stage: Stage) -> None:
        stage.source.take(1, stage.chunk, MASK)
        (check,) = stage.judge.checks
        stage.source.drop(1)
        assert not stage.judge.checks
        assert not stage.chunk.pins
        stage.judge.end(check)
        assert not stage.told

    staged(scene)
