"""The one thread that changes the index: it gathers jobs, syncs, commits once.

Invariants:

X5. After a failed sync of a region no record of that use of it is committed any more, also those
    written before the failure and synced "successfully" after it.
X6. Every job that was submitted is settled, whatever happens.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from kvd.failpoints import maybe_hang
from kvd.tiers.index import Changes, Index, IndexBroken, IndexFailed, IndexFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.tiers.rows import Row
    from kvd.tiers.threads import Watch

T = TypeVar("T")

BATCH_JOBS: Final = 256
"""Most jobs in one transaction."""


class SyncFailed(OSError):
    """A region could not be synced; told from a write that failed."""


@dataclass(slots=True)
class Job:
    """One caller's share of a transaction.

    Attributes:
        changes: What to change.
        region: To be synced before the commit, None for none.
        withdrawn: Set by the loop, at any time: leave it out if there is still time.
        done: The rows replaced or deleted, or the error.
    """

    changes: Changes
    region: int | None = None
    withdrawn: bool = False
    done: Future[list[Row | None]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        """Keep a waiter that leaves from cancelling the future under the thread."""
        self.done.set_running_or_notify_cancel()

    def withdraw(self) -> None:
        """Leave this out if its transaction has not begun; any thread."""
        self.withdrawn = True


class Withdrawn(Exception):
    """The caller of a job left before its transaction began."""


class IndexThread:
    """Group commit: takes what has gathered, syncs the regions concerned, commits once.

    Everything that touches the index after the start runs in the one thread of `executor`.
    """

    def __init__(
        self,
        index: Index,
        executor: Executor,
        sync: Callable[[int], None],
        relieve: Callable[[], None],
        watch: Watch,
        *,
        turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over an open index.

        Args:
            index: From now on for the thread only.
            executor: Of one thread.
            sync: Makes a region durable; raises OSError.
            relieve: Frees what is kept for a full disk; called before deletes are tried again.
            watch: Told of each sync and transaction, and of other calls.
            turn: Told of each turn over the jobs.
        """
        self._watch = watch
        self._turn = turn
        self._index = index
        self._executor = executor
        self._sync = sync
        self._relieve = relieve
        self._guard = threading.Lock()
        self._waiting: list[Job] = []
        self._running = False
        self._condemned: dict[int, OSError] = {}
        self.commits = 0
        self.jobs = 0

    @property
    def depth(self) -> int:
        """Jobs that wait for their transaction to begin."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a job waits or is being carried out."""
        return self._running

    def submit(self, job: Job) -> None:
        """Queue a job; `job.done` tells. The caller bounds how many there are."""
        with self._guard:
            self._waiting.append(job)
            if self._running:
                return
            self._running = True
        self._executor.submit(self._drain)

    def call(self, function: Callable[[Index], T]) -> Future[T]:
        """Run something in the thread, with the index."""
        return self._executor.submit(self._call, function)

    def _call(self, function: Callable[[Index], T]) -> T:
        with self._watch:
            return function(self._index)

    def replace(self, index: Index) -> None:
        """Go on with another index; in the thread only."""
        self._index = index

    def _drain(self) -> None:
        while True:
            maybe_hang("index.turn")
            self._turn()
            with self._guard:
                batch, self._waiting = self._waiting[:BATCH_JOBS], self._waiting[BATCH_JOBS:]
                if not batch:
                    self._running = False
                    return
            try:
                self._run(batch)
            except BaseException as error:
                with self._guard:
                    batch += self._waiting
                    self._waiting = []
                    self._running = False
                self._fail([job for job in batch if not job.done.done()], error)
                raise

    def _run(self, batch: list[Job]) -> None:
        synced: dict[int, OSError | None] = {}
        ready = []
        for job in batch:
            if job.withdrawn:
                job.done.set_exception(Withdrawn())
                continue
            if job.region is not None and job.region not in synced:
                synced[job.region] = self._try_sync(job.region)
            error = synced[job.region] if job.region is not None else None
            if error is not None:
                job.done.set_exception(error)
            else:
                ready.append(job)
        if ready:
            self._commit(ready)

    def _try_sync(self, region: int) -> OSError | None:
        """Sync a region; one that failed once fails for good (X5)."""
        error = self._condemned.get(region)
        if error is None:
            try:
                with self._watch:
                    self._sync(region)
            except OSError as failure:
                error = SyncFailed(failure.errno, failure.strerror)
                self._condemned[region] = error
        return error

    def pardon(self, region: int) -> None:
        """Let a region that begins anew be synced again; before its first job."""
        self._condemned.pop(region, None)

    def _commit(self, batch: list[Job]) -> None:
        """Commit all; if that fails, the jobs that only delete once more, in the room they make."""
        error = self._attempt(batch)
        if error is None or isinstance(error, IndexBroken):
            self._fail(batch if error else [], error)
            return
        deletes = [job for job in batch if all(c.value is None for c in job.changes.rows)]
        self._fail([job for job in batch if job not in deletes], error)
        if deletes:
            self._relieve()
            self._fail(deletes, self._attempt(deletes))

    def _attempt(self, batch: list[Job]) -> Exception | None:
        joined = Changes()
        for job in batch:
            joined.rows += job.changes.rows
            joined.spaces |= job.changes.spaces
            joined.meta |= job.changes.meta
        try:
            with self._watch:
                olds = iter(self._index.commit(joined))
        except (IndexFull, IndexFailed, IndexBroken) as error:
            return error
        self.commits += 1
        self.jobs += len(batch)
        for job in batch:
            job.done.set_result([next(olds) for _ in job.changes.rows])
        return None

    @staticmethod
    def _fail(batch: list[Job], error: BaseException | None) -> None:
        for job in batch:
            if error is not None:
                job.done.set_exception(error)
