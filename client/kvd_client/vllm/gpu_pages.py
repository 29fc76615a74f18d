"""vLLM's pages on a GPU: `pages.Pages` with the copies of `kvd_client.cuda`.

A copy begins when the GPU has done what the engine had asked of it by `mark`, and is over when the
call returns: so the mover's order of blocks, fences and leases holds here as it does on a CPU.

Invariants:

G1. Pages are touched only after the GPU has passed the `mark` that is given.
G2. `load` and `save` return or raise when nothing of theirs is under way any more; but `Lost`: then
    nobody knows, and slots and leases are kept until the process ends.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.mover import LOST_S, STAGE_BYTES_DEFAULT, TABLE_BYTES, Mover, one_stage
from kvd_client.cuda.pages import DevicePages
from kvd_client.cuda.registrar import Registrar
from kvd_client.cuda.steps import stage_of
from kvd_client.cuda.transfer import Piece as Place
from kvd_client.cuda.transfer import State, Transfer
from kvd_client.errors import KvdError, Unsupported
from kvd_client.vllm import frames
from kvd_client.vllm.errors import Lost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd_client.cuda.device import Device
    from kvd_client.cuda.kernels import Direction
    from kvd_client.vllm.pages import GroupPages, Piece

POLL_S: Final = 200e-6
STAGE_BYTES_MIN: Final = 8 << 20
LEFT_OUT: Final = -1
"""Block id, for the kernels, of a page that stays where it is."""


class GpuPages:
    """The pages of one rank on its GPU. Any thread; owns GPU memory for staging until `close`."""

    on_gpu: Final = True
    piece_bytes: Final = 256 << 20
    """Reserved, copied and published at a time: some 5 ms on a PCIe 5 bus."""

    def __init__(
        self,
        groups: Sequence[GroupPages],
        blocks: int,
        device: Device,
        *,
        stage_bytes: int = STAGE_BYTES_DEFAULT,
    ) -> None:
        """Take the GPU memory that staging needs, and begin the threads.

        Args:
            groups: In the layout's order; their addresses are the GPU's.
            blocks: How many the engine has.
            device: The GPU.
            stage_bytes: For all groups together.

        Raises:
            Unsupported: The GPU gives no memory, or the pages are too large for the stages.
        """
        self.groups: Final = tuple(groups)
        self.blocks: Final = blocks
        self._device = device
        self._guard = threading.Lock()
        self._marks: list[int] = []
        self._busy = 0
        self._forms = [group.form for group in self.groups]
        share = max(STAGE_BYTES_MIN, stage_bytes // len(self.groups))
        need = max(stage_of(form, 1).stride for form in self._forms)
        if need > one_stage(share):
            raise Unsupported(
                f"a layer of a chunk has {need} bytes, a stage {one_stage(share)}:"
                " set a smaller chunk_tokens"
            )
        self._movers: list[Mover] = []
        try:
            for group in self.groups:
                planes = len(group.starts)
                own = DevicePages(
                    group.starts[:, 0].tolist(),
                    [group.block_stride] * planes,
                    blocks=blocks,
                    page_bytes=group.page_bytes,
                )
                self._movers.append(Mover(device, own, stage_bytes=share))
        except (DeviceError, ValueError) as error:
            self._close_movers()
            raise Unsupported(f"the GPU cannot be used: {error}") from error
        self._registrar = Registrar(device)
        for mover in self._movers:
            mover.start()
        self._registrar.start()

    # ---------------------------------------------------------------- order

    def mark(self) -> int:
        """Mark what the engine has asked of its GPU so far; on the engine's thread, never waits.

        Returns:
            For one `wait`; 0 if the GPU does not answer, and then no copy succeeds.
        """
        try:
            stream = self._device.current_stream()
            with self._guard:
                mark = self._marks.pop() if self._marks else self._device.make_event()
            self._device.record(mark, stream)
        except DeviceError:
            return 0
        return mark

    def wait(self, mark: int) -> None:
        """Wait until the GPU has passed a mark (G1).

        Raises:
            KvdError: It does not, or has failed.
        """
        if not mark:
            raise KvdError("the GPU has failed")
        deadline = time.monotonic() + LOST_S
        try:
            while not self._device.happened(mark):
                if time.monotonic() > deadline:
                    raise KvdError(f"the GPU has not done in {LOST_S:.0f} s what was asked of it")
                time.sleep(POLL_S)
        except DeviceError as error:
            raise KvdError(f"the GPU has failed: {error}") from error
        with self._guard:
            self._marks.append(mark)

    # ---------------------------------------------------------------- copies

    def load(self, pieces: Sequence[Piece], epoch: int) -> int:
        """Copy pages out of kvd's objects; return the bytes.

        Raises:
            Lost: Nobody knows what the GPU still does.
            KvdError: Nothing of it is under way.
        """
        return self._copy(pieces, epoch, "scatter")

    def save(self, pieces: Sequence[Piece], epoch: int) -> int:
        """Copy pages into kvd's objects; return the bytes. Raises as `load`."""
        return self._copy(pieces, epoch, "gather")

    def _copy(self, pieces: Sequence[Piece], epoch: int, direction: Direction) -> int:
        self._enter(epoch)
        try:
            transfers = [
                (number, self._transfer(number, part, epoch, direction))
                for number in range(len(self.groups))
                for part in self._parts(number, [p for p in pieces if p.group == number])
            ]  # all of them before one is begun: what raises here leaves nothing under way (G2)
            for number, transfer in transfers:
                self._movers[number].submit(transfer)
            for _, transfer in transfers:
                transfer.wait(2 * LOST_S)
            states = {transfer.state for _, transfer in transfers}
            if states - {State.DONE, State.FAILED}:
                raise Lost("the GPU has failed in the middle of a copy")
            if State.FAILED in states:
                raise KvdError("the GPU's copies were refused")
            return sum(map(self._bytes, pieces))
        finally:
            with self._guard:
                self._busy -= 1

    def _enter(self, epoch: int) -> None:
        """Note a copy; let go of what belongs to a daemon that is gone, if none is under way."""
        with self._guard:
            if not self._busy:
                self._registrar.retire(epoch)
            self._busy += 1

    def _parts(self, number: int, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Cut into what one transfer can take."""
        most = max(1, TABLE_BYTES // 4 // self.groups[number].pages)
        for start in range(0, len(pieces), most):
            yield pieces[start : start + most]

    def _bytes(self, piece: Piece) -> int:
        return self.groups[piece.group].bytes_of(sum(map(bool, piece.blocks)))

    def _transfer(
        self, number: int, pieces: list[Piece], epoch: int, direction: Direction
    ) -> Transfer:
        group = self.groups[number]
        ids = [block for piece in pieces for block in piece.blocks]
        assert min(ids) >= 0  # A1 of pages.py
        assert max(ids) < self.blocks  # A1
        assert direction == "scatter" or all(ids)
        assert all(piece.buffer.nbytes == group.object_bytes for piece in pieces)
        form = self._forms[number]
        header = form.header()
        for piece in pieces:
            if direction == "scatter":
                frames.check(form, piece.buffer)
            elif header:
                piece.buffer[: len(header)] = header
        return Transfer(
            self._device,
            direction,
            form,
            pieces=[
                Place(self._registrar.address(piece.buffer, epoch), keep=piece.buffer)
                for piece in pieces
            ],
            blocks=[block or LEFT_OUT for block in ids],
            planes_a_layer=1,
            finish=lambda _: None,
        )

    # ---------------------------------------------------------------- end

    def close(self) -> None:
        """Give the memory back; what the GPU never ended stays until the process does."""
        if self._close_movers():
            self._registrar.close()

    def _close_movers(self) -> bool:
        ended = [mover.close() for mover in self._movers]
        return all(ended)
