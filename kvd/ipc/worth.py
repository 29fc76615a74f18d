"""How much of a prefix is worth loading, of what is here and of what other hosts have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.cost import Rates, sooner_by_peer
from kvd.prefix import load_of, present

if TYPE_CHECKING:
    from kvd.catalog import Catalog
    from kvd.entry import Space
    from kvd.ipc.seams import Reach, Riser


class Worth:
    """Weighs loading against computing by the rates that were measured."""

    def __init__(self, catalog: Catalog, riser: Riser | None, reach: Reach | None) -> None:
        """Share the loop's state."""
        self._catalog = catalog
        self._riser = riser
        self._reach = reach

    def of(self, space: Space, hashes: list[bytes], here: int, more: int) -> int:
        """Return how much is faster to load than to compute: what is here, and `more` elsewhere."""
        chunks, warm = present(space, hashes[:here])
        if not more and (warm == len(chunks) or self._riser is None):
            return here  # from host memory it always is
        lengths = {self._catalog.usable(space, hashes[:warm]), here, here + more} - {0}
        offers = [(n, load_of(space, chunks[:n], n)) for n in sorted(lengths)]
        return space.gate.worth(offers, self._rates(peers=bool(more)))

    def of_whole(self, space: Space, hashes: list[bytes], here: int, whole: int) -> int:
        """Return how much of a prefix is worth it of which others complete what is here."""
        return max(here, self.of(space, hashes, here, max(0, whole - here)))

    def from_peers(self, space: Space, hashes: list[bytes], here: int) -> int:
        """Return from which chunk on others are asked; for what lies below, if it is slower."""
        chunks, warm = present(space, hashes[:here])
        cold = sum([chunk.cold_bytes for chunk in chunks[warm:] if not chunk.ready])
        raw = sum([chunk.weight_bytes - chunk.size_bytes for chunk in chunks[warm:]])
        if cold and sooner_by_peer(cold, raw, self._rates(peers=True)):
            return warm
        return here

    def _rates(self, *, peers: bool) -> Rates:
        """Return what was measured of the tier below, and of other hosts."""
        rates = self._riser.cost() if self._riser is not None else Rates(0.0, 0.0, 0.0, 0)
        if self._reach is not None and peers:
            rates = Rates(*rates[:4], *self._reach.rates())
        return rates
