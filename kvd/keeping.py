"""A restart that keeps host memory: slabs and a picture of them wait in systemd's fd store.

At the end of an orderly drain each object of the slabs that may be kept is summed, the picture is
written to a memfd, and all of it is handed to systemd. The next start takes it, marks the picture
as used *before* anything else, verifies every object, and only then serves. A picture is good for
one start; without one, or with a used or damaged one, host memory begins empty.

    head    magic, state, version, length, xxh3-128 of the rest
    4096    the picture (`keepsake.encode`)

Invariants:

Z1. The state is READY only after everything else is written and summed, and USED before the first
    client of the next life: what somebody changed later is never believed.
Z2. What cannot be kept within KEEP_S is not.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import time
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvd import keepsake, log, memory, notify
from kvd.types import SlabId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.catalog import Catalog
    from kvd.config import HostConfig
    from kvd.entry import Slot
    from kvd.tiers.host import HostTier
    from kvd.tiers.slab import Slab
    from kvd.types import Tenant

_LOG = log.get("keep")
CATALOG_NAME: Final = "kvd-catalog"
SLAB_NAME: Final = "kvd-slab-"
KEEP_S: Final = 10.0
"""For sums and for systemd, at the end: what `TimeoutStopSec` has to leave for it."""
SLABS_MAX: Final = 4000
"""Most slabs that are kept: the unit's FileDescriptorStoreMax allows some more."""
MAGIC: Final = b"kvdkeep\n"
VERSION: Final = 1
READY, USED = 1, 2
_HEAD: Final = Struct("<8sB3xIQ16s")
_STATE_AT: Final = 8
_BODY_AT: Final = 4096
_SEALS: Final = 0x2 | 0x4  # F_SEAL_SHRINK, F_SEAL_GROW
_F_GET_SEALS: Final = 1034


class KeptSlab(NamedTuple):
    """A slab to be taken up: its descriptor, and what has to be in it, by place.

    Attributes:
        fd: The caller's until it is given on.
        objects: Place, offset, bytes and digest of each.
    """

    fd: int
    objects: tuple[tuple[int, int, int, bytes], ...]


class Kept(NamedTuple):
    """What an earlier life left: the picture, and the slabs that fit this configuration."""

    picture: keepsake.Picture
    slabs: dict[SlabId, KeptSlab]


# -------------------------------------------------------------------------------- the end


def hand_over(catalog: Catalog, tier: HostTier) -> int:
    """Give systemd what may be kept; return the bytes of the slabs. Blocks for KEEP_S at most.

    Call it when nobody is served any more and nothing moves.
    """
    if not notify.listening():
        return 0
    deadline = time.monotonic() + KEEP_S / 2
    digests: dict[Slot, bytes] = {}
    slabs: list[Slab] = []
    for slab in keepsake.slabs_to_keep(catalog)[:SLABS_MAX]:
        found = _sum(slab.slots.values(), tier, deadline)
        if found is None:
            break  # Z2
        digests |= found
        slabs.append(slab)
    if not slabs:
        return 0
    packed = keepsake.encode(keepsake.picture(catalog, digests, slabs))
    fd = _write(packed)
    try:
        stored = all(notify.store(f"{SLAB_NAME}{slab.id}", tier.fd(slab.id)) for slab in slabs)
        if not stored or not notify.store(CATALOG_NAME, fd) or not notify.barrier(KEEP_S / 2):
            os.pwrite(fd, bytes([USED]), _STATE_AT)
            _LOG.warning("systemd does not take host memory; the next start begins without")
            return 0
    finally:
        os.close(fd)
    kept = len(slabs) * catalog.pool.slab_bytes
    _LOG.info("kept for the next start", slabs=len(slabs), objects=len(digests), bytes=kept)
    return kept


def _sum(slots: Iterable[Slot], tier: HostTier, deadline: float) -> dict[Slot, bytes] | None:
    found = {}
    for slot in slots:
        if time.monotonic() > deadline:
            return None
        view = tier.view(slot.slab, slot.offset_bytes, slot.size_bytes)
        found[slot] = slot.digest or xxhash.xxh3_128_digest(view)
    return found


