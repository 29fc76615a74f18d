"""Serving other hosts: who may ask, what is held in place for them, until when. Pure.

    ask:  --Take--> taken --Offer--> held --Have | Release | lease's end | link lost--> Drop

One holder for all hosts. It keeps a bounded piece of each ask in place ahead of what was handed
back; the lease bounds how long. It unpins at the lease's end by its own clock, which began later
than the asker's, so that an asker that keeps to its own never reads what is not held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.peer.messages import Ask, Have, Message, Offer, Piece, Ping, Pong, Release, Stop, seal
from kvd.peer.protocol import MS, Drop, Held, HolderAction, Knobs, Send, Take

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Rights = Callable[[str, bytes, bytes], bool]

BUSY_MS = 250
"""When to come again, for a host that is asked too much."""


class Service:
    """One ask being served."""

    def __init__(self, host: str, ask: Ask, end_ns: int) -> None:
        """Begin at the first chunk."""
        self.host = host
        self.ask = ask
        self.end_ns = end_ns
        self.next = 0
        self.said = 0
        self.stop = len(ask.wants)
        self.why = "end"
        self.tickets: dict[int, int] = {}
        self.ready: dict[int, tuple[int, tuple[Held, ...]]] = {}
        self.bytes: dict[int, int] = {}
        self.chunk_bytes = 0
        """Of the largest chunk so far."""
        self.stopped = False


class Holder:
    """What this host serves."""

    def __init__(self, epoch: int, knobs: Knobs, rights: Rights) -> None:
        """Serve nobody yet.

        Args:
            epoch: Of this life of the daemon.
            knobs: Bounds.
            rights: Whether a host may have a tenant's namespace, both as named in an ask.
        """
        self.epoch = epoch
        self.knobs = knobs
        self._rights = rights
        self.services: dict[tuple[str, int], Service] = {}
        self._tickets: dict[int, tuple[tuple[str, int], int]] = {}
        self._next_ticket = 0
        self.draining = False
        self.offered = 0
        self.refusals = dict.fromkeys(("busy", "forbidden", "epoch", "draining"), 0)

    def held_bytes(self) -> int:
        """Return what is in place for others."""
        return sum(sum(service.bytes.values()) for service in self.services.values())

    def heard(self, now_ns: int, host: str, message: Message) -> list[HolderAction]:
        """Take in what an asker says; what does not fit is dropped."""
        if isinstance(message, Ask):
            return self._asked(now_ns, host, message)
        if isinstance(message, Ping):
            return [Send(host, Pong(message.nonce, self.epoch))]
        if isinstance(message, Have):
            service = self.services.get((host, message.ask))
            return self._handed_back(service, message.at) if service else []
        if isinstance(message, Release):
            return self._end((host, message.ask))
        return []

    def _asked(self, now_ns: int, host: str, ask: Ask) -> list[HolderAction]:
        key = (host, ask.ask)
        if key in self.services:
            return []  # said twice
        why = self._refusal(host, ask)
        if why:
            self.refusals[why] += 1
            retry_ms = BUSY_MS if why == "busy" else 0
            return [Send(host, Stop(ask.ask, self.epoch, 0, why, retry_ms))]
        lease_ms = min(ask.lease_ms, self.knobs.lease_ms)
        if lease_ms < ask.lease_ms:  # to shorten it would break the asker's own count
            return [Send(host, Stop(ask.ask, self.epoch, 0, "busy", BUSY_MS))]
        service = self.services[key] = Service(host, ask, now_ns + lease_ms * MS)
        return self._ahead(service)

    def _refusal(self, host: str, ask: Ask) -> str:
        if ask.epoch != self.epoch:
            return "epoch"
        if self.draining:
            return "draining"
        if not self._rights(host, ask.tag, ask.namespace):
            return "forbidden"
        of_host = sum(service.host == host for service in self.services.values())
        if of_host >= self.knobs.asks_max or len(self.services) >= self.knobs.serve_max:
            return "busy"
        return ""

    def _ahead(self, service: Service) -> list[HolderAction]:
        """Take more chunks, as far as may be held at once."""
        actions: list[HolderAction] = []
        ask = service.ask
        while service.next < service.stop and self._room(service):
            self._next_ticket += 1
            index = service.next
            service.next += 1
            service.tickets[index] = self._next_ticket
            self._tickets[self._next_ticket] = ((service.host, ask.ask), index)
            key, mask = ask.wants[index]
            take = Take(
                self._next_ticket,
                service.host,
                ask.tag,
                ask.namespace,
                ask.layout,
                key,
                mask,
            )
            actions.append(take)
        return actions

    def _room(self, service: Service) -> bool:
        """Tell whether one chunk more may be held; what is being taken counts as the largest."""
        knobs, held = self.knobs, len(service.tickets)
        if not service.chunk_bytes:
            return held < min(knobs.ahead_first, knobs.ahead_max)
        coming_bytes = (held - len(service.bytes)) * service.chunk_bytes
        held_bytes = sum(service.bytes.values()) + coming_bytes
        return held < knobs.ahead_max and held_bytes < knobs.ahead_bytes

    def taken(self, ticket: int, agent: int, held: Sequence[Held] | None) -> list[HolderAction]:
        """Hear what a Take came to.

        Args:
            ticket: The Take's.
            agent: Version of the source's metadata.
            held: The chunk's objects; None when it is not here, empty when it cannot be had now.
        """
        known = self._tickets.get(ticket)
        if known is None:
            return []  # dropped meanwhile
        key, index = known
        service = self.services[key]
        if not held:
            service.stop = min(service.stop, index)
            service.why = "miss" if held is None else "not now"
            return [*self._forget(service, index), *self._say(service)]
        service.ready[index] = (agent, tuple(held))
        service.bytes[index] = sum(item.size_bytes for item in held)
        service.chunk_bytes = max(service.chunk_bytes, service.bytes[index])
        return [*self._say(service), *self._ahead(service)]

    def _say(self, service: Service) -> list[HolderAction]:
        """Offer what is ready, in order; then say that it was all."""
        actions: list[HolderAction] = []
        ask = service.ask
        while service.said < service.stop and service.said in service.ready:
            index = service.said
            agent, held = service.ready.pop(index)
            pieces = tuple(_piece(ask, index, item) for item in held)
            actions.append(Send(service.host, Offer(ask.ask, self.epoch, index, agent, pieces)))
            service.said += 1
            self.offered += 1
        if service.said >= service.stop and not service.stopped:
            service.stopped = True
            stop = Stop(ask.ask, self.epoch, service.stop, service.why, 0)
            actions.append(Send(service.host, stop))
        return actions

    def _handed_back(self, service: Service, index: int) -> list[HolderAction]:
        return [*self._forget(service, index), *self._ahead(service)]

    def _forget(self, service: Service, index: int) -> list[HolderAction]:
        ticket = service.tickets.pop(index, None)
        service.bytes.pop(index, None)
        service.ready.pop(index, None)
        if ticket is None:
            return []
        del self._tickets[ticket]
        return [Drop(ticket)]

    def _end(self, key: tuple[str, int]) -> list[HolderAction]:
        service = self.services.pop(key, None)
        if service is None:
            return []
        actions: list[HolderAction] = []
        for index in list(service.tickets):
            actions += self._forget(service, index)
        return actions

    def link_down(self, host: str) -> list[HolderAction]:
        """Hear that a host is gone: what it was reading is its own affair now."""
        actions: list[HolderAction] = []
        for key in [key for key in self.services if key[0] == host]:
            actions += self._end(key)
        return actions

    def tick(self, now_ns: int) -> list[HolderAction]:
        """Let time pass: leases end."""
        actions: list[HolderAction] = []
        for key in [k for k, service in self.services.items() if now_ns >= service.end_ns]:
            actions += self._end(key)
        return actions


def _piece(ask: Ask, index: int, item: Held) -> Piece:
    numbers = (item.column, item.size_bytes, item.generation, item.lossy)
    sealed = seal(ask.namespace, ask.layout, ask.wants[index][0], numbers, item.digest)
    return Piece(item.column, item.address, item.size_bytes, item.generation, item.lossy, sealed)
