"""Verifies host memory: sums objects in threads of its own, and takes out what differs.

The loop decides, by `verifying.py`; the threads read the daemon's own mapping of the slabs and
touch nothing else. Only while `[host] verify` is not "off".

Invariants:

N1. No call of the loop waits for a sum.
N2. Who asks hears once, on the loop and never within the call; who leaves does not.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final

import xxhash

from kvd import log
from kvd.entry import SlotState
from kvd.failpoints import maybe_hang
from kvd.pulse import TURN_S
from kvd.tiers.disk import TierError
from kvd.tiers.threads import Workers
from kvd.verifying import Check, Sampler, Sums, Verdict, judge, take_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from kvd.catalog import Catalog
    from kvd.entry import Slot
    from kvd.pulse import Pulse
    from kvd.tiers.host import HostTier

_LOG = log.get("verify")
THREADS_MAX: Final = 4
"""One sums some 10 GB a second, about what one core copies."""
BATCH_BYTES: Final = 8 << 20
"""Summed by one call of a thread: long against the way there, short for who waits behind it."""
MOVE_S: Final = 10.0
"""What a copy to another tier waits for its objects to be verified."""
CLOSE_S: Final = 5.0


class Differs(TierError):
    """An object is no longer what was published."""


class Verifier:
    """Watches what is published, and checks it for who asks. Loop only."""

    def __init__(
        self, catalog: Catalog, host: HostTier, every: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Watch one of `every` objects from now on; own the threads."""
        self._catalog = catalog
        self._host = host
        self._loop = loop
        self._sampler = Sampler(every)
        self._sums = Sums()
        self._threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self._workers = Workers(self._threads, "verify")
        self._running: set[Future[list[bytes]]] = set()
        self._due = self._closed = False
        self.counts = dict.fromkeys(Verdict, 0)
        self.hangs = False
        """Whether a thread did not end with the rest."""
        catalog.on_publish = self.published

    # ---------------------------------------------------------------- for the rest of the daemon

    def published(self, slot: Slot) -> None:
        """Hear of an object that can be found from now on."""
        if not self._sampler.due():
            return
        slot.watched = True
        if not slot.digest and self._sums.published(slot):
            self._soon()

    def check(self, slots: Iterable[Slot], done: Callable[[], None]) -> Check:
        """Have watched objects summed; the caller keeps them in place, or ignores the answer.

        Args:
            slots: At least one, in the order in which they are of use.
            done: Called once all have an answer: what differed is no longer in its chunk.
        """
        check = Check(slots, done)
        self._sums.ask(check)
        self._soon()
        return check

    def leave(self, check: Check) -> list[Slot]:
        """Stop waiting; return what has no answer."""
        self._sums.leave(check)
        return list(check.left)

    async def sure(self, slots: Sequence[Slot]) -> None:
        """Wait until published objects that are being copied elsewhere are verified.

        Raises:
            Differs: One of them is not what was published, and has been taken out.
            TierError: It took too long.
        """
        watched = [slot for slot in slots if slot.watched and slot.state is SlotState.PUBLISHED]
        if watched:
            done = asyncio.Event()
            check = self.check(watched, done.set)
            try:
                async with asyncio.timeout(MOVE_S):
                    await done.wait()
            except TimeoutError as error:
                raise TierError("host memory was not verified in time") from error
            finally:
                self.leave(check)
        if any(slot.state is not SlotState.PUBLISHED for slot in slots):
            raise Differs("an object in host memory differs from what was published")

    def beat(self, pulse: Pulse) -> None:
        """Say when the threads last turned."""
        pulse.beat("verify pool", int(self._workers.turned_s() * 1e9), TURN_S)

    def close(self) -> None:
        """Begin nothing any more, and see the threads end; before the host tier closes."""
        self._closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        left = [future for future in self._running if not future.cancelled()]
        self.hangs = bool(wait(left, CLOSE_S).not_done)

    def stats(self) -> dict[str, int]:
        """Describe it, as part of the host tier."""
        counts = self.counts
        return {
            "summed": counts[Verdict.FIRST],
            "verified": counts[Verdict.SAME] + counts[Verdict.DIFFERS],
            "differed": counts[Verdict.DIFFERS],
            "verifying": len(self._sums),
        }

    # ---------------------------------------------------------------- the threads

    def _soon(self) -> None:
        """Begin what is to be done once the present call of the loop has ended."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._due = False
        while len(self._running) < 2 * self._threads and not self._closed:
            batch = self._sums.next(BATCH_BYTES)
            if not batch:
                return
            views = [self._host.view(s.slab, s.offset_bytes, s.size_bytes) for s in batch]
            future = self._workers.submit(_sum, views)
            self._running.add(future)
            future.add_done_callback(lambda done, batch=batch: self._tell(done, batch))  # type: ignore[misc]

    def _tell(self, done: Future[list[bytes]], batch: list[Slot]) -> None:
        """Hand a finished batch to the loop; any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._summed, done, batch)

    def _summed(self, done: Future[list[bytes]], batch: list[Slot]) -> None:
        self._running.discard(done)
        if done.cancelled():
            return  # at the end of the daemon
        for slot, digest in zip(batch, done.result(), strict=True):
            verdict = judge(slot, digest)
            self.counts[verdict] += 1
            if verdict is Verdict.DIFFERS:
                self._differs(slot)
            self._sums.ended(slot)
        self._begin()

    def _differs(self, slot: Slot) -> None:
        chunk = slot.chunk
        assert chunk is not None
        _LOG.limited(
            "an object differs from what was published; it is dropped, its place no longer used",
            tenant=slot.tenant,
            label=chunk.space.label,
            slab=slot.slab,
            offset=slot.offset_bytes,
            bytes=slot.size_bytes,
        )
        take_out(self._catalog, slot)


def _sum(views: Sequence[memoryview]) -> list[bytes]:
    maybe_hang("verify.call")
    return [xxhash.xxh3_128_digest(view) for view in views]
