"""The configuration: one TOML file and a few options, checked once, then frozen.

Few knobs, each with a default that is safe. Every error says where it is and what to change. The
environment decides only which file is read and where a user's own daemon keeps its things.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from kvd import (
    activation,
    config_events,
    config_gpu,
    config_http,
    config_nvme,
    config_peer,
    config_transfer,
    memory_limit,
)
from kvd.config_gpu import EVERY, word_of
from kvd.config_peer import PeerKnobs
from kvd.config_source import Source, Table, shown
from kvd.config_transfer import TransferKnobs
from kvd.errors import ConfigError
from kvd.sizes import GIB, MIB, about, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.config_events import EventsKnobs
    from kvd.config_gpu import GpuKnobs
    from kvd.config_http import HttpKnobs
    from kvd.config_nvme import NvmeKnobs

SYSTEM_FILE = "/etc/kvd/kvd.toml"
SLAB_STEP = 2 * MIB
"""A huge page, and the unit in which CUDA shares memory."""
SOCKET_PATH_BYTES_MAX = 107
"""What `sockaddr_un` holds, without its final zero."""
TENANT_NAME_MAX = 64
UID_MAX = (1 << 32) - 2
POLICIES = ("lifetable", "lru", "s3fifo")
"""As in `kvd.policies`, which is not imported for three words."""
WHENEVER = ("auto", "off", "require")
"""Use it if it is there; never use it; do not start without it."""
_SHARE_SLACK = 1e-9


def auto_slab_bytes(size_bytes: int, smallest_share: float = 1.0) -> int:
    """Return a slab size for a tier of which some tenant gets only `smallest_share`.

    64 MiB, or 256 MiB from 16 GiB on. Where that leaves the smallest tenant with less than four
    slabs, it is smaller, down to 1 MiB, and, if there is such a size, one that wastes nothing.
    """
    base = 64 * MIB if size_bytes < 16 * GIB else 256 * MIB
    quarter = int(size_bytes * smallest_share + _SHARE_SLACK) // 4
    if quarter >= base:
        return base
    if quarter < SLAB_STEP:
        return MIB
    most = quarter - quarter % SLAB_STEP
    for slab_bytes in range(most, most // 2, -SLAB_STEP):
        if size_bytes % slab_bytes == 0:
            return slab_bytes
    return most


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The host tier.

    Attributes:
        size_bytes: How much memory it takes; `load` makes it whole slabs.
        slab_bytes: The unit in which tenants get it; given as 0, it is chosen to suit the size.
        huge_pages: Whether slabs are made of huge pages, see `WHENEVER`.
        lock: Whether slabs are locked into memory, see `WHENEVER`.
        fault_threads: Threads that make slabs ready; given as 0, up to 8.
        policy: What is evicted first, one of `kvd.policies.POLICIES`.
        verify: Of how many objects one is summed when it is stored and again before it is read; 0
            for none.
    """

    size_bytes: int = GIB
    slab_bytes: int = 0
    huge_pages: str = "auto"
    lock: str = "auto"
    fault_threads: int = 0
    policy: str = "lifetable"
    verify: int = 0

    def __post_init__(self) -> None:
        """Replace the zeros by what they stand for."""
        if self.slab_bytes == 0:
            object.__setattr__(self, "slab_bytes", auto_slab_bytes(self.size_bytes))
        if self.fault_threads == 0:
            threads = min(8, len(os.sched_getaffinity(0)))
            object.__setattr__(self, "fault_threads", threads)

    @property
    def slab_count(self) -> int:
        """Whole slabs that fit."""
        return self.size_bytes // self.slab_bytes


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """One tenant: the users that share KV cache and trust each other.

    Attributes:
        name: For people; never leaves this host.
        uids: Users, as the kernel names a client's. No user is in two tenants.
        host_share: The most of the host tier it may hold, more than 0, at most 1.
    """

    name: str
    uids: tuple[int, ...]
    host_share: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients may hold and for how long.

    Attributes:
        sessions: Of one tenant at a time.
        leases_per_session: At a time.
        fill_deadline_s: From reserving a slot to publishing it, at most.
        lease_s: Longest life of a lease that is not released.
        greeting_s: From connecting to a complete greeting.
        drain_s: What sessions get to finish when the daemon goes down.
        promote_s: What an acquire waits for its chunks to come up from the tier below, and again
            for them to be verified.
        pinned_share: Of a tenant's part of the tier, what leases may hold at a time.
        filling_share: The same for slots that are being filled or are in quarantine.
    """

    sessions: int = 256
    leases_per_session: int = 4096
    fill_deadline_s: float = 120.0
    lease_s: float = 600.0
    greeting_s: float = 2.0
    drain_s: float = 5.0
    promote_s: float = 10.0
    pinned_share: float = 0.875
    filling_share: float = 0.5


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that a daemon is told at its start.

    Attributes:
        socket: Where clients connect.
        state_dir: Where the daemon keeps its own files; one daemon each.
        host: The host tier.
        nvme: The tier below it.
        tenants: Who may connect, and shares what.
        limits: Bounds on what clients may hold.
        http: Metrics and the status page.
        events: KV events for routers.
        socket_mode: Who may connect, as far as the file system goes.
    """

    socket: str
    state_dir: str
    host: HostConfig
    nvme: NvmeKnobs
    gpu: GpuKnobs
    tenants: tuple[TenantConfig, ...]
    limits: Limits
    http: HttpKnobs
    events: EventsKnobs
    socket_mode: int = 0o660
    peer: PeerKnobs = field(default_factory=PeerKnobs)
    transfer: TransferKnobs = field(default_factory=TransferKnobs)


