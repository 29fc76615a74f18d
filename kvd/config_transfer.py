"""Of the [peer] table, what concerns transfers: transport, trust, what is shared, bounds."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from kvd.sizes import MIB, format_size

if TYPE_CHECKING:
    from kvd.config_source import Table

TRANSPORTS: dict[str, Literal["tcp", "rdma"]] = {"tcp": "tcp", "rdma": "rdma"}


@dataclass(frozen=True, slots=True)
class TransferKnobs:
    """How chunks travel between hosts.

    Attributes:
        transport: What carries the bytes; the same on all hosts, and nothing else is ever used.
        devices: Network devices that may carry them, as UCX names them; none: that of `address`.
        tls_cert: PEM file with this host's certificate; a DNS name in it is the host's.
        tls_key: PEM file with its key.
        tls_ca: PEM file with the authority that signed every host's.
        key_file: A key that all hosts have, instead of certificates; on loopback only.
        shared: What other hosts may have: TENANT, or TENANT/LABEL with * for any text.
        shared_with: Hosts that may have it, with * for any text.
        hold_s: For how long a holder keeps in place what it offers, at most.
        quarantine_bytes: Of one peer, what may be out of use before its mover is killed.
        fetch_bytes_s: Fetched a second at most, over all peers; 0 for no limit.
    """

    transport: Literal["tcp", "rdma"] = "tcp"
    devices: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    key_file: str = ""
    shared: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ("*",)
    hold_s: float = 30.0
    quarantine_bytes: int = 256 * MIB
    fetch_bytes_s: int = 0

    def shares(self, host: str, tenant: str, label: str) -> bool:
        """Tell whether a host may have what a tenant has under a label."""
        matches = any(fnmatchcase(host, pattern) for pattern in self.shared_with)
        return matches and self.gives(tenant, label)

    def gives(self, tenant: str, label: str) -> bool:
        """Tell whether some host may have what a tenant has under a label."""
        for rule in self.shared:
            name, _, pattern = rule.partition("/")
            if name == tenant and (not pattern or fnmatchcase(label, pattern)):
                return True
        return False

    def tenants(self) -> set[str]:
        """Return the tenants of which something is shared."""
        return {rule.partition("/")[0] for rule in self.shared}

    def tenants_of(self, host: str) -> set[str]:
        """Return the tenants that share something with a host."""
        matches = any(fnmatchcase(host, pattern) for pattern in self.shared_with)
        return self.tenants() if matches else set()


KEYS = tuple(field.name for field in fields(TransferKnobs))


def read(table: Table, address: str, tenants: set[str]) -> TransferKnobs:
    """Check the table; raises ConfigError saying where and what to change.

    Args:
        table: `[peer]`.
        address: Its `address`, checked; empty for a host that takes no part.
        tenants: All that there are.
    """
    files = {
        key: table.file_path(key, "") if table.values.get(key) else ""
        for key in ("tls_cert", "tls_key", "tls_ca", "key_file")
    }
    knobs = TransferKnobs(
        transport=TRANSPORTS[table.choice("transport", "tcp", TRANSPORTS)],
        devices=_texts(table, "devices", ()),
        shared=_texts(table, "shared", ()),
        shared_with=_texts(table, "shared_with", ("*",)),
        hold_s=table.number("hold_s", 30.0, 1, 600),
        quarantine_bytes=table.size("quarantine_bytes", 256 * MIB),
        fetch_bytes_s=table.size("fetch_bytes_s", 0),
        **files,
    )
    for rule in knobs.shared:
        if rule.partition("/")[0] not in tenants:
            raise table.error(
                "shared", f"{rule!r} names no tenant of this daemon; use one of those"
            )
    if address and knobs.shared:
        _check_trust(table, knobs, address)
    return knobs


def _check_trust(table: Table, knobs: TransferKnobs, address: str) -> None:
    certificates = (knobs.tls_cert, knobs.tls_key, knobs.tls_ca)
    if knobs.key_file and any(certificates):
        raise table.error("key_file", "set this or the tls_ files, not both")
    if knobs.key_file and not _loopback(address):
        raise table.error(
            "key_file",
            "a key neither encrypts nor names a host: it is for loopback and tests only;"
            " set tls_cert, tls_key and tls_ca instead",
        )
    if not knobs.key_file and not all(certificates):
        raise table.error(
            "shared", "other hosts must be authenticated: set tls_cert, tls_key and tls_ca"
        )


def _loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _texts(table: Table, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = table.values.get(key, list(default))
    if not isinstance(value, list | tuple) or not all(
        isinstance(item, str) and item.isprintable() and item for item in value
    ):
        raise table.error(key, 'write a list of texts, as in ["default"]')
    return tuple(value)


def dump(knobs: TransferKnobs) -> list[str]:
    """Return the table's lines."""
    lines = []
    for field in fields(TransferKnobs):
        value = getattr(knobs, field.name)
        if field.name.endswith("bytes"):
            shown = f'"{format_size(value)}"'
        elif isinstance(value, tuple):
            shown = f"[{', '.join(map(_quoted, value))}]"
        else:
            shown = _quoted(value) if isinstance(value, str) else repr(value)
        lines.append(f"{field.name} = {shown}")
    return lines


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
