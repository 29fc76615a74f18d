"""What a fleet needs to hold: payload, metadata, staging, quarantine, copies, lost hosts. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.plan.loading import CHUNK_BYTES
from kvd.plan.shape import PlanError

if TYPE_CHECKING:
    from kvd.plan.shape import Shape

HOSTS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be held.

    Attributes:
        prefixes: Different ones.
        tokens: Of each.
        copies: Hosts that hold each.
        chunk_tokens: Of a chunk.
    """

    prefixes: int
    tokens: int
    copies: int = 1
    chunk_tokens: int = 256

    def payload_bytes(self, shape: Shape, smaller: float = 1.0) -> int:
        """Return the KV itself, all copies."""
        raw = self.prefixes * self.tokens * shape.token_bytes * self.copies
        return raw if smaller == 1.0 else math.ceil(raw / smaller)

    @property
    def chunks(self) -> int:
        """Chunks of all copies."""
        return self.prefixes * -(-self.tokens // self.chunk_tokens) * self.copies


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts, all alike.

    Attributes:
        hosts: How many.
        host_bytes: Memory (or disk) of each.
        share: Of it for kvd.
        staging: Of that share, for what is being stored or brought up.
        quarantine: Of that share, for slots whose writer is not known to have ended.
        lost: Hosts that may be lost while all is still held as often as asked for.
    """

    hosts: int
    host_bytes: int
    share: float = 0.8
    staging: float = 0.05
    quarantine: float = 0.01
    lost: int = 1

    @property
    def usable_bytes(self) -> int:
        """What kvd has, all hosts up."""
        return int(self.hosts * self.host_bytes * self.share)


class Budget(NamedTuple):
    """How a demand fits a fleet.

    Attributes:
        payload_bytes: The KV, all copies.
        metadata_bytes: Records of the chunks in the daemons.
        staging_bytes: Kept for stores and loads.
        quarantine_bytes: Kept for slots that may not be used.
        lost_bytes: What lost hosts had.
        usable_bytes: What kvd has.
        payload_fits: Whether the payload alone does.
        fits: Whether all of it does.
        hosts_for_payload: Hosts that hold the payload alone.
        hosts_needed: Hosts that hold all of it.
    """

    payload_bytes: int
    metadata_bytes: int
    staging_bytes: int
    quarantine_bytes: int
    lost_bytes: int
    usable_bytes: int
    payload_fits: bool
    fits: bool
    hosts_for_payload: int
    hosts_needed: int

    @property
    def needed_bytes(self) -> int:
        """All of it."""
        return sum(self[:5])


def budget(shape: Shape, demand: Demand, fleet: Fleet, smaller: float = 1.0) -> Budget:
    """Say how a demand fits, and how many hosts it takes.

    Args:
        shape: Of the model.
        demand: What is to be held.
        fleet: On what.
        smaller: How much smaller the tier's form makes it.

    Raises:
        PlanError: The fleet is none, or kept shares leave nothing.
    """
    kept = fleet.staging + fleet.quarantine
    if not (fleet.hosts > 0 and fleet.host_bytes > 0 and 0 < fleet.share <= 1 and 0 <= kept < 1):
        raise PlanError("a fleet has hosts with bytes, a share above 0, and reserves below 1")
    payload = demand.payload_bytes(shape, smaller)
    metadata = demand.chunks * CHUNK_BYTES
    usable = fleet.usable_bytes
    host = fleet.host_bytes * fleet.share
    for_payload = math.ceil(payload / host)
    needed = math.ceil((payload + metadata) / (host * (1 - kept))) + fleet.lost
    if needed > HOSTS_MAX:
        raise PlanError(f"that takes {needed:,} hosts: look at the numbers again")
    lost = int(min(fleet.lost, fleet.hosts) * host)
    return Budget(
        payload,
        metadata,
        int((usable - lost) * fleet.staging),
        int((usable - lost) * fleet.quarantine),
        lost,
        usable,
        payload <= usable,
        needed <= fleet.hosts,
        for_payload,
        needed,
    )


class Traffic(NamedTuple):
    """What hits take of a tier.

    Attributes:
        all_bytes_s: Of the fleet.
        host_bytes_s: Of one host, with all up.
        host_lost_bytes_s: Of one host, with the lost ones down.
    """

    all_bytes_s: float
    host_bytes_s: float
    host_lost_bytes_s: float


def traffic(shape: Shape, fleet: Fleet, requests_s: float, hit_tokens: int) -> Traffic:
    """Return the read bandwidth that so many hits a second need."""
    every = requests_s * shape.load_bytes(hit_tokens)
    return Traffic(
        every, every / fleet.hosts, every / max(1, fleet.hosts - min(fleet.lost, fleet.hosts))
    )
