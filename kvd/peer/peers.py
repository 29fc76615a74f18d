"""The peer side of a daemon: built here, opened, ticked, closed. Loop only."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvd import log
from kvd.errors import StartError
from kvd.peer.asking import Requests
from kvd.peer.control import Connection, Link, Me, Server
from kvd.peer.devices import devices_of
from kvd.peer.nixl_agent import missing
from kvd.peer.process import START_S
from kvd.peer.protocol import Knobs
from kvd.peer.security import credentials
from kvd.peer.serving import Serving
from kvd.peer.sink import Sink, World
from kvd.peer.source import Source
from kvd.types import OwnerId, Tenant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config_peer import PeerKnobs
    from kvd.config_transfer import TransferKnobs
    from kvd.peer.membership import Member
    from kvd.peer.messages import Message
    from kvd.peer.redis_directory import RedisDirectory
    from kvd.peer.source import Riser, Slabs, Verifier

_LOG = log.get("peers")
EAGER_MAX: Final = 8
"""In a fleet of so many others, movers start with their links; in a larger one, when needed."""
LISTED_MAX: Final = 64


class Peers:
    """The peer side of a daemon."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        catalog: Catalog,
        slabs: Slabs,
        riser: Riser | None,
        *,
        epoch: int,
        peer: PeerKnobs,
        transfer: TransferKnobs,
        directory: RedisDirectory,
        verifier: Verifier | None = None,
    ) -> None:
        """Plan it.

        Raises:
            StartError: Certificates, key or transport cannot be used here.
        """
        lack = missing(transfer.transport)
        if lack:
            raise StartError(lack)
        self._directory = directory
        self._address = peer.address
        self._me = Me(peer.cluster, peer.host, epoch, transfer.transport)
        self._credentials = credentials(transfer)
        self._random = random.SystemRandom().random
        self._owner = 0
        devices = transfer.devices or devices_of(peer.address)
        lease_ms = int(transfer.hold_s * 1e3)
        knobs = Knobs(lease_ms=lease_ms, quarantine_bytes=transfer.quarantine_bytes)
        source = partial(Source, loop, catalog, slabs, riser, verifier=verifier)
        tenants = [Tenant(name) for name in transfer.tenants()]
        make_source = partial(
            source, transport=transfer.transport, devices=devices, tenants=tenants
        )
        self.serving = Serving(
            catalog,
            clock,
            transfer,
            knobs,
            cluster=peer.cluster,
            epoch=epoch,
            make_source=lambda on_taken: make_source(on_taken=on_taken),
        )
        self._world = World(
            loop=loop,
            clock=clock,
            catalog=catalog,
            slabs=slabs,
            transport=transfer.transport,
            devices=devices,
            knobs=knobs,
            tenants=lambda host: [Tenant(name) for name in transfer.tenants_of(host)],
            random=self._random,
            owner=self._new_owner,
        )
        self.sinks: dict[str, Sink] = {}
        self.requests = Requests(
            peer.cluster,
            clock,
            transfer=transfer,
            directory=directory,
            sinks=self.sinks,
            random=self._random,
        )
        self._links: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._server = Server(self._me, self._credentials, self.serving)
        self._group: asyncio.TaskGroup | None = None
        self._members: object = None

    def _new_owner(self) -> OwnerId:
        self._owner -= 1
        return OwnerId(self._owner)

    # ---------------------------------------------------------------- start and end

    async def open(self) -> None:
        """Start the source and take the address; nobody is served yet.

        Raises:
            StartError: One of them does not work here; the text says what to change.
        """
        started, source = asyncio.Event(), self.serving.source
        source.on_change = started.set
        try:
            source.start()
            async with asyncio.timeout(START_S):
                await started.wait()
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or f"not ready within {START_S:.0f} s"
            msg = f"[peer] source process: {why}"
            raise StartError(msg) from error
        if not source.up:
            msg = (
                f'[peer] transport = "{self._me.transport}" does not work on this host: the source'
                " process ended, its own words are above; install kvd[peer], and see kvd doctor"
            )
            raise StartError(msg)
        host, _, port = self._address.rpartition(":")
        try:
            await self._server.open(host.strip("[]"), int(port))
        except OSError as error:
            msg = f"[peer] address {self._address}: {error.strerror or error}"
            raise StartError(f"{msg}; name an address of this host and a free port") from error
        if self._credentials.key:
            _LOG.warning("peers are trusted by a key alone, not encrypted: loopback, tests only")

    async def begin(self, group: asyncio.TaskGroup) -> None:
        """Serve and ask from now on; everything that waits is a task of `group`."""
        self._group = self.requests.group = group
        await self._server.begin(group)
        _LOG.info("peers served", address=self._address, transport=self._me.transport)

    def close(self) -> None:
        """End all links and kill all movers; what they hold goes with the daemon."""
        self._server.close()
        self.requests.close()
        for _, task in self._links.values():
            task.cancel()
        for sink in self.sinks.values():
            sink.close()
        self.serving.source.close()

    # ---------------------------------------------------------------- who there is

    def members(self, members: Iterable[Member]) -> None:
        """Take in who there is: links to newcomers, none to those who have gone."""
        wanted = {m.host: m.address for m in members if m.address and m.host != self._me.host}
        for host, (address, task) in list(self._links.items()):
            if wanted.get(host) != address:
                task.cancel()
                del self._links[host]
        assert self._group is not None
        for host, address in wanted.items():
            if host in self._links:
                continue
            sink = self.sinks.setdefault(host, Sink(self._world, host))
            sink.address = address
            sink.asker.eager = len(wanted) <= EAGER_MAX
            link = Link(self._me, self._credentials, Asked(sink))
            task = self._group.create_task(link.run(host, address, self._random))
            self._links[host] = (address, task)
        for host in [h for h in self.sinks if h not in wanted]:
            sink = self.sinks[host]
            if not sink.asker.reads and not sink.asker.fetches:
                sink.close()
                del self.sinks[host]

    def tick(self) -> None:
        """Let time pass; call it some five times a second."""
        if self._directory.members.by_host is not self._members:
            self._members = self._directory.members.by_host
            self.members(self._directory.members.by_host.values())
        for sink in self.sinks.values():
            sink.tick()
        self.serving.tick()

    def drain(self) -> None:
        """Serve nothing new."""
        self.serving.holder.draining = True

    def stats(self) -> dict[str, Any]:
        """Describe all of it for the statistics page."""
        return {
            "host": self._me.host,
            "address": self._address,
            "transport": self._me.transport,
            "trust": "key" if self._credentials.key else "certificates",
            **self.serving.stats(),
            "connections_refused": self._server.refused,
            "waiting": self.requests.waiting,
            "over_budget": self.requests.over_budget,
            "retried": self.requests.retried,
            "quarantined_bytes": sum(s.asker.quarantined_bytes for s in self.sinks.values()),
            "peers": [sink.stats() for sink in list(self.sinks.values())[:LISTED_MAX]],
        }


class Asked:
    """Hears of the connection that this host made to another."""

    def __init__(self, sink: Sink) -> None:
        """Tell the sink."""
        self._sink = sink

    def up(self, connection: Connection, epoch: int) -> None:
        """Pass it on."""
        self._sink.up(connection, epoch)

    def heard(self, connection: Connection, message: Message) -> None:
        """Pass it on."""
        del connection
        self._sink.heard(message)

    def down(self, connection: Connection, why: str) -> None:
        """Pass it on."""
        if self._sink.connection is connection:
            self._sink.down(why)

    def failed(self, why: str) -> None:
        """Remember why there is no connection."""
        self._sink.why = why
