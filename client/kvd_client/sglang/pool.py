"""One host pool's pages, and moving them between SGLang's memory and kvd's slots.

A page is some runs of bytes (`get_page_buffer_meta`), an object is these runs one after the other.
The copy is made here, by the engine's own thread, once, between two mappings: SGLang's pool, be it
private or a memfd (`allocator: shm`), and the daemon's slab (docs/adr/0019-sglang-pages.md).

Invariants:

P1. No byte of SGLang's memory is written but in pages it asked for, and none after a call returned.
P2. A page is told as read only if its object was held from before the first byte until after the
    last: the lease was good, and the session that gave it has lasted.
P3. Every wait has a bound, and no lock is held while waiting for NVMe.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvd_client import _copiers
from kvd_client.client import connect
from kvd_client.errors import KvdError
from kvd_client.sglang.identity import Shape
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from kvd_client.client import Client
    from kvd_client.handles import Lease, Reservation, Slot, T, Ticket
    from kvd_client.sglang.identity import Identity

    Addresses = npt.NDArray[np.int64]
    Spans = list[tuple[int, int]]
    """Address and bytes of each run of a page."""

COPY_THREADS: Final = 2
ASKED_AT_ONCE: Final = 256
"""Look-ups under way at a time, where each page is asked for by itself."""
_DETAILS: Final = (
    *("start_layer", "end_layer", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "temporal_dtype"),
)
"""What pools of several kinds say of themselves, beside what all do."""
NAP_S: Final = (0.0001, 0.005)
"""First and longest pause between looks at a reply that takes its time."""


def shape_of(pool: Any, name: str) -> Shape:  # noqa: ANN401 - SGLang's host pool
    """Read how a pool keeps a page.

    Raises:
        ValueError: It does not say, or its pages are no runs of bytes; the text names the pool.
            What it fails with when asked is SGLang's, and whatever that is ends the start here.
    """
    import torch

    page_tokens = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 0) or 1)
    try:
        meta = pool.get_page_buffer_meta(torch.arange(page_tokens, dtype=torch.int64))
    except Exception as error:
        what = f"{type(error).__name__} {error}".rstrip()
        msg = f"SGLang's host pool {name!r} does not tell where its pages lie: {what}"
        raise ValueError(msg) from error
    sizes = tuple(int(size) for size in meta[1]) if meta else ()
    if not sizes:
        msg = f"SGLang's host pool {name!r} has no bytes of its own: kvd cannot keep this model's"
        raise ValueError(msg)
    missing = [key for key in ("dtype", "layout") if not getattr(pool, key, None)]
    if missing:
        lacks = " and no ".join(missing)
        msg = f"SGLang's host pool {name!r} has no {lacks}: kvd cannot tell it apart"
        raise ValueError(msg)
    kinds = {key: str(getattr(pool, key, "")) for key in _DETAILS}
    detail = f"{type(pool).__name__} {kinds} {getattr(pool, 'storage_format_tag', None)}"
    return Shape(
        name=name,
        spans=sizes,
        page_tokens=page_tokens,
        dtype=str(pool.dtype).removeprefix("torch."),
        order=str(pool.layout),
        detail=detail,
        layers=max(1, int(getattr(pool, "layer_num", 1) or 1)),
        heads=int(getattr(pool, "head_num", 0) or 0),
        head_size=int(getattr(pool, "head_dim", 0) or 0),
    )


class PoolStore:
    """One pool's way to kvd. Thread-safe: SGLang reads and writes from threads of its own."""

    def __init__(
        self,
        pool: Any,  # noqa: ANN401 - SGLang's host pool
        shape: Shape,
        identity: Identity,
        *,
        socket: str,
        wait_s: float,
        load_wait_s: float,
    ) -> None:
        """Open a session; without a daemon all is a miss until there is one.

        Raises:
            Refused: The daemon refuses this session until something is changed.
        """
        self.pool = pool
        self.shape = shape
        self.client: Client = connect(
            socket or None,
            namespace=identity.namespace,
            layout=identity.layout,
            rank=identity.rank,
            name=f"sglang {shape.name}",
            timeout_s=max(1.0, wait_s),
            wait_s=wait_s,
        )
        self._load_wait_s = load_wait_s
        self._copier = _copiers.best_copier(COPY_THREADS)
        self.lossy = False
        """Whether a lossy copy was ever loaded: what is computed from then on may be lossy too."""

    def close(self) -> None:
        """End the session; SGLang has stopped its threads by then."""
        self.client.close()

    def count(self, hashes: Sequence[bytes]) -> int:
        """Return how many pages of a chain kvd has, from the first on, and are worth loading."""
        return self.client.lookup(hashes).worth if hashes else 0

    def present(self, hashes: Sequence[bytes]) -> list[bool]:
        """Tell of each page by itself whether kvd has it."""
        there: list[bool] = []
        deadline = time.monotonic() + self.client.wait_s  # one for all: P3
        for at in range(0, len(hashes), ASKED_AT_ONCE):
            tickets = [self.client.begin_lookup([key]) for key in hashes[at : at + ASKED_AT_ONCE]]
            for ticket in tickets:
                left_s = max(0.0, deadline - time.monotonic())
                there.append(bool(self.client.wait(ticket, left_s).chunks))
        return there

    def read(self, hashes: Sequence[bytes], indices: Any) -> list[bool]:  # noqa: ANN401 - a tensor
        """Read pages of a chain into the pool, from the first to the first that is not there.

        Args:
            hashes: The pages'.
            indices: Of their tokens in the pool, as SGLang gives them.

        Returns:
            Of each page whether it was read; what the others' memory holds is undefined.
        """
        spans = self._spans(len(hashes), indices)
        if spans is None:
            return [False] * len(hashes)
        got = 0
        try:
            with self._patient(self.client.begin_acquire(hashes)) as lease:
                if self._copy_out(lease, spans) and lease.still_held():  # P2
                    got = lease.chunks
                    self.lossy |= bool(got) and lease.lossy
        except (KvdError, OSError):
            got = 0
        return [number < got for number in range(len(hashes))]

    def _copy_out(self, lease: Lease, spans: list[Spans]) -> bool:
        """Copy what a lease holds to where the spans are; False if it is not what was asked."""
        views = [lease.view(chunk) for chunk in range(lease.chunks)]
        if any(view.nbytes != self.shape.page_bytes for view in views):
            return False
        self._copy(views, spans[: len(views)], out=True)
        return True

    def write(
        self,
        hashes: Sequence[bytes],
        indices: Any,  # noqa: ANN401 - a tensor
        before: bytes | None,
    ) -> list[bool]:
        """Store pages of a chain out of the pool.

        Args:
            hashes: The pages'.
            indices: Of their tokens in the pool.
            before: The page before the first one; None for the sequence's start, or if unknown.

        Returns:
            Of each page whether kvd has it now, or another engine is storing it.
        """
        spans = self._spans(len(hashes), indices)
        if spans is None:
            return [False] * len(hashes)
        try:
            held = self._store(hashes, spans, before)
            if before is not None and held is None:
                held = self._store(hashes, spans, None)  # kvd does not know that page: begin here
        except (KvdError, OSError):
            held = None
        return held or [False] * len(hashes)

    def _store(
        self, hashes: Sequence[bytes], spans: list[Spans], before: bytes | None
    ) -> list[bool] | None:
        """Reserve, fill, publish; None if the page before is not there."""
        first = 0 if before is None else 1
        chain = [*([] if before is None else [before]), *hashes]
        ticket = self.client.begin_reserve(chain, first=first, lossy=self.lossy)
        with self.client.wait(ticket) as reservation:
            if any(slot.status == Status.ORPHAN for slot in reservation.slots):
                return None
            states = self._fill(reservation, spans, first)
        good = {Status.OK, Status.EXISTS, Status.BUSY}
        return [states.get(number) in good for number in range(len(hashes))]

    def _fill(self, reservation: Reservation, spans: list[Spans], first: int) -> dict[int, Status]:
        """Copy pages into the slots that there are, and publish them; states by page."""
        placed: list[Slot] = reservation.placed
        states = {slot.chunk - first: slot.status for slot in reservation.slots}
        buffers = [slot.buffer for slot in placed if slot.buffer is not None]
        if any(buffer.nbytes != self.shape.page_bytes for buffer in buffers):
            return {}
        self._copy(buffers, [spans[slot.chunk - first] for slot in placed], out=False)
        results = self.client.publish(reservation, placed)
        states |= {slot.chunk - first: status for slot, status in zip(placed, results, strict=True)}
        return states

    def _patient(self, ticket: Ticket[T]) -> T:
        """Wait for what may have to come up from NVMe, without keeping others from the client."""
        deadline = time.monotonic() + self._load_wait_s
        nap_s, longest_s = NAP_S
        while not ticket.done and time.monotonic() < deadline:
            self.client.poll()
            if not ticket.done:
                time.sleep(nap_s)
                nap_s = min(nap_s * 2, longest_s)
        return self.client.wait(ticket, 0.0)  # done, or given up and given back when it comes

    def _spans(self, pages: int, indices: Any) -> list[Spans] | None:  # noqa: ANN401 - a tensor
        """Ask the pool where pages lie; None if it is not what kvd was told at the start."""
        expected = pages * self.shape.page_tokens
        if not pages or indices is None or len(indices) != expected:
            return None
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        runs = len(self.shape.spans)
        if len(addresses) != pages * runs or tuple(sizes) != self.shape.spans * pages:
            return None
        pairs = list(zip(addresses, sizes, strict=True))
        return [pairs[at : at + runs] for at in range(0, len(pairs), runs)]

    def _copy(self, buffers: Sequence[memoryview], spans: list[Spans], *, out: bool) -> None:
        """Copy whole pages; one call of the copier for each size of run there is."""
        import numpy as np

        if not buffers:
            return
        bases = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
        offsets = [0]
        for size in self.shape.spans:
            offsets.append(offsets[-1] + size)
        for size in sorted(set(self.shape.spans)):
            runs = [run for run, each in enumerate(self.shape.spans) if each == size]
            slots = [base + offsets[run] for base in bases for run in runs]
            pages = [page[run][0] for page in spans for run in runs]
            pair = (np.array(slots, dtype=np.int64), np.array(pages, dtype=np.int64))
            source, target = pair if out else pair[::-1]
            self._copier.copy(target, source, size)
