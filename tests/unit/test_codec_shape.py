"""How the codec reads a layout: every known order, and what is refused."""

from __future__ import annotations

import pytest

from kvd.codec import ObjectShape, flat_shape, frame_bytes_max, shape_of, usable_form
from kvd_client.identity import DTYPES, Group, Layout

LAYERS, TOKENS, PAGE, HEADS, DIM = 3, 32, 8, 4, 16
SIZE = LAYERS * 2 * TOKENS * HEADS * DIM * 2
PLAIN = Group("full", LAYERS, HEADS, DIM, SIZE)


def layout(group: Group = PLAIN, dtype: str = "bfloat16", order: str | None = None) -> Layout:
    """Make a layout of one group."""
    made = Layout(TOKENS, PAGE, dtype, (group,))
    return (made if order is None else made._replace(order=order)).check()


@pytest.mark.parametrize(
    ("order", "blocks", "run"),
    [
        ("layer,kv,page,token,head,dim/1", TOKENS, DIM),
        ("layer,kv,token,head,dim/1", TOKENS, DIM),
        ("kv,layer,token,head,dim/1", TOKENS, DIM),
        ("layer,kv,page,head,token,dim/1", TOKENS // PAGE, PAGE * DIM),
        ("layer,kv,head,token,dim/1", 1, TOKENS * DIM),
    ],
)
def test_known_orders(order: str, blocks: int, run: int) -> None:
    """Each known order gives the axes that its name says."""
    shape = shape_of(layout(order=order), 0)
    assert shape == ObjectShape(SIZE, "bfloat16", 2 * LAYERS, blocks, HEADS, run)
    assert shape.scaled
    assert shape.scales == 2 * LAYERS * HEADS


def test_default_order_is_known() -> None:
    """What a client says when it says nothing is readable."""
    assert shape_of(layout(), 0) is not None


@pytest.mark.parametrize(
    "order",
    [
        "layer,kv,page,token,head,dim/2",
        "layer,kv,page,token,head,dim",
        "layer,kv,page,token,dim,head/1",
        "page,layer,kv,token,head,dim/1",
        "layer,page,kv,token,head,dim/1",
        "layer,kv,kv,token,head,dim/1",
        "layer,kv/1",
        "layer,kv,head,token,dim/1 ",
        "mine",
    ],
)
def test_unknown_orders_are_refused(order: str) -> None:
    """An order that is not known exactly has no scales."""
    assert shape_of(layout(order=order), 0) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str) -> None:
    """Only floats of 16 and 32 bits are quantised; every dtype of a layout has a flat shape."""
    size = SIZE // 2 * {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    made = layout(PLAIN._replace(object_bytes=size), dtype)
    assert (shape_of(made, 0) is not None) == (dtype in {"float32", "float16", "bfloat16"})
    flat = flat_shape(made, 0)
    assert (flat.raw_bytes, flat.dtype, flat.scaled) == (size, dtype, False)
    assert frame_bytes_max("lossless", flat) > size


@pytest.mark.parametrize(
    "group",
    [
        PLAIN._replace(kind="mla"),
        PLAIN._replace(kind="recurrent"),
        PLAIN._replace(object_bytes=SIZE + 2),
        PLAIN._replace(object_bytes=SIZE - LAYERS * TOKENS * HEADS * 2),  # V narrower than K
        PLAIN._replace(kv_heads=0),
        PLAIN._replace(head_size=0),
    ],
)
def test_other_groups_are_refused(group: Group) -> None:
    """Kinds without heads, and sizes the axes do not explain, stay lossless."""
    made = layout(group)
    assert shape_of(made, 0) is None
    flat = flat_shape(made, 0)
    assert flat.raw_bytes == group.object_bytes
    assert usable_form("fp8", flat) == "lossless"
    assert usable_form("raw", flat) == "raw"
    with pytest.raises(ValueError, match="axes"):
        frame_bytes_max("fp8", flat)


def test_sliding_groups_are_read() -> None:
    """A sliding-window group's object is a chunk like any other."""
    shape = shape_of(layout(PLAIN._replace(kind="sliding", window=16)), 0)
    assert shape == shape_of(layout(), 0)
    assert shape is not None
    assert usable_form("fp8", shape) == "fp8"


def test_group_index_counts() -> None:
    """The shape is that of the group asked for."""
    other = Group("full", 1, HEADS, DIM, SIZE // LAYERS)
    made = Layout(TOKENS, PAGE, "bfloat16", (PLAIN, other)).check()
    shape = shape_of(made, 1)
    assert shape is not None
    assert (shape.planes, shape.raw_bytes) == (2, SIZE // LAYERS)
