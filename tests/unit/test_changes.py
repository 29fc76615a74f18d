"""What observers of the catalog hear; tests/state has the machines that compare it with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.changes import tiers_of
from kvd.types import Generation
from tests.unit.test_catalog import ME, PAGE, ROOT, Host, chain, layout_of

if TYPE_CHECKING:
    from kvd.changes import Tier
    from kvd.entry import Chunk, Space

PLACE = (1, 4096, 8192, 7)


class Notebook:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bytes, Tier, str]] = []

    def stored(self, space: Space, chunk: Chunk, tier: Tier) -> None:
        """Note a chunk; its parent can be asked for."""
        assert space.chunks[chunk.hash] is chunk
        self.lines.append(("stored", chunk.hash, tier, ""))

    def removed(self, space: Space, chunk: Chunk, tier: Tier, reason: str) -> None:
        """Note that one is gone, and why; what it was after can still be asked for."""
        assert chunk.space is space
        self.lines.append(("removed", chunk.hash, tier, reason))

    def take(self) -> list[tuple[str, bytes, Tier, str]]:
        """Return what was heard since the last time."""
        lines, self.lines = self.lines, []
        return lines


def stored_host(groups: int = 1) -> tuple[Host, Space, Notebook]:
    """A host with a listener and a space of so many groups."""
    host = Host(4)
    space = host.enter(layout_of(*[PAGE] * groups))
    notebook = Notebook()
    host.catalog.changes.watch(notebook)
    return host, space, notebook


def fill(host: Host, space: Space, hashes: list[bytes], groups: int) -> list[Generation]:
    """Reserve chunks; return the generations of their slots."""
    records = host.catalog.reserve(
        space, ME, 0, parent=ROOT, hashes=hashes, groups=groups, deadline_ns=9
    )
    return [Generation(record[-1]) for record in records]


def test_whole_chunks_in_chain_order() -> None:
    """A chunk is told of when its last object is published, not before, the head first."""
    host, space, notebook = stored_host(groups=2)
    hashes = chain("a", 3)
    first = fill(host, space, hashes, groups=1)
    host.catalog.publish_all(ME, first, 1)
    assert notebook.take() == []
    host.catalog.publish_all(ME, fill(host, space, hashes, groups=2), 1)
    assert notebook.take() == [("stored", key, "host", "") for key in hashes]


def test_both_tiers_and_the_reasons() -> None:
    """Going down is a second copy; giving up either is told with its reason."""
    host, space, notebook = stored_host()
    (key,) = hashes = chain("a", 1)
    host.catalog.publish_all(ME, fill(host, space, hashes, groups=1), 1)
    chunk = space.chunks[key]
    host.catalog.begin_demotion(chunk)
    host.catalog.end_demotion(chunk, (PLACE, 1, False))
    assert tiers_of(chunk) == ("host", "nvme")
    host.catalog.begin_demotion(chunk)
    host.catalog.end_demotion(chunk, (PLACE, 1, False))  # written again elsewhere: no news
    host.catalog.evict(chunk)
    slots = host.catalog.begin_promotion(chunk)
    assert slots is not None
    assert notebook.take() == [
        ("stored", key, "host", ""),
        ("stored", key, "nvme", ""),
        ("removed", key, "host", "clean"),
    ]
    host.catalog.end_promotion(chunk, slots, read=True)
    host.catalog.drop_cold(chunk, "damaged")
    host.catalog.evict(chunk, "operator")
    assert notebook.take() == [
        ("stored", key, "host", ""),
        ("removed", key, "nvme", "damaged"),
        ("removed", key, "host", "operator"),
    ]
    assert tiers_of(chunk) == ()


def test_half_a_copy_is_no_news() -> None:
    """A copy of some of a chunk's objects is told of in neither tier, nor is its end."""
    host, space, notebook = stored_host(groups=2)
    (key,) = hashes = chain("a", 1)
    host.catalog.publish_all(ME, fill(host, space, hashes, groups=1), 1)
    chunk = space.chunks[key]
    host.catalog.begin_demotion(chunk)
    host.catalog.end_demotion(chunk, (PLACE, 1, False))
    host.catalog.evict(chunk)
    host.catalog.drop_cold(chunk)
    assert notebook.take() == []


def test_every_observer_hears() -> None:
    """Two listeners hear the same."""
    host, space, notebook = stored_host()
    second = Notebook()
    host.catalog.changes.watch(second)
    host.catalog.publish_all(ME, fill(host, space, chain("a", 2), groups=1), 1)
    assert notebook.lines == second.lines
    assert len(second.lines) == 2
