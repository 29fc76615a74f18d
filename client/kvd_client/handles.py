"""What a client holds: leases to read, reservations to write, tickets to wait for.

A handle belongs to the client that made it and is used from one thread at a time. Leaving its
`with` block ends it. A view of a slot must not be used after its handle has ended: the slot may
hold other bytes by then. Views are released at the end where nothing (a tensor) still holds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvd_client.errors import HandleClosed
from kvd_client.wire import Place, Status, unpack_places
from kvd_client.wire_gpu import GPU_SLABS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from kvd_client.client import Client
    from kvd_client.connection import Connection

    Make = Callable[[int], tuple[Any, ...]]
    """Builds a request from its number."""
    Undo = Callable[[Any], Make | None]
    """Builds from a reply what gives back what it brings."""

T = TypeVar("T")


class Found(NamedTuple):
    """Answer to a look-up: the usable prefix, which may be gone a moment later.

    Attributes:
        chunks: Its length.
        tokens: The same in tokens.
        worth: Of the chunks, how many are faster to load than to compute, as far as is known.
    """

    chunks: int
    tokens: int
    worth: int


class Ticket(Generic[T]):
    """A request under way. It ends exactly once: with the daemon's answer, or as a miss."""

    __slots__ = ("_finish", "abandoned", "done", "patient", "request", "result", "undo")

    def __init__(
        self,
        request: int,
        miss: T,
        finish: Callable[[Any], T],
        undo: Undo | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """Hold the miss as result until `complete`; a patient one may be answered late."""
        self.patient = patient
        self.request = request
        self.result: T = miss
        self.done = False
        self.abandoned = False
        self.undo = undo
        self._finish = finish

    def complete(self, reply: tuple[object, ...]) -> None:
        """Take the daemon's answer."""
        assert not self.done
        self.done = True  # whatever happens below: a failed finish is a miss
        self.result = self._finish(reply)

    def miss(self) -> None:
        """End without an answer; the result is the miss."""
        self.done = True


class _Views:
    """Views handed out by a handle, released at its end where nothing else holds them."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []

    def keep(self, view: memoryview) -> memoryview:
        self._views.append(view)
        return view

    def release(self) -> None:
        for view in self._views:
            try:
                view.release()
            except BufferError:
                continue  # a tensor or array over it is alive; its owner answers for it
        self._views.clear()


class Lease:
    """A hold on the objects of chunks `first` to `chunks` - 1 of a chain, for this rank.

    Attributes:
        first: First chunk held.
        chunks: Chunks of the usable prefix; equal to `first` for a miss.
        lossy: Whether any of the objects went through a lossy form.
        token: What a worker of the same tenant gives to `Client.attach`; 16 bytes.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection | None,
        lease: int = 0,
        *,
        token: bytes = b"",
        first: int = 0,
        chunks: int = 0,
        lossy: bool = False,
        objects: bytes = b"",
        slabs: dict[int, memoryview] | None = None,
    ) -> None:
        """Hold nothing (a miss) unless told otherwise; `objects` are OBJECT records."""
        self._client = client
        self.connection = connection
        self.lease = lease
        self.token = token
        self.first = first
        self.chunks = chunks
        self.lossy = lossy
        self._objects = objects
        self._slabs = slabs or {}  # of its own: a lost session does not end the bytes
        self._table: dict[tuple[int, int], Place] | None = None
        self._views = _Views()
        self._open = True

    def __bool__(self) -> bool:
        """Tell whether there is anything to load."""
        return self.chunks > self.first

    @property
    def _places(self) -> dict[tuple[int, int], Place]:
        """The records by chunk and group, read at first need: a view of one costs one table."""
        if self._table is None:
            places = unpack_places(self._objects)
            self._table = {(place.chunk, place.group): place for place in places}
        return self._table

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects this lease can read."""
        return sum(place.size_bytes for place in self._places.values())

    def has(self, chunk: int, group: int = 0) -> bool:
        """Tell whether the object of (chunk, group) is among those held."""
        return (chunk, group) in self._places

    def on_gpu(self, chunk: int, group: int = 0) -> tuple[int, int] | None:
        """Return (slab, offset in bytes) of an object in the memory of the session's GPU, if so."""
        place = self._places[chunk, group]
        return (place.slab, place.offset_bytes) if place.slab >= GPU_SLABS else None

    def still_held(self) -> bool:
        """Look whether the session that gave this lease has lasted: so long nobody wrote its bytes.

        To be asked after they were copied, before they are believed.
        """
        self._client.poll()
        return self.connection is not None and self._client.connection is self.connection

    def view(self, chunk: int, group: int = 0) -> memoryview:
        """Return the object's bytes in place, read-only, valid until `release`.

        Raises:
            HandleClosed: The lease was released.
            KeyError: The lease does not hold that object (see `has`), or not in host memory.
        """
        if not self._open:
            msg = "this lease has ended: acquire again"
            raise HandleClosed(msg)
        place = self._places[chunk, group]
        end = place.offset_bytes + place.size_bytes
        return self._views.keep(self._slabs[place.slab][place.offset_bytes : end].toreadonly())

    def hand_over(self) -> Lease:
        """End this handle and give a new one that holds in its place, for who copies later."""
        if not self._open:
            msg = "this lease has ended: acquire again"
            raise HandleClosed(msg)
        self._open = False
        self._views.release()
        number, self.lease = self.lease, 0
        return Lease(
            self._client,
            self.connection,
            number,
            token=self.token,
            first=self.first,
            chunks=self.chunks,
            lossy=self.lossy,
            objects=self._objects,
            slabs=self._slabs,
        )

    def release(self) -> None:
        """End the lease. Call it when the last copy out of it has finished; twice is harmless."""
        if self._open:
            self._open = False
            self._views.release()
            self._client.release(self)

    def __enter__(self) -> Self:
        """Return the lease itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release."""
        self.release()


