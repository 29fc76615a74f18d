"""The vLLM worker's mover against a real daemon, with pages of its own and without vLLM.

Once with pages in host memory, once on a fake GPU whose streams move in random order; and both with
objects of FP8, of values that FP8 holds exactly.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd_client
from kvd_client import _copiers
from kvd_client.cuda.kernels import Axes
from kvd_client.vllm.cuts import Cut
from kvd_client.vllm.gpu_pages import GpuPages
from kvd_client.vllm.messages import Load, Save
from kvd_client.vllm.mover import Mover
from kvd_client.vllm.pages import GroupPages, Pages, Piece, cut_pages
from kvd_client.vllm.stats import Counts
from tests.daemon_fixture import namespace
from tests.engines.vllm_kit import stats
from tests.gpu.fake_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

PAGES = 4
PAGE_BYTES = 1024
LAYERS = 3
BLOCKS = 64
CUT = Cut(1, Axes("bfloat16", 4, 2, 64))
CHAIN = [bytes([n]) * 32 for n in range(1, 9)]


class Rank:
    """Memory of an engine, and the mover over it."""

    def __init__(
        self, join: Callable[..., kvd_client.Client], device: FakeDevice | None, *, fp8: bool
    ) -> None:
        """Lay out two groups in one allocation, as vLLM does; the second sees two chunks."""
        rng = np.random.default_rng(1)
        shape = (LAYERS, BLOCKS, PAGE_BYTES)
        if fp8:  # 1, 1.125 .. 1.875 and their negatives, whatever the scale
            sign, digits = rng.integers(0, 2, shape), rng.integers(0, 8, shape)
            bits = (0x3F80 | sign << 15 | digits << 4).astype("<u2")[:, :, : PAGE_BYTES // 2]
            self.memory = np.ascontiguousarray(bits).view(np.uint8)
        else:
            self.memory = rng.integers(1, 255, shape, dtype=np.uint8)
        base = self.memory.ctypes.data
        starts = np.array([[base + n * BLOCKS * PAGE_BYTES] for n in range(LAYERS)])
        group = GroupPages(starts, PAGE_BYTES, PAGE_BYTES, PAGES)
        self.group = group = cut_pages(group, CUT) if fp8 else group
        groups = [group] * 2
        self.pages: Pages | GpuPages = (
            Pages(groups, BLOCKS, _copiers.build_copier("syscall", 1))
            if device is None
            else GpuPages(groups, BLOCKS, device)
        )
        kinds = (
            kvd_client.Group("full", LAYERS, 1, 8, group.object_bytes),
            kvd_client.Group("sliding", LAYERS, 1, 8, group.object_bytes, window=9),
        )
        client = join(
            layout=kvd_client.Layout(4, 1, "uint8", kinds), namespace=namespace(lossy=fp8)
        )
        self.client = client
        self.counts = Counts()
        self.mover = Mover(client, self.pages, self.counts, writes=True)

    def wait(self) -> None:
        """Wait until nothing is under way."""
        until = time.monotonic() + 30
        while not self.mover.idle:
            assert time.monotonic() < until
            time.sleep(0.002)

    def load(self, first: int, blocks: tuple[tuple[int, ...], ...], chunks: int) -> Any:
        """Hold, load, and wait for the end."""
        lease = self.client.acquire(CHAIN[:chunks], first=first, read=False)
        self.mover.load(Load("r", lease.token, first, blocks, wait=False))
        ended = self.ended()
        lease.release()
        return ended

    def ended(self) -> Any:
        """Wait until a load has ended."""
        until = time.monotonic() + 30
        while not (ended := self.mover.take()).loaded:
            assert time.monotonic() < until
            time.sleep(0.002)
        return ended


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[FakeDevice | None]:
    """Give a GPU that moves by itself, or none."""
    if request.param == "host":
        yield None
        return
    made = FakeDevice(seed=3)
    end = made.begin_life()
    yield made
    end()
    assert not made.memory, "GPU memory is left"


@pytest.fixture(params=[False, True], ids=["exact", "fp8"])
def fp8(request: pytest.FixtureRequest) -> bool:
    """Whether objects are FP8."""
    return bool(request.param)


@pytest.fixture
def rank(
    connect: Callable[..., kvd_client.Client],
    device: FakeDevice | None,
    fp8: bool,  # noqa: FBT001
) -> Iterator[Rank]:
    """Make a rank with two groups."""
    made = Rank(connect, device, fp8=fp8)
    yield made
    made.mover.close()
    made.pages.close()


def test_what_was_saved_is_loaded_elsewhere(rank: Rank) -> None:
    """Pages come back in other blocks, byte for byte; null blocks and known pages are left alone.

    Of the sliding group only the chunks that were there are saved, and the window's are needed.
    """
    before = rank.memory.copy()
    full = tuple(range(1, 17))
    sliding = (0, 0, 0, 0, 0, 18, 19, 20, *range(21, 29))
    rank.mover.save(Save("r", b"", tuple(CHAIN[:4]), (full, sliding)))
    rank.wait()
    assert rank.counts.take()["saves"] == 1
    target_full = (0, 0, 42, 43, *range(44, 56))
    target_sliding = (*(0,) * 8, *range(56, 64))
    ended = rank.load(0, (target_full, target_sliding), 4)
    assert (ended.loaded, ended.failed, ended.bad_blocks) == ({"r"}, set(), set())
    assert (rank.memory[:, 42:56] == before[:, 3:17]).all()
    assert (rank.memory[:, 56:64] == before[:, 21:29]).all()
    assert (rank.memory[:, :42] == before[:, :42]).all()
    assert rank.counts.take()["loads"] == 1


def test_a_save_goes_on_where_another_ended(rank: Rank) -> None:
    """The parent's hash joins two saves into one chain."""
    blocks = tuple(range(1, 9)), tuple(range(9, 17))
    rank.mover.save(Save("r", b"", tuple(CHAIN[:2]), blocks))
    rank.mover.save(Save("r", CHAIN[1], tuple(CHAIN[2:4]), blocks))
    rank.wait()
    assert rank.client.lookup(CHAIN).chunks == 4


