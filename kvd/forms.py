"""Objects to their cold form and back, in the codec's threads. The loop owns everything else here.

A form is asked for by configuration, and allowed by the namespace (lossy or exact) and the layout;
what cannot be had becomes the next best: fp8, lossless, raw.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from kvd import codec
from kvd.cost import Rate
from kvd.failpoints import maybe_hang
from kvd.tiers.disk import Corrupt
from kvd.tiers.region import FORM_RAW, Part
from kvd.tiers.threads import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from kvd.codec import Form
    from kvd.entry import Slot, Space
    from kvd.tiers.transfer import Loaded
    from kvd_client.identity import Layout

SHORT_BYTES = 240
"""Of more bytes the lower half of an xxh3-128 is their xxh3-64."""
FORM_FRAME = 1
"""A codec frame, which says itself which form it is."""
UNREAD_BYTES_S = 2e9
"""Taken for the rate of a disk not read yet, for FP8: zstd on top of it takes a sixth off the bytes
and makes encoding five times slower (bench.codec), so it has to be known to pay."""
UNZSTD_BYTES_S = 1e9
"""Taken for what one thread decompresses before it has."""


class DiskRates(NamedTuple):
    """What the tier has been seen to do at its usual depth, bytes a second; 0: not known."""

    read_bytes_s: float
    write_bytes_s: float


class Forms:
    """Encodes and decodes."""

    def __init__(
        self,
        wanted: Form,
        threads: int,
        view_of: Callable[[Slot], memoryview],
        take: Callable[[int], memoryview],
    ) -> None:
        """Start the threads' pool.

        Args:
            wanted: The form to write where it is allowed.
            threads: For the work.
            view_of: Gives the bytes of a slot.
            take: Gives aligned memory for a frame, of so many bytes or more.
        """
        self._wanted = wanted
        self._threads = threads
        self._view_of = view_of
        self._take = take
        self.workers = Workers(threads, "codec")
        self._warming: Future[None] | None = None
        self._choosers: dict[tuple[Space, Form], codec.Chooser] = {}
        self._zstd: dict[Form, Rate] = {}
        self._unzstd: dict[Form, Rate] = {}
        self.note = ""
        """Why the wanted form is not written, for the operator."""
        if wanted not in codec.available_forms():
            self.note = f"form {wanted} needs numba and zstandard: writing raw"

    def begin_warm_up(self) -> None:
        """Compile what is needed before it is, in a thread: 0.5 s, some more the first time."""
        if self._wanted != "raw" and not self.note:
            self._warming = self.workers.submit(codec.warm_up)

    async def warmed_up(self) -> None:
        """Wait for what `begin_warm_up` began."""
        if self._warming is not None:
            await asyncio.wrap_future(self._warming)

    def close(self) -> None:
        """Wait for the threads."""
        self.workers.shutdown(wait=True)

    def of(self, space: Space) -> Form:
        """Return the form to write for a namespace: a lossy one only where it allows it."""
        if self.note:
            return "raw"
        if self._wanted == "fp8" and not space.lossy:
            return "lossless"
        return self._wanted

    async def encode(
        self, space: Space, form: Form, slots: Sequence[Slot], disk: DiskRates
    ) -> list[Part]:
        """Bring objects into a form, by rising column.

        Args:
            space: Whose.
            form: As from `of`.
            slots: Where they are; they must stay as they are meanwhile.
            disk: How fast the tier is: whether zstd pays.
        """
        loop = asyncio.get_running_loop()
        parts = []
        for slot in sorted(slots, key=lambda slot: slot.column):
            source = self._view_of(slot)
            if form == "raw":
                parts.append(Part(slot.column, FORM_RAW, slot.size_bytes, source))
                continue
            shape = _shape(space.layout, slot.column)
            used = codec.usable_form(form, shape)
            chooser = self._choosers.setdefault((space, used), codec.Chooser())
            planes = chooser.next_planes(self._rates(used, disk))
            out = self._take(codec.frame_bytes_max(used, shape))
            encoded, spent_s = await loop.run_in_executor(
                self.workers, _encode_one, used, shape, source, out, planes
            )
            chooser.record(encoded)
            packed = sum(plane.raw_bytes for plane in encoded.planes if plane.tried)
            self._zstd.setdefault(used, Rate()).observe(packed, spent_s)
            parts.append(Part(slot.column, FORM_FRAME, slot.size_bytes, out[: encoded.size_bytes]))
        return parts

    def _rates(self, form: Form, disk: DiskRates) -> codec.Rates:
        """Give what decides on zstd; without it FP8 is half as large, lossless not any smaller."""
        unzstd = self._unzstd[form].per_s if form in self._unzstd else UNZSTD_BYTES_S
        if form != "fp8":
            return codec.Rates(disk.read_bytes_s, unzstd, self._threads)
        zstd = self._zstd[form].per_s if form in self._zstd else 0.0
        read_bytes_s = disk.read_bytes_s or UNREAD_BYTES_S
        return codec.Rates(read_bytes_s, unzstd, self._threads, disk.write_bytes_s, zstd)

    async def decode(self, space: Space, slot: Slot, item: Loaded, into: memoryview) -> None:
        """Bring an object that was read into its slot.

        Raises:
            Corrupt: It is not of the layout's size, or in a form this release does not know.
            CorruptFrame: It is damaged.
            CodecMissing: A library is not installed.
        """
        if item.raw_bytes != slot.size_bytes:
            raise Corrupt("an object of another size than its layout's")
        if item.form == FORM_RAW:
            return  # it was read into the slot
        if item.form != FORM_FRAME:
            raise Corrupt("a form this release does not know")
        decoded, spent_s = await asyncio.get_running_loop().run_in_executor(
            self.workers, _decode_one, item.stored, _shape(space.layout, slot.column), into
        )
        self._unzstd.setdefault(decoded.form, Rate()).observe(decoded.unzstd_bytes, spent_s)


def as_published(parts: Iterable[Part], slots: Iterable[Slot]) -> list[Part]:
    """Have a record say of raw objects what was published, where that is known."""
    known = {s.column: s.digest for s in slots if s.digest and s.size_bytes > SHORT_BYTES}
    return [
        part._replace(checksum=int.from_bytes(known[part.column][8:]))
        if part.form == FORM_RAW and part.column in known
        else part
        for part in parts
    ]


def _encode_one(
    form: Form, shape: codec.ObjectShape, source: memoryview, out: memoryview, planes: int
) -> tuple[codec.Encoded, float]:
    maybe_hang("codec.call")
    started = time.perf_counter()
    encoded = codec.encode(form, shape, source, out, planes=planes)
    return encoded, time.perf_counter() - started


def _decode_one(
    frame: memoryview, shape: codec.ObjectShape, into: memoryview
) -> tuple[codec.Decoded, float]:
    started = time.perf_counter()
    decoded = codec.decode(frame, shape, into)
    return decoded, time.perf_counter() - started


def _shape(layout: Layout, column: int) -> codec.ObjectShape:
    group = layout.group_of(column)
    return codec.shape_of(layout, group) or codec.flat_shape(layout, group)
