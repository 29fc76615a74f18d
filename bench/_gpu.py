"""What the GPU bench and checks share: a device, an engine's pages on it, a daemon beside.

Everything goes through `kvd_client.cuda.device.Device`, so that the tests can run the same code
with a fake GPU and small sizes. Needs torch, NumPy and msgpack; on a GPU also CuPy.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import kvd_client
from bench._daemon import DaemonProcess
from bench._gpu_machine import missing
from kvd_client.cuda.engine import DeviceKV
from kvd_client.cuda.forms import fp8_layout
from kvd_client.cuda.pages import DevicePages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from kvd_client.cuda.device import Device
    from kvd_client.cuda.transfer import Transfer

STORED_CHUNKS = 8
"""Reserved at a time: 256 MiB of an 8B model."""
WAIT_S = 30.0


class Shape(NamedTuple):
    """An engine's KV: the default is an 8B-shaped Llama's, 128 KiB a token in bfloat16."""

    layers: int = 32
    heads: int = 8
    dim: int = 128
    page: int = 16
    chunk: int = 256
    tokens: int = 8192
    blocks: int = 2048

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one plane."""
        return self.page * self.heads * self.dim * 2

    @property
    def layout(self) -> kvd_client.Layout:
        """As the client is told."""
        size = 2 * self.layers * (self.chunk // self.page) * self.page_bytes
        group = kvd_client.Group("full", self.layers, self.heads, self.dim, size)
        return kvd_client.Layout(self.chunk, self.page, "bfloat16", (group,))

    @property
    def total_bytes(self) -> int:
        """Bytes of the KV of all tokens."""
        return self.tokens * 4 * self.layers * self.heads * self.dim


class NotHere(Exception):
    """The device, or something needed, is missing; the text says what to do."""


def real_device() -> Device:
    """Open GPU 0; raises NotHere with the reason and the mend."""
    lacking = missing()
    if lacking:
        raise NotHere("; ".join(f"{name}: {error}" for name, error in lacking.items()))
    import torch

    from kvd_client.cuda.cupy_device import CupyDevice
    from kvd_client.cuda.device import DeviceError

    if not torch.cuda.is_available():
        raise NotHere("no CUDA device here: run this on a GPU host")
    torch.cuda.init()
    try:
        device = CupyDevice(0)
        device.prepare()
    except DeviceError as error:
        raise NotHere(str(error)) from error
    return device


class Engine:
    """Paged KV in torch tensors, a client and its GPU side.

    Attributes:
        kv: (layers) tensors of (2, blocks, page, heads, dim), bfloat16.
    """

    def __init__(
        self,
        device: Device,
        socket: str,
        shape: Shape,
        *,
        where: str = "cuda",
        fp8: bool = False,
        seed: int = 0,
        model: str = "bench",
    ) -> None:
        """Make tensors on `where` and connect."""
        import torch

        self.device, self.shape = device, shape
        generator = torch.Generator(device=where).manual_seed(seed)
        size = (2, shape.blocks, shape.page, shape.heads, shape.dim)
        self.kv = [
            torch.randn(size, generator=generator, device=where, dtype=torch.float32).bfloat16()
            for _ in range(shape.layers)
        ]
        if where == "cuda":
            torch.cuda.synchronize()
        pages = DevicePages.from_layers(self.kv, "kv_blocks")
        layout = fp8_layout(shape.layout) if fp8 else shape.layout
        self.client = kvd_client.connect(
            socket,
            namespace=kvd_client.Namespace(model, "1", "bfloat16", lossy=fp8),
            layout=layout,
            required=True,
            timeout_s=10.0,
            wait_s=10.0,
        )
        self.side = DeviceKV(self.client, pages, device, page_layout=shape.layout if fp8 else None)

    def hashes(self, seed: int, tokens: int = 0) -> list[bytes]:
        """Hash a prompt of its own."""
        count = tokens or self.shape.tokens
        return self.client.chunk_hashes([seed, *range(count - 1)])

    def blocks(self, seed: int, tokens: int = 0) -> list[int]:
        """Choose scattered blocks for a prompt."""
        import random

        count = (tokens or self.shape.tokens) // self.shape.page
        return random.Random(seed).sample(range(self.shape.blocks), count)

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Reserve, gather and copy; over when it returns.

        In pieces, as vLLM's connector does: places are found for the next while the bus has work.
        """
        pages = len(blocks) // len(hashes)
        transfers = [
            self.side.store(
                self.client.reserve(hashes[: first + STORED_CHUNKS], first=first),
                blocks[first * pages : (first + STORED_CHUNKS) * pages],
                first,
            )
            for first in range(0, len(hashes), STORED_CHUNKS)
        ]
        for transfer in transfers:
            if not transfer.wait(WAIT_S):
                raise AssertionError(f"a store ended as {transfer.state}: {self.side.mover.broken}")

    def stored(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Store, and wait until all of it is found."""
        self.store(hashes, blocks)
        until(lambda: self.client.lookup(hashes).chunks == len(hashes), "a store is not found")

    def load(
        self, hashes: Sequence[bytes], blocks: Sequence[int], *, by_layer: bool = False
    ) -> Transfer:
        """Acquire, copy and scatter; over when it returns."""
        lease = self.client.acquire(hashes)
        if lease.chunks != len(hashes):
            raise AssertionError(f"{lease.chunks} of {len(hashes)} chunks can be loaded")
        transfer = self.side.load(lease, blocks, by_layer=by_layer)
        if not transfer.wait(WAIT_S):
            raise AssertionError(f"a load ended as {transfer.state}: {self.side.mover.broken}")
        return transfer

    @property
    def stored_bytes(self) -> int:
        """Bytes that a prompt takes in the tiers."""
        chunks = self.shape.tokens // self.shape.chunk
        return chunks * self.client.layout.groups[0].object_bytes

    def pinned(self) -> dict[str, Any]:
        """Wait until all host slabs that were named are pinned; their bytes, and what failed."""
        registrar = self.side.registrar
        until(lambda: not registrar._todo, "host memory does not get pinned")  # noqa: SLF001
        return {"bytes": registrar.pinned_bytes, "note": registrar.failed}

    def content(self, blocks: Sequence[int]) -> list[Any]:
        """Give the pages of these blocks, layer by layer."""
        return [layer[:, list(blocks)].clone() for layer in self.kv]

    def wipe(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""
        for layer in self.kv:
            layer[:, list(blocks)] = 0

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End; raises if a copy is still under way."""
        ended = self.side.close()
        self.client.close()
        if not ended:
            raise AssertionError("a copy is still under way at the end")


def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Compare what `content` gave, bit by bit."""
    import torch

    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, two, strict=True)
    )


