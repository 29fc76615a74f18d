"""How transfers are cut, and how a stage is laid out. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client.cuda.forms import Form
from kvd_client.cuda.kernels import Axes
from kvd_client.cuda.mover import STAGE_BYTES_DEFAULT, one_stage
from kvd_client.cuda.steps import Step, stage_of, steps


@given(
    objects=st.integers(1, 9),
    stage=st.integers(1, 200),
    layers=st.integers(1, 6),
    by_layer=st.booleans(),
    fp8=st.booleans(),
)
def test_steps_cover_every_plane_of_every_object_once(
    objects: int, stage: int, layers: int, *, by_layer: bool, fp8: bool
) -> None:
    """No page is moved twice or left out, no step exceeds the stage, layers come in order."""
    axes = Axes("bfloat16", 2, 1, 16) if fp8 else None
    form = Form(2 * layers, 3, 64, axes)
    layer = 2 if by_layer else 0
    size = stage * 64
    least = stage_of(form, layer or 1).stride
    if size < least and size < stage_of(form, form.planes).stride:
        with pytest.raises(ValueError, match="too small"):
            list(steps(form, objects, size, planes_a_layer=layer))
        return
    seen = set()
    last = 0
    for step in steps(form, objects, size, planes_a_layer=layer, copy_bytes=1):
        assert isinstance(step, Step)
        assert step.objects * stage_of(form, step.planes).stride <= size
        assert step.plane >= last
        last = step.plane
        for o in range(step.first, step.first + step.objects):
            for p in range(step.plane, step.plane + step.planes):
                assert (o, p) not in seen
                seen.add((o, p))
    assert seen == {(o, p) for o in range(objects) for p in range(form.planes)}


def test_an_8b_models_objects_are_cut_evenly() -> None:
    """Exact and FP8 objects of 32 layers go through small stages in equal parts."""
    exact = Form(64, 16, 16 * 8 * 128 * 2)
    coded = Form(64, 16, 16 * 8 * 128 * 2, Axes("bfloat16", 16, 8, 128))
    for form in (exact, coded):
        cut = {(s.plane, s.planes) for s in steps(form, 4, 16 << 20)}
        assert cut == {(0, 32), (32, 32)}


def test_an_8b_models_objects_go_over_the_bus_in_16_mib() -> None:
    """Two copies of it as it is, one as FP8 with its scales; no small rest."""
    exact = Form(64, 16, 16 * 8 * 128 * 2)
    coded = Form(64, 16, 16 * 8 * 128 * 2, Axes("bfloat16", 16, 8, 128))
    stage = one_stage(STAGE_BYTES_DEFAULT)
    halves = [Step(i, 1, plane, 32) for i in range(3) for plane in (0, 32)]
    assert sorted(steps(exact, 3, stage)) == halves
    assert list(steps(coded, 3, stage)) == [Step(i, 1, 0, 64) for i in range(3)]
    place = stage_of(coded, 64)
    assert (place.joined, place.codes_at) == (True, 64 * 8 * 2)
