"""FP8 objects of vLLM's pages: the codec's frames, of pages in host memory and on a fake GPU."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd_client
from kvd import codec
from kvd.codec.shape import ObjectShape
from kvd_client import _copiers
from kvd_client.cuda.kernels import ITEM_BYTES, Axes
from kvd_client.errors import KvdError, Unsupported
from kvd_client.vllm import frames
from kvd_client.vllm.cuts import Cut
from kvd_client.vllm.gpu_pages import GpuPages
from kvd_client.vllm.pages import GroupPages, Pages, Piece, cut_pages
from tests.gpu.fake_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, BLOCKS, PAGES = 3, 16, 4
CUTS = [
    Cut(1, Axes("bfloat16", 16, 4, 8)),
    Cut(2, Axes("bfloat16", 16, 2, 8)),
    Cut(1, Axes("float16", 2, 4, 64)),
    Cut(1, Axes("float32", 1, 4, 128)),
    Cut(1, Axes("bfloat16", 5, 2, 3)),
]
IDS = (9, 2, 11, 4)


class Memory:
    """An engine's memory of one group, its pages on the host and on a fake GPU."""

    def __init__(self, cut: Cut, device: FakeDevice) -> None:
        """Fill it with values like KV, each plane and head of its own size."""
        self.cut, axes = cut, cut.axes
        rng = np.random.default_rng(4)
        shape = (LAYERS, BLOCKS, cut.planes, axes.rows, axes.heads, axes.run)
        sizes = 2.0 ** rng.integers(-5, 6, (LAYERS, 1, cut.planes, 1, axes.heads, 1))
        wide = (rng.standard_normal(shape) * sizes).astype(np.float32)
        if axes.dtype == "float16":
            bits: Any = wide.astype(np.float16)
        else:
            bits = wide.view(np.uint32)
            bits = (bits >> 16).astype(np.uint16) if axes.dtype == "bfloat16" else bits
        self.bytes = np.ascontiguousarray(bits).view(np.uint8).reshape(LAYERS, BLOCKS, -1)
        page = self.bytes.shape[2]
        starts = [[self.bytes.ctypes.data + layer * BLOCKS * page] for layer in range(LAYERS)]
        self.group = cut_pages(GroupPages(np.array(starts), page, page, PAGES), cut)
        self.device = device
        self.host = Pages([self.group], BLOCKS, _copiers.build_copier("memmove", 1))
        self.gpu = GpuPages([self.group], BLOCKS, device)

    def close(self) -> None:
        """Close once the GPU is idle: to free waits for it on a real one, here it fails."""
        until = time.monotonic() + 30
        while not self.device.idle():
            assert time.monotonic() < until
            time.sleep(0.001)
        self.gpu.close()

    def object(self, ids: tuple[int, ...]) -> bytes:
        """Give the pages of a chunk, as an exact object of these planes has them."""
        parts = self.bytes.reshape(LAYERS, BLOCKS, self.cut.planes, -1)[:, list(ids)]
        return parts.transpose(0, 2, 1, 3).tobytes()

    @property
    def shape(self) -> ObjectShape:
        """The object as the daemon's codec reads it."""
        axes, form = self.cut.axes, self.group.form
        return ObjectShape(
            form.useful_bytes, axes.dtype, form.planes, PAGES * axes.rows, axes.heads, axes.run
        )

    def frame(self, ids: tuple[int, ...]) -> bytes:
        """Encode a chunk by the codec."""
        out = bytearray(codec.frame_bytes_max("fp8", self.shape))
        made = codec.encode("fp8", self.shape, self.object(ids), out, planes=0)
        assert made.size_bytes == len(out) == self.group.object_bytes
        return bytes(out)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """Make a GPU that moves by itself."""
    made = FakeDevice(seed=9)
    end = made.begin_life()
    yield made
    end()


@pytest.fixture(params=CUTS, ids=str)
def memory(request: pytest.FixtureRequest, device: FakeDevice) -> Iterator[Memory]:
    """Make an engine's memory."""
    made = Memory(request.param, device)
    yield made
    made.close()


def slot(content: bytes | int) -> memoryview:
    """Make a slot of kvd's."""
    return memoryview(bytearray(content))


def test_host_gpu_and_codec_make_the_same_object(memory: Memory) -> None:
    """Byte for byte, header and scales included; half of the bytes, of float32 a quarter."""
    expected = memory.frame(IDS)
    codes = len(memory.object(IDS)) // ITEM_BYTES[memory.cut.axes.dtype]
    assert len(expected) == memory.group.form.codes_at + codes
    for pages in (memory.host, memory.gpu):
        buffer = slot(memory.group.object_bytes)
        size = pages.save([Piece(0, IDS, buffer)], 1)
        assert bytes(buffer) == expected
        assert size == len(expected) - memory.group.form.codes_at


def test_host_gpu_and_codec_restore_the_same_pages(memory: Memory) -> None:
    """Into other blocks; those that are not wanted, and all others, stay as they are."""
    frame = memory.frame(IDS)
    out = bytearray(memory.shape.raw_bytes)
    codec.decode(frame, memory.shape, out)
    before = memory.bytes.copy()
    for pages in (memory.host, memory.gpu):
        memory.bytes[:] = before
        size = pages.load([Piece(0, (1, 0, 3, 14), slot(frame))], 1)
        assert memory.object((1, 7, 3, 14)) != bytes(out)
        memory.bytes[:, 7] = 0
        parts = np.frombuffer(bytes(out), np.uint8).reshape(LAYERS * memory.cut.planes, PAGES, -1)
        found = np.frombuffer(memory.object((1, 7, 3, 14)), np.uint8).reshape(parts.shape)
        assert np.array_equal(found[:, [0, 2, 3]], parts[:, [0, 2, 3]])
        others = [block for block in range(BLOCKS) if block not in {1, 3, 14, 7}]
        assert np.array_equal(memory.bytes[:, others], before[:, others])
        assert size == (len(frame) - memory.group.form.codes_at) * 3 // 4


@pytest.mark.parametrize("cut", CUTS[:1])
@pytest.mark.parametrize("where", ["host", "gpu"])
@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"x"), (5, b"\2"), (6, b"\2"), (9, b"\0"), (24, b"\0"), (64, b"\xff\x7f"), (65, b"\x80")],
)
def test_what_is_no_frame_of_this_engine_is_not_loaded(
    cut: Cut, where: str, at: int, value: bytes, device: FakeDevice
) -> None:
    """Another magic, form, type, size or axes, or a scale that encoding never gives: no hit."""
    memory = Memory(cut, device)
    frame = bytearray(memory.frame(IDS))
    frame[at : at + len(value)] = value
    before = memory.bytes.copy()
    pages = memory.host if where == "host" else memory.gpu
    with pytest.raises(KvdError, match="FP8"):
        pages.load([Piece(0, (1, 5, 3, 14), slot(bytes(frame)))], 1)
    assert np.array_equal(memory.bytes, before)
    memory.close()


def test_without_numba_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install: an engine that asked for FP8 gets no other objects instead."""
    monkeypatch.setitem(sys.modules, "kvd_client._fp8_loops", None)
    monkeypatch.delattr(kvd_client, "_fp8_loops", raising=False)
    with pytest.raises(Unsupported, match=r"pip install 'kvd\[vllm\]'"):
        frames.warm_up()