_KNOWN = {
    "": (
        "socket",
        "socket_mode",
        "state_dir",
        "host",
        "nvme",
        "gpu",
        "peer",
        "http",
        "events",
        "tenants",
        "limits",
    ),
    "nvme": config_nvme.KEYS,
    "gpu": config_gpu.KEYS,
    "peer": (*config_peer.KEYS, *config_transfer.KEYS),
    "http": config_http.KEYS,
    "events": config_events.KEYS,
    "host": ("bytes", "slab_bytes", "huge_pages", "lock", "fault_threads", "policy", "verify"),
    "limits": tuple(field.name for field in fields(Limits)),
    "tenants.NAME": ("uids", "host_share"),
}


def find_file(path: str | None) -> str | None:
    """Return the file to read: the one named, else $KVD_CONFIG, else the system's if it exists."""
    named = path or os.environ.get("KVD_CONFIG")
    return named or (SYSTEM_FILE if os.path.exists(SYSTEM_FILE) else None)  # noqa: PTH110


def load(path: str | None, overrides: Mapping[str, object]) -> Config:
    """Read, check and complete the configuration.

    Args:
        path: The file, or None for the usual one, which need not exist.
        overrides: Values that win over the file's, by dotted key as in the file ("host.bytes");
            None counts as not given.

    Raises:
        ConfigError: It cannot be used; one line that says where and what to change.
    """
    source = Source(find_file(path), overrides)
    top = source.table((), _KNOWN)
    host_table = source.table(("host",), _KNOWN)
    host = _host(host_table)
    tenants = tuple(_tenants(source))
    smallest = min(tenants, key=lambda tenant: tenant.host_share)
    if host_table.size("slab_bytes", 0) == 0:
        slab_bytes = auto_slab_bytes(host.size_bytes, smallest.host_share)
        whole_bytes = host.size_bytes - host.size_bytes % slab_bytes
        host = replace(host, size_bytes=whole_bytes, slab_bytes=slab_bytes)
    _check_sizes(source, host_table, host, smallest)
    _check_memory(host_table, host)
    state_dir = top.file_path("state_dir", _default_state_dir())
    peer_table = source.table(("peer",), _KNOWN)
    peer = config_peer.read(peer_table)
    return Config(
        socket=_socket(top),
        socket_mode=_mode(top),
        state_dir=state_dir,
        host=host,
        nvme=config_nvme.read(source.table(("nvme",), _KNOWN), state_dir),
        peer=peer,
        transfer=config_transfer.read(peer_table, peer.address, {t.name for t in tenants}),
        gpu=config_gpu.read(source.table(("gpu",), _KNOWN)),
        tenants=tenants,
        limits=_limits(source.table(("limits",), _KNOWN)),
        http=config_http.read(source.table(("http",), _KNOWN)),
        events=config_events.read(source.table(("events",), _KNOWN)),
    )


