"""Who is on the other end of a connection: certificates of one authority, or a key on loopback.

With certificates (mutual TLS 1.3) a host is who its certificate says: its name is a DNS entry of
the subject's alternative names, on both sides. A pre-shared key proves only that somebody has the
key, and nothing is encrypted; it is accepted between loopback addresses alone, for tests.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import ssl
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.errors import StartError
from kvd.peer.messages import PeerError

if TYPE_CHECKING:
    from kvd.config_transfer import TransferKnobs

NONCE_BYTES: Final = 32
KEY_BYTES_MIN: Final = 16
AUTH_S: Final = 5.0
"""For handshake and proof, each."""


class Credentials(NamedTuple):
    """What this host proves itself with.

    Attributes:
        server: For connections that are accepted; None with a key.
        client: For connections that are made; None with a key.
        key: The pre-shared key; empty with certificates.
    """

    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    key: bytes


def credentials(knobs: TransferKnobs) -> Credentials:
    """Read certificates or key.

    Raises:
        StartError: A file cannot be used; the text says which and what to change.
    """
    if knobs.key_file:
        try:
            key = Path(knobs.key_file).read_bytes().strip()
        except OSError as error:
            msg = f"[peer] key_file {knobs.key_file}: {error.strerror}; write a key into it"
            raise StartError(msg) from error
        if len(key) < KEY_BYTES_MIN:
            msg = f"[peer] key_file {knobs.key_file}: shorter than {KEY_BYTES_MIN} bytes; as in"
            raise StartError(f"{msg} openssl rand -hex 32")
        return Credentials(None, None, key)
    return Credentials(_context(knobs, server=True), _context(knobs, server=False), b"")


def _context(knobs: TransferKnobs, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    files = f"[peer] tls_cert {knobs.tls_cert}, tls_key {knobs.tls_key}"
    try:
        context.load_cert_chain(knobs.tls_cert, knobs.tls_key)
        files = f"[peer] tls_ca {knobs.tls_ca}"
        context.load_verify_locations(knobs.tls_ca)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or error
        msg = f"{files}: {why}; name PEM files that this user can read and that belong together"
        raise StartError(msg) from error
    return context


def names_of(certificate: object) -> set[str]:
    """Return the DNS names of a verified certificate, as `getpeercert` gives it."""
    if not isinstance(certificate, dict):
        return set()
    return {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}


def check_name(writer: asyncio.StreamWriter, host: str) -> None:
    """Check that the other end is the host it says it is; with a key there is nothing to check.

    Raises:
        PeerError: It has a certificate, but another host's.
    """
    tls = writer.get_extra_info("ssl_object")
    if tls is not None and host not in names_of(tls.getpeercert()):
        msg = f"says that it is {host}, but its certificate is another host's"
        raise PeerError(msg)


def is_loopback(address: object) -> bool:
    """Tell whether a socket's address is on this host."""
    if not isinstance(address, tuple) or not address:
        return False
    try:
        return ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback
    except ValueError:
        return False


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, server: bool
) -> None:
    """Prove to each other, by a fresh challenge both ways, that both have the key.

    Raises:
        PeerError: The other end has not, or is not on this host.
    """
    ends = (writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
    if not all(map(is_loopback, ends)):
        raise PeerError("a pre-shared key is for loopback only")
    mine = secrets.token_bytes(NONCE_BYTES)
    writer.write(mine)
    async with asyncio.timeout(AUTH_S):
        theirs = await reader.readexactly(NONCE_BYTES)
        nonces = theirs + mine if server else mine + theirs  # the client's first
        writer.write(_mac(key, nonces, server=server))
        proof = await reader.readexactly(sha256().digest_size)
    if not hmac.compare_digest(proof, _mac(key, nonces, server=not server)):
        raise PeerError("has another pre-shared key")


def _mac(key: bytes, nonces: bytes, *, server: bool) -> bytes:
    role = b"kvd.peer.server" if server else b"kvd.peer.client"
    return hmac.digest(key, role + nonces, "sha256")
