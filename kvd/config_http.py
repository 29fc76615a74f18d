"""The [http] table: metrics and the status page, on a loopback port; off without an address."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.config_source import Table

PORT = 9810
"""Where `kvd serve --http` listens without an address; not one that exporters of GPU hosts take."""
DEFAULT = f"127.0.0.1:{PORT}"
NAMES_MAX = 16
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class HttpKnobs:
    """The HTTP port.

    Attributes:
        listen: An IP address and a port, as in "127.0.0.1:9810"; empty for none.
        names: Names, beside the loopback's, by which clients may call it (the Host header).
    """

    listen: str = ""
    names: tuple[str, ...] = ()


KEYS = tuple(field.name for field in fields(HttpKnobs))


def parse(listen: str) -> tuple[str, int]:
    """Return the address and the port of a text like "127.0.0.1:9810" or "[::1]:9810".

    Raises:
        ValueError: It is none.
    """
    host, _, port = listen.rpartition(":")
    address = ipaddress.ip_address(host.strip("[]"))
    if not port.isdecimal() or not 0 <= int(port) <= _PORT_MAX:
        raise ValueError(port)
    return str(address), int(port)


def is_loopback(listen: str) -> bool:
    """Tell whether only this host can reach an address."""
    return ipaddress.ip_address(parse(listen)[0]).is_loopback


def read(table: Table) -> HttpKnobs:
    """Check the table; raises ConfigError saying where and what to change."""
    listen = table.values.get("listen", "")
    names = table.values.get("names", ())
    if not isinstance(listen, str):
        raise table.error("listen", f'write an address and a port, as in "{DEFAULT}", or ""')
    if not isinstance(names, list | tuple) or len(names) > NAMES_MAX or not all(map(_named, names)):
        raise table.error("names", 'list up to 16 host names without ports, as in ["gpu7.local"]')
    if listen:
        try:
            loopback = is_loopback(listen)
        except ValueError:
            raise table.error(
                "listen", f'write an IP address and a port, as in "{DEFAULT}"'
            ) from None
        if not loopback and not names:
            raise table.error(
                "listen",
                "others can reach this address, and what it shows is not secret but not public"
                " either; if you want that, list the names it is called by in names",
            )
    return HttpKnobs(listen, tuple(name.lower() for name in names))


def _named(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) < 254 and name.isprintable() and " " not in name  # noqa: PLR2004


def dump(knobs: HttpKnobs) -> list[str]:
    """Return the table's lines."""
    names = ", ".join(f'"{name}"' for name in knobs.names)
    return ["[http]", f'listen = "{knobs.listen}"', f"names = [{names}]"]
