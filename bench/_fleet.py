"""Several hosts on one machine: network namespaces on a bridge, a Redis, certificates, daemons.

    hub: bridge -- veth -- ns of host a, 10.91.N.1    kvd serve
                -- veth -- ns of host b, 10.91.N.2    kvd serve
                -- veth -- ns of redis,  10.91.N.99   redis-server

Needs root, `ip` and `redis-server`; `lacking` says what is missing. Clients need no namespace: they
reach a daemon by its socket file.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.peer.nixl_agent import load
from kvd_client.paths import stat_page_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

START_S = 60.0
REDIS_PORT = 6379
PEER_PORT = 7600


def lacking() -> str:
    """Return why no fleet can be made here, or nothing."""
    for tool, package in (("ip", "iproute2"), ("redis-server", "redis-server")):
        if shutil.which(tool) is None:
            return f"no {tool} here: apt install {package}"
    try:
        load()
        import trustme  # noqa: F401
    except ImportError as error:
        return f"no {error.name} here: pip install 'kvd[peer,dev]'"
    name = f"kvd-try-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True)
    if done.returncode:
        return "no network namespaces here: needs root"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def wait_for(what: Callable[[], Any], why: str, limit_s: float = START_S) -> Any:  # noqa: ANN401
    """Wait until something is true; return it."""
    deadline = time.monotonic() + limit_s
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > deadline:
            msg = f"not within {limit_s:.0f} s: {why}"
            raise AssertionError(msg)
        time.sleep(0.02)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that comes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Host:
    """A host of the fleet: its namespace and its daemon."""

    def __init__(self, fleet: Fleet, name: str, number: int, options: dict[str, Any]) -> None:
        """Describe it."""
        self.fleet = fleet
        self.name = name
        self.space = f"{fleet.tag}-{name}"
        self.link = f"v{fleet.tag[4:]}{number}"
        self.ip = f"10.91.{fleet.net}.{number}"
        self.directory = fleet.directory / name
        self.directory.mkdir()
        self.socket = str(self.directory / "kvd.sock")
        self.log = self.directory / "daemon.log"
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs in the namespace."""
        return ["ip", "netns", "exec", self.space, *command]

    def config(self) -> str:
        """Return the daemon's configuration."""
        options: dict[str, Any] = {
            "cluster": "test",
            "host": self.name,
            "address": f"{self.ip}:{PEER_PORT}",
            "directory": f"redis://{self.fleet.redis_ip}:{REDIS_PORT}/0",
            "heartbeat_s": 0.5,
            "lookup_ms": 200,  # a busy test machine; the default is for a real one
            "transport": "tcp",
            "shared": ["default"],
            **self.fleet.certificate(self.name),
            **self.options.get("peer", {}),
        }
        lines = [f'socket = "{self.socket}"', f'state_dir = "{self.directory}/state"']
        lines += ["[host]", f"bytes = {self.options.get('host_bytes', 256 << 20)}"]
        lines += [f"slab_bytes = {self.options.get('slab_bytes', 64 << 20)}"]
        lines += [f'verify = "{self.options.get("verify", "off")}"']
        for table, values in (("peer", options), *self.options.get("tables", {}).items()):
            lines.append(f"[{table}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Run the daemon and wait until it serves."""
        file = self.directory / "kvd.toml"
        file.write_text(self.config())
        with self.log.open("ab") as log:
            seen = log.tell()
            self.process = subprocess.Popen(
                self.command(sys.executable, "-m", "kvd", "serve", "--config", str(file)),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no thread holds a lock here
            )

        def ready() -> bool:
            assert self.process is not None
            text = self.log.read_bytes()[seen:]
            if self.process.poll() is not None:
                msg = f"the daemon did not start: {text.decode()[-3000:]}"
                raise RuntimeError(msg)
            return b"peers served" in text and b"host tier whole" in text

        wait_for(ready, f"daemon {self.name}")

    def stat(self) -> dict[str, Any]:
        """Return the statistics page."""
        done = subprocess.run(
            [sys.executable, "-m", "kvd", "stat", "--socket", self.socket, "--json"],
            check=False,
            capture_output=True,
        )
        if done.returncode not in {0, 3}:  # 3: the page is some seconds old
            done.check_returncode()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def peer(self, name: str) -> dict[str, Any]:
        """Return what the statistics say of a peer; nothing if it is not known."""
        for found in self.stat()["peer"]["peers"]:
            if found["host"] == name:
                return dict(found)
        return {}

    def wait_for_peer(self, name: str, state: str = "ready") -> None:
        """Wait until a peer is in a state."""
        wait_for(lambda: self.peer(name).get("state") == state, f"{self.name}: {name} {state}")

    def signal(self, number: int) -> None:
        """Signal the daemon and all its movers."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill daemon and movers, and reap the daemon."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.process.wait()
        page = Path("/dev/shm") / stat_page_name(self.socket)[1:]  # noqa: S108 - where Linux has it
        page.unlink(missing_ok=True)

    def cut(self) -> None:
        """Take the link down."""
        subprocess.run(["ip", "-n", self.space, "link", "set", "eth0", "down"], check=True)

    def mend(self) -> None:
        """Bring it up."""
        subprocess.run(["ip", "-n", self.space, "link", "set", "eth0", "up"], check=True)


class Fleet:
    """Namespaces, a Redis and daemons; `close` removes all of it."""

    count = 0

    def __init__(self, directory: Path) -> None:
        """Make the bridge and the Redis."""
        Fleet.count += 1
        self.directory = directory
        self.tag = f"kvd-{os.getpid() % 46656:x}{Fleet.count:x}"
        self.net = (os.getpid() * 7 + Fleet.count) % 250
        self.hosts: dict[str, Host] = {}
        self.redis_ip = f"10.91.{self.net}.99"
        self.redis: subprocess.Popen[bytes] | None = None
        self._authority: Any = None
        self._spaces: list[str] = []
        self._space(self.tag)
        self._ip("-n", self.tag, "link", "add", "br0", "type", "bridge")
        self._ip("-n", self.tag, "link", "set", "br0", "up")
        self._join(f"{self.tag}-redis", f"v{self.tag[4:]}99", self.redis_ip)
        self.start_redis()

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def _space(self, name: str) -> None:
        self._ip("netns", "add", name)
        self._spaces.append(name)
        self._ip("-n", name, "link", "set", "lo", "up")

    def _join(self, space: str, link: str, ip: str) -> None:
        """Make a namespace with one end of a link; the other is in the bridge."""
        self._space(space)
        hub = self.tag
        self._ip("-n", hub, "link", "add", link, "type", "veth", "peer", "name", f"{link}p")
        self._ip("-n", hub, "link", "set", f"{link}p", "netns", space, "name", "eth0")
        self._ip("-n", hub, "link", "set", link, "master", "br0", "up")
        self._ip("-n", space, "addr", "add", f"{ip}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")

    def start_redis(self) -> None:
        """Run a Redis that forgets all at its end."""
        command = ["ip", "netns", "exec", f"{self.tag}-redis", "redis-server"]
        command += ["--bind", self.redis_ip, "--port", str(REDIS_PORT), "--protected-mode", "no"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.directory)]
        with (self.directory / "redis.log").open("ab") as log:
            self.redis = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - as above
            )

    def kill_redis(self) -> None:
        """Kill it the hard way."""
        if self.redis is not None:
            self.redis.kill()
            self.redis.wait()

    def certificate(self, name: str) -> dict[str, str]:
        """Return a certificate for a host, signed by the fleet's authority."""
        import trustme

        if self._authority is None:
            self._authority = trustme.CA()
        return self.issue(self._authority, name, name)

    def issue(self, authority: Any, name: str, file: str) -> dict[str, str]:  # noqa: ANN401
        """Write a certificate for a name, and who signed it; return the configuration's keys."""
        made = authority.issue_cert(name)
        paths = {k: self.directory / f"{file}.{k}" for k in ("tls_cert", "tls_key", "tls_ca")}
        paths["tls_cert"].write_bytes(b"".join(p.bytes() for p in made.cert_chain_pems))
        paths["tls_key"].write_bytes(made.private_key_pem.bytes())
        authority.cert_pem.write_to_path(str(paths["tls_ca"]))
        return {key: str(path) for key, path in paths.items()}

    def host(self, name: str, **options: Any) -> Host:  # noqa: ANN401
        """Make a host; its daemon is not started yet."""
        host = Host(self, name, len(self.hosts) + 1, options)
        self.hosts[name] = host
        self._join(host.space, host.link, host.ip)
        return host

    def drop(self, host: Host) -> None:
        """Take a host out again, with all that it left."""
        host.kill()
        self._ip("netns", "del", host.space)
        self._spaces.remove(host.space)
        shutil.rmtree(host.directory)
        del self.hosts[host.name]

    def start(self, names: Sequence[str], **options: Any) -> list[Host]:  # noqa: ANN401
        """Make hosts, start their daemons, wait until each has a link to each other."""
        hosts = [self.host(name, **options) for name in names]
        for host in hosts:
            host.start()
        for host in hosts:
            for other in hosts:
                if other is not host:
                    host.wait_for_peer(other.name)
        return hosts

    def close(self) -> None:
        """End every process, and remove every namespace."""
        for host in self.hosts.values():
            host.kill()
        self.kill_redis()
        for name in self._spaces:
            with suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", name)
