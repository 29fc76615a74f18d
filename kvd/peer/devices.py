"""Which network device an address belongs to: UCX wants names."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import Final

_SIOCGIFADDR: Final = 0x8915


def devices_of(address: str) -> tuple[str, ...]:
    """Return the device of an IPv4 HOST:PORT, or nothing: then UCX uses any.

    A device that is left open may turn out to be a management network or a container bridge, so
    `kvd doctor` shows what was found.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        wanted = ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError):
        return ()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if ipaddress.ip_address(reply[20:24]) == wanted:
                return (name,)
    return ()
