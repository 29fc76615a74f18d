"""Which slabs a mover process is given before anything is asked of them. Pure.

To map a slab costs a page table entry a page, and over RDMA a registration: with 4 KiB pages some
10 ms for 128 MiB, a sixth of what its transfer takes over a 2 GB/s link. A process that has nothing
else to do is given one slab at a time, so that the first transfer finds them mapped. None of a
tenant that shares nothing with the host in question: what a process maps is what a fault of it, or
of its peer, could reach. A process that ends while it maps one is given none ahead any more: what
it died of, as a limit on locked memory, would end the next one, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kvd.types import SlabId, Tenant

AHEAD_BYTES: Final = 16 << 30
"""Of one process: 32 MiB of page tables at most. What lies beyond is mapped as it is asked for."""
AHEAD_SLABS: Final = 256
"""The same in slabs, each of which makes a source's metadata longer."""


class Slab(Protocol):
    """A slab that a tenant has."""

    id: SlabId


class Pool(Protocol):
    """The host tier's slabs: who has which."""

    slab_bytes: int

    @property
    def shares(self) -> Mapping[Tenant, int]:
        """Most slabs that a tenant may have, of every tenant."""
        ...

    def slabs_of(self, tenant: Tenant) -> Iterable[Slab]:
        """Iterate over a tenant's slabs."""
        ...

    def held_count(self, tenant: Tenant) -> int:
        """Count a tenant's slabs."""
        ...

    def blanks(self) -> Iterable[SlabId]:
        """Iterate over the slabs that no tenant has, in the order in which they are assigned."""
        ...

    def blank_count(self) -> int:
        """Count them."""
        ...


def next_slab(pool: Pool, tenants: Collection[Tenant], known: set[SlabId]) -> SlabId | None:
    """Return a slab to map next, None when enough are.

    Args:
        pool: The host tier's.
        tenants: That share something with the host in question.
        known: Slabs that are mapped already, of those tenants only.
    """
    if len(known) >= min(AHEAD_SLABS, AHEAD_BYTES // pool.slab_bytes):
        return None
    blank = set(tenants) == pool.shares.keys()  # nobody else can come to have them
    have = sum(pool.held_count(tenant) for tenant in tenants) + blank * pool.blank_count()
    if len(known) >= have:
        return None
    for tenant in tenants:
        for slab in pool.slabs_of(tenant):
            if slab.id not in known:
                return slab.id
    return next((slab for slab in pool.blanks() if slab not in known), None) if blank else None
