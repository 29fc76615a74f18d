"""vLLM's pages on a GPU: what only a GPU does, on a fake one; the rest is test_vllm_mover.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd_client
from kvd_client.errors import KvdError, Unsupported
from kvd_client.vllm import gpu_pages
from kvd_client.vllm.gpu_pages import GpuPages
from kvd_client.vllm.messages import Load, Save
from kvd_client.vllm.mover import Mover
from kvd_client.vllm.pages import GroupPages, Piece, open_device
from kvd_client.vllm.stats import Counts
from kvd_client.vllm.stopwatch import UNREAD_MAX, GpuStopwatch, Stopwatch, stopwatch
from tests.engines.vllm_kit import stats
from tests.gpu.fake_device import ENGINE_STREAM, FakeDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

PAGES, PAGE_BYTES, LAYERS, BLOCKS = 4, 1024, 3, 64
SIZE = LAYERS * PAGES * PAGE_BYTES
CHAIN = [bytes([n]) * 32 for n in range(1, 9)]
LAYOUT = kvd_client.Layout(4, 1, "uint8", (kvd_client.Group("full", LAYERS, 1, 8, SIZE),))
IDS = tuple(range(1, 5))


def until(holds: Callable[[], Any]) -> None:
    """Wait until it holds, within the test's own limit."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Rank:
    """An engine's memory on a fake GPU, and the mover over it."""

    def __init__(self, client: kvd_client.Client) -> None:
        self.device = FakeDevice(seed=5)
        self.memory = np.random.default_rng(2).integers(
            1, 255, (LAYERS, BLOCKS, PAGE_BYTES), dtype=np.uint8
        )
        base = self.memory.ctypes.data
        starts = np.array([[base + n * BLOCKS * PAGE_BYTES] for n in range(LAYERS)])
        self.group = GroupPages(starts, PAGE_BYTES, PAGE_BYTES, PAGES)
        self.pages = GpuPages([self.group], BLOCKS, self.device)
        self.client = client
        self.counts = Counts()
        self.mover = Mover(client, self.pages, self.counts, writes=True)
        self.end = self.device.begin_life()
        until(self.device.idle)

    def compute(self, blocks: tuple[int, ...], value: int) -> None:
        """Ask the GPU to write blocks, on the engine's stream."""

        def write() -> None:
            self.memory[:, list(blocks)] = value

        self.device._do(ENGINE_STREAM, write)

    def save(self, chunk: int) -> None:
        """Begin to save a chunk of its own."""
        self.mover.save(Save("r", b"", (CHAIN[chunk],), (IDS,)))


@pytest.fixture
def rank(connect: Callable[..., kvd_client.Client]) -> Iterator[Rank]:
    """Make a rank whose GPU moves by itself."""
    made = Rank(connect(layout=LAYOUT))
    yield made
    made.device.held.clear()
    made.mover.close()
    made.pages.close()
    made.end()


def copies(device: FakeDevice) -> bool:
    """Tell whether copies were asked for that the GPU has not done."""
    return any(work for stream, work in device.streams.items() if stream != ENGINE_STREAM)


def test_a_save_waits_for_what_the_gpu_has_still_to_compute(rank: Rank) -> None:
    """The step has returned and its kernels have not run: what they write is what is saved."""
    rank.device.held.set()
    rank.compute(IDS, 7)
    rank.save(0)
    time.sleep(0.05)
    assert not copies(rank.device), "before the step's kernels"
    rank.device.held.clear()
    until(lambda: rank.client.lookup([CHAIN[0]]).chunks)
    with rank.client.acquire([CHAIN[0]]) as lease:
        assert set(bytes(lease.view(0))) == {7}


def test_a_load_waits_for_what_still_uses_its_blocks(rank: Rank) -> None:
    """The blocks were another request's in a step that the GPU has not done yet."""
    before = rank.memory.copy()
    rank.save(0)
    until(lambda: rank.client.lookup([CHAIN[0]]).chunks)
    rank.device.held.set()
    rank.compute(tuple(range(8, 12)), 1)
    lease = rank.client.acquire([CHAIN[0]], read=False)
    rank.mover.load(Load("r", lease.token, 0, ((8, 9, 10, 11),), wait=False))
    time.sleep(0.05)
    assert not rank.mover.take().loaded
    rank.device.held.clear()
    ended = None
    while not (ended := rank.mover.take()).loaded:
        time.sleep(0.002)
    lease.release()
    assert not ended.failed
    assert (rank.memory[:, 8:12] == before[:, 1:5]).all()


def test_a_gpu_that_dies_in_a_copy_gives_nothing_back(rank: Rank, daemon: DaemonProcess) -> None:
    """What it still writes nobody knows: the slot stays reserved, the load fails, no hit comes."""
    rank.save(0)
    until(lambda: rank.client.lookup([CHAIN[0]]).chunks)
    lease = rank.client.acquire([CHAIN[0]], read=False)
    rank.device.held.set()
    rank.save(2)
    while rank.device.streams[ENGINE_STREAM]:
        rank.device.advance()
    until(lambda: copies(rank.device))
    rank.device.fail_after = 0
    until(lambda: rank.mover.idle)
    rank.mover.load(Load("r", lease.token, 0, ((8, 9, 10, 11),), wait=False))
    ended = None
    while not (ended := rank.mover.take()).loaded:
        time.sleep(0.002)
    assert (ended.failed, ended.bad_blocks) == ({"r"}, {8, 9, 10, 11})
    assert not rank.client.lookup([CHAIN[2]]).chunks
    host = stats(daemon)["host"]
    assert host["reserved_bytes"] + host["quarantined_bytes"] >= SIZE, "the slot was given back"
    rank.device.fail_after = -1
    pinned = dict(rank.device.registered)
    rank.pages.close()
    assert rank.device.registered == pinned, "the GPU may still read it"
    lease.release()


