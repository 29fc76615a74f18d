"""`DeviceKV` with a real daemon and a fake GPU: what was stored is loaded, or it is a miss."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd_client
from kvd import codec, statpage
from kvd.codec.shape import shape_of
from kvd_client.cuda.engine import DeviceKV
from kvd_client.cuda.forms import fp8_layout, page_axes
from kvd_client.cuda.pages import DevicePages
from kvd_client.cuda.transfer import State
from kvd_client.paths import stat_page_name
from tests.daemon_fixture import namespace, tokens
from tests.gpu.fake_device import FakeDevice
from tests.gpu.test_registrar import resident

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

pytestmark = pytest.mark.timeout(90)
LAYERS, HEADS, DIM, PAGE, CHUNK, BLOCKS = 2, 2, 32, 4, 16, 64
PLANES, PAGES = 2 * LAYERS, CHUNK // PAGE
PAGE_BYTES = PAGE * HEADS * DIM * 2
GROUP = kvd_client.Group("full", LAYERS, HEADS, DIM, PLANES * PAGES * PAGE_BYTES)
LAYOUT = kvd_client.Layout(CHUNK, PAGE, "bfloat16", (GROUP,))


class Engine:
    """Pages on a fake GPU that moves by itself, unless it is held."""

    def __init__(self, client: kvd_client.Client, seed: int, **options: Any) -> None:
        self.device = FakeDevice(seed)
        pool = np.random.default_rng(seed).standard_normal(PLANES * BLOCKS * PAGE_BYTES // 2)
        bits = pool.astype(np.float32).view(np.uint32) >> 16
        self.pool = bits.astype(np.uint16).reshape(PLANES, BLOCKS, -1)
        base = int(self.pool.ctypes.data)
        pages = DevicePages(
            [base + p * BLOCKS * PAGE_BYTES for p in range(PLANES)],
            [PAGE_BYTES] * PLANES,
            blocks=BLOCKS,
            page_bytes=PAGE_BYTES,
        )
        self.client = client
        self.kv = DeviceKV(client, pages, self.device, stage_bytes=1 << 20, **options)
        self.held = self.device.held
        self._end = self.device.begin_life()

    def content(self, blocks: list[int]) -> Any:
        return self.pool[:, blocks].copy()

    def stop(self) -> None:
        self.held.clear()
        closed = self.kv.close()
        self._end()
        assert closed
        assert not [a for a in self.device.registered if a not in pinned_by_itself(self.device)]
        assert not self.device.memory


def pinned_by_itself(device: FakeDevice) -> set[int]:
    """Addresses of the device's own pinned memory."""
    return {int(part.ctypes.data) for part in device._pinned}


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Make engines; all are closed at the end, and leave nothing pinned or allocated."""
    made: list[Engine] = []

    def make(client: kvd_client.Client, seed: int = 0, **options: Any) -> Engine:
        made.append(Engine(client, seed, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds, within the test's own limit."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def leases(daemon: DaemonProcess) -> int:
    """Count what the daemon says is under lease."""
    return int(statpage.read(stat_page_name(daemon.socket)).stats["leases"])


def stored(engine: Engine, hashes: list[bytes], blocks: list[int]) -> None:
    """Store, and wait until it is found."""
    transfer = engine.kv.store(engine.client.reserve(hashes), blocks)
    assert transfer.wait(30)
    until(lambda: engine.client.lookup(hashes).chunks == len(hashes))


def test_two_engines_share(connect: Callable[..., Any], make_engine: Callable[..., Engine]) -> None:
    """What one GPU stored, another loads into other pages; so does an engine on the CPU."""
    pytest.importorskip("torch", reason="torch is not installed")
    import torch

    from kvd_client.paged import PagedKV

    one, two = make_engine(connect(layout=LAYOUT), 1), make_engine(connect(layout=LAYOUT), 2)
    hashes = one.client.chunk_hashes(tokens(3))
    blocks, others = list(range(5, 17)), list(range(40, 52))
    stored(one, hashes, blocks)
    load = two.kv.load(two.client.acquire(hashes), others, by_layer=True)
    assert all(load.wait_layer(layer) for layer in range(LAYERS))
    assert load.wait(30)
    assert np.array_equal(two.content(others), one.content(blocks))
    pool = torch.zeros(PLANES, BLOCKS, PAGE * HEADS * DIM, dtype=torch.int16)
    cpu = PagedKV(list(pool.view(PLANES, BLOCKS, PAGE, HEADS, DIM)), PAGE, threads=1)
    with two.client.acquire(hashes) as lease:
        for chunk in range(3):
            ids = blocks[chunk * PAGES : (chunk + 1) * PAGES]
            cpu.scatter(ids, lease.view(chunk))
    assert np.array_equal(pool.numpy().view(np.uint16)[:, blocks], one.content(blocks))


def test_fp8_objects_are_the_codecs_frames(
    connect: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    """Slots hold frames that the daemon's codec reads, and a GPU loads what the codec decodes."""
    small = fp8_layout(LAYOUT)
    space = namespace(lossy=True)
    one = make_engine(connect(layout=small, namespace=space), 1, page_layout=LAYOUT)
    hashes = one.client.chunk_hashes(tokens(2))
    blocks, others = list(range(8)), list(range(20, 28))
    stored(one, hashes, blocks)
    shape = shape_of(LAYOUT, 0)
    assert shape is not None
    expected = []
    with one.client.acquire(hashes) as lease:
        for chunk in range(2):
            exact = one.content(blocks[chunk * PAGES : (chunk + 1) * PAGES]).tobytes()
            frame = bytearray(codec.frame_bytes_max("fp8", shape))
            encoded = codec.encode("fp8", shape, exact, frame, planes=0)
            assert lease.view(chunk) == frame[: encoded.size_bytes]
            target = bytearray(shape.raw_bytes)
            codec.decode(lease.view(chunk), shape, target)
            expected.append(np.frombuffer(target, np.uint16).reshape(PLANES, PAGES, -1))
    assert one.kv.load(one.client.acquire(hashes), others).wait(30)
    assert np.array_equal(one.content(others), np.concatenate(expected, axis=1))


