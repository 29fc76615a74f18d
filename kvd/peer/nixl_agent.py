"""One NIXL agent over UCX: registered memory, reads, their ends. Used by mover processes only.

NIXL as shipped burns a core while idle and reads over TCP at a quarter of a plain socket; what is
set here, in the environment before the library is loaded and in the agent's configuration, makes
it sleep and reach the socket. Which transport is used is named, never guessed: with `tcp` in UCX's
list a missing NIC would go unnoticed (ADR 0023).

There is no cancel: `release` frees a handle, and the bytes may still arrive. Whoever wants a buffer
back before its read has ended ends this process (ADR 0024).

One thread calls; NIXL's own progress thread moves bytes.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Transport = Literal["tcp", "rdma"]
State = Literal["going", "done", "lost"]
WHEELS: Final = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
PROGRESS_US: Final = 10_000
"""The longest sleep of the progress thread, which events wake; 0, the library's own, spins."""
COMMON: Final = {
    "UCX_KEEPALIVE_INTERVAL": "3s",
    "UCX_KEEPALIVE_NUM_EPS": "4096",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_MEM_MMAP_HOOK_MODE": "none",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
}
TUNED: Final[dict[Transport, dict[str, str]]] = {
    "tcp": {
        "UCX_TLS": "tcp",
        "UCX_TCP_TX_SEG_SIZE": "1m",
        "UCX_TCP_RX_SEG_SIZE": "1m",
        "UCX_TCP_SNDBUF": "auto",
        "UCX_TCP_RCVBUF": "auto",
        "UCX_TCP_USER_TIMEOUT": "5s",
        "UCX_TCP_KEEPIDLE": "2s",
        "UCX_TCP_KEEPINTVL": "1s",
        "UCX_TCP_KEEPCNT": "3",
    },
    "rdma": {"UCX_TLS": "rc", "UCX_RC_TIMEOUT": "250ms", "UCX_RC_RETRY_COUNT": "7"},
}
"""What UCX is told; measured in docs/benchmarks.md."""


def environment(transport: Transport, devices: Sequence[str]) -> dict[str, str]:
    """Return what a mover's environment needs before NIXL is loaded."""
    found = {**COMMON, **TUNED[transport]}
    if devices:
        found["UCX_NET_DEVICES"] = ",".join(devices)
    return found


def missing(transport: Transport, root: str = "/sys/class/infiniband") -> str:
    """Return what this host lacks for a transport and what to do, or nothing."""
    if transport == "tcp":
        return ""
    ports = list(Path(root).glob("*/ports/*/state")) if Path(root).is_dir() else []
    if any("ACTIVE" in port.read_text(encoding="ascii", errors="replace") for port in ports):
        return ""
    have = "no active port on its RDMA devices" if ports else "no RDMA device"
    return (
        f'transport = "rdma", but this host has {have}: load its driver and bring the port up, '
        'or set [peer] transport = "tcp" on every host of the cluster'
    )


def load() -> Any:  # noqa: ANN401 - a library without types
    """Import NIXL's bindings, from whichever of its wheels is installed.

    Not by `import nixl`, which imports torch to choose between them: for host memory it does not
    matter, and it takes two seconds.

    Raises:
        ImportError: None is installed.
    """
    for wheel in WHEELS:
        try:
            return import_module(f"{wheel}._bindings")
        except ModuleNotFoundError as error:
            if error.name != wheel:
                raise
    raise ImportError("NIXL is not installed: pip install 'kvd[peer]'", name="nixl")


class Agent:
    """A NIXL agent with the UCX back end."""

    def __init__(self, name: str) -> None:
        """Make it; the environment is set. Takes up to a second.

        Raises:
            ImportError: NIXL is not installed.
            Exception: UCX cannot work here, in the library's own words.
        """
        self._nixl: Any = load()
        nixl = self._nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_US
        self.name = name
        self._agent = nixl.nixlAgent(name, config)
        parameters, _ = self._agent.getPluginParams("UCX")
        self._backend = self._agent.createBackend("UCX", dict(parameters))
        self._registered: list[Any] = []

    def register(self, address: int, size_bytes: int) -> None:
        """Let peers read a range, and read into it; it stays registered."""
        ranges = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size_bytes, 0, b"kvd")])
        self._agent.registerMem(ranges, [self._backend])
        self._registered.append(ranges)

    def metadata(self) -> bytes:
        """Return what a peer needs to read what is registered so far."""
        found: bytes = self._agent.getLocalMD()
        return found

    def load(self, metadata: bytes) -> str:
        """Take in a peer's metadata, also again when it has registered more; return its name."""
        name: bytes | str = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def forget(self, peer: str) -> None:
        """Forget a peer, after a disconnect or when it has a new life."""
        self._agent.invalidateRemoteMD(peer)

    def read(
        self, peer: str, into: Sequence[tuple[int, int]], source: Sequence[tuple[int, int]]
    ) -> object:
        """Begin to read ranges (address, bytes) of a peer; return a handle, None if it is gone.

        Raises:
            Exception: Another error, after which nobody knows what may still land.
        """
        lists = [
            self._nixl.nixlXferDList(self._nixl.DRAM_SEG, [(a, n, 0) for a, n in ranges])
            for ranges in (into, source)
        ]
        read = self._nixl.NIXL_READ
        try:
            handle = self._agent.createXferReq(read, *lists, peer, b"", [self._backend])
        except (self._nixl.nixlNotFoundError, self._nixl.nixlRemoteDisconnectError):
            return None  # not registered there, or gone: nothing was begun
        try:
            self._agent.postXferReq(handle, b"")
        except self._nixl.nixlRemoteDisconnectError:
            self._agent.releaseXferReq(handle)
            return None
        return handle

    def state(self, handle: object) -> State:
        """Tell how a read is; "lost": its peer is gone, and nothing more of it lands.

        Raises:
            Exception: Another error, after which nobody knows what may still land.
        """
        try:
            status = self._agent.getXferStatus(handle)
        except self._nixl.nixlRemoteDisconnectError:
            return "lost"
        if status == self._nixl.NIXL_SUCCESS:
            return "done"
        assert status == self._nixl.NIXL_IN_PROG
        return "going"

    def release(self, handle: object) -> None:
        """Free a handle; of one that is going, the bytes may still land."""
        self._agent.releaseXferReq(handle)
