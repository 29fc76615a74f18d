"""Hosts of a fleet in one process: a catalog each, and a real directory between them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from kvd.clock import MonotonicClock
from kvd.config_peer import PeerKnobs
from kvd.peer import redis_calls
from kvd.peer.redis_directory import RedisDirectory
from kvd.types import Generation
from tests.unit.test_catalog import ME, PAGE, ROOT, Host, chain, layout_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest

    from kvd.entry import Space

WAIT_S = 30.0
LAYOUT = layout_of(PAGE)
SLACK_S = 10.0
"""Two busy cores may take so long to wake a loop."""
PATIENT_S = 20.0
"""Given to the server where a test needs its answer, however busy the machine is."""


class Node:
    """One host: what it holds, and its directory."""

    def __init__(self, url: str, name: str, epoch: int = 1, **knobs: object) -> None:
        """Start with room for some hundred chunks, and nothing in it."""
        self.host = Host(16, places=64)
        settings: dict[str, object] = {
            "host": name,
            "address": f"{name}.example:7600",
            "domain": f"rack-of-{name}",
            "directory": url,
            "heartbeat_s": 0.3,
            "lookup_ms": 250.0,
            **knobs,
        }
        self.knobs = PeerKnobs(**settings)  # type: ignore[arg-type]
        self.directory = RedisDirectory(self.knobs, self.host.catalog, MonotonicClock(), epoch)
        self.space: Space = self.host.enter(LAYOUT)

    def store(self, hashes: list[bytes], first: int = 0) -> None:
        """Store the chunks of a chain from `first` on."""
        catalog = self.host.catalog
        records = catalog.reserve(
            self.space,
            ME,
            0,
            parent=hashes[first - 1] if first else ROOT,
            hashes=hashes[first:],
            groups=1,
            deadline_ns=1 << 62,
        )
        generations = [Generation(record[-1]) for record in records if record[-1]]
        catalog.publish_all(ME, generations, 1)

    def evict(self, hashes: list[bytes]) -> None:
        """Evict chunks, the last first."""
        for key in reversed(hashes):
            self.host.catalog.evict(self.space.chunks[key])

    async def hosts(self, hashes: list[bytes], first: int = 0) -> list[set[str]]:
        """Ask who holds a chain; the names."""
        found = await self.directory.where(self.space, hashes, first)
        return [{one.host for one in holders} for holders in found]

    async def sees(self, hashes: list[bytes], names: set[str], count: int | None = None) -> None:
        """Wait until exactly the first `count` chunks are seen at exactly these hosts."""
        count = len(hashes) if count is None else count
        await self.finds(hashes, [names] * count + [set()] * (len(hashes) - count))

    async def finds(self, hashes: list[bytes], expected: list[set[str]], first: int = 0) -> None:
        """Wait until a look-up says exactly this."""
        found: list[set[str]] = []

        async def agrees() -> bool:
            nonlocal found
            found = await self.hosts(hashes, first)
            return found == expected

        try:
            async with asyncio.timeout(WAIT_S):
                while not await agrees():  # noqa: ASYNC110 - a server, no event, changes it
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError((found, self.directory.stats())) from None


@asynccontextmanager
async def fleet(*nodes: Node) -> AsyncIterator[None]:
    """Run hosts until the block ends; wait for their directory before it begins."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.directory.run(group)) for node in nodes]
        try:
            await until(lambda: all(node.directory.gate.open for node in nodes))
            yield
        finally:
            for task in tasks:
                task.cancel()
            for node in nodes:
                await node.directory.close()


async def until(condition: Callable[[], object], seconds: float = WAIT_S) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a server, no event, changes it
            await asyncio.sleep(0.02)


def patient(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Have calls wait for the server; return knobs by which hosts do so too, and last as long."""
    monkeypatch.setattr(redis_calls, "CALL_S", PATIENT_S)
    monkeypatch.setattr(redis_calls, "CONNECT_S", PATIENT_S)
    return {"lookup_ms": PATIENT_S * 1e3, "heartbeat_s": 1.5}


async def duration_s(node: Node, hashes: list[bytes]) -> float:
    """Measure one look-up."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await node.directory.where(node.space, hashes)
    return loop.time() - begun


def names(count: int, length: int) -> list[list[bytes]]:
    """Return chains that share nothing."""
    return [chain(f"chain-{number}", length) for number in range(count)]
