"""The source process's keeper, with the process played: what it is given, told, and told of."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvd.peer import source as source_module
from kvd.peer.process import MoverProcess
from kvd.types import SlabId
from tests.peer.test_landing import PAGE, PLACES, TENANT, Host

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.catalog import Catalog

SLABS, DIGEST = 6, b"d" * 16


class Process:
    """A source process, played: what it was told, and whether it was killed."""

    def __init__(self, *_: object, **hooks: Any) -> None:
        """Take the hooks."""
        self.hooks = hooks
        self.slabs: set[SlabId] = set()
        self.mapping: set[SlabId] = set()
        self.sent: list[tuple[object, ...]] = []
        self.process = SimpleNamespace(pid=1)

    def give(self, slab: SlabId, *_: object, **__: object) -> None:
        """Note a slab."""
        self.slabs.add(slab)

    def send(self, *message: object) -> None:
        """Note a message."""
        self.sent.append(message)

    def kill(self) -> None:
        """End at once."""
        self.hooks["on_gone"]()


class Played:
    """A source on a catalog; its processes are played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, catalog: Catalog) -> None:
        """Start it; the first process is up."""
        self.made: list[Process] = []
        self.later: list[Callable[[], None]] = []
        self.taken: list[tuple[Any, ...]] = []
        monkeypatch.setattr(source_module, "MoverProcess", self._process)
        later = self.later
        loop: Any = SimpleNamespace(time=lambda: 1.0, call_later=lambda _, do: later.append(do))
        slabs: Any = SimpleNamespace(fd=lambda slab: slab)
        self.source = source_module.Source(
            loop,
            catalog,
            slabs,
            None,
            transport="tcp",
            devices=(),
            tenants=[TENANT],
            on_taken=lambda *what: self.taken.append(what),
        )
        self.source.start()
        self.say("up", "name")

    def _process(self, *arguments: object, **hooks: Any) -> Process:
        self.made.append(Process(*arguments, **hooks))
        return self.made[-1]

    def say(self, *message: object) -> None:
        """Hear the process."""
        self.made[-1].hooks["on_message"](list(message))


def test_a_source_that_was_asked_of_too_much_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata that no longer fits a message ends the process; the next begins with no slab."""
    host = Host()
    for number in range(1, SLABS):
        host.catalog.pool.add_blank(SlabId(number))
    played = Played(monkeypatch, host.catalog)
    for _ in range(SLABS + 1):
        played.source.tick()
    assert played.made[0].slabs == set(range(SLABS)), "one a tick, while nothing is asked of it"
    played.say("mapped", 0, 1 << 30, 1, bytes(source_module.METADATA_MOST))
    assert played.source.pid == 1
    played.say("mapped", 1, 2 << 30, 2, bytes(source_module.METADATA_MOST + 1))
    assert played.source.pid == 0
    (again,) = played.later
    again()
    assert len(played.made) == 2
    assert played.made[1].slabs == set()


def test_a_process_that_dies_of_a_slab_is_given_none_ahead_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one maps what is asked of, and nothing before."""
    played = Played(monkeypatch, Host().catalog)
    for dies in (False, True):
        first = played.made[-1]
        first.mapping = {SlabId(0)} if dies else set()
        first.kill()
        played.later.pop()()
        played.say("up", "name")
        played.source.tick()
        assert played.made[-1].slabs == (set() if dies else {0})


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_a_real_process_was_mapping_when_it_died() -> None:
    """A slab that it says it maps is not among it; one that it cannot map is."""
    pytest.importorskip("nixl")

    async def story() -> list[set[SlabId]]:
        heard: asyncio.Queue[str] = asyncio.Queue()
        gone = asyncio.Event()
        process = MoverProcess(
            asyncio.get_running_loop(),
            "source",
            transport="tcp",
            devices=(),
            on_message=lambda message: heard.put_nowait(message[0]),
            on_gone=gone.set,
        )
        fds = [os.memfd_create("kvd-slab") for _ in range(2)]
        os.ftruncate(fds[0], PAGE)  # the other is empty: it cannot be mapped
        seen = []
        try:
            process.give(SlabId(0), PAGE, fds[0], writable=False)
            seen.append(set(process.mapping))
            assert [await heard.get(), await heard.get()] == ["up", "mapped"]
            seen.append(set(process.mapping))
            process.give(SlabId(1), PAGE, fds[1], writable=False)
            await gone.wait()
            return [*seen, process.mapping]
        finally:
            process.kill()
            for fd in fds:
                os.close(fd)

    assert asyncio.run(story()) == [{0}, set(), {1}]


def test_the_policy_hears_of_what_is_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each chunk that is offered, when it is; of a miss nothing."""
    host = Host()
    assert host.take(1, 0)
    chunk = host.landings.publish(1, 0)
    served: list[object] = []
    monkeypatch.setattr(host.catalog.eviction, "served", served.append)
    played = Played(monkeypatch, host.catalog)
    played.source.take(7, None, 1)
    played.source.take(8, chunk, 1)
    assert played.taken == [(7, 0, None)]
    assert played.made[0].sent == [("sum", 8, [[0, 0, PAGE]])]
    assert not served
    played.say("mapped", 0, 1 << 30, 1, b"m")
    played.say("summed", 8, [DIGEST])
    assert served == [chunk]
    ticket, _, held = played.taken[1]
    assert (ticket, held[0].digest) == (8, DIGEST)
    played.source.drop(8)
    assert host.usable() == 1
    assert host.free == PLACES - 1
