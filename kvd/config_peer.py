"""The [peer] table of the configuration: other hosts, and the directory of who holds what."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from kvd.config_source import Table

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a fleet, a host and a failure domain may be called: all of them end up in keys."""
ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
SCHEMES = ("redis", "rediss", "unix")
MODES = ("single", "cluster")
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class PeerKnobs:
    """Who this host is to others, and the directory.

    Attributes:
        cluster: The fleet's name: hosts of another see nothing of this one.
        host: This host's name, unique in the fleet.
        address: Where other hosts reach this daemon, HOST:PORT; empty: they do not.
        domain: What fails together with this host, a rack or a zone.
        directory: URL of the Redis or Valkey; empty for none.
        directory_mode: One server (or a proxy that looks like one), or a Redis Cluster.
        directory_password_file: Holds its password; empty for none.
        lookup_ms: What a look-up waits for the directory, at most.
        announce_per_s: Entries told to it a second, at most.
        entry_ttl_s: How long an entry lasts that nobody renews.
        heartbeat_s: Between two signs of life; a host is gone after three without.
    """

    cluster: str = "kvd"
    host: str = ""
    address: str = ""
    domain: str = ""
    directory: str = ""
    directory_mode: str = "single"
    directory_password_file: str = ""
    lookup_ms: float = 20.0
    announce_per_s: int = 2000
    entry_ttl_s: float = 21_600.0
    heartbeat_s: float = 5.0


KEYS = tuple(field.name for field in fields(PeerKnobs))


def read(table: Table) -> PeerKnobs:
    """Check the table; raises ConfigError saying where and what to change."""
    host = _name(table, "host", "") or _host_name()
    used = table.values.get("directory") or table.values.get("address")
    if not host and used:
        raise table.error("host", "is needed: this machine's own name cannot serve as one")
    password_file = table.values.get("directory_password_file", "")
    if password_file != "":
        password_file = table.file_path("directory_password_file", "")
    return PeerKnobs(
        cluster=_name(table, "cluster", "kvd"),
        host=host,
        address=_address(table),
        domain=_name(table, "domain", "") or host,
        directory=_directory(table),
        directory_mode=table.choice("directory_mode", "single", MODES),
        directory_password_file=str(password_file),
        lookup_ms=table.number("lookup_ms", 20.0, 1, 1000),
        announce_per_s=table.integer("announce_per_s", 2000, 1, 1_000_000),
        entry_ttl_s=table.number("entry_ttl_s", 21_600.0, 60, 604_800),
        heartbeat_s=table.number("heartbeat_s", 5.0, 0.1, 60),
    )


def _host_name() -> str:
    name = socket.gethostname()
    return name if NAME.fullmatch(name) else ""


def _name(table: Table, key: str, default: str) -> str:
    value = table.values.get(key, default)
    if not isinstance(value, str) or (value != default and not NAME.fullmatch(value)):
        raise table.error(key, "write a name of 1 to 64 letters, digits, dots and dashes")
    return value


def _address(table: Table) -> str:
    value = table.values.get("address", "")
    found = ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if value != "" and (found is None or not 0 < int(found[1]) <= PORT_MAX):
        raise table.error("address", 'write host and port, as in "10.0.0.7:7600"')
    return str(value)


def _directory(table: Table) -> str:
    value = table.values.get("directory", "")
    mend = 'write a URL, as in "redis://10.0.0.5:6379/0" or "unix:///run/redis.sock"'
    if not isinstance(value, str) or not value.isprintable():
        raise table.error("directory", mend)
    if not value:
        return ""
    try:
        parts = urlsplit(value)
        reachable = parts.hostname or (parts.scheme == "unix" and parts.path)
        parts.port  # noqa: B018 - raises for what is no port
    except ValueError:
        raise table.error("directory", mend) from None
    if parts.scheme not in SCHEMES or not reachable:
        raise table.error("directory", mend)
    if parts.password is not None:  # not repeated in the message either
        raise table.hidden(
            "directory", "has a password in it; put it in a file, for directory_password_file"
        )
    if parts.scheme == "unix" and table.values.get("directory_mode") == "cluster":
        raise table.error("directory", "a cluster is not reached by a unix socket")
    return value


def dump(knobs: PeerKnobs) -> list[str]:
    """Return the table's lines."""
    lines = ["[peer]"]
    for field in fields(PeerKnobs):
        value = getattr(knobs, field.name)
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'{field.name} = "{escaped}"')
        else:
            lines.append(f"{field.name} = {value!r}")
    return lines
