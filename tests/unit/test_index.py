"""The index: LMDB and the simulated one keep the same promises; the thread commits in groups."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import lmdb
import pytest

from kvd.tiers import _index_copy
from kvd.tiers.disk import RealDisk
from kvd.tiers.group_commit import IndexThread, Job, SyncFailed, Withdrawn
from kvd.tiers.index import (
    Change,
    Changes,
    IndexBroken,
    IndexFailed,
    IndexFull,
    LmdbPlace,
    lmdb_error,
)
from kvd.tiers.rows import KEY_BYTES, ROW_BYTES, Row, encode_row
from kvd.tiers.threads import Watch
from tests.simdisk import SimDisk, SimPlace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvd.tiers.index import Index, IndexPlace

META = {b"uuid": b"u" * 16}


def row(number: int, generation: int = 1, region: int = 0) -> Row:
    """Return a row of its own."""
    key = number.to_bytes(4, "big") * 8
    return Row(b"s" * 16, key, b"p" * 32, b"m" * 32, region, 0, 4096, 8192, generation, 10, 0)


def put(item: Row) -> Change:
    """Return the change that puts a row."""
    packed = encode_row(item)
    return Change(packed[:KEY_BYTES], packed[KEY_BYTES:])


@pytest.fixture(params=["lmdb", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], IndexPlace]:
    """Return a maker of places over the same files."""
    if request.param == "lmdb":
        return lambda: LmdbPlace(RealDisk(), tmp_path, 16 << 20)
    disk = SimDisk()
    disk.make_dir(tmp_path)
    return lambda: SimPlace(disk, tmp_path)


def rows_of(index: Index) -> list[bytes]:
    """Return all packed rows."""
    joined = b"".join(index.batches())
    return [joined[at : at + ROW_BYTES] for at in range(0, len(joined), ROW_BYTES)]


def test_conformance(place: Callable[[], IndexPlace]) -> None:
    """Whatever is committed is there, sorted by key, in this life and the next."""
    assert place().open(b"") is None
    index = place().build([Changes([put(row(3))], {b"s" * 16: b"blob", b"t": b"x"}, META)])
    assert index.meta() == META
    olds = index.commit(Changes([put(row(1)), put(row(2)), put(row(3, 2))], {b"t": None}))
    assert olds == [None, None, row(3)]
    assert index.spaces() == {b"s" * 16: b"blob"}
    assert index.get([row(1).key, row(9).key]) == [row(1), None]
    keys = [row(1).key, row(2).key, row(3).key, row(4).key]
    olds = index.commit(
        Changes([Change(keys[0], None), Change(keys[2], None, 1), Change(keys[3], None)])
    )
    assert olds == [row(1), None, None]
    again = index.commit(Changes([put(row(1, 5)), Change(keys[0], None, 5), put(row(1, 6))]))
    assert again == [None, row(1, 5), None]
    mark = index.close()
    for vouch in (mark, b"", b"another"):
        found = place().open(vouch)
        assert found is not None
        assert rows_of(found) == [encode_row(item) for item in (row(1, 6), row(2), row(3, 2))]
        assert found.meta() == META
        mark = found.close()
    fresh = place().build([Changes(meta=META)])
    assert rows_of(fresh) == []
    fresh.close()


def test_a_clean_mark_spares_the_copy(tmp_path: Path) -> None:
    """The file is opened directly only if it is the one that was closed."""
    LmdbPlace(RealDisk(), tmp_path, 16 << 20).build([Changes(meta=META)]).close()
    first = LmdbPlace(RealDisk(), tmp_path, 16 << 20)
    index = first.open(b"")
    assert index is not None
    assert first.copied
    mark = index.close()
    second = LmdbPlace(RealDisk(), tmp_path, 16 << 20)
    found = second.open(mark)
    assert found is not None
    assert not second.copied
    found.close()
    assert not (tmp_path / "index.mdb-lock").exists()
    assert (tmp_path / "index.mdb").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["empty", "noise", "short", "rows"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    """What is no index of ours raises IndexBroken, whatever it does to the child."""
    place = LmdbPlace(RealDisk(), tmp_path, 16 << 20)
    place.build([Changes([put(row(n)) for n in range(100)], meta=META)]).close()
    path = tmp_path / "index.mdb"
    content = path.read_bytes()
    match damage:
        case "empty":
            path.write_bytes(b"")
        case "noise":
            path.write_bytes(os.urandom(len(content)))
        case "short":
            path.write_bytes(content[: len(content) // 2])
        case _:
            with lmdb.open(str(path), subdir=False, lock=False, max_dbs=3) as env:
                rows = env.open_db(b"rows")
                with env.begin(rows, write=True) as txn:
                    txn.put(b"short", b"row")
    with pytest.raises(IndexBroken):
        place.open(b"")


def test_a_child_that_is_killed_is_a_broken_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that ends the child, or a child that hangs, does not end us."""
    place = LmdbPlace(RealDisk(), tmp_path, 16 << 20)
    place.build([Changes(meta=META)]).close()

    def killed(*_: Any, **__: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], -signal.SIGSEGV)

    def hung(*_: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
        raise subprocess.TimeoutExpired("x", options["timeout"])

    for child in (killed, hung):
        monkeypatch.setattr(subprocess, "run", child)
        with pytest.raises(IndexBroken):
            place.open(b"")


def test_the_copy_imports_nothing_of_ours() -> None:
    """The child starts in milliseconds, and agrees with us about a row's length."""
    assert _index_copy.ROW_BYTES == ROW_BYTES
    code = f"import runpy, sys; runpy.run_path({_index_copy.__file__!r}, run_name='x')"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code + "; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"kvd", "numpy", "asyncio"} & set(done.stdout.split())


def test_a_full_map_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """A transaction that does not fit changes nothing; deletes still work afterwards."""
    index = LmdbPlace(RealDisk(), tmp_path, 256 << 10).build([Changes(meta=META)])
    index.commit(Changes([put(row(1))]))
    with pytest.raises(IndexFull):
        index.commit(Changes([put(row(n)) for n in range(5000)]))
    assert rows_of(index) == [encode_row(row(1))]
    assert index.commit(Changes([Change(row(1).key, None)])) == [row(1)]
    index.close()


def test_what_lmdb_errors_mean() -> None:
    """Full, failed once, or broken for good: LMDB's errors fall into these three."""
    assert isinstance(lmdb_error(lmdb.MapFullError("x")), IndexFull)
    assert isinstance(lmdb_error(lmdb.Error("x", errno.EIO)), IndexFailed)
    assert isinstance(lmdb_error(lmdb.PanicError("x")), IndexBroken)
    assert isinstance(lmdb_error(lmdb.CorruptedError("x")), IndexBroken)


# -------------------------------------------------------------------------------- the thread


class Held(Executor):
    """Runs what is submitted when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        """Run everything."""
        while self.waiting:
            self.waiting.pop(0)()


class Journal:
    """An index that notes its transactions and fails as it is told to."""

    def __init__(self) -> None:
        self.commits: list[list[bytes]] = []
        self.errors: list[Exception | None] = []

    def commit(self, changes: Changes) -> list[Row | None]:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.commits.append([change.key for change in changes.rows])
        return [None for _ in changes.rows]


def thread_over(
    journal: Journal, sync: Callable[[int], None] = lambda _: None
) -> tuple[IndexThread, Held, list[str]]:
    """Return an index thread that runs when told to, and what it relieved."""
    held, relieved = Held(), list[str]()
    thread = IndexThread(
        journal,  # type: ignore[arg-type]
        held,
        sync,
        lambda: relieved.append("ballast"),
        Watch(),
    )
    return thread, held, relieved


def test_jobs_that_gather_share_a_transaction_and_a_sync() -> None:
    """Ten writes to two regions cost two syncs and one commit, in that order."""
    events: list[str] = []
    journal = Journal()
    thread, held, _ = thread_over(journal, lambda region: events.append(f"sync {region}"))
    jobs = [Job(Changes([put(row(n))]), region=n % 2) for n in range(10)]
    for job in jobs:
        thread.submit(job)
    assert thread.depth == 10
    held.run()
    assert events == ["sync 0", "sync 1"]
    assert [len(commit) for commit in journal.commits] == [10]
    assert all(job.done.result() == [None] for job in jobs)
    assert (thread.commits, thread.jobs) == (1, 10)


def test_a_failed_sync_condemns_the_region() -> None:
    """After a sync failed, nothing of that region is committed, though the next sync would work."""
    failures = [OSError(errno.EIO, "I/O error")]

    def sync(region: int) -> None:
        if region == 1 and failures:
            raise failures.pop()

    journal = Journal()
    thread, held, _ = thread_over(journal, sync)
    jobs = [Job(Changes([put(row(n))]), region=n) for n in (0, 1)]
    for job in jobs:
        thread.submit(job)
    held.run()
    late = Job(Changes([put(row(5))]), region=1)
    thread.submit(late)
    held.run()
    assert jobs[0].done.exception() is None
    for job in (jobs[1], late):
        assert isinstance(job.done.exception(), SyncFailed)
    assert journal.commits == [[row(0).key]]
    thread.pardon(1)
    again = Job(Changes([put(row(6))]), region=1)
    thread.submit(again)
    held.run()
    assert again.done.exception() is None


def test_a_withdrawn_job_is_left_out() -> None:
    """A caller that left before the transaction leaves nothing in it; its job is settled."""
    journal = Journal()
    thread, held, _ = thread_over(journal)
    job, other = Job(Changes([put(row(1))])), Job(Changes([put(row(2))]))
    assert not job.done.cancel()
    for item in (job, other):
        thread.submit(item)
    job.withdraw()
    held.run()
    assert isinstance(job.done.exception(), Withdrawn)
    assert journal.commits == [[row(2).key]]


def test_deletes_go_through_when_puts_do_not_fit() -> None:
    """On a full disk the ballast goes and the deletes of the batch are committed alone."""
    journal = Journal()
    journal.errors = [IndexFull("full")]
    thread, held, relieved = thread_over(journal)
    puts, deletes = Job(Changes([put(row(1))])), Job(Changes([Change(row(2).key, None)]))
    for job in (puts, deletes):
        thread.submit(job)
    held.run()
    assert isinstance(puts.done.exception(), IndexFull)
    assert deletes.done.result() == [None]
    assert relieved == ["ballast"]
    assert journal.commits == [[row(2).key]]


def test_a_broken_index_fails_all() -> None:
    """Nothing is tried twice in an environment that is broken."""
    journal = Journal()
    journal.errors = [IndexBroken("panic")]
    thread, held, relieved = thread_over(journal)
    jobs = [Job(Changes([put(row(1))])), Job(Changes([Change(row(2).key, None)]))]
    for job in jobs:
        thread.submit(job)
    held.run()
    assert all(isinstance(job.done.exception(), IndexBroken) for job in jobs)
    assert not relieved


def test_a_bug_leaves_nobody_waiting() -> None:
    """An error that nobody foresaw reaches every job, and the thread goes on."""
    journal = Journal()
    journal.errors = [RuntimeError("bug")]
    thread, held, _ = thread_over(journal)
    jobs = [Job(Changes([put(row(n))])) for n in range(300)]
    for job in jobs:
        thread.submit(job)
    with pytest.raises(RuntimeError):
        held.run()
    assert all(isinstance(job.done.exception(), RuntimeError) for job in jobs)
    job = Job(Changes([put(row(1))]))
    thread.submit(job)
    held.run()
    assert job.done.exception() is None


def test_in_a_real_thread(tmp_path: Path) -> None:
    """Everything after the start happens in one thread, and `call` runs there too."""
    with ThreadPoolExecutor(1) as pool:
        index = LmdbPlace(RealDisk(), tmp_path, 16 << 20).build([Changes(meta=META)])
        thread = IndexThread(index, pool, lambda _: None, lambda: None, Watch())
        jobs = [Job(Changes([put(row(n))])) for n in range(500)]
        for job in jobs:
            thread.submit(job)
        for job in jobs:
            assert job.done.result(45) == [None]
        assert thread.call(lambda inner: len(rows_of(inner))).result(45) == 500
        thread.call(lambda inner: inner.close()).result(45)