class Slot(NamedTuple):
    """One object of a reservation: a place to fill, or the reason there is none.

    Attributes:
        chunk: Index in the chain of hashes.
        group: Layer group.
        status: OK with a buffer; EXISTS, NO_SPACE, BUSY, ... without.
        buffer: Writable bytes of the object, yours until publish or abort.
        generation: The slot's generation, 0 without a place.
        on_gpu: (slab, offset in bytes) in the memory of the session's GPU, instead of a buffer.
    """

    chunk: int
    group: int
    status: Status
    buffer: memoryview | None
    generation: int
    on_gpu: tuple[int, int] | None = None


class Reservation:
    """Slots to fill and publish. Leaving the `with` block gives unpublished ones back."""

    def __init__(
        self, client: Client, connection: Connection | None, slots: tuple[Slot, ...] = ()
    ) -> None:
        """Own the buffers of `slots`."""
        self._client = client
        self.connection = connection
        self.slots = slots
        self.open = {slot.generation: slot for slot in slots if slot.generation}

    @property
    def placed(self) -> list[Slot]:
        """The slots that have a place and are neither published nor given back."""
        return list(self.open.values())

    def hand_over(self, slots: list[Slot]) -> Reservation:
        """Give open slots to a reservation of their own, for who fills them later."""
        chosen = [slot for slot in slots if self.open.pop(slot.generation, None) is not None]
        return Reservation(self._client, self.connection, tuple(chosen))

    def close(self, generations: list[int]) -> None:
        """Forget slots that were published or given back."""
        for generation in generations:
            slot = self.open.pop(generation, None)
            if slot is not None and slot.buffer is not None:
                try:
                    slot.buffer.release()
                except BufferError:
                    continue  # a tensor over it is alive; its owner answers for it

    def __enter__(self) -> Self:
        """Return the reservation itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give back what was not published."""
        if self.open:
            self._client.abort(self)
