"""The GPU tier in a real daemon process, on a fake GPU whose memory the processes share.

What it cannot show: CUDA itself.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd_client
from kvd import statpage
from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.engine import DeviceKV
from kvd_client.cuda.forms import fp8_layout
from kvd_client.cuda.pages import DevicePages
from kvd_client.cuda.transfer import State
from kvd_client.paths import stat_page_name
from kvd_client.wire_gpu import GPU_SLABS
from tests.daemon_fixture import namespace, tokens
from tests.gpu.shared_device import SharedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench._daemon import DaemonProcess

pytestmark = pytest.mark.timeout(90)
LAYERS, HEADS, DIM, PAGE, CHUNK, BLOCKS = 2, 2, 64, 16, 64, 64
PLANES, PAGES = 2 * LAYERS, CHUNK // PAGE
PAGE_BYTES = PAGE * HEADS * DIM * 2
GROUP = kvd_client.Group("full", LAYERS, HEADS, DIM, PLANES * PAGES * PAGE_BYTES)
LAYOUT = kvd_client.Layout(CHUNK, PAGE, "bfloat16", (GROUP,))
ROOT = Path(__file__).resolve().parent.parent.parent


class Engine:
    """Pages, a client and a fake GPU of this process."""

    def __init__(self, socket: str, seed: int, layout: kvd_client.Layout = LAYOUT) -> None:
        self.device = SharedDevice(seed)
        rng = np.random.default_rng(seed)
        self.pool = rng.integers(0, 1 << 15, (PLANES, BLOCKS, PAGE_BYTES // 2), np.uint16) & 0x7F7F
        base = int(self.pool.ctypes.data)
        pages = DevicePages(
            [base + p * BLOCKS * PAGE_BYTES for p in range(PLANES)],
            [PAGE_BYTES] * PLANES,
            blocks=BLOCKS,
            page_bytes=PAGE_BYTES,
        )
        fp8 = layout is not LAYOUT
        self.client = kvd_client.connect(
            socket,
            namespace=namespace(lossy=fp8),
            layout=layout,
            required=True,
            timeout_s=20.0,
            wait_s=20.0,
        )
        self.kv = DeviceKV(
            self.client, pages, self.device, stage_bytes=4 << 20,
            page_layout=LAYOUT if fp8 else None,
        )  # fmt: skip
        assert self.client.ping()

    def content(self, blocks: list[int]) -> Any:
        return self.pool[:, blocks].copy()

    def close(self) -> None:
        assert self.kv.close()
        assert not self.device.opened
        self.device.over.set()
        self.client.close()


def with_gpu(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    """Start a daemon with a GPU tier of 16 MiB on the fake GPU."""
    config = tmp_path / "kvd.toml"
    config.write_text('[gpu]\nbytes = "16MiB"\nslab_bytes = "4MiB"\n')
    daemon = make_daemon(host_bytes=256 << 20, arguments=["--config", str(config)])
    daemon._command[1:3] = ["-m", "tests.gpu.gpu_daemon"]
    daemon.start()
    until(lambda: gpu(daemon)["ready_bytes"] == 16 << 20)
    return daemon


@pytest.fixture
def gpu_daemon(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    """Run a daemon with a GPU tier."""
    return with_gpu(make_daemon, tmp_path)


@pytest.fixture
def make_engine(gpu_daemon: DaemonProcess) -> Iterator[Callable[..., Engine]]:
    """Make engines of this process on the daemon; all are closed at the end."""
    made: list[Engine] = []

    def make(seed: int = 1, **options: Any) -> Engine:
        made.append(Engine(gpu_daemon.socket, seed, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def gpu(daemon: DaemonProcess) -> dict[str, Any]:
    """Read what the daemon says of its GPU tier."""
    found: Any = statpage.read(stat_page_name(daemon.socket)).stats["gpu"]
    return dict(found)


def hits(daemon: DaemonProcess, what: str) -> dict[str, int]:
    """Read how many tokens or bytes were given, by the tier they lay in."""
    (tenant,) = statpage.read(stat_page_name(daemon.socket)).stats["tenants"]
    return {tier: count for tier, count in tenant[f"hit_{what}"].items() if count}


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds, within the test's own limit."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stored(engine: Engine, hashes: list[bytes], blocks: list[int]) -> None:
    """Store, and wait until it is found."""
    assert engine.kv.store(engine.client.reserve(hashes), blocks).wait(30)
    until(lambda: engine.client.lookup(hashes).chunks == len(hashes))


def test_two_engines_share_the_gpu_tier(
    gpu_daemon: DaemonProcess, make_engine: Callable[..., Engine]
) -> None:
    """A store goes to GPU memory and comes down by the daemon; a load is told of GPU memory."""
    one, two = make_engine(1), make_engine(2)
    hashes = one.client.chunk_hashes(tokens_of(3))
    with one.client.reserve(hashes) as reservation:
        assert all(slot.on_gpu and slot.on_gpu[0] >= GPU_SLABS for slot in reservation.placed)
    blocks, others = list(range(12)), list(range(30, 42))
    stored(one, hashes, blocks)
    lease = two.client.acquire(hashes)
    assert all(lease.on_gpu(chunk) for chunk in range(3))
    assert two.kv.load(lease, others).wait(30)
    assert np.array_equal(two.content(others), one.content(blocks))
    until(lambda: gpu(gpu_daemon)["objects"] == 3)
    until(lambda: gpu(gpu_daemon)["bytes_down"] >= 3 * GROUP.object_bytes)
    assert gpu(gpu_daemon)["bytes_down"] == 3 * GROUP.object_bytes
    until(lambda: hits(gpu_daemon, "tokens") == {"gpu": 3 * CHUNK})
    assert hits(gpu_daemon, "bytes") == {"gpu": 3 * GROUP.object_bytes}
    # The same bytes are in host memory, for who has no GPU.
    with (
        kvd_client.connect(
            gpu_daemon.socket,
            namespace=namespace(lossy=False),
            layout=LAYOUT,
            timeout_s=20.0,
            wait_s=20.0,
        ) as plain,
        plain.acquire(hashes) as host,
    ):
        for chunk in range(3):
            own = one.content(blocks[chunk * PAGES : (chunk + 1) * PAGES])
            assert bytes(host.view(chunk)) == own.tobytes()
    until(lambda: hits(gpu_daemon, "tokens") == {"gpu": 3 * CHUNK, "host": 3 * CHUNK})


def test_an_engine_that_cannot_map_the_tier_gets_host_memory(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle that does not open is a miss once: then places are those of host memory."""
    one, two = make_engine(1), make_engine(2)
    hashes = one.client.chunk_hashes(tokens_of(2))
    stored(one, hashes, list(range(8)))
    tries: list[bytes] = []

    def refuse(handle: bytes) -> int:
        tries.append(handle)
        raise DeviceError("of another user")

    monkeypatch.setattr(two.device, "open", refuse)
    assert two.kv.load(two.client.acquire(hashes), list(range(20, 28))).state is State.FAILED
    assert two.kv.imports.failed == "of another user"
    assert two.kv.load(two.client.acquire(hashes), list(range(20, 28))).wait(30)
    assert np.array_equal(two.content(list(range(20, 28))), one.content(list(range(8))))
    more = two.client.chunk_hashes(tokens_of(2, 9))
    stored(two, more, list(range(8)))
    assert len(tries) == 1
    assert one.kv.load(one.client.acquire(hashes), list(range(30, 38))).wait(30)


