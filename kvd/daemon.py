"""The composition root: puts the parts together, runs the loop, drains in order.

One thread runs the loop and is the only one that touches catalog, leases, quotas and sessions.
The fault threads make memory and report through `call_soon_threadsafe`.

Start: lock the state, socket, begin to fault memory in, page, first slab (all of them where locking
or huge pages are required), READY. A bug anywhere on the loop ends the daemon: better a restart
than a catalog that nobody can trust.
Drain: no new sessions; reserves and acquires refused; readers and writers get `drain_s` to end;
sessions closed with the reason; page and socket removed; memory and lock let go.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvd import __version__, activation, keeping, log, memory, notify, parts
from kvd.admin.side import AdminSide
from kvd.catalog import Catalog
from kvd.clock import MonotonicClock, epoch_now
from kvd.errors import RefusedSession, StartError
from kvd.events.feed import EventFeed
from kvd.failpoints import maybe_fault, maybe_hang
from kvd.http_child import HttpChild
from kvd.ipc.admin import AdminDoor
from kvd.ipc.dispatch import Dispatcher
from kvd.ipc.listener import Listener, Peer
from kvd.ipc.session import Session
from kvd.lease import LeaseBook
from kvd.lockfile import LockFile
from kvd.metrics import Counters
from kvd.peer import joining
from kvd.prefills import Prefills
from kvd.pulse import Pulse
from kvd.quota import Quota, Resource
from kvd.statpage import StatPage
from kvd.stats import gather
from kvd.tiers.host import HostTier
from kvd.tiers.slab import SlabPool
from kvd.types import OwnerId, SlabId, Tenant
from kvd_client import wire
from kvd_client.paths import stat_page_name
from kvd_client.wire import Refusal

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine

    from kvd.config import Config
    from kvd.entry import Space
    from kvd.side import Side
    from kvd_client.identity import Layout

_LOG = log.get("daemon")
TICK_S = 0.2
"""Between two sweeps of deadlines, and two statistics pages."""
GIVE_UP_S = 40.0
"""What the store and the threads get to end after the last write, before the daemon just leaves."""
EXIT_GAVE_UP = 4
SLAB_S = 30.0
"""How long the next slab may take while the start waits for memory."""


class Daemon:
    """Everything one `kvd serve` owns."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        """Build the parts; nothing is taken from the host yet."""
        self.config = config
        self.loop = loop
        self.clock = MonotonicClock()
        self.epoch = epoch_now()
        self.slab_bytes = config.host.slab_bytes
        self.counters = Counters()
        self.tenant_by_uid = {uid: Tenant(t.name) for t in config.tenants for uid in t.uids}
        count = config.host.slab_count
        shares = {Tenant(t.name): int(count * t.host_share + 1e-9) for t in config.tenants}
        self.pool = SlabPool(self.slab_bytes, shares)
        self.quota = Quota(
            {
                t: parts.limits_of(config.limits, slabs * self.slab_bytes)
                for t, slabs in shares.items()
            }
        )
        self.catalog = Catalog(self.pool, self.quota, self.counters, config.host.policy)
        self.leases = LeaseBook()
        self.tier = HostTier(config.host, on_ready=self._slab_ready, on_note=self._note)
        self.verifier = parts.verifier(self)
        self.cold = parts.cold_tier(self)
        self.directory = joining.join(config, self.catalog, self.clock, self.epoch)
        self.gpu = parts.gpu_side(self)
        self.peers = joining.peers(self)
        self.dispatcher = Dispatcher(
            self.catalog,
            self.leases,
            config.limits,
            self.clock,
            self.cold,
            gpu=self.gpu,
            reach=self.peers.requests if self.peers else None,
            verifier=self.verifier,
        )
        self.sessions: dict[OwnerId, Session] = {}
        self.orphans: dict[OwnerId, tuple[int, Tenant]] = {}
        self.notes: list[str] = []
        self.started_ns = self.clock.now_ns()
        self.loop_lag_ms = 0.0
        self.pulse = Pulse()
        self.prefills = Prefills(config.state_dir, self.catalog)
        self.sides: list[Side] = [self.prefills]
        self._was_late: list[str] = []
        self._next_owner = 0
        self._stop = asyncio.Event()
        self._admin = AdminSide(self, stop=self._stop.set)
        self.desk = self._admin.desk
        self.admins = AdminDoor(self, config.limits.greeting_s)
        self._group: asyncio.TaskGroup | None = None
        self._memory_changed = asyncio.Event()
        self._slabs_made = 0
        self._return: keeping.Return
        self._bug: BaseException | None = None

    # ---------------------------------------------------------------- from the fault threads

    def _slab_ready(self, slab: SlabId) -> None:
        self.loop.call_soon_threadsafe(self._add_slab, slab)

    def _add_slab(self, slab: SlabId) -> None:
        self.pool.add_blank(slab)
        self._memory_changed.set()
        self._count_slabs(1)

    def _count_slabs(self, more: int) -> None:
        self._slabs_made += more
        if more and self._slabs_made == self.config.host.slab_count:
            _LOG.info("host tier whole", bytes=self.tier.ready_bytes)

    def _note(self, text: str) -> None:
        self.loop.call_soon_threadsafe(self._add_note, text)

    def _add_note(self, text: str) -> None:
        _LOG.warning("host tier", note=text)
        self.notes.append(text)
        if self.tier.failed:
            self._memory_changed.set()

    # ---------------------------------------------------------------- for the sessions

    def enter(self, tenant: Tenant, hello: wire.Hello, layout: Layout) -> Space:
        """Admit a greeting; raises RefusedSession."""
        if self.dispatcher.draining:
            raise RefusedSession(Refusal.DRAINING, "this daemon is going down")
        self.counters.sessions += 1
        lossy = bool(hello.lossy)
        space = self.catalog.enter(tenant, hello.namespace, hello.label, layout, lossy=lossy)
        self.prefills.recall(space)
        return space

    def slab_fd(self, tenant: Tenant, slab: int) -> int | None:
        """Return the descriptor of a slab if it is the tenant's."""
        if self.pool.tenant_of(slab) != tenant:
            return None
        return self.tier.fd(SlabId(slab))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task in the daemon's group."""
        assert self._group is not None  # nobody is let in before
        return self._group.create_task(work)

    def becomes_admin(
        self, session: Session, connection: socket.socket, hello: wire.AdminHello
    ) -> None:
        """Let an admin in who knocked as everybody does."""
        del self.sessions[session.owner]
        peer = Peer(connection, session.pidfd, session.pid, session.uid)
        self.admins.take_over(peer, session.tenant, hello)

    def gone(self, session: Session, *, orphaned: bool, refusal: RefusedSession | None) -> None:
        """Account for a closed session; wait for its process if it may still touch slots."""
        del self.sessions[session.owner]
        if refusal is not None and session.caller is None:
            self.counters.sessions_refused += 1
        elif refusal is not None and refusal.code in {Refusal.MALFORMED, Refusal.PROTOCOL}:
            self.counters.sessions_ended_badly += 1
        if session.caller is not None:
            self.catalog.leave(session.caller.space)
        if orphaned:
            self.orphans[session.owner] = (session.pidfd, session.tenant)  # still charged
            self.loop.add_reader(session.pidfd, self._orphan_died, session.owner)
        else:
            self.quota.discharge(session.tenant, Resource.SESSIONS, 1)
            os.close(session.pidfd)

    def _orphan_died(self, owner: OwnerId) -> None:
        pidfd, tenant = self.orphans.pop(owner)
        self.quota.discharge(tenant, Resource.SESSIONS, 1)
        self.loop.remove_reader(pidfd)
        os.close(pidfd)
        stays = self.dispatcher.part(owner, dead=True)
        assert not stays  # C8
        _LOG.info("orphan gone", id=owner)

    def _accept(self) -> None:
        for peer in self.listener.accept():
            tenant = self.tenant_by_uid.get(peer.uid)
            if tenant is None:
                text = (
                    f"uid {peer.uid} belongs to no tenant of this daemon: "
                    f"add it to the uids of a [tenants.NAME] table and restart"
                )
                if not self.admins.admit(peer, Refusal.FORBIDDEN, text):
                    self._turn_away(peer, Refusal.FORBIDDEN, text)
            elif not self.quota.charge(tenant, Resource.SESSIONS, 1):
                text = (
                    f"this tenant has its {self.config.limits.sessions} sessions: close some, "
                    "or raise [limits] sessions"
                )
                if not self.admins.admit(peer, Refusal.TOO_MANY, text):
                    self._turn_away(peer, Refusal.TOO_MANY, text)
            else:
                self._next_owner += 1
                owner = OwnerId(self._next_owner)
                self.sessions[owner] = Session(
                    self,
                    owner,
                    connection=peer.connection,
                    pidfd=peer.pidfd,
                    pid=peer.pid,
                    uid=peer.uid,
                    tenant=tenant,
                    greeting_s=self.config.limits.greeting_s,
                )

    def _turn_away(self, peer: Peer, code: Refusal, text: str) -> None:
        self.counters.sessions_refused += 1
        _LOG.limited("session refused", uid=peer.uid, pid=peer.pid, why=text)
        with suppress(OSError):  # it left already
            peer.connection.send(wire.encode(wire.Refused(code, text)))
        peer.connection.close()
        os.close(peer.pidfd)

    # ---------------------------------------------------------------- life

    async def serve(self) -> None:
        """Run until a signal, then drain.

        Raises:
            StartError: Something is in the way; nothing is left behind.
        """
        lock = LockFile(self.config.state_dir, self.config.socket)
        try:
            inherited_fd, stored = activation.take_named("kvd")
            kept = keeping.take_up(stored, self.config.host, self.pool.shares)
            self._return = keeping.Return(kept, self.loop)
            self.listener = Listener(self.config.socket, self.config.socket_mode, inherited_fd)
            try:
                if self.config.http.listen:
                    self.sides.append(HttpChild(self.config.http, self.config.socket))
                if self.config.events.endpoint:
                    self.sides.append(EventFeed(self.config.events, self.catalog))
                await self._serve()
                keeping.hand_over(self.catalog, self.tier)
            finally:
                self.listener.close()
                for side in self.sides:
                    side.close()
        finally:
            if self.gpu is not None:
                self.gpu.close()  # it copies out of the host tier's memory
            if self.verifier is not None:
                self.verifier.close()  # it reads it
            self.tier.close()
            lock.release()

    def _start_tiers(self) -> None:
        """Begin to make slabs; returns at once."""
        self.tier.start(self._return.slabs, self._return.hear)
        if self.gpu is not None:
            self.gpu.start()

    async def _serve(self) -> None:
        opened = False
        self._start_tiers()
        page = StatPage.create(stat_page_name(self.config.socket))
        try:
            self.loop.set_exception_handler(self._on_bug)
            for number in (signal.SIGTERM, signal.SIGINT):
                self.loop.add_signal_handler(number, self._stop.set)
            if self.cold is not None:
                self.cold.open()
                opened = True
            await self._wait_for_memory()
            if self.peers is not None:
                await self.peers.open()
            maybe_fault("open.before_ready")
            self.loop.add_reader(self.listener, self._accept)
            self._publish(page)
            notify.ready(f"serving at {self.config.socket}")
            _LOG.info("ready", socket=self.config.socket, epoch=self.epoch, pid=os.getpid())
            async with asyncio.TaskGroup() as group:
                self._group = group
                tasks = await self._begin(group, page)
                await self._stop.wait()
                if self._bug is not None:
                    raise self._bug
                await self._end(tasks)
                if self._bug is not None:
                    raise self._bug
        finally:
            page.close()
            if self.peers is not None:
                self.peers.close()
            if opened and self.cold is not None:
                await self.cold.close()

    async def _begin(self, group: asyncio.TaskGroup, page: StatPage) -> list[asyncio.Task[None]]:
        """Start what runs until the end, but for what others start in `group`."""
        tasks = [group.create_task(self._tick(page))]
        tasks += [group.create_task(side.run()) for side in self.sides]
        if self.cold is not None:
            tasks.append(group.create_task(self.cold.run(group)))
        if self.directory is not None:
            group.create_task(self.directory.run(group))  # until it is closed
        if self.peers is not None:
            await self.peers.begin(group)
        return tasks

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Drain, write down what is dirty, leave the fleet."""
        await self._drain()
        if self.cold is not None:
            left = await self.cold.flush(self.config.nvme.flush_s)
            _LOG.info("flushed", bytes_left=left)
        self.admins.close()
        if self.peers is not None:
            self.peers.close()
        for task in tasks:
            task.cancel()
        if self.directory is not None:
            await self.directory.close()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the daemon for an exception that nothing caught."""
        loop.default_exception_handler(context)
        self._bug = context.get("exception") or RuntimeError(context["message"])
        self._stop.set()

    async def _wait_for_memory(self) -> None:
        self._count_slabs(await self._return.finish(self.catalog))
        host = self.config.host
        required = "require" in {host.lock, host.huge_pages}
        need = host.slab_count if required else 1
        while self._slabs_made < need and not (self.tier.failed and required):
            self._memory_changed.clear()
            try:
                async with asyncio.timeout(SLAB_S):
                    await self._memory_changed.wait()
            except TimeoutError as error:
                msg = f"no memory for a slab of {self.slab_bytes} bytes within {SLAB_S:.0f} s"
                raise StartError(msg) from error
            if self.tier.failed and (required or not self._slabs_made):
                raise StartError("; ".join(self.notes))

    async def _tick(self, page: StatPage) -> None:
        """Let time pass: turn over every queue, end what is late, show it; then feed systemd."""
        while True:
            due = self.loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.loop_lag_ms = max(0.0, (self.loop.time() - due) * 1e3)
            self.counters.measures.seconds["loop_lag"].note(self.loop_lag_ms / 1e3)
            maybe_hang("loop.tick")
            for session in list(self.sessions.values()):
                session.turn()
            self.dispatcher.sweep()
            self._admin.tick()
            if self.cold is not None:
                self.cold.tick()
                self.cold.beat(self.pulse)
            if self.verifier is not None:
                self.verifier.beat(self.pulse)
            if self.gpu is not None:
                self.gpu.beat(self.pulse)
            if self.peers is not None:
                self.peers.tick()
            self._publish(page)
            self._feed()

    def _feed(self) -> None:
        """Tell systemd that the daemon lives, unless a task or thread hangs or has died."""
        late = self.pulse.late(self.clock.now_ns())
        if late and late != self._was_late:
            _LOG.error("hangs or has died; the watchdog is no longer fed", what=", ".join(late))
        self._was_late = late
        if not late:
            notify.watchdog()

    def _publish(self, page: StatPage) -> None:
        page.write(gather(self), self.clock.now_ns())

    async def _drain(self) -> None:
        """Stop taking in; let readers and writers finish; close the rest."""
        maybe_fault("drain.begin")
        _LOG.info("draining", sessions=len(self.sessions), leases=len(self.leases))
        notify.stopping()
        limits, nvme = self.config.limits, self.config.nvme
        self.loop.call_later(limits.drain_s + nvme.flush_s + GIVE_UP_S, self._give_up)
        self.dispatcher.drain()
        if self.peers is not None:
            self.peers.drain()
        self.loop.remove_reader(self.listener)
        self.listener.close()
        deadline = self.loop.time() + self.config.limits.drain_s
        while self._busy() and self.loop.time() < deadline:  # noqa: ASYNC110 - a drain, not a hot path
            await asyncio.sleep(0.01)
        refusal = RefusedSession(Refusal.DRAINING, "this daemon is going down")
        for session in list(self.sessions.values()):
            session.close("drained", refusal=refusal)
        for owner, (pidfd, _) in list(self.orphans.items()):
            del self.orphans[owner]
            self.loop.remove_reader(pidfd)
            os.close(pidfd)
        _LOG.info("drained", version=__version__)

    def _give_up(self) -> None:
        """Leave although something hangs, a disk most likely; nothing durable is lost by it."""
        _LOG.warning("gave up draining", moves=len(asyncio.all_tasks(self.loop)))
        os._exit(EXIT_GAVE_UP)

    @property
    def hangs(self) -> bool:
        """Whether a thread did not end with the rest."""
        disk = self.cold is not None and self.cold.store.hangs
        return disk or (self.verifier is not None and self.verifier.hangs)

    def _busy(self) -> bool:
        falling = self.gpu.falling if self.gpu is not None else 0
        return bool(falling) or any(
            self.leases.count(owner) or self.catalog.fillings.count(owner)
            for owner in self.sessions
        )


def run(config: Config) -> int:
    """Run a daemon until it is told to stop; return the exit status.

    Raises:
        StartError: It cannot start here; the text says what to change.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    memory.set_undumpable()

    async def main() -> bool:
        await (daemon := Daemon(config, asyncio.get_running_loop())).serve()
        return daemon.hangs

    if asyncio.run(main()):
        _LOG.warning("left calls that hang")  # the interpreter's end would wait for their threads
        os._exit(EXIT_GAVE_UP)
    return 0
