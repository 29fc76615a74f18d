"""The worker's thread that copies between vLLM's KV cache and kvd.

Loads go before saves, each in the order they came. A save is done in pieces, so that a load, or a
step that takes one of its blocks again, waits for one piece at most.

Invariants:

M1. Every load ends once: with `take` naming it, failed or not. From then on its blocks are not
    written.
M2. When `fence` returns, no save reads any of those blocks, nor ever will.
M3. What is published was read whole before any of its blocks was fenced.
M4. Bytes loaded were leased by one session from before the copy until after it.
M5. A lease or slot that a GPU may still read or write (`Lost`) is never given back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd_client.errors import KvdError
from kvd_client.link import warn
from kvd_client.vllm.errors import Lost, log_fault
from kvd_client.vllm.pages import Piece
from kvd_client.wire import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvd_client.client import Client
    from kvd_client.handles import Lease, Reservation
    from kvd_client.vllm.gpu_pages import GpuPages
    from kvd_client.vllm.messages import Load, Save
    from kvd_client.vllm.pages import Pages
    from kvd_client.vllm.stats import Counts

SAVES_MAX: Final = 256
"""Saves that may wait; more are dropped, and counted."""
FILL_S: Final = 30.0
OWED_S: Final = 0.2
"""Between looks for late replies, which bring what has to be given back."""
CLOSE_S: Final = 10.0
"""How long an engine's end waits for saves."""


class Ended(NamedTuple):
    """Loads that have ended since the last look.

    Attributes:
        loaded: All of them.
        failed: Those that failed.
        bad_blocks: Blocks of the failed ones, which hold nothing.
    """

    loaded: set[str]
    failed: set[str]
    bad_blocks: set[int]


class _Job:
    """A save under way."""

    __slots__ = ("after", "blocks", "cancelled", "save")

    def __init__(self, save: Save, after: int) -> None:
        self.save = save
        self.after = after
        self.blocks = {block for ids in save.blocks for block in ids if block}
        self.cancelled = False