def until(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until it holds; AssertionError naming what did not come."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.002)


@contextlib.contextmanager
def daemon(
    host_bytes: int, gpu_bytes: int = 0, *, slab_bytes: int = 256 << 20, main: str = "kvd"
) -> Iterator[DaemonProcess]:
    """Run a daemon in a temporary directory, with a GPU tier if it has a size."""
    with TemporaryDirectory(prefix="kvd-gpu-") as folder:
        config = Path(folder) / "kvd.toml"
        config.write_text(f"[gpu]\nbytes = {gpu_bytes}\nslab_bytes = {slab_bytes}\n")
        running = DaemonProcess(
            Path(folder), host_bytes=host_bytes, arguments=["--config", str(config)]
        )
        running._command[1:3] = [sys.executable, "-m", main][1:]  # noqa: SLF001 - our own process
        running.start()
        try:
            if gpu_bytes:
                until_ready(running, gpu_bytes)
            yield running
        finally:
            running.stop()
            running.clean_up()


def until_ready(running: DaemonProcess, gpu_bytes: int) -> None:
    """Wait for a GPU tier of this size; AssertionError saying what there is instead."""
    deadline = time.monotonic() + WAIT_S
    while (state := gpu_state(running)).get("ready_bytes") != gpu_bytes:
        if state.get("state") == "failed" or state.get("note") or time.monotonic() > deadline:
            told = {name: state.get(name) for name in ("state", "note", "ready_bytes")}
            raise AssertionError(f"no GPU tier of {gpu_bytes} bytes: {told}")
        time.sleep(0.01)


def gpu_state(running: DaemonProcess) -> dict[str, Any]:
    """Read what the daemon says of its GPU tier."""
    from kvd import statpage
    from kvd_client.paths import stat_page_name

    told: Any = statpage.read(stat_page_name(running.socket)).stats["gpu"]
    return dict(told or {})