def _socket(top: Table) -> str:
    default = "/run/kvd/kvd.sock"
    if "socket" not in top.values and os.geteuid() != 0:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if not runtime:
            raise ConfigError(
                "socket: XDG_RUNTIME_DIR is not set, so there is no usual place for it;"
                " name one with --socket, as in --socket /tmp/me/kvd.sock"
            )
        default = f"{runtime}/kvd/kvd.sock"
    path = top.file_path("socket", default)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise top.error("socket", f"choose a path of at most {SOCKET_PATH_BYTES_MAX} bytes")
    return path


def _mode(top: Table) -> int:
    value = top.values.get("socket_mode", 0o660)
    if isinstance(value, str) and 0 < len(value) <= 4 and not value.strip("01234567"):  # noqa: PLR2004
        value = int(value, 8)
    if type(value) is not int or not 0 <= value <= 0o777:  # noqa: PLR2004
        raise top.error("socket_mode", "write the permissions in octal, as in 0o660")
    return value


def _default_state_dir() -> str:
    if os.geteuid() == 0:
        return "/var/lib/kvd"
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    return f"{base}/kvd"


def _host(table: Table) -> HostConfig:
    size_bytes = table.size("bytes", GIB)
    if size_bytes < MIB:
        raise table.error("bytes", "too small for even one slab; set it to 1MiB or more")
    slab_bytes = table.size("slab_bytes", 0)
    if slab_bytes not in {0, MIB} and slab_bytes % SLAB_STEP:
        raise table.error("slab_bytes", 'write 1MiB, a multiple of 2MiB, or "auto"')
    threads = 0 if table.values.get("fault_threads") == "auto" else None
    return HostConfig(
        size_bytes=size_bytes,
        slab_bytes=slab_bytes,
        huge_pages=table.choice("huge_pages", "auto", WHENEVER),
        lock=table.choice("lock", "auto", WHENEVER),
        fault_threads=table.integer("fault_threads", 0, 0, 64) if threads is None else threads,
        policy=table.choice("policy", "lifetable", POLICIES),
        verify=EVERY[table.choice("verify", "off", EVERY)],
    )


def _check_sizes(source: Source, table: Table, host: HostConfig, smallest: TenantConfig) -> None:
    size_bytes, slab_bytes = host.size_bytes, host.slab_bytes
    size = format_size(size_bytes)
    if slab_bytes > size_bytes:
        raise table.error("slab_bytes", f"larger than the whole tier; set it to {size} or less")
    if size_bytes % slab_bytes and table.size("slab_bytes", 0):
        down = size_bytes - size_bytes % slab_bytes
        raise table.error(
            "slab_bytes",
            f"the tier of {size} is no multiple of it;"
            f" set bytes to {format_size(down)} or {format_size(down + slab_bytes)}",
        )
    if host.huge_pages == "require" and slab_bytes < SLAB_STEP:
        raise table.error("huge_pages", "slabs of 1MiB have none; set slab_bytes to 2MiB or more")
    if smallest.host_share * host.slab_count < 1 - _SHARE_SLACK:
        raise source.error(
            ("tenants", smallest.name, "host_share"),
            f"{smallest.host_share:.3g} of {size} is less than one slab of"
            f" {format_size(slab_bytes)}; raise it or host.bytes, or lower host.slab_bytes",
        )


def _check_memory(table: Table, host: HostConfig) -> None:
    memory = memory_limit.available(huge_pages=host.huge_pages != "off")
    needed = host.slab_count * host.slab_bytes - activation.stored_bytes()  # kept over a restart
    if memory is None or needed <= memory.available_bytes:
        return
    room = memory.available_bytes * 7 // 8  # the rest of the host needs some, too
    step = next((s for s in (GIB, 64 * MIB, SLAB_STEP) if room >= 8 * s), MIB)
    raise table.error(
        "bytes",
        f"{about(host.size_bytes)} is more than the {about(memory.available_bytes)} of memory"
        f" {memory.limit}; set host.bytes to {format_size(room - room % step)} or less",
    )