class Mover:
    """Moves pages for one rank. `load`, `save`, `fence`, `take`: the engine's thread."""

    def __init__(
        self,
        client: Client,
        pages: Pages | GpuPages,
        counts: Counts,
        *,
        writes: bool,
        tells: bool = False,
    ) -> None:
        """Start the thread.

        Args:
            client: Of this rank; used by the thread.
            pages: Of this rank.
            counts: Where to count.
            writes: Whether this rank saves (a replica of another rank does not).
            tells: Whether `kept` is asked for, which chunks kvd has taken.
        """
        self._client = client
        self._pages = pages
        self._counts = counts
        self._writes = writes
        self._changed = threading.Condition()
        self._loads: deque[tuple[Load, int]] = deque()
        self._saves: deque[_Job] = deque()
        self._saving: _Job | None = None
        self._copying = False
        self._ended = Ended(set(), set(), set())
        self._kept: list[bytes] | None = [] if tells else None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvd-mover", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the engine's side

    def load(self, load: Load) -> None:
        """Begin a load."""
        after = self._pages.mark()
        with self._changed:
            self._loads.append((load, after))
            self._changed.notify_all()

    def load_now(self, load: Load) -> None:
        """Load on the calling thread; `take` tells of its blocks if it failed, not of its end."""
        self._load(load, self._pages.mark())
        with self._changed:
            self._ended.loaded.discard(load.request)
            self._ended.failed.discard(load.request)

    def save(self, save: Save) -> None:
        """Begin a save; its blocks must not change until it is over, or they are fenced."""
        if not self._writes:
            return
        with self._changed:
            if len(self._saves) >= SAVES_MAX:
                self._counts.add("saves_cut")
                return
            self._saves.append(_Job(save, self._pages.mark()))
            self._changed.notify_all()

    def fence(self, blocks: Iterable[int]) -> None:
        """End what reads these blocks (M2). Waits for the copy of one piece at most."""
        with self._changed:
            jobs = [*self._saves, *([self._saving] if self._saving else [])]
            if not jobs:
                return
            taken = set(blocks)
            for job in jobs:
                job.cancelled = job.cancelled or not job.blocks.isdisjoint(taken)
            while self._copying and self._saving is not None and self._saving.cancelled:
                self._changed.wait()

    def take(self) -> Ended:
        """Return the loads that have ended (M1)."""
        with self._changed:
            ended, self._ended = self._ended, Ended(set(), set(), set())
        return ended

    def kept(self) -> list[bytes]:
        """Return the chunks that kvd has of this rank since the last look."""
        with self._changed:
            kept, self._kept = self._kept, None if self._kept is None else []
        return kept or []

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        with self._changed:
            return not (self._loads or self._saves or self._saving)

    def close(self, *, saves_s: float = CLOSE_S) -> None:
        """End the thread, once what is under way is over; saves get `saves_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(saves_s)
        with self._changed:
            for job in (*self._saves, self._saving):
                if job is not None:
                    job.cancelled = True
        if self._thread.is_alive():
            self._thread.join()  # of one piece

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            owed = self._client.owed
            with self._changed:
                work = self._changed.wait_for(
                    lambda: bool(self._loads or self._saves or self._closing),
                    OWED_S if owed else None,
                )
                job = None
                if work and not self._loads:
                    if not self._saves:
                        return
                    job = self._saving = self._saves.popleft()
            if not work:
                self._client.poll()  # not under the lock that the engine's thread takes
            elif job is None:
                self._help_loads()
            else:
                self._save(job)

    def _load(self, load: Load, after: int) -> None:
        began = time.perf_counter()
        size = 0
        try:
            self._pages.wait(after)
            size = self._copy_load(load)
        except (KvdError, OSError, KeyError, ValueError) as error:
            warn(f"a load failed, the engine computes instead: {error}")
        except Exception:  # noqa: BLE001
            log_fault("a load")  # a mistake of ours must not leave the engine waiting (M1)
        if size:
            self._counts.add("loads")
            self._counts.add("loaded_bytes", size)
            self._counts.add("load_micros", int((time.perf_counter() - began) * 1e6))
        else:
            self._counts.add("loads_failed")
        with self._changed:
            self._ended.loaded.add(load.request)
            if not size:
                self._ended.failed.add(load.request)
                self._ended.bad_blocks.update(b for ids in load.blocks for b in ids if b)

    def _copy_load(self, load: Load) -> int:
        """Copy a load; return its bytes.

        Raises:
            KvdError: It failed, in whole or in part; the text says why.
        """
        self._client.poll()  # sees that the session was lost; the scheduler half has a new one
        self._client.greet(self._client.wait_s)
        asked = time.perf_counter()
        with self._client.attach(load.token) as lease:
            if not lease:
                waited_s = time.perf_counter() - asked
                late = waited_s >= self._client.wait_s
                what = "kvd does not answer" if late else "its lease has ended, or kvd went away"
                raise KvdError(f"{what} (asked for {waited_s:.3f} s)")
            try:
                size = self._pages.load(self._pieces(load, lease), self._client.epoch)
            except Lost:
                lease.hand_over()  # M5
                raise
            if not lease.still_held():  # M4
                raise KvdError("the session with kvd ended meanwhile")
        return size

    def _pieces(self, load: Load, lease: Lease) -> list[Piece]:
        """List what a load copies; KvdError if the lease does not hold all of it."""
        pieces = []
        for number, (group, ids) in enumerate(zip(self._pages.groups, load.blocks, strict=True)):
            count = group.pages
            for index in range(len(ids) // count):
                part = ids[index * count : (index + 1) * count]
                chunk = load.first + index
                if not any(part):
                    continue
                if not lease.has(chunk, number):
                    raise KvdError(f"the lease lacks group {number} of chunk {chunk}")
                pieces.append(Piece(number, part, lease.view(chunk, number)))
        return pieces

    def _save(self, job: _Job) -> None:
        began = time.perf_counter()
        size, whole = 0, False
        try:
            self._pages.wait(job.after)
            for start, stop, groups in self._batches(job.save):
                saved, whole = self._save_batch(job, start, stop, groups)
                size += saved
                if not whole:
                    break
                self._help_loads()
        except (KvdError, OSError, ValueError) as error:
            whole = False
            warn(f"a save was lost: {error}")
        except Exception:  # noqa: BLE001 - logged
            whole = False
            log_fault("a save")
        finally:
            with self._changed:
                self._saving = None
                self._changed.notify_all()
        self._counts.add("saves")
        self._counts.add("saved_bytes", size)
        self._counts.add("save_micros", int((time.perf_counter() - began) * 1e6))
        if not whole:
            self._counts.add("saves_cut")

    def _help_loads(self) -> None:
        """Do the loads that wait."""
        while True:
            with self._changed:
                if not self._loads:
                    return
                load, after = self._loads.popleft()
            self._load(load, after)

    def _batches(self, save: Save) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Cut a save into runs of chunks with the same groups, of `piece_bytes` of pages each."""
        groups = [self._whole_groups(save, chunk) for chunk in range(len(save.hashes))]
        start = 0
        while start < len(groups):
            chosen = groups[start]
            size = sum(self._pages.groups[number].form.useful_bytes for number in chosen)
            most = start + max(1, self._pages.piece_bytes // max(1, size))
            stop = start + 1
            while stop < min(most, len(groups)) and groups[stop] == chosen:
                stop += 1
            if chosen:
                yield start, stop, chosen
            start = stop

    def _whole_groups(self, save: Save, chunk: int) -> tuple[int, ...]:
        """Groups of which all pages of a chunk are there."""
        return tuple(
            number
            for number, (group, ids) in enumerate(zip(self._pages.groups, save.blocks, strict=True))
            if all(ids[chunk * group.pages : (chunk + 1) * group.pages])
        )

    def _save_batch(
        self, job: _Job, start: int, stop: int, groups: tuple[int, ...]
    ) -> tuple[int, bool]:
        """Save chunks `start` to `stop` - 1; return the bytes, and whether kvd has them all now."""
        save = job.save
        chain = [save.parent, *save.hashes] if save.parent else list(save.hashes)
        ahead = len(chain) - len(save.hashes)
        with self._client.reserve(
            chain[: stop + ahead],
            first=start + ahead,
            groups=groups,
            deadline_s=FILL_S,
            lossy=self._client.lossy,  # FP8 itself, or computed from it
        ) as reservation:
            if not reservation.slots or not self._fill(job, reservation, ahead):
                return 0, False
            placed = reservation.placed
            results = self._client.publish(reservation, placed) if placed else []
            if self._kept is not None and set(results) <= {Status.OK}:
                here = {slot.chunk - ahead for slot in placed}
                with self._changed:
                    self._kept.extend(save.hashes[chunk] for chunk in sorted(here))
            size = sum(self._pages.groups[slot.group].object_bytes for slot in placed)
            kept = {Status.OK, Status.EXISTS, Status.BUSY}
            states = {slot.status for slot in reservation.slots} | set(results)
            return size, states <= kept

    def _fill(self, job: _Job, reservation: Reservation, ahead: int) -> bool:
        """Copy into the slots that were given; False if the job was cancelled before."""
        pieces = []
        for slot in reservation.placed:
            count = self._pages.groups[slot.group].pages
            at = (slot.chunk - ahead) * count
            ids = job.save.blocks[slot.group][at : at + count]
            assert slot.buffer is not None
            pieces.append(Piece(slot.group, ids, slot.buffer))
        with self._changed:
            if job.cancelled:
                return False
            self._copying = True
        try:
            self._pages.save(pieces, self._client.epoch)
        except Lost:
            reservation.hand_over(reservation.placed).open.clear()  # M5
            raise
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        return True  # M3: a fence that came meanwhile waited for this
