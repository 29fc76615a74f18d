"""The [events] table: KV events over ZeroMQ for cache-aware routers; off without an endpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvd.config_source import Table

Hashes = Literal["int", "bytes"]
HASHES: dict[str, Hashes] = {"int": "int", "bytes": "bytes"}
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[0-9.]+):([0-9]{1,5})|ipc:///[\w./@-]{1,100}")
_EVERYWHERE = ("tcp://0.0.0.0:", "tcp://[::]:")
_TOPIC_BYTES_MAX = 200


@dataclass(frozen=True, slots=True)
class EventsKnobs:
    """KV events.

    Attributes:
        endpoint: Where subscribers connect, as in "tcp://127.0.0.1:5557"; empty for no events.
        replay_endpoint: Where they ask for what they have missed; empty for none.
        topic: The first frame of each batch.
        hashes: As vLLM sends them by default, the low 64 bits as numbers; or whole, as bytes.
        buffer_steps: Batches kept for replay.
        hwm: Batches that wait for one subscriber before it loses some.
    """

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = "kvd"
    hashes: Hashes = "int"
    buffer_steps: int = 10_000
    hwm: int = 100_000


KEYS = tuple(field.name for field in fields(EventsKnobs))


def read(table: Table) -> EventsKnobs:
    """Check the table; raises ConfigError saying where and what to change."""
    usual = EventsKnobs()
    topic = table.values.get("topic", usual.topic)
    if not isinstance(topic, str) or not topic.isprintable() or len(topic) > _TOPIC_BYTES_MAX:
        raise table.error("topic", f"write a printable text of up to {_TOPIC_BYTES_MAX} characters")
    endpoint = _endpoint(table, "endpoint")
    replay = _endpoint(table, "replay_endpoint")
    if replay and not endpoint:
        raise table.error("replay_endpoint", "there is nothing to replay without an endpoint")
    if replay and replay == endpoint:
        raise table.error("replay_endpoint", "choose another port than the endpoint's")
    return EventsKnobs(
        endpoint=endpoint,
        replay_endpoint=replay,
        topic=topic,
        hashes=HASHES[table.choice("hashes", usual.hashes, HASHES)],
        buffer_steps=table.integer("buffer_steps", usual.buffer_steps, 1, 1_000_000),
        hwm=table.integer("hwm", usual.hwm, 1, 10_000_000),
    )


def _endpoint(table: Table, key: str) -> str:
    value = table.values.get(key, "")
    if value == "":
        return ""
    if not isinstance(value, str) or _ENDPOINT.fullmatch(value) is None:
        raise table.error(key, 'write an address, as in "tcp://127.0.0.1:5557" or "ipc:///run/x"')
    if value.startswith(_EVERYWHERE):
        raise table.error(
            key,
            "ZeroMQ asks nobody who they are; name the address of the network that routers are on",
        )
    return value


def dump(knobs: EventsKnobs) -> list[str]:
    """Return the table's lines."""
    topic = knobs.topic.replace("\\", "\\\\").replace('"', '\\"')
    return [
        "[events]",
        f'endpoint = "{knobs.endpoint}"',
        f'replay_endpoint = "{knobs.replay_endpoint}"',
        f'topic = "{topic}"',
        f'hashes = "{knobs.hashes}"',
        f"buffer_steps = {knobs.buffer_steps}",
        f"hwm = {knobs.hwm}",
    ]