def test_a_frame_that_is_none_is_a_miss(
    connect: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    """An object that does not begin as its form demands is not loaded, and no page changes."""
    small = fp8_layout(LAYOUT)
    client = connect(layout=small, namespace=namespace(lossy=True))
    engine = make_engine(client, 1, page_layout=LAYOUT)
    hashes = client.chunk_hashes(tokens(1))
    stored(engine, hashes, [0, 1, 2, 3])
    axes = page_axes(LAYOUT, GROUP)
    assert axes.heads == HEADS
    before = engine.pool.copy()
    for at, bad in ((0, b"K"), (8, b"\1"), (64, b"\xff\x7f")):
        lease = client.acquire(hashes)
        slab = lease._slabs[next(iter(lease._slabs))]
        place = lease._places[0, 0].offset_bytes + at
        good = bytes(slab[place : place + len(bad)])
        slab[place : place + len(bad)] = bad
        load = engine.kv.load(lease, [8, 9, 10, 11])
        assert load.state is State.FAILED
        assert not load.wait_layer(0)
        slab[place : place + len(bad)] = good
    assert np.array_equal(engine.pool, before)
    assert engine.kv.load(client.acquire(hashes), [8, 9, 10, 11]).wait(30)


def test_nothing_is_published_or_released_before_its_copy_is_over(
    daemon: DaemonProcess, connect: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    """While the GPU holds still a store is not found and a load keeps its lease; `with` or not."""
    client = connect(layout=LAYOUT)
    engine = make_engine(client, 1)
    hashes = client.chunk_hashes(tokens(2))
    engine.held.set()
    with client.reserve(hashes) as reservation:
        store = engine.kv.store(reservation, list(range(8)))
        assert not reservation.placed
    time.sleep(0.3)
    assert client.lookup(hashes).chunks == 0
    assert not store.ended
    engine.held.clear()
    assert store.wait(30)
    until(lambda: client.lookup(hashes).chunks == 2)
    engine.held.set()
    with client.acquire(hashes) as lease:
        load = engine.kv.load(lease, list(range(16, 24)))
    with pytest.raises(kvd_client.HandleClosed):
        lease.view(0)
    until(lambda: leases(daemon) == 1)
    time.sleep(0.5)
    assert leases(daemon) == 1
    engine.held.clear()
    assert load.wait(30)
    until(lambda: leases(daemon) == 0)


def test_a_daemon_that_dies_while_copies_run_is_a_miss_and_no_more(
    daemon: DaemonProcess, connect: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    """Copies under way end with right bytes; stores are lost; a new daemon's slabs are used."""
    client = connect(layout=LAYOUT)
    engine = make_engine(client, 1)
    hashes = client.chunk_hashes(tokens(2))
    stored(engine, hashes, list(range(8)))
    more = client.chunk_hashes(tokens(2, seed=5))
    engine.held.set()
    load = engine.kv.load(client.acquire(hashes), list(range(16, 24)))
    store = engine.kv.store(client.reserve(more), list(range(8)))
    daemon.kill()
    engine.held.clear()
    assert load.wait(30)
    assert store.wait(30)
    assert np.array_equal(engine.content(list(range(16, 24))), engine.content(list(range(8))))
    assert client.lookup(more).chunks == 0
    lease = client.acquire(hashes)
    assert not lease
    assert engine.kv.load(lease, []).state is State.FAILED
    daemon.start()
    until(client.ping)
    engine.kv.idle()
    assert not [a for a in engine.device.registered if a not in pinned_by_itself(engine.device)]
    stored(engine, hashes, list(range(8)))
    until(lambda: engine.kv.registrar.pinned_bytes > 0)


def test_threads_of_kvd_do_not_spoil_a_graph_that_the_engine_records(
    connect: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    """Their calls are theirs; what the engine's thread asks for meanwhile is a miss."""
    client = connect(layout=LAYOUT)
    engine = make_engine(client, 1)
    hashes = client.chunk_hashes(tokens(1))
    engine.held.set()
    store = engine.kv.store(client.reserve(hashes), [0, 1, 2, 3])
    engine.device.recording = True
    engine.held.clear()
    assert store.wait(30)
    until(lambda: engine.kv.registrar.pinned_bytes > 0)
    until(lambda: client.lookup(hashes).chunks == 1)
    assert engine.kv.load(client.acquire(hashes), [4, 5, 6, 7]).state is State.FAILED
    engine.device.recording = False
    assert not engine.device.spoiled
    assert engine.kv.load(client.acquire(hashes), [4, 5, 6, 7]).wait(30)


def test_an_engine_on_a_gpu_maps_slabs_without_their_pages(
    daemon: DaemonProcess,
    connect: Callable[..., Any],
    make_engine: Callable[..., Engine],
) -> None:
    """The call that names a slab first does not wait for them: the thread that pins it does."""
    client = connect(layout=LAYOUT)
    engine = make_engine(client, 1, threads=False)
    with client.reserve(client.chunk_hashes(tokens(1))) as reservation:
        buffer = reservation.placed[0].buffer
        assert buffer is not None
        address = int(np.frombuffer(buffer, np.uint8).ctypes.data)
        assert resident(address) == 0
        assert engine.kv.registrar.address(buffer, client.epoch) == address
        engine.kv.registrar.step()
        assert resident(address) == len(memoryview(buffer.obj))


def test_wrong_block_ids_are_refused_before_anything_is_taken_over(
    connect: Callable[..., Any], make_engine: Callable[..., Engine]
) -> None:
    """Too few ids, or ids that the engine does not have: ValueError, and the handles stay good."""
    client = connect(layout=LAYOUT)
    engine = make_engine(client, 1)
    hashes = client.chunk_hashes(tokens(1))
    with client.reserve(hashes) as reservation:
        for ids in ([0, 1, 2], [0, 1, 2, BLOCKS], [0, 1, 2, -1]):
            with pytest.raises(ValueError, match="block ids"):
                engine.kv.store(reservation, ids)
        assert engine.kv.store(reservation, [0, 1, 2, 3]).wait(30)
    until(lambda: client.lookup(hashes).chunks == 1)
    with client.acquire(hashes) as lease:
        for ids in ([0, 1, 2], [0, 1, 2, BLOCKS]):
            with pytest.raises(ValueError, match="block ids"):
                engine.kv.load(lease, ids)
        assert len(lease.view(0)) == GROUP.object_bytes


def test_pages_that_do_not_fit_the_layout_are_refused(connect: Callable[..., Any]) -> None:
    """Pages of another size, FP8 for latents, a layout that is not the FP8 form: ValueError."""
    client = connect(layout=LAYOUT)
    pages = DevicePages([4096] * PLANES, [256] * PLANES, blocks=1, page_bytes=256)
    with pytest.raises(ValueError, match="bytes a plane"):
        DeviceKV(client, pages, FakeDevice())
    right = DevicePages([4096] * PLANES, [PAGE_BYTES] * PLANES, blocks=1, page_bytes=PAGE_BYTES)
    with pytest.raises(ValueError, match="FP8 form"):
        DeviceKV(client, right, FakeDevice(), page_layout=LAYOUT)
    with pytest.raises(ValueError, match="a layer of a chunk has 4096 bytes, a stage 0"):
        DeviceKV(client, right, FakeDevice(), stage_bytes=4096)
    with pytest.raises(ValueError, match="full and sliding"):
        fp8_layout(LAYOUT._replace(groups=(GROUP._replace(kind="mla"),)))