def tokens_of(chunks: int, seed: int = 0) -> list[int]:
    """Return that many chunks of tokens."""
    return tokens(chunks * CHUNK // 16, seed)


def test_fp8_goes_through_the_gpu_tier_too(make_engine: Callable[..., Engine]) -> None:
    """FP8 objects are whole frames in GPU memory as well: host and GPU hold the same bytes."""
    layout = fp8_layout(LAYOUT)
    one = make_engine(1, layout=layout)
    hashes = one.client.chunk_hashes(tokens_of(2))
    stored(one, hashes, list(range(8)))
    assert one.kv.load(one.client.acquire(hashes), list(range(20, 28))).wait(30)
    from_gpu = one.content(list(range(20, 28)))
    plain = kvd_client.connect(
        one.client._link._path,
        namespace=namespace(lossy=True),
        layout=layout,
        timeout_s=20.0,
        wait_s=20.0,
    )
    lease = plain.acquire(hashes)
    assert lease.chunks == 2
    assert all(one.kv._form.sound(lease.view(chunk)) for chunk in range(2))
    plain.close()
    stored(one, one.client.chunk_hashes(tokens_of(2, seed=9)), list(range(20, 28)))
    assert one.kv.load(one.client.acquire(hashes), list(range(40, 48))).wait(30)
    assert np.array_equal(one.content(list(range(40, 48))), from_gpu)


def test_what_is_asked_for_twice_comes_up(
    gpu_daemon: DaemonProcess, make_engine: Callable[..., Engine]
) -> None:
    """Objects in host memory get a copy in GPU memory at their second use, with the same bytes."""
    engine = make_engine(1)
    plain = kvd_client.connect(
        gpu_daemon.socket,
        namespace=namespace(lossy=False),
        layout=LAYOUT,
        timeout_s=20.0,
        wait_s=20.0,
    )
    hashes = plain.chunk_hashes(tokens_of(2))
    with plain.reserve(hashes) as reservation:
        for slot in reservation.placed:
            assert slot.buffer is not None
            slot.buffer[:] = hashes[slot.chunk] * (len(slot.buffer) // 32)
        plain.publish(reservation)
    for blocks in (range(8), range(8, 16)):
        assert engine.kv.load(engine.client.acquire(hashes), list(blocks)).wait(30)
    until(lambda: gpu(gpu_daemon)["bytes_up"] == 2 * GROUP.object_bytes)
    until(lambda: gpu(gpu_daemon)["objects"] == 2)
    lease = engine.client.acquire(hashes)
    assert all(lease.on_gpu(chunk) for chunk in range(2))
    assert engine.kv.load(lease, list(range(16, 24))).wait(30)
    assert np.array_equal(engine.content(list(range(16, 24))), engine.content(list(range(8))))
    plain.close()


def test_more_than_fits_goes_to_host_memory_and_the_oldest_make_room(
    gpu_daemon: DaemonProcess, make_engine: Callable[..., Engine]
) -> None:
    """The tier gives up its least lately used copies; every object stays, and loads right."""
    engine = make_engine(1)
    room = 4 * ((4 << 20) // GROUP.object_bytes)
    chains = [engine.client.chunk_hashes(tokens_of(4, seed)) for seed in range(room // 4 + 4)]
    contents = []
    for seed, hashes in enumerate(chains):
        engine.pool[:, :16] = seed
        stored(engine, hashes, list(range(16)))
        contents.append(engine.content(list(range(16))))
    until(lambda: gpu(gpu_daemon)["evicted"] > 0)
    assert gpu(gpu_daemon)["objects"] <= room
    for hashes, content in zip(chains, contents, strict=True):
        assert engine.kv.load(engine.client.acquire(hashes), list(range(32, 48))).wait(30)
        assert np.array_equal(engine.content(list(range(32, 48))), content)


@pytest.mark.parametrize("spoil", [False, True])
def test_copies_are_read_back_and_compared(
    spoil: bool,  # noqa: FBT001
    make_daemon: Callable[..., DaemonProcess],
    tmp_path: Path,
) -> None:
    """With `verify = "always"` each copy is read back; what differs is found by nobody."""
    config = tmp_path / "kvd.toml"
    config.write_text('[gpu]\nbytes = "16MiB"\nslab_bytes = "4MiB"\nverify = "always"\n')
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon._command[1:3] = ["-m", "tests.gpu.gpu_daemon"]
    daemon._command = ["env", f"TEST_GPU_SPOILS={int(spoil)}", *daemon._command]
    daemon.start()
    until(lambda: gpu(daemon)["ready_bytes"] == 16 << 20)
    engine = Engine(daemon.socket, 1)
    hashes = engine.client.chunk_hashes(tokens_of(3))
    assert engine.kv.store(engine.client.reserve(hashes), list(range(12))).wait(30)
    until(lambda: gpu(daemon)["verified"] == 3)
    if spoil:
        until(lambda: gpu(daemon)["lost"] == 3)
        assert engine.client.lookup(hashes).chunks == 0
        assert gpu(daemon)["differed"] == 3
    else:
        until(lambda: engine.client.lookup(hashes).chunks == 3)
        assert gpu(daemon)["differed"] == 0
    engine.close()


ENGINE = """
import sys
from tests.gpu.test_gpu_tier import Engine, tokens_of
engine = Engine(sys.argv[1], int(sys.argv[2]))
print("up", flush=True)
seed = 100 * int(sys.argv[2])
while True:
    seed += 1
    hashes = engine.client.chunk_hashes(tokens_of(2, seed))
    engine.kv.store(engine.client.reserve(hashes), list(range(8)))
    engine.kv.load(engine.client.acquire(hashes), list(range(8, 16)))
    engine.client.ping()
"""


@pytest.mark.slow
def test_engines_killed_mid_copy_leave_the_others_right(
    gpu_daemon: DaemonProcess, make_engine: Callable[..., Engine]
) -> None:
    """Five engines die mid-copy: the other's bytes stay right, and no place is lost or shared."""
    engine = make_engine(1)
    hashes = engine.client.chunk_hashes(tokens_of(4))
    stored(engine, hashes, list(range(16)))
    content = engine.content(list(range(16)))
    for number in range(5):
        other = subprocess.Popen(
            [sys.executable, "-c", ENGINE, gpu_daemon.socket, str(number + 2)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        )
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        time.sleep(0.2)
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
        assert engine.kv.load(engine.client.acquire(hashes), list(range(32, 48))).wait(30)
        assert np.array_equal(engine.content(list(range(32, 48))), content)
    until(lambda: stats(gpu_daemon)["session_count"] == 1)
    until(lambda: stats(gpu_daemon)["host"]["reserved_bytes"] == 0)
    assert gpu(gpu_daemon)["lost"] == 0


def stats(daemon: DaemonProcess) -> Any:
    """Read the statistics page."""
    return statpage.read(stat_page_name(daemon.socket)).stats


def test_a_daemon_killed_while_engines_copy_makes_its_handles_stale(
    gpu_daemon: DaemonProcess, make_engine: Callable[..., Engine]
) -> None:
    """Copies end, old places are refused by epoch, old slabs are closed, new ones are used."""
    engine = make_engine(1)
    hashes = engine.client.chunk_hashes(tokens_of(2))
    stored(engine, hashes, list(range(8)))
    lease = engine.client.acquire(hashes)
    old = lease.on_gpu(0)
    epoch = engine.client.epoch
    assert old is not None
    engine.device.pause.set()
    load = engine.kv.load(lease, list(range(20, 28)))
    gpu_daemon.kill()
    engine.device.pause.clear()
    assert load.wait(30)
    assert np.array_equal(engine.content(list(range(20, 28))), engine.content(list(range(8))))
    gpu_daemon.start()
    until(engine.client.ping)
    assert engine.client.epoch != epoch
    until(lambda: gpu(gpu_daemon)["ready_bytes"] == 16 << 20)
    mapped = dict(engine.kv.imports._slabs)
    assert {key[0] for key in mapped} == {epoch}
    engine.kv.idle()
    assert len(engine.kv.imports) == 0
    assert engine.kv.imports.address(old[0], old[1], 64, epoch) is None  # a stale handle
    stored(engine, hashes, list(range(8)))
    assert engine.kv.load(engine.client.acquire(hashes), list(range(40, 48))).wait(30)
    assert np.array_equal(engine.content(list(range(40, 48))), engine.content(list(range(8))))


def test_a_slab_is_zero_before_a_tenant_sees_it(make_engine: Callable[..., Engine]) -> None:
    """What another process left in GPU memory is gone when a slab is exported."""
    engine = make_engine(1)
    reservation = engine.client.reserve(engine.client.chunk_hashes(tokens_of(1)))
    place = reservation.placed[0].on_gpu
    assert place is not None
    told = engine.client.gpu_slab(place[0])
    assert told is not None
    address = engine.device.open(told.handle)
    assert not np.frombuffer(engine.device.opened[address], np.uint8).any()
    engine.device.close(address)
    assert engine.client.gpu_slab(place[0] + 3) is None  # nobody's yet
    assert engine.client.gpu_slab(place[0] + 1000) is None
    engine.client.abort(reservation)


@pytest.mark.parametrize("calls", [0, 3, 20, 60])
def test_a_gpu_that_fails_closes_the_tier_and_no_more(
    calls: int, make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """The daemon serves on from host memory, names the reason, and loses no object it had."""
    config = tmp_path / "kvd.toml"
    config.write_text('[gpu]\nbytes = "16MiB"\nslab_bytes = "4MiB"\n')
    daemon = make_daemon(arguments=["--config", str(config)])
    daemon._command = ["env", f"TEST_GPU_FAILS_AFTER={calls}", *daemon._command]
    daemon._command[3:5] = ["-m", "tests.gpu.gpu_daemon"]
    daemon.start()
    engine = Engine(daemon.socket, 1)
    seeds = itertools.count(2000)

    def failed() -> bool:
        """Give the tier something more to do, and look."""
        hashes = engine.client.chunk_hashes(tokens_of(2, next(seeds)))
        store = engine.kv.store(engine.client.reserve(hashes), list(range(8)))
        assert store.wait(30) or store.state is State.FAILED
        return bool(gpu(daemon)["state"] == "failed")

    until(failed)
    assert "fails as told" in gpu(daemon)["note"]
    hashes = engine.client.chunk_hashes(tokens_of(2, 1000))
    reservation = engine.client.reserve(hashes)
    assert all(slot.buffer is not None for slot in reservation.placed)
    assert engine.kv.store(reservation, list(range(8))).wait(30)
    until(lambda: engine.client.lookup(hashes).chunks == 2)
    assert engine.kv.load(engine.client.acquire(hashes), list(range(40, 48))).wait(30)
    assert np.array_equal(engine.content(list(range(40, 48))), engine.content(list(range(8))))
    engine.close()


def test_a_hanging_thread_is_seen(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that hangs with a copy to be made, in the driver for instance, turns health red."""
    monkeypatch.setenv("KVD_STALL", "gpu.turn")
    daemon = with_gpu(make_daemon, tmp_path)
    monkeypatch.delenv("KVD_STALL")

    def late() -> list[str]:
        found: list[str] = statpage.read(stat_page_name(daemon.socket)).stats["late"]
        return found

    engine = Engine(daemon.socket, 1)
    hashes = engine.client.chunk_hashes(tokens_of(1))
    assert engine.kv.store(engine.client.reserve(hashes), list(range(4))).wait(10)
    assert late() == []
    until(lambda: late() == ["gpu thread"])
    daemon.kill()
    engine.close()