def test_a_fence_ends_saves_of_its_blocks_and_no_others(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save in the middle of a copy is waited for and kept; one that waits is not begun."""
    copying, go = threading.Event(), threading.Event()
    save_pages = rank.pages.save

    def held(*arguments: Any) -> int:
        copying.set()
        assert go.wait(30)
        return save_pages(*arguments)

    monkeypatch.setattr(rank.pages, "save", held)
    blocks = [tuple(range(8 * n + 1, 8 * n + 5)) for n in range(3)]
    for number in range(3):
        save = Save("r", b"", (CHAIN[number],), (blocks[number], blocks[number]))
        rank.mover.save(save)
    assert copying.wait(30)
    fence = threading.Thread(target=rank.mover.fence, args=([blocks[0][0], blocks[1][0]],))
    fence.start()
    until = time.monotonic() + 30
    while rank.mover._saving is None or not rank.mover._saving.cancelled:
        assert time.monotonic() < until, "the fence does not begin"
        time.sleep(0.002)
    fence.join(0.05)
    assert fence.is_alive(), "the fence did not wait for the copy"
    go.set()
    fence.join(30)
    rank.memory[:, blocks[0]] = 0
    rank.wait()
    found = [rank.client.lookup([key]).chunks for key in CHAIN[:3]]
    assert found == [1, 0, 1]
    with rank.client.acquire([CHAIN[0]]) as lease:
        assert all(lease.view(0)[rank.group.form.codes_at :]), "saved after the fence"


@pytest.mark.parametrize("fp8", [False], indirect=True)  # takes its time, whatever is in it
def test_a_load_that_cannot_be_done_ends_all_the_same(rank: Rank, daemon: DaemonProcess) -> None:
    """A lease that holds too little, a token of nobody, a dead daemon: failed, with its blocks."""
    rank.mover.save(Save("r", b"", (CHAIN[0],), (tuple(range(1, 5)), (0,) * 4)))
    rank.wait()
    blocks = (tuple(range(30, 34)), tuple(range(34, 38)))
    before = rank.memory.copy()
    rank.mover.load(Load("a", bytes(16), 0, blocks, wait=False))
    rank.wait()
    daemon.kill()
    rank.mover.load(Load("b", bytes(range(16)), 0, blocks, wait=False))
    until = time.monotonic() + 30
    loaded: set[str] = set()
    while loaded != {"a", "b"}:
        ended = rank.mover.take()
        assert ended.loaded == ended.failed
        assert not ended.loaded or ended.bad_blocks == set(range(30, 38))
        assert not loaded & ended.loaded, "a load ended twice"
        loaded |= ended.loaded
        assert time.monotonic() < until
        time.sleep(0.002)
    assert (rank.memory == before).all()


def test_a_session_lost_before_a_load_is_made_again(
    rank: Rank, connect: Callable[..., kvd_client.Client]
) -> None:
    """The scheduler half may hold a lease of a new daemon before this rank has met it."""
    blocks = (tuple(range(1, 5)), tuple(range(5, 9)))
    rank.mover.save(Save("r", b"", (CHAIN[0],), blocks))
    rank.wait()
    other = connect(layout=rank.client.layout, namespace=namespace(lossy=rank.client.lossy))
    with other.acquire(CHAIN[:1], read=False) as lease:
        rank.client._link._drop()
        assert lease
        rank.mover.load(Load("r", lease.token, 0, blocks, wait=False))
        ended = rank.ended()
    assert (ended.loaded, ended.failed) == ({"r"}, set())


def test_a_session_lost_in_a_load_fails_it(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease ended with it: what was copied may be anything (M4), even if another one is up."""
    blocks = (tuple(range(1, 5)), tuple(range(5, 9)))
    rank.mover.save(Save("r", b"", (CHAIN[0],), blocks))
    rank.wait()
    load_pages = rank.pages.load

    def load_and_lose(*arguments: Any) -> int:
        size = load_pages(*arguments)
        rank.client._link._drop()
        rank.client.greet(5.0)
        return size

    monkeypatch.setattr(rank.pages, "load", load_and_lose)
    ended = rank.load(0, blocks, 1)
    assert (ended.failed, ended.bad_blocks) == ({"r"}, set(range(1, 9)))


def test_a_lease_that_comes_too_late_is_given_back(
    rank: Rank, daemon: DaemonProcess, connect: Callable[..., kvd_client.Client]
) -> None:
    """The load has failed for want of an answer; nothing more is asked for, and nothing is held."""
    blocks = (tuple(range(1, 5)), tuple(range(5, 9)))
    rank.mover.save(Save("r", b"", (CHAIN[0],), blocks))
    rank.wait()
    scheduler = connect(layout=rank.client.layout, namespace=namespace(lossy=rank.client.lossy))
    lease = scheduler.acquire(CHAIN[:1], read=False)
    assert lease
    rank.client.wait_s = 0.3
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        rank.mover.load(Load("r", lease.token, 0, blocks, wait=False))
        assert rank.ended().failed == {"r"}
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    lease.release()
    until = time.monotonic() + 30
    while stats(daemon)["leases"] or stats(daemon)["host"]["pinned_bytes"]:
        assert time.monotonic() < until, "a lease is held for a load that is over"
        time.sleep(0.05)


def test_no_address_outside_the_allocation(rank: Rank) -> None:
    """A block id that the engine does not have is refused before a byte moves (A1)."""
    buffer = memoryview(bytearray(rank.group.object_bytes))
    for wrong in (BLOCKS, -1):
        with pytest.raises(AssertionError):
            rank.pages.load([Piece(0, (1, 2, 3, wrong), buffer)], 1)
