"""Transfers on a fake GPU with delayed, reordered completions: what ends when, with which bytes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client.cuda import reference
from kvd_client.cuda.forms import Form
from kvd_client.cuda.kernels import Axes
from kvd_client.cuda.mover import POLL_MIN_S, POLL_S, QUEUE_MAX, Mover
from kvd_client.cuda.pages import DevicePages
from kvd_client.cuda.steps import stage_of
from kvd_client.cuda.transfer import Piece, State, Transfer
from tests.gpu.fake_device import ENGINE_STREAM, FakeDevice

BLOCKS, LAYERS = 24, 3
PLANES = 2 * LAYERS
PAGE_BYTES = 1024


class Bench:
    """An engine's pages, slots and a mover on one fake device."""

    def __init__(
        self, *, seed: int = 0, axes: Axes | None = None, pages: int = 2, stage: int = 3
    ) -> None:
        self.device = FakeDevice(seed)
        self.rng = np.random.default_rng(seed)
        page_bytes = axes.page_values * 2 if axes else PAGE_BYTES
        self.form = Form(PLANES, pages, page_bytes, axes)
        pool = self.rng.standard_normal(PLANES * BLOCKS * page_bytes // 2).astype(np.float32)
        self.pool = (pool.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        base = int(self.pool.ctypes.data)
        self.pages = DevicePages(
            [base + p * BLOCKS * page_bytes for p in range(PLANES)],
            [page_bytes] * PLANES,
            blocks=BLOCKS,
            page_bytes=page_bytes,
        )
        unit = stage_of(self.form, stage).stride
        self.mover = Mover(
            self.device, self.pages, stage_bytes=4 * (-(-unit // 4096) * 4096), copy_bytes=1
        )
        self.device.finish()
        self.slots: list[Any] = []
        self.ends: list[State] = []

    def slot(self, content: int = 0x77) -> Piece:
        slot = np.full(self.form.object_bytes, content, np.uint8)
        self.slots.append(slot)
        return Piece(int(slot.ctypes.data), keep=slot)

    def transfer(self, direction: Any, blocks: list[int], **more: Any) -> Transfer:
        pieces = more.pop("pieces", None) or [
            self.slot() for _ in range(len(blocks) // self.form.pages)
        ]
        transfer = Transfer(
            self.device,
            direction,
            self.form,
            pieces=pieces,
            blocks=blocks,
            planes_a_layer=2,
            finish=self.ends.append,
            after=self.mover.record_after(),
            **more,
        )
        self.mover.submit(transfer)
        return transfer

    def content(self, blocks: list[int]) -> Any:
        """Bytes of these blocks, plane by plane: one object."""
        planes = self.pool.reshape(PLANES, BLOCKS, -1)
        return planes[:, blocks].ravel().copy()

    def run(self, transfer: Transfer) -> None:
        while not transfer.ended:
            self.mover.turn()
            self.device.advance()

    def settle(self) -> None:
        while self.mover.turn():
            self.device.advance()
        self.device.finish()


def test_a_store_and_a_load_bring_the_pages_back() -> None:
    """What was stored is loaded into other pages, byte for byte, and nothing else changes."""
    bench = Bench()
    blocks, others = [3, 9, 0, 5], [1, 2, 20, 23]
    store = bench.transfer("gather", blocks)
    bench.run(store)
    assert store.ok
    pieces = store.pieces
    expected = [bench.content(blocks[:2]), bench.content(blocks[2:])]
    assert np.array_equal(np.concatenate(bench.slots), np.concatenate(expected))
    before = bench.content(blocks)
    load = bench.transfer("scatter", others, pieces=pieces, by_layer=True)
    bench.run(load)
    assert np.array_equal(bench.content(others[:2]), expected[0])
    assert np.array_equal(bench.content(others[2:]), expected[1])
    assert np.array_equal(bench.content(blocks), before)
    assert bench.ends == [State.DONE, State.DONE]


@given(data=st.data(), seed=st.integers(0, 1 << 20))
def test_whatever_the_order_what_has_ended_is_right(data: st.DataObject, seed: int) -> None:
    """Under any interleaving of streams: at `finish` the bytes are there, and never before."""
    axes = data.draw(st.sampled_from([None, Axes("bfloat16", 16, 2, 32)]))
    bench = Bench(seed=seed, axes=axes, stage=data.draw(st.integers(2, PLANES)))
    free = list(range(BLOCKS))
    bench.device.random.shuffle(free)
    under_way: list[tuple[Transfer, list[int], list[Any]]] = []
    stored: list[tuple[Piece, Any]] = []
    for _ in range(data.draw(st.integers(2, 8))):
        action = data.draw(st.sampled_from(["store", "load", "advance", "advance", "cancel"]))
        if action == "store" and len(free) >= 4:
            blocks = [free.pop() for _ in range(4)]
            expected = [bench.content(blocks[:2]), bench.content(blocks[2:])]
            under_way.append((bench.transfer("gather", blocks), blocks, expected))
        elif action == "load" and stored and len(free) >= 2:
            piece, content = data.draw(st.sampled_from(stored))
            blocks = [free.pop(), free.pop()]
            by_layer = data.draw(st.booleans())
            load = bench.transfer("scatter", blocks, pieces=[piece], by_layer=by_layer)
            under_way.append((load, blocks, [content]))
        elif action == "cancel" and under_way:
            data.draw(st.sampled_from(under_way))[0].cancel()
        for _ in range(data.draw(st.integers(0, 30))):
            bench.mover.turn()
            bench.device.advance()
            under_way = check_ended(bench, under_way, stored, free)
    bench.settle()
    assert not check_ended(bench, under_way, stored, free)
    assert bench.mover.close(1.0)


def check_ended(bench: Bench, under_way: Any, stored: Any, free: list[int]) -> list[Any]:
    """Look at the bytes of every transfer that has ended; return the others."""
    left = []
    for transfer, blocks, expected in under_way:
        if not transfer.ended:
            left.append((transfer, blocks, expected))
            continue
        if transfer.ok:
            compare(bench, transfer, blocks, expected, stored)
        free.extend(blocks)
    return left


def compare(
    bench: Bench, transfer: Transfer, blocks: list[int], expected: Any, stored: Any
) -> None:
    """A store's slots hold the pages, a load's pages what was stored."""
    pages = bench.form.pages
    for index, piece in enumerate(transfer.pieces):
        own = blocks[index * pages : (index + 1) * pages]
        content = bench.content(own)
        if transfer.direction == "gather":
            assert np.array_equal(content, expected[index])  # a store changes no page
            if bench.form.axes is None:
                slot: Any = piece.keep
                assert np.array_equal(slot, content)
            else:
                content = restored(bench, piece)
                relative(content, expected[index])
            stored.append((piece, content))
        else:
            assert np.array_equal(content, expected[index])


def restored(bench: Bench, piece: Piece) -> Any:
    """Decode an FP8 slot by the reference: the object's bytes."""
    form, axes = bench.form, bench.form.axes
    assert axes is not None
    slot: Any = piece.keep
    scales = slot[form.scales_at : form.codes_at].view("<i2").reshape(PLANES, 1, 1, axes.heads, 1)
    shape = (PLANES, form.pages, axes.rows, axes.heads, axes.run)
    wide = reference.decode(slot[form.codes_at :].reshape(shape), scales)
    return reference.narrow(wide, axes.dtype).ravel().view(np.uint8)


def relative(coded: Any, exact: Any) -> None:
    """FP8 is within half a step of 2**-3, or a subnormal step under the largest."""
    got, was = (
        (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for bits in (coded, exact)
    )
    assert np.all(np.abs(got - was) <= np.maximum(np.abs(was) / 16, np.abs(was).max() * 2.0**-17))


def test_a_store_waits_for_the_engines_work_on_its_pages() -> None:
    """Pages that the engine's stream is still filling are read only after that (M2)."""
    bench = Bench()
    new = np.full(PAGE_BYTES, 0x11, np.uint8)
    target = bench.pages.starts[0] + 5 * PAGE_BYTES
    bench.device.copy_on(target, int(new.ctypes.data), PAGE_BYTES, ENGINE_STREAM)
    store = bench.transfer("gather", [5, 6])
    for _ in range(200):  # everything but the engine's stream goes on
        bench.mover.turn()
        held, bench.device.streams[ENGINE_STREAM] = bench.device.streams[ENGINE_STREAM], held_back()
        bench.device.advance()
        bench.device.streams[ENGINE_STREAM] = held
    assert not store.ended
    bench.run(store)
    assert (bench.slots[0][:PAGE_BYTES] == 0x11).all()


def held_back() -> Any:
    """Stand in for a stream that does not move."""
    from collections import deque

    return deque()


@pytest.mark.parametrize("seed", range(12))
def test_a_load_waits_for_the_engines_work_on_its_pages(seed: int) -> None:
    """What the engine's stream still did to the pages when it asked comes before the load (M2)."""
    bench = Bench(seed=seed, stage=2)
    for plane in range(PLANES):
        bench.device.fill(bench.pages.starts[plane], 0, 2 * PAGE_BYTES, ENGINE_STREAM)
    bench.run(bench.transfer("scatter", [0, 1], pieces=[bench.slot(9)]))
    assert (bench.content([0, 1]) == 9).all()


@pytest.mark.parametrize("seed", range(12))
def test_layers_come_in_order_and_the_engines_stream_waits_for_each(seed: int) -> None:
    """After `wait_layer(i)` the engine's stream sees layers up to i, and computes on."""
    bench = Bench(seed=seed, stage=2)
    pieces = [bench.slot(i + 1) for i in range(3)]
    load = bench.transfer("scatter", [0, 1, 2, 3, 4, 5], pieces=pieces, by_layer=True)
    bench.mover.turn()  # all of it is on the streams now
    seen: list[tuple[int, bool, bool]] = []

    def look(layer: int) -> None:
        planes = bench.pool.reshape(PLANES, BLOCKS, -1)[:, :6]
        here = [(planes[p] == np.repeat([1, 2, 3], 2)[:, None]).all() for p in range(PLANES)]
        seen.append((layer, all(here[: 2 * layer + 2]), load.ended))

    for layer in range(LAYERS):
        assert load.wait_layer(layer)
        bench.device.streams[ENGINE_STREAM].append(("do", lambda layer=layer: look(layer)))
    bench.device.finish()
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    assert all(there for _, there, _ in seen)
    assert not any(ended for *_, ended in seen)  # the mover had no turn: no host wait was needed


def test_pages_may_be_overwritten_once_they_are_read() -> None:
    """Behind `wait_pages` the engine's stream may fill the pages anew; the store keeps the old."""
    bench = Bench(stage=2)
    expected = bench.content([7, 8])
    store = bench.transfer("gather", [7, 8])
    bench.mover.turn()
    assert store.wait_pages()
    for plane in range(PLANES):
        bench.device.fill(
            bench.pages.starts[plane] + 7 * PAGE_BYTES, 0, 2 * PAGE_BYTES, ENGINE_STREAM
        )
    bench.run(store)
    bench.device.finish()
    assert np.array_equal(bench.slots[0], expected)
    assert not bench.content([7, 8]).any()


@given(calls=st.integers(0, 60), seed=st.integers(0, 99))
def test_a_device_that_fails_gives_nothing_back(calls: int, seed: int) -> None:
    """Whenever the device fails: each transfer ends once, LOST if it had begun (X2, M3)."""
    bench = Bench(seed=seed)
    first, second = bench.transfer("gather", [0, 1]), bench.transfer("gather", [2, 3])
    bench.device.fail_after = calls
    for _ in range(200):
        bench.mover.turn()
        bench.device.advance()
        if bench.mover.broken or (first.ended and second.ended):
            break
    assert first.ended
    assert second.ended
    assert len(bench.ends) == 2
    if bench.mover.broken:
        assert State.LOST in bench.ends or set(bench.ends) <= {State.DONE, State.FAILED}
    bench.device.fail_after = -1
    asks = list(bench.device.streams.values())
    if bench.mover.broken:
        late = Transfer(
            bench.device,
            "gather",
            bench.form,
            pieces=[bench.slot()],
            blocks=[4, 5],
            planes_a_layer=2,
            finish=bench.ends.append,
        )
        bench.mover.submit(late)
        assert late.state is State.FAILED
        assert list(bench.device.streams.values()) == asks


def test_a_copy_that_never_ends_is_given_up() -> None:
    """An event that does not happen ends the transfer as LOST after a bound, and the mover."""
    bench = Bench()
    now = [0.0]
    bench.mover._clock = lambda: now[0] + 1e9
    bench.device.stuck = True
    store = bench.transfer("gather", [0, 1])
    bench.mover.turn()
    assert store.state is State.LOST
    assert "did not end" in bench.mover.broken


def test_more_than_the_queue_takes_is_refused() -> None:
    """The queue has a bound; what is beyond fails at once and gives its slots back."""
    bench = Bench()
    transfers = [bench.transfer("gather", [0, 1]) for _ in range(QUEUE_MAX + 2)]
    assert [t.state for t in transfers[-2:]] == [State.FAILED] * 2
    assert not transfers[QUEUE_MAX - 1].ended
    bench.settle()
    assert all(t.ok for t in transfers[:-2])


def test_the_thread_ends_what_it_was_given() -> None:
    """With the real thread and a device that moves by itself, stores end and `close` joins."""
    bench = Bench()
    stop = threading.Event()

    def life() -> None:
        while not stop.is_set():
            bench.device.advance()

    device = threading.Thread(target=life)
    device.start()
    try:
        bench.mover.start()
        stores = [bench.transfer("gather", [2 * i, 2 * i + 1]) for i in range(10)]
        assert all(store.wait(45.0) for store in stores)
        assert bench.mover.close(45.0)
    finally:
        stop.set()
        device.join()
    assert bench.ends == [State.DONE] * 10


def test_scales_and_codes_of_a_whole_object_are_one_copy() -> None:
    """They follow each other in the slot, so they do on the stage: a small copy takes 5 us."""
    bench = Bench(axes=Axes("bfloat16", 16, 4, 32), stage=PLANES)
    copies: list[int] = []
    for name in ("copy_in", "copy_out"):
        plain = getattr(bench.device, name)

        def counted(target: int, source: int, size: int, stream: int, plain: Any = plain) -> None:
            copies.append(size)
            plain(target, source, size, stream)

        setattr(bench.device, name, counted)
    store = bench.transfer("gather", [0, 1])
    bench.run(store)
    load = bench.transfer("scatter", [2, 3], pieces=store.pieces)
    bench.run(load)
    table = 2 * 4
    assert copies == [table, bench.form.object_bytes - 64, table, bench.form.object_bytes - 64]


@given(data=st.data(), seed=st.integers(0, 99))
def test_slots_on_the_gpu_need_no_stage_wherever_they_lie(data: st.DataObject, seed: int) -> None:
    """Slots in a row, apart, in falling order and among host slots: the same bytes come back."""
    axes = data.draw(st.sampled_from([None, Axes("bfloat16", 16, 2, 32)]))
    bench = Bench(seed=seed, axes=axes, stage=2)
    count, size = data.draw(st.integers(1, 6)), -(-bench.form.object_bytes // 512) * 512
    memory = np.full((9, size), 0x55, np.uint8)
    places = data.draw(st.permutations(range(9)))[:count]
    pieces = [
        Piece(int(memory[p].ctypes.data), on_device=True, keep=memory[p][: bench.form.object_bytes])
        if data.draw(st.booleans())
        else bench.slot()
        for p in places
    ]
    blocks = list(range(2 * count))
    bench.run(bench.transfer("gather", blocks, pieces=pieces))
    for index, piece in enumerate(pieces):
        exact = bench.content(blocks[2 * index : 2 * index + 2])
        if axes is None:
            slot: Any = piece.keep
            assert np.array_equal(slot, exact)
        else:
            relative(restored(bench, piece), exact)
    others = list(range(12, 12 + 2 * count))
    before = [bench.content(blocks[2 * i : 2 * i + 2]) for i in range(count)]
    if axes is not None:
        before = [restored(bench, piece) for piece in pieces]
    load = bench.transfer("scatter", others, pieces=pieces, by_layer=data.draw(st.booleans()))
    bench.run(load)
    for index, content in enumerate(before):
        assert np.array_equal(bench.content(others[2 * index : 2 * index + 2]), content)
    used = {p for p, piece in zip(places, pieces, strict=True) if piece.on_device}
    assert all((memory[p] == 0x55).all() for p in range(9) if p not in used)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_slots_in_a_row_are_one_launch(order: list[int]) -> None:
    """What lies in a row in a slab is copied by one kernel, in whatever order it was reserved."""
    bench = Bench()
    memory = np.zeros((4, bench.form.object_bytes), np.uint8)
    rows = [memory[i] for i in order]
    pieces = [Piece(int(row.ctypes.data), on_device=True, keep=row) for row in rows]
    launches = []
    launch = bench.device.launch
    bench.device.launch = lambda call, stream: (launches.append(call), launch(call, stream))[1]  # type: ignore[method-assign, func-returns-value]
    bench.run(bench.transfer("gather", list(range(8)), pieces=pieces))
    assert len(launches) == 1
    for index, row in enumerate(rows):
        assert np.array_equal(row, bench.content([2 * index, 2 * index + 1]))


@pytest.mark.parametrize("off", [0, 2])
def test_pages_that_are_no_whole_vectors_are_copied_by_the_byte(off: int) -> None:
    """A GPU fails on a vector at an odd address, and the whole context with it."""
    bench = Bench()
    starts = [start + off for start in bench.pages.starts]
    pages = DevicePages(starts, bench.pages.strides, blocks=BLOCKS - 1, page_bytes=PAGE_BYTES)
    bench.mover = Mover(bench.device, pages, stage_bytes=4 << 20)
    names = []
    launch = bench.device.launch
    bench.device.launch = lambda call, stream: (names.append(call.name), launch(call, stream))[1]  # type: ignore[method-assign, func-returns-value]
    bench.run(bench.transfer("gather", [0, 1]))
    assert bench.ends == [State.DONE]
    assert names == ["kvd_gather_1" if off else "kvd_gather_16"]


def test_a_short_transfer_is_looked_at_soon_and_a_long_one_seldom() -> None:
    """Looking costs the engine its interpreter; being late costs the transfer its rate."""
    now = [100.0]
    bench = Bench()
    bench.mover._clock = lambda: now[0]
    bench.transfer("gather", [0, 1])
    assert bench.mover.turn()
    bench.mover._running[0].transfer.started_s = 100.0
    for after_s, poll_s in ((0.0, POLL_MIN_S), (800e-6, 50e-6), (0.1, POLL_S)):
        now[0] = 100.0 + after_s
        assert bench.mover._poll_s() == pytest.approx(poll_s)
    bench.settle()
