"""What the dispatcher knows of the rest of the daemon: the tiers around, and other hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvd.cost import Rates
    from kvd.entry import Chunk, Slot, Space
    from kvd.places import PlaceRecord
    from kvd.types import Generation, OwnerId, Tenant
    from kvd.verifying import Check
    from kvd_client import wire_gpu
    from kvd_client.wire import Status


class Riser(Protocol):
    """What brings chunks up from the tier below."""

    def promote(self, chunk: Chunk, done: Callable[[bool], None]) -> bool:
        """Begin, or join; False when there is no room."""
        ...

    def leave(self, chunk: Chunk, done: Callable[[bool], None]) -> None:
        """Stop waiting for a promotion."""
        ...

    def cost(self) -> Rates:
        """Return the measured rates."""
        ...

    def touched(self, tenant: Tenant, hashes: Sequence[bytes]) -> None:
        """Hear of a request's chain, once."""
        ...

    def wake(self) -> None:
        """Hear that a store found no room."""
        ...


class Reach(Protocol):
    """What other hosts may have."""

    def elsewhere(
        self, space: Space, hashes: Sequence[bytes], found: int, done: Callable[[int], None]
    ) -> bool:
        """Ask how many chunks after `found` others have; False when it is not worth asking."""
        ...

    def fetch(
        self,
        space: Space,
        hashes: Sequence[bytes],
        found: int,
        *,
        over_cold: bool,
        deadline_ns: int,
        worth: Callable[[int], int],
        done: Callable[[], None],
    ) -> bool:
        """Fetch what `worth` says of what they have; False when there is nothing to wait for.

        With `over_cold`, also what lies in the tier below.
        """
        ...

    def rates(self) -> tuple[float, float, float]:
        """Return bytes a second, latency in seconds and queued bytes."""
        ...


class Verifier(Protocol):
    """What checks the bytes of objects before they are told of."""

    def check(self, slots: Iterable[Slot], done: Callable[[], None]) -> Check:
        """Have pinned, watched objects checked; what differs is no longer in its chunk then."""
        ...

    def leave(self, check: Check) -> list[Slot]:
        """Stop waiting; return what has no answer."""
        ...


class GpuSide(Protocol):
    """What the tier in GPU memory changes about requests."""

    def use(self, uuid: bytes) -> Status:
        """Tell whether there is a tier on this GPU."""
        ...

    def slab(self, request: int, tenant: Tenant, slab: int) -> wire_gpu.GpuSlabReply:
        """Say how a slab of the tenant's is mapped."""
        ...

    def reserved(self, owner: OwnerId, places: list[PlaceRecord]) -> list[PlaceRecord]:
        """Give places in GPU memory instead, as far as there is room."""
        ...

    def places(
        self, chunks: Sequence[Chunk], first: int, rank: int, places: list[PlaceRecord]
    ) -> list[PlaceRecord]:
        """Tell of GPU memory instead, where pinned chunks are there."""
        ...

    def whole(self, chunk: Chunk) -> bool:
        """Tell whether all that rank 0 reads of a chunk may be read from GPU memory."""
        ...

    def publish(
        self, owner: OwnerId, generations: Sequence[Generation], now_ns: int
    ) -> list[Status]:
        """Publish slots, with or without a place in GPU memory."""
        ...
