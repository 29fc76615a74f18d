"""An engine's KV on a GPU and its client: load what a lease holds, store into a reservation.

    kv = DeviceKV(client, DevicePages.from_layers(kv_caches, "kv_blocks"), CupyDevice(0))
    lease = client.acquire(hashes)
    load = kv.load(lease, block_ids, by_layer=True)      # takes the lease over
    for layer in range(layers):
        if not load.wait_layer(layer): ...               # compute what is missing
        attention(layer)
    store = kv.store(client.reserve(hashes), block_ids)  # takes the slots over
    store.wait_pages()                                   # the engine's stream may overwrite now

Both return at once. A lease is released, and slots are published, by the mover's thread when the
copy's events have happened; never earlier, and not at all if the GPU fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd_client.cuda.device import DeviceError
from kvd_client.cuda.forms import form_of
from kvd_client.cuda.imports import Imports
from kvd_client.cuda.mover import STAGE_BYTES_DEFAULT, Mover, one_stage
from kvd_client.cuda.registrar import Registrar
from kvd_client.cuda.steps import stage_of
from kvd_client.cuda.transfer import Piece, State, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd_client.client import Client
    from kvd_client.cuda.device import Device
    from kvd_client.cuda.pages import DevicePages
    from kvd_client.handles import Lease, Reservation, Slot
    from kvd_client.identity import Layout


class DeviceKV:
    """One layer group of an engine's paged KV on one GPU. Any thread."""

    def __init__(
        self,
        client: Client,
        pages: DevicePages,
        device: Device,
        *,
        group: int = 0,
        page_layout: Layout | None = None,
        stage_bytes: int = STAGE_BYTES_DEFAULT,
        threads: bool = True,
    ) -> None:
        """Take the GPU memory that staging needs.

        Args:
            client: Of the rank whose pages these are.
            pages: The engine's memory.
            device: The GPU.
            group: Which layer group of the client's layout.
            page_layout: What the pages hold, where the client's layout is its FP8 form
                (`forms.fp8_layout`); objects are then quantised and restored on the GPU.
            stage_bytes: Most GPU memory for staging.
            threads: False to drive `mover.turn` and `registrar.step` by hand, as tests do.

        Raises:
            ValueError: Layout and pages do not fit, or FP8 is refused.
            DeviceError: No working GPU, or no memory on it.
        """
        self._layout = page_layout or client.layout
        fp8 = page_layout is not None
        self._form = form_of(self._layout, group, planes=pages.planes, fp8=fp8)
        if client.layout.groups[group].object_bytes != self._form.object_bytes:
            raise ValueError("the client's layout is not page_layout's FP8 form")
        if self._form.page_bytes != pages.page_bytes:
            raise ValueError(
                f"the engine's pages have {pages.page_bytes} bytes a plane,"
                f" the layout's {self._form.page_bytes}"
            )
        layers = self._layout.groups[group].layers
        self._planes_a_layer, rest = divmod(pages.planes, layers)
        if rest:
            raise ValueError(f"{pages.planes} planes are not those of {layers} layers")
        need = stage_of(self._form, self._planes_a_layer).stride
        if need > one_stage(stage_bytes):
            raise ValueError(
                f"a layer of a chunk has {need} bytes, a stage {one_stage(stage_bytes)}:"
                " set a smaller chunk_tokens, or larger stage_bytes"
            )
        self._client, self._group, self._pages = client, group, pages
        self._device = device
        self._header = self._form.header()
        self.mover = Mover(device, pages, stage_bytes=stage_bytes, header=self._header)
        client.map_lazily()
        self.registrar = Registrar.of(client, device).join(self)
        self.imports = Imports(client, device)
        self._told_epoch = 0
        self._use_gpu()
        if threads:
            self.mover.start()
            self.registrar.start()

    def load(self, lease: Lease, blocks: Sequence[int], *, by_layer: bool = False) -> Transfer:
        """Begin to load a lease's objects into pages.

        Args:
            lease: Taken over: released when the copy is over.
            blocks: Block ids of chunks `lease.first` to `lease.chunks` - 1, all pages of each.
            by_layer: For engines that begin to compute before all is there (`wait_layer`).

        Raises:
            ValueError: Block ids that are too few or not the engine's; the lease is untouched.
        """
        count, pages = lease.chunks - lease.first, self._form.pages
        if len(blocks) != count * pages:
            raise ValueError(f"{count} chunks need {count * pages} block ids, not {len(blocks)}")
        self._pages.check(blocks)
        own = lease.hand_over()
        held = [c for c in range(own.first, own.chunks) if own.has(c, self._group)]
        pieces = [self._readable(own, chunk) for chunk in held]
        sound = [piece for piece in pieces if piece is not None]
        chosen = [b for c in held for b in _part(blocks, c - own.first, pages)]

        def finish(state: State) -> None:
            if state is not State.LOST:  # lost: something may still read the slots
                own.release()

        if not held or len(sound) < len(pieces):
            own.release()
            return self._refused("scatter")
        return self._begin("scatter", sound, chosen, finish, by_layer=by_layer)

    def _readable(self, lease: Lease, chunk: int) -> Piece | None:
        """Find an object's slot; None if it does not begin as it must, or cannot be mapped."""
        on_gpu = lease.on_gpu(chunk, self._group)
        if on_gpu is not None:
            return self._mapped(on_gpu, lease)
        view = lease.view(chunk, self._group)
        if not self._form.sound(view):
            return None
        return Piece(self._address(view), keep=lease)

    def _mapped(self, on_gpu: tuple[int, int], holder: Lease | Reservation) -> Piece | None:
        """Find a place of the GPU tier in this process."""
        connection = holder.connection
        assert connection is not None
        epoch, size = connection.welcome.epoch, self._form.object_bytes
        address = self.imports.address(*on_gpu, size, epoch)
        return None if address is None else Piece(address, on_device=True, keep=holder)

    def store(self, reservation: Reservation, blocks: Sequence[int], first: int = 0) -> Transfer:
        """Begin to store pages into a reservation's open slots of this group.

        Args:
            reservation: Its slots of this group are taken over: published when the copy is over,
                given back if it never begins.
            blocks: Block ids of chunks `first` and later, all pages of each.
            first: The chunk that `blocks` begins with.

        Raises:
            ValueError: Block ids that are too few or not the engine's; nothing was taken over.
        """
        pages = self._form.pages
        slots = [slot for slot in reservation.placed if slot.group == self._group]
        last = max((slot.chunk for slot in slots), default=first - 1)
        if any(slot.chunk < first for slot in slots) or len(blocks) < (last + 1 - first) * pages:
            raise ValueError(f"block ids of chunks {first} to {last} are needed, {pages} each")
        self._pages.check(blocks)
        own = reservation.hand_over(slots)
        chosen = [b for slot in slots for b in _part(blocks, slot.chunk - first, pages)]

        def finish(state: State) -> None:
            if state is State.DONE:
                self._client.begin_publish(own)
            elif state is State.FAILED:
                self._client.abort(own)
            else:
                own.open.clear()  # lost: nobody may use the slots before this process is gone

        if not slots:
            return self._refused("gather")
        found = [self._writable(own, slot) for slot in slots]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) < len(found):
            self._client.abort(own)
            return self._refused("gather")
        return self._begin("gather", pieces, chosen, finish)

    def _writable(self, reservation: Reservation, slot: Slot) -> Piece | None:
        """Find a slot to fill; None if it cannot be mapped."""
        if slot.on_gpu is not None:
            return self._mapped(slot.on_gpu, reservation)
        assert slot.buffer is not None
        slot.buffer[: len(self._header)] = self._header
        return Piece(self._address(slot.buffer), keep=reservation)

    def _use_gpu(self) -> None:
        """Tell each new session which GPU this is."""
        epoch = self._client.epoch
        if epoch != self._told_epoch:
            self._told_epoch = epoch
            self._client.begin_use_gpu(self._device.uuid)

    def _address(self, view: memoryview) -> int:
        return self.registrar.address(view, self._client.epoch, self)

    def _begin(
        self,
        direction: str,
        pieces: list[Piece],
        blocks: list[int],
        finish: Callable[[State], None],
        *,
        by_layer: bool = False,
    ) -> Transfer:
        self._use_gpu()
        after, broken = 0, False
        try:
            after = self.mover.record_after()
        except DeviceError:
            broken = True
        transfer = Transfer(
            self._device,
            "scatter" if direction == "scatter" else "gather",
            self._form,
            pieces=pieces,
            blocks=blocks,
            planes_a_layer=self._planes_a_layer,
            finish=finish,
            by_layer=by_layer,
            after=after,
        )
        if broken:
            transfer.end(State.FAILED)
        else:
            self.mover.submit(transfer)
        return transfer

    def _refused(self, direction: str) -> Transfer:
        """Give a transfer that moves nothing and has failed."""
        transfer = Transfer(
            self._device,
            "scatter" if direction == "scatter" else "gather",
            self._form,
            pieces=[],
            blocks=[],
            planes_a_layer=self._planes_a_layer,
            finish=lambda _: None,
        )
        transfer.end(State.FAILED)
        return transfer

    def idle(self) -> None:
        """Let go of what belongs to a daemon that is gone; no transfer may be under way."""
        self._use_gpu()
        self.registrar.retire(self._client.epoch, self)
        try:
            self.imports.retire(self._client.epoch)
        except DeviceError:
            return  # it is mapped until the process ends

    def close(self, timeout_s: float = 10.0) -> bool:
        """End, before the client is closed; False if a copy is still under way.

        Then neither the client nor the engine's tensors may be let go before the process ends.
        """
        ended = self.mover.close(timeout_s)
        if ended:
            self.registrar.close(self)
            self.imports.close()
        return ended


def _part(blocks: Sequence[int], index: int, pages: int) -> Sequence[int]:
    return blocks[index * pages : (index + 1) * pages]