def _write(packed: bytes) -> int:
    """Return a memfd with a picture; READY is its last byte to be written (Z1)."""
    fd = memory.make_memfd(CATALOG_NAME, -(-(_BODY_AT + len(packed)) // _BODY_AT) * _BODY_AT)
    digest = xxhash.xxh3_128_digest(packed)
    with mmap.mmap(fd, _BODY_AT + len(packed)) as body:
        body[_BODY_AT:] = packed
        body[: _HEAD.size] = _HEAD.pack(MAGIC, 0, VERSION, len(packed), digest)
        body[_STATE_AT] = READY
    return fd


# -------------------------------------------------------------------------------- the start


def take_up(
    stored: Mapping[str, int], config: HostConfig, shares: Mapping[Tenant, int]
) -> Kept | None:
    """Take what an earlier life left, once; None if there is nothing that can be used.

    Args:
        stored: Descriptors by name; they are the callee's: closed, or returned.
        config: Of the host tier.
        shares: Most slabs of each tenant.
    """
    fds = dict(stored)
    kept = None
    try:
        kept = _read(fds, config, shares)
    except (OSError, ValueError) as error:
        _LOG.warning("what was kept cannot be used", why=str(error))
    for name, fd in stored.items():
        notify.unstore(name)
        if kept is None or fd not in {slab.fd for slab in kept.slabs.values()}:
            os.close(fd)
    if stored:
        notify.barrier(
            notify.STORE_S
        )  # the memory of what is not wanted is free before it is needed
    return kept


def _read(fds: dict[str, int], config: HostConfig, shares: Mapping[Tenant, int]) -> Kept | None:
    """Read and use up the picture; raises OSError or ValueError."""
    fd = fds.get(CATALOG_NAME)
    if fd is None:
        return None
    size = os.fstat(fd).st_size
    magic, state, version, length, digest = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
    os.pwrite(fd, bytes([USED]), _STATE_AT)  # Z1
    if (magic, state, version) != (MAGIC, READY, VERSION):
        raise ValueError("it was used already, or is another release's")
    if length > size - _BODY_AT:
        raise ValueError("the picture is cut short")
    packed = _pread(fd, length)
    if xxhash.xxh3_128_digest(packed) != digest:
        raise ValueError("the picture is damaged")
    picture = keepsake.decode(packed)
    objects = keepsake.objects_of(picture)
    slabs = {}
    for number in keepsake.wanted(picture, config.slab_bytes, config.slab_count, shares):
        slab_fd = fds.get(f"{SLAB_NAME}{number}")
        if slab_fd is not None and _whole(slab_fd, config):
            _, stride = picture.slabs[number]
            places = tuple(
                (each.place, each.place * stride, each.size_bytes, each.digest)
                for each in objects[number]
            )
            slabs[SlabId(number)] = KeptSlab(slab_fd, places)
    return Kept(picture, slabs)


def _pread(fd: int, length: int) -> bytes:
    with mmap.mmap(fd, _BODY_AT + length, prot=mmap.PROT_READ) as body:
        return body[_BODY_AT:]


def _whole(fd: int, config: HostConfig) -> bool:
    """Tell whether a descriptor is a sealed slab of this size, in pages as they are wanted."""
    found = os.fstat(fd)
    if found.st_size != config.slab_bytes or fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
        return False
    return config.huge_pages != "require" or found.st_blksize == memory.HUGE_BYTES


class Return:
    """Slabs of an earlier life on their way back. Loop only, but for `hear`."""

    def __init__(self, kept: Kept | None, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for each of the slabs, if there are any."""
        self._kept = kept
        self.slabs = kept.slabs if kept is not None else {}
        self._loop = loop
        self._good: dict[int, set[int]] = {}
        self._left = len(self.slabs)
        self._over = asyncio.Event()
        if not self._left:
            self._over.set()

    def hear(self, slab: SlabId, good: set[int] | None) -> None:
        """Take in the places of a slab whose bytes are as they were; any thread."""
        self._loop.call_soon_threadsafe(self._heard, slab, good)

    def _heard(self, slab: SlabId, good: set[int] | None) -> None:
        self._left -= 1
        if good is not None:
            self._good[slab] = good
        if not self._left:
            self._over.set()

    async def finish(self, catalog: Catalog) -> int:
        """Wait for all, put what is good into the catalog; return the slabs taken up."""
        if self._kept is None:
            return 0
        notify.status("verifying the host memory of the life before")
        await self._over.wait()
        chunks = keepsake.adopt(catalog, self._kept.picture, self._good)
        wrong = sum(len(slab.objects) for slab in self.slabs.values())
        wrong -= sum(len(self._good.get(slab, ())) for slab in self.slabs)
        _LOG.info("taken up again", slabs=len(self._good), chunks=chunks, damaged=wrong)
        return len(self._good)