def test_what_one_transfer_cannot_take_goes_in_several(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block ids of a copy have a table of a fixed size."""
    monkeypatch.setattr(gpu_pages, "TABLE_BYTES", 4 * 2 * PAGES)
    begun = []
    submit = rank.pages._movers[0].submit

    def noted(transfer: Any) -> None:
        begun.append(len(transfer.pieces))
        submit(transfer)

    monkeypatch.setattr(rank.pages._movers[0], "submit", noted)
    buffers = [memoryview(bytearray(SIZE)) for _ in range(5)]
    pieces = [
        Piece(0, tuple(range(1 + PAGES * n, 1 + PAGES * (n + 1))), buffer)
        for n, buffer in enumerate(buffers)
    ]
    assert rank.pages.save(pieces, 1) == 5 * SIZE
    assert begun == [2, 2, 1]
    for n, buffer in enumerate(buffers):
        found = np.frombuffer(buffer, np.uint8).reshape(LAYERS, PAGES, PAGE_BYTES)
        assert (found == rank.memory[:, 1 + PAGES * n : 1 + PAGES * (n + 1)]).all()


def test_a_copy_with_a_wrong_part_begins_none_of_it(rank: Rank) -> None:
    """Whoever hears of the mistake gives slots back at once: nothing may be on its way to them."""
    rank.device.held.set()
    buffers = [memoryview(bytearray(SIZE)) for _ in range(2)]
    pieces = [Piece(0, IDS, buffers[0]), Piece(1, (1, 2, 3, BLOCKS), buffers[1])]
    two = GpuPages([rank.group, rank.group], BLOCKS, rank.device)
    before = {stream: len(work) for stream, work in rank.device.streams.items()}
    with pytest.raises(AssertionError):
        two.save(pieces, 1)
    time.sleep(0.05)
    assert {stream: len(work) for stream, work in rank.device.streams.items()} == before
    rank.device.held.clear()
    until(rank.device.idle)
    two.close()


@pytest.mark.parametrize(("memory_bytes", "words"), [(1 << 20, "out of memory"), (1 << 30, "set")])
def test_a_gpu_that_will_not_do_keeps_kvd_out(memory_bytes: int, words: str) -> None:
    """Too little memory, or pages larger than a stage: a line that says so, nothing is kept."""
    device = FakeDevice(memory_bytes=memory_bytes)
    large = words == "set"
    page = (4 << 20) if large else PAGE_BYTES
    group = GroupPages(np.array([[1 << 20]]), page, page, PAGES)
    with pytest.raises(Unsupported, match=words):
        GpuPages([group, group], BLOCKS, device, stage_bytes=16 << 20)
    assert not device.memory


def test_a_gpu_that_does_not_answer_fails_every_copy(rank: Rank) -> None:
    """On the engine's thread nothing is raised."""
    rank.device.fail_after = 0
    mark = rank.pages.mark()
    assert mark == 0
    with pytest.raises(KvdError, match="has failed"):
        rank.pages.wait(mark)
    rank.save(0)
    until(lambda: rank.mover.idle)
    rank.device.fail_after = -1
    assert not rank.client.lookup([CHAIN[0]]).chunks


def test_other_devices_are_refused() -> None:
    """With what to do about it, where something can be done."""
    assert open_device(SimpleNamespace(type="cpu", index=None)) is None
    with pytest.raises(Unsupported, match="NVIDIA"):
        open_device(SimpleNamespace(type="xpu", index=0))
    with pytest.raises(
        Unsupported, match=r"CuPy is not installed|no CUDA device|CUDA does not work"
    ):
        open_device(SimpleNamespace(type="cuda", index=99))


# ------------------------------------------------------------------------------- steps


class Event:
    """A torch event of a GPU that has reached a time."""

    reached_ms = 0.0
    asked_ms = 0.0

    def record(self) -> None:
        self.at_ms = Event.asked_ms

    def query(self) -> bool:
        return self.at_ms <= Event.reached_ms

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_a_step_is_timed_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by when its Python returns; what the GPU has not done yet is told later, or never."""
    monkeypatch.setattr(Event, "reached_ms", 0.0)
    monkeypatch.setattr(Event, "asked_ms", 0.0)
    watch = GpuStopwatch(Event)
    for step in range(3):
        watch.begin()
        Event.asked_ms += 100.0
        assert watch.end(1000 + step) == []
    Event.reached_ms = 200.0
    watch.begin()
    assert watch.end(0) == [(1000, 0.1), (1001, 0.1)], "a step without tokens is not timed"
    for _ in range(2 * UNREAD_MAX):
        watch.begin()
        Event.asked_ms += 100.0
        watch.end(1)
    Event.reached_ms = 1e9
    watch.begin()
    assert len(watch.end(0)) == UNREAD_MAX
    assert type(stopwatch(on_gpu=False)) is Stopwatch
