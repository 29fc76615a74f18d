"""In which pieces a transfer goes through its staging memory. Pure.

A *step* is some planes of some objects: what one kernel moves between the pages and one stage,
with a copy an object on the bus. Steps take the stages in turn.

    whole requests:  as many objects as fit a stage, all planes of each
    by layer:        the planes of some layers, over all objects, before the next layers begin
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd_client.cuda.forms import Form

COPY_BYTES_MIN = 4 << 20
"""Copies by layer take in as many layers as make this much: smaller ones do not fill the bus."""
ALIGN_BYTES = 256
VECTOR_BYTES = 16
"""The kernels' widest load."""


class Step(NamedTuple):
    """Objects `first` to `first + objects` - 1, planes `plane` to `plane + planes` - 1 of each."""

    first: int
    objects: int
    plane: int
    planes: int


class Stage(NamedTuple):
    """How one object's part of a step lies in a stage.

    Attributes:
        codes_at: Where its planes begin.
        codes_bytes: Of its planes.
        scales_at: Where their scales begin.
        stride: From one object to the next.
        joined: Scales and planes follow each other as in the slot: one copy brings both.
    """

    codes_at: int
    codes_bytes: int
    scales_at: int
    stride: int
    joined: bool = False


def stage_of(form: Form, planes: int) -> Stage:
    """Lay out `planes` planes of an object in a stage."""
    codes, scales = planes * form.plane_bytes, planes * form.scales_bytes
    if scales and planes == form.planes and scales % VECTOR_BYTES == 0:
        return Stage(scales, codes, 0, _up(scales + codes), joined=True)
    return Stage(0, codes, _up(codes), _up(_up(codes) + scales))


def _up(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def steps(
    form: Form,
    objects: int,
    stage_bytes: int,
    *,
    planes_a_layer: int = 0,
    copy_bytes: int = COPY_BYTES_MIN,
) -> Iterator[Step]:
    """Cut a transfer.

    Args:
        form: Of the objects.
        objects: How many.
        stage_bytes: Bytes of one stage.
        planes_a_layer: By layer if not 0: planes that a layer has.
        copy_bytes: By layer, least bytes of an object's copy, whole layers.

    Raises:
        ValueError: Not even one plane (one layer) fits a stage.
    """
    unit = planes_a_layer or 1
    whole = _planes_that_fit(form, stage_bytes, unit)
    if planes_a_layer:
        wanted = -(-copy_bytes // max(1, form.plane_bytes * unit)) * unit
        whole = min(whole, max(unit, wanted))
    parts = -(-form.planes // whole)
    whole = min(whole, -(-form.planes // (parts * unit)) * unit)  # even parts: no tiny last one
    for plane in range(0, form.planes, whole):
        planes = min(whole, form.planes - plane)
        count = max(1, stage_bytes // stage_of(form, planes).stride)
        for first in range(0, objects, count):
            yield Step(first, min(count, objects - first), plane, planes)


def _planes_that_fit(form: Form, stage_bytes: int, unit: int) -> int:
    """Return the largest multiple of `unit` planes of one object that fits; all if they do."""
    if stage_of(form, form.planes).stride <= stage_bytes:
        return form.planes
    planes = form.planes // unit * unit
    while planes and stage_of(form, planes).stride > stage_bytes:
        planes -= unit
    if not planes:
        need = stage_of(form, unit).stride
        raise ValueError(f"a stage of {stage_bytes} bytes is too small: {need} are needed")
    return planes