def _tenants(source: Source) -> Iterator[TenantConfig]:
    """Read the tenants; those without a share divide equally what the others leave."""
    tables = source.table(("tenants",), _KNOWN)
    if not tables.values:
        yield TenantConfig("default", (os.geteuid(),), 1.0)
        return
    uids: dict[str, tuple[int, ...]] = {}
    shares: dict[str, float] = {}
    owners: dict[int, str] = {}
    for name in tables.values:
        if not name.isprintable() or not 0 < len(name.encode()) <= TENANT_NAME_MAX:
            raise tables.error(name, f"choose a printable name of 1 to {TENANT_NAME_MAX} bytes")
        path = ("tenants", name)
        table = source.table(path, _KNOWN, like="tenants.NAME")
        uids[name] = _uids(table, owners, name)
        if "host_share" in table.values:
            shares[name] = table.number("host_share", 1.0, 0.0001, 1.0)
            if sum(shares.values()) > 1 + _SHARE_SLACK:
                total = f"{sum(shares.values()):.6g}"
                raise table.error("host_share", f"the shares add up to {total}; lower them to 1")
    rest = 1.0 - sum(shares.values())
    without = [name for name in uids if name not in shares]
    if without and rest <= _SHARE_SLACK:
        raise source.error(
            ("tenants", without[0]),
            "gets nothing: the other tenants' shares add up to 1; lower them",
        )
    for name, ids in uids.items():
        yield TenantConfig(name, ids, shares.get(name, rest / max(1, len(without))))


def _uids(table: Table, owners: dict[int, str], name: str) -> tuple[int, ...]:
    listed = table.values.get("uids")
    if not isinstance(listed, list | tuple) or not listed:
        raise table.error("uids", 'list its users by number or name, as in uids = [1000, "alice"]')
    found: list[int] = []
    for user in listed:
        uid = _uid(table, user)
        owner = owners.setdefault(uid, name)
        if owner != name:
            raise table.error(
                "uids", f"user {shown(user)} is also in tenant {shown(owner)}; remove it from one"
            )
        if uid not in found:
            found.append(uid)
    return tuple(found)


def _uid(table: Table, user: object) -> int:
    if isinstance(user, str):
        if user.isdecimal():
            raise table.error("uids", f"write user {user} without quotes")
        try:
            return pwd.getpwnam(user).pw_uid
        except (KeyError, ValueError):
            raise table.error(
                "uids",
                f"user {shown(user)} is not known on this host; create it, or write its number",
            ) from None
    if type(user) is not int or not 0 <= user <= UID_MAX:
        raise table.error("uids", f"{shown(user)} is no user; write a number or a name in quotes")
    return user


def _limits(table: Table) -> Limits:
    usual = Limits()
    return Limits(
        sessions=table.integer("sessions", usual.sessions, 1, 65_536),
        leases_per_session=table.integer(
            "leases_per_session", usual.leases_per_session, 1, 1_000_000
        ),
        fill_deadline_s=table.number("fill_deadline_s", usual.fill_deadline_s, 0.01, 3600),
        lease_s=table.number("lease_s", usual.lease_s, 0.01, 86_400),
        greeting_s=table.number("greeting_s", usual.greeting_s, 0.01, 60),
        drain_s=table.number("drain_s", usual.drain_s, 0, 600),
        promote_s=table.number("promote_s", usual.promote_s, 0.01, 600),
        pinned_share=table.number("pinned_share", usual.pinned_share, 0.01, 1),
        filling_share=table.number("filling_share", usual.filling_share, 0.01, 1),
    )


def dump(config: Config) -> str:
    """Return a configuration as a TOML text that loads as the same again."""
    host = config.host
    lines = [
        f"socket = {_quoted(config.socket)}",
        f"socket_mode = 0o{config.socket_mode:o}",
        f"state_dir = {_quoted(config.state_dir)}",
        "",
        "[host]",
        f'bytes = "{format_size(host.size_bytes)}"',
        f'slab_bytes = "{format_size(host.slab_bytes)}"  # {host.slab_count} slabs',
        f'huge_pages = "{host.huge_pages}"',
        f'lock = "{host.lock}"',
        f"fault_threads = {host.fault_threads}",
        f'policy = "{host.policy}"',
        f'verify = "{word_of(host.verify)}"',
    ]
    lines += ["", *config_nvme.dump(config.nvme)]
    lines += ["", *config_peer.dump(config.peer)]
    lines += config_transfer.dump(config.transfer)
    lines += ["", *config_gpu.dump(config.gpu)]
    lines += ["", *config_http.dump(config.http)]
    lines += ["", *config_events.dump(config.events)]
    for tenant in config.tenants:
        uids = ", ".join(map(str, tenant.uids))
        lines += ["", f"[tenants.{_quoted(tenant.name)}]", f"uids = [{uids}]"]
        lines += [f"host_share = {tenant.host_share!r}"]
    lines += ["", "[limits]"]
    lines += [f"{field.name} = {getattr(config.limits, field.name)!r}" for field in fields(Limits)]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
