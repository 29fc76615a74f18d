"""What `kernels.cu` offers: its kernels' names and arguments, and how it is compiled.

A launch is described by values (`Call`) and carried out by a device (`device.py`), so that the same
description runs on a GPU, in the NumPy reference and in a fake device.

Importing this imports neither CuPy nor NumPy. Any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

from kvd_client.fp8 import EXPONENTS

SOURCE: Final = Path(__file__).with_name("kernels.cu")
OPTIONS: Final = ("--std=c++14",)
THREADS: Final = 256
"""Threads a block, for every kernel."""
PIECES_MAX: Final = 1 << 31
"""A launch has fewer pieces: the kernels count them in 32 bits."""
ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100")
"""What `make lint` compiles for: A100, H100 and H200, B200."""

Direction = Literal["gather", "scatter"]
Argument = Literal["pointer", "u64", "u32", "i32"]

ITEM_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Value types that FP8 is made of."""
_VECTOR: Final = {"bfloat16": 8, "float16": 8, "float32": 4}

COPY_ARGUMENTS: Final[tuple[Argument, ...]] = (*("pointer",) * 4, "u64", *("u32",) * 4)
GATHER_FP8_ARGUMENTS: Final[tuple[Argument, ...]] = (
    *("pointer",) * 4, "u64", "pointer", "u64", "pointer", *("u32",) * 6, "i32", "i32",
)  # fmt: skip
SCATTER_FP8_ARGUMENTS: Final[tuple[Argument, ...]] = (
    *("pointer",) * 4, "u64", "pointer", "u64", *("u32",) * 6, "i32", "i32",
)  # fmt: skip

NAMES: Final[dict[str, tuple[Argument, ...]]] = {
    **{f"kvd_{way}_{unit}": COPY_ARGUMENTS for way in ("gather", "scatter") for unit in (16, 1)},
    **{f"kvd_gather_fp8_{t}_{n}": GATHER_FP8_ARGUMENTS for t, m in _VECTOR.items() for n in (m, 1)},
    **{
        f"kvd_scatter_fp8_{t}_{n}": SCATTER_FP8_ARGUMENTS
        for t, m in _VECTOR.items()
        for n in (m, 1)
    },
}
"""Every kernel and what it takes, in order."""


class Axes(NamedTuple):
    """How a page is cut for FP8: (rows, heads, run) values of `dtype`, C order.

    Tokens first (NHD): `rows` tokens, `run` the head size. Heads first (HND): 1 row, `run` the
    page's tokens times the head size.
    """

    dtype: str
    rows: int
    heads: int
    run: int

    @property
    def page_values(self) -> int:
        """Values of a page."""
        return self.rows * self.heads * self.run


class Call(NamedTuple):
    """One launch.

    Attributes:
        name: Of the kernel, a key of `NAMES`.
        grid: Thread blocks; there are `THREADS` threads in each.
        arguments: As `NAMES` says; pointers are addresses.
    """

    name: str
    grid: int
    arguments: tuple[int, ...]


def copy_call(
    direction: Direction,
    *,
    bases: int,
    strides: int,
    blocks: int,
    objects: int,
    object_stride: int,
    shape: tuple[int, int, int],
    page_bytes: int,
    wide: bool,
    grid_max: int,
) -> Call:
    """Describe a plain gather or scatter.

    Args:
        direction: Gather reads the pages, scatter writes them.
        bases: Address of (planes,) u64: each plane's first byte.
        strides: Address of (planes,) u64: bytes from a block to the next.
        blocks: Address of (objects, pages) i32: the block of each page; below 0 it is left out.
        objects: Address of the first object; the others follow every `object_stride` bytes.
        object_stride: See `objects`.
        shape: (objects, planes, pages).
        page_bytes: Bytes of one page of one plane.
        wide: Every address, stride and size is a multiple of 16 (`aligned`).
        grid_max: Most thread blocks.
    """
    count, planes, pages = shape
    arguments = (bases, strides, blocks, objects, object_stride, count, planes, pages, page_bytes)
    assert count * planes * pages < PIECES_MAX
    grid = max(1, min(count * planes * pages, grid_max))
    return Call(f"kvd_{direction}_{16 if wide else 1}", grid, arguments)


def fp8_call(
    direction: Direction,
    axes: Axes,
    *,
    bases: int,
    strides: int,
    blocks: int,
    codes: int,
    code_stride: int,
    exponents: int,
    exponent_stride: int,
    wild: int = 0,
    shape: tuple[int, int, int],
    wide: bool,
    grid_max: int,
) -> Call:
    """Describe a gather to FP8 or a scatter from it; arguments as `copy_call`.

    Args:
        axes: How a page is cut.
        codes: Address of the first object's codes, one byte a value in the object's order.
        code_stride: Bytes from an object's codes to the next object's.
        exponents: Address of the first object's (planes, heads) i16, little-endian.
        exponent_stride: Bytes from an object's exponents to the next object's.
        wild: Address of a u32 that counts (plane, head) with values that are not finite, or 0.
        wide: See `fp8_wide`.
    """
    count, planes, pages = shape
    head = (bases, strides, blocks, codes, code_stride, exponents, exponent_stride)
    tail = (count, planes, pages, axes.rows, axes.heads, axes.run, *EXPONENTS[axes.dtype])
    arguments = (*head, wild, *tail) if direction == "gather" else (*head, *tail)
    vector = _VECTOR[axes.dtype] if wide else 1
    assert count * planes * axes.heads < PIECES_MAX
    grid = max(1, min(count * planes * axes.heads, grid_max))
    return Call(f"kvd_{direction}_fp8_{axes.dtype}_{vector}", grid, arguments)


def aligned(unit: int, *numbers: int) -> bool:
    """Tell whether all of these are multiples of `unit`."""
    return all(number % unit == 0 for number in numbers)


def fp8_wide(axes: Axes, paged: tuple[int, ...], coded: tuple[int, ...]) -> bool:
    """Tell whether the kernel that moves whole vectors may be used.

    Args:
        axes: How a page is cut.
        paged: Bases and strides of the planes, in bytes.
        coded: Address and stride of the codes.
    """
    vector = _VECTOR[axes.dtype]
    size = vector * ITEM_BYTES[axes.dtype]
    return axes.run % vector == 0 and aligned(size, *paged) and aligned(vector, *coded)
