"""What of host memory a restart keeps: which slabs, what is in them, and back again. Pure.

    slabs_to_keep   at the end: slabs that nobody writes to or reads from any more
    picture         what is in them, with a digest of each object
    adopt           at the next start: what of it was verified goes into the new catalog

Invariants:

Y1. A slab is kept only if each of its slots is published and unpinned: no late writer of an earlier
    life has a place in it, and no late reader is told other bytes than it asked for.
Y2. An object is adopted only if its bytes have the digest that was taken when it was let go, under
    the same tenant, namespace, layout, chunk and column.
Y3. A kept slab stays its tenant's, also if nothing in it is adopted: it was written to.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from kvd.changes import HOST
from kvd.entry import Chunk, SlotState, stride_of
from kvd.types import OwnerId, SlabId, Tenant
from kvd_client.identity import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvd.catalog import Catalog
    from kvd.entry import Slot, Space
    from kvd.tiers.slab import Slab

    Accepted = tuple[Space, "KeptChunk", list["KeptObject"]]

VERSION = 1
NOBODY = OwnerId(0)
"""Owner of adopted slots: the daemon."""


class KeptObject(NamedTuple):
    """One object: its column, where it lies, whether it is lossy, and its digest."""

    column: int
    slab: int
    place: int
    size_bytes: int
    lossy: int
    digest: bytes


class KeptChunk(NamedTuple):
    """One chunk with its objects; its parent is the namespace for a first one."""

    hash: bytes
    parent: bytes
    tick: int
    objects: tuple[KeptObject, ...]


class KeptSpace(NamedTuple):
    """The chunks of a space, each after its parent."""

    tenant: str
    namespace: bytes
    label: str
    layout: bytes
    chunks: tuple[KeptChunk, ...]


class Picture(NamedTuple):
    """All that is kept.

    Attributes:
        slab_bytes: Size of a slab.
        slabs: By number: whose, and the distance of two places.
        spaces: What is in them.
    """

    slab_bytes: int
    slabs: dict[int, tuple[str, int]]
    spaces: tuple[KeptSpace, ...]


# -------------------------------------------------------------------------------- letting go


def slabs_to_keep(catalog: Catalog) -> list[Slab]:
    """Return the slabs that may be kept (Y1), those used last first."""
    found = [
        slab
        for tenant in catalog.pool.shares
        for slab in catalog.pool.slabs_of(tenant)
        if slab.slots and all(map(_at_rest, slab.slots.values()))
    ]
    return sorted(found, key=lambda slab: -slab.touched)


def _at_rest(slot: Slot) -> bool:
    chunk = slot.chunk
    published = slot.state is SlotState.PUBLISHED and chunk is not None
    return published and not (chunk.pins or chunk.moves)  # type: ignore[union-attr]


def picture(catalog: Catalog, digests: Mapping[Slot, bytes], slabs: Iterable[Slab]) -> Picture:
    """Describe what is kept: the objects that have a digest, in these slabs."""
    spaces = []
    for space in catalog.spaces.values():
        chunks = []
        for chunk in _heads_first(space):
            objects = tuple(
                KeptObject(
                    column, slot.slab, slot.index, slot.size_bytes, int(slot.lossy), digests[slot]
                )
                for column, slot in sorted(chunk.slots.items())
                if slot in digests
            )
            above = chunk.parent.hash if chunk.parent else space.namespace
            chunks.append(KeptChunk(chunk.hash, above, chunk.tick, objects))
        layout = msgpack.packb(space.layout.fields(), use_bin_type=True)
        kept = KeptSpace(space.tenant, space.namespace, space.label, layout, tuple(chunks))
        if any(chunk.objects for chunk in chunks):
            spaces.append(kept)
    whose = {int(slab.id): (str(slab.tenant), slab.stride_bytes) for slab in slabs}
    return Picture(catalog.pool.slab_bytes, whose, tuple(spaces))


def _heads_first(space: Space) -> list[Chunk]:
    """Return the warm chunks of a space, each after its parent."""
    order = [chunk for chunk in space.chunks.values() if chunk.parent is None and chunk.warm]
    for chunk in order:
        if chunk.warm_children:
            order.extend(child for child in chunk.children() if child.warm)
    return order


def encode(kept: Picture) -> bytes:
    """Return a picture as bytes."""
    packed = msgpack.packb((VERSION, *kept), use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def decode(packed: bytes) -> Picture:
    """Read a picture.

    Raises:
        ValueError: It is none of this version.
    """
    try:
        version, slab_bytes, slabs, spaces = msgpack.unpackb(
            packed, strict_map_key=False, use_list=False, max_ext_len=0
        )
        if version != VERSION:
            raise ValueError("another version")
        return Picture(
            slab_bytes,
            {number: (tenant, stride) for number, (tenant, stride) in slabs.items()},
            tuple(_space_of(fields) for fields in spaces),
        )
    except (TypeError, AttributeError, msgpack.UnpackException) as error:
        raise ValueError("no picture of kept memory") from error


def _space_of(fields: Sequence[Any]) -> KeptSpace:
    tenant, namespace, label, layout, chunks = fields
    made = []
    for key, parent, tick, objects in chunks:
        made.append(KeptChunk(key, parent, tick, tuple(KeptObject(*each) for each in objects)))
    return KeptSpace(tenant, namespace, label, layout, tuple(made))


# -------------------------------------------------------------------------------- taking up


def wanted(kept: Picture, slab_bytes: int, count: int, shares: Mapping[Tenant, int]) -> set[int]:
    """Return the slabs that fit this configuration: their size, number, tenant and share."""
    left = dict(shares)
    found: set[int] = set()
    if kept.slab_bytes != slab_bytes:
        return found
    for number, (tenant, stride) in kept.slabs.items():
        if number < count and left.get(Tenant(tenant), 0) > 0 and 0 < stride <= slab_bytes:
            left[Tenant(tenant)] -= 1
            found.add(number)
    return found


def objects_of(kept: Picture) -> dict[int, list[KeptObject]]:
    """Return what is to be verified, by slab."""
    found: dict[int, list[KeptObject]] = {number: [] for number in kept.slabs}
    for space in kept.spaces:
        for chunk in space.chunks:
            for each in chunk.objects:
                found[each.slab].append(each)
    return found


def adopt(catalog: Catalog, kept: Picture, good: Mapping[int, set[int]]) -> int:
    """Put what was verified into a catalog that serves nobody yet.

    Args:
        catalog: Chunks with a copy in the tier below may be in it.
        kept: The picture.
        good: By slab that was taken up, its places whose bytes are those of the picture (Y2).

    Returns:
        How many chunks have objects in host memory now.
    """
    spaces = [_enter(catalog, each) for each in kept.spaces]
    accepted: list[Accepted] = []
    for space, each in zip(spaces, kept.spaces, strict=True):
        if space is not None:
            accepted += _accept(space, each, kept, good)
    slots = _cut(catalog, kept, good, accepted)
    planted = []
    for space, chunk, objects in accepted:
        node = space.chunks.get(chunk.hash)
        if node is None:
            node = Chunk(chunk.hash, space, space.chunks.get(chunk.parent))
            space.chunks[chunk.hash] = node
        if objects:
            _furnish(catalog, node, objects, slots)
            planted.append((chunk.tick, node))
    for _, node in sorted(planted, key=itemgetter(0)):
        catalog.touch(node)
        catalog.settle(node, node.warm)
        if not node.warm_children:
            catalog.eviction.touched(node.space, _chain(node))
        if catalog.changes.heard and node.mask == node.space.full_mask:
            catalog.changes.stored(node, HOST)
    for space in filter(None, spaces):
        catalog.leave(space)  # nobody is in it: it lives by its chunks
    return len(planted)


def _chain(node: Chunk) -> list[bytes]:
    """Return the hashes from the first chunk to this one."""
    hashes, at = [], node
    while True:
        hashes.append(at.hash)
        if at.parent is None:
            return hashes[::-1]
        at = at.parent


def _accept(
    space: Space, each: KeptSpace, kept: Picture, good: Mapping[int, set[int]]
) -> Iterator[Accepted]:
    """Yield the chunks of a space that can be had, each after its parent."""
    here = {space.namespace, *space.chunks}
    for chunk in each.chunks:
        if chunk.parent in here:  # else its chain is broken
            objects = [o for o in chunk.objects if _fits(space, each.tenant, o, kept, good)]
            if objects or chunk.hash in space.chunks:
                here.add(chunk.hash)
                yield space, chunk, objects


def _enter(catalog: Catalog, kept: KeptSpace) -> Space | None:
    if kept.tenant not in catalog.pool.shares:
        return None
    try:
        layout = Layout.from_fields(msgpack.unpackb(kept.layout, max_map_len=0))
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return catalog.enter(Tenant(kept.tenant), kept.namespace, kept.label, layout)


def _fits(
    space: Space, tenant: str, each: KeptObject, kept: Picture, good: Mapping[int, set[int]]
) -> bool:
    """Tell whether an object was verified, and is what its column has to be."""
    if each.place not in good.get(each.slab, ()) or not 0 <= each.column < space.layout.columns:
        return False
    size_bytes = space.layout.groups[space.layout.group_of(each.column)].object_bytes
    return each.size_bytes == size_bytes and kept.slabs[each.slab] == (
        tenant,
        stride_of(size_bytes),
    )


def _cut(
    catalog: Catalog,
    kept: Picture,
    good: Mapping[int, set[int]],
    accepted: Sequence[Accepted],
) -> dict[tuple[int, int], Slot]:
    """Give the pool the slabs that were taken up (Y3); return their slots, by slab and place."""
    sizes: dict[int, dict[int, int]] = {number: {} for number in good}
    for _, _, objects in accepted:
        for each in objects:
            assert each.place not in sizes[each.slab], "Y2"
            sizes[each.slab][each.place] = each.size_bytes
    slots = {}
    for number, places in sizes.items():
        tenant, stride = kept.slabs[number]
        made = catalog.pool.adopt(SlabId(number), Tenant(tenant), stride, places, NOBODY)
        slots.update({(number, slot.index): slot for slot in made})
    return slots


def _furnish(
    catalog: Catalog,
    node: Chunk,
    objects: Iterable[KeptObject],
    slots: Mapping[tuple[int, int], Slot],
) -> None:
    was_warm = node.warm
    for each in objects:
        slot = slots[each.slab, each.place]
        slot.chunk, slot.column, slot.lossy = node, each.column, bool(each.lossy)
        slot.digest = each.digest
        catalog.on_publish(slot)
        node.put(each.column, slot)
        node.mask |= 1 << each.column
        node.lossy_mask |= each.lossy << each.column
        node.size_bytes += slot.size_bytes
    catalog.settle(node, was_warm)
