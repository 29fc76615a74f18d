"""The parts of a daemon that not every configuration has, and what its clients may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd import rates
from kvd.gpu import GpuSide
from kvd.quota import Resource

if TYPE_CHECKING:
    from kvd.cold import ColdTier
    from kvd.config import Limits
    from kvd.daemon import Daemon
    from kvd.verifier import Verifier


def limits_of(limits: Limits, share_bytes: int) -> dict[Resource, int]:
    """Return what a tenant with so much host memory may hold."""
    return {
        Resource.SESSIONS: limits.sessions,
        Resource.LEASES: limits.sessions * limits.leases_per_session,
        Resource.PINNED_BYTES: int(share_bytes * limits.pinned_share),
        Resource.FILLING_BYTES: int(share_bytes * limits.filling_share),
    }


def verifier(daemon: Daemon) -> Verifier | None:
    """Build what verifies host memory, None where nothing does."""
    every = daemon.config.host.verify
    if not every:
        return None
    from kvd.verifier import Verifier

    return Verifier(daemon.catalog, daemon.tier, every, daemon.loop)


def cold_tier(daemon: Daemon) -> ColdTier | None:
    """Build the NVMe tier, None without one."""
    nvme = daemon.config.nvme
    if not nvme.size_bytes:
        return None
    from kvd.cold import ColdTier  # here, so that host memory alone needs fewer libraries
    from kvd.tiers.nvme import NvmeStore

    sure = daemon.verifier.sure if daemon.verifier is not None else None
    begin = rates.read(daemon.config.state_dir)
    store = NvmeStore(nvme.store(), daemon.loop)
    return ColdTier(daemon.catalog, daemon.tier, store, nvme, begin, sure=sure)


def gpu_side(daemon: Daemon) -> GpuSide | None:
    """Build the GPU tier, None without one."""
    knobs = daemon.config.gpu
    if not knobs.size_bytes:
        return None
    size, epoch = daemon.slab_bytes, daemon.epoch
    return GpuSide(
        daemon.catalog,
        knobs,
        daemon.tier,
        size,
        epoch=epoch,
        loop=daemon.loop,
        verifier=daemon.verifier,
    )
