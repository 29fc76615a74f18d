"""What this host gives to those who ask: rights, the holder's machine, their connections. Loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.peer.holder import Holder
from kvd.peer.messages import Agent, Message, Offer, tag_of
from kvd.peer.protocol import Drop, Held, HolderAction, Knobs, Send, Take
from kvd.peer.pump import Pump
from kvd.types import Tenant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config_transfer import TransferKnobs
    from kvd.peer.control import Connection
    from kvd.peer.source import Source

    MakeSource = Callable[[Callable[[int, int, Sequence[Held] | None], None]], Source]


class Serving:
    """Serves other hosts."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        transfer: TransferKnobs,
        knobs: Knobs,
        *,
        cluster: str,
        epoch: int,
        make_source: MakeSource,
    ) -> None:
        """Serve nobody yet; `make_source` gets whom to tell what was taken."""
        self._catalog = catalog
        self._clock = clock
        self._transfer = transfer
        self._tenants = {tag_of(cluster, name): Tenant(name) for name in transfer.tenants()}
        self.holder = Holder(epoch, knobs, self._may)
        self.source = make_source(self._taken)
        self._connections: dict[str, Connection] = {}
        self._do = Pump(self._act)

    def _may(self, host: str, tag: bytes, namespace: bytes) -> bool:
        """Tell whether a host may have a namespace of a tenant, under every label it has here."""
        tenant = self._tenants.get(tag)
        if tenant is None:
            return False
        labels = {
            space.label
            for (owner, known, _), space in self._catalog.spaces.items()
            if owner == tenant and known == namespace
        }
        return all(self._transfer.shares(host, tenant, label) for label in labels)

    def tick(self) -> None:
        """Let time pass."""
        self.source.tick()
        if self.holder.services:
            self._do(self.holder.tick(self._clock.now_ns()))

    # ---------------------------------------------------------------- connections

    def up(self, connection: Connection, epoch: int) -> None:
        """Serve whoever asks; an asker's life is its connection's."""
        del epoch
        self._connections[connection.host] = connection

    def heard(self, connection: Connection, message: Message) -> None:
        """Hear what it asks."""
        self._do(self.holder.heard(self._clock.now_ns(), connection.host, message))

    def down(self, connection: Connection) -> None:
        """Hear that it is gone."""
        if self._connections.get(connection.host) is connection:
            del self._connections[connection.host]
            self._do(self.holder.link_down(connection.host))

    # ---------------------------------------------------------------- what to do

    def _taken(self, ticket: int, agent: int, held: Sequence[Held] | None) -> None:
        self._do(self.holder.taken(ticket, agent, held))

    def _act(self, action: HolderAction) -> None:
        match action:
            case Take():
                tenant = self._tenants.get(action.tag, Tenant(""))
                space = self._catalog.spaces.get((tenant, action.namespace, action.layout))
                chunk = space.chunks.get(action.key) if space is not None else None
                self.source.take(action.ticket, chunk, action.mask)
            case Drop(ticket=ticket):
                self.source.drop(ticket)
            case Send(host=host, message=message):
                connection = self._connections.get(host)
                if connection is not None:
                    self._say(connection, message)

    def _say(self, connection: Connection, message: Message) -> None:
        """Send; before the first offer of a source's new state, say how it is reached."""
        if isinstance(message, Offer):
            source = self.source
            if connection.agent != source.version:
                connection.agent = source.version
                connection.send(Agent(source.version, source.metadata))
            message = message._replace(agent=source.version)
        connection.send(message)

    def stats(self) -> dict[str, Any]:
        """Describe it for the statistics page."""
        return {
            "source": "up" if self.source.up else "down",
            "source_pid": self.source.pid,
            "served_hosts": len(self._connections),
            "served_asks": len(self.holder.services),
            "held_bytes": self.holder.held_bytes(),
            "offered": self.holder.offered,
            "asks_refused": dict(self.holder.refusals),
        }
