"""The HTTP port: what it shows, to whom, and that it tells the truth about a daemon in trouble."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvd import config
from kvd.errors import ConfigError
from kvd.health import Health
from kvd.http import page
from kvd.http.history import STEP_S, History
from kvd.statpage import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench._daemon import DaemonProcess

LIMIT_S: Final = 30.0
PORTS: Final = range(20_000, 32_000)
"""Below those that the kernel gives to connections: none of these takes one meanwhile."""
PATHS: Final = ("/", "/style.css", "/metrics", "/health", "/stat.json")


def free_port() -> int:
    """Return a port that nobody has at the moment."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


class Site:
    """A daemon's HTTP port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        """Return status, body and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        with closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return what /health says."""
        status, body, _ = self.get("/health")
        return status, json.loads(body)

    def until(self, status: int, word: str = "") -> dict[str, Any]:
        """Wait for /health to have a status, and a word in why; return what it says then."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                found, said = self.health()
            except OSError:
                found, said = 0, {}
            if found == status and word in " ".join(said["why"]):
                return said
            assert time.monotonic() < deadline, (found, said)
            time.sleep(0.05)

    def steady(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        """Return status and body, of /health once the daemon is not starved (503) any more."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            status, body, _ = self.get(path, method, **headers)
            if status != 503 or time.monotonic() > deadline:
                return status, body

    def until_refused(self) -> None:
        """Wait until nobody listens."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                self.health()
            except ConnectionRefusedError:
                return
            except OSError:
                pass  # an end in the middle of an answer
            assert time.monotonic() < deadline, "the HTTP process outlives its daemon"
            time.sleep(0.05)


@pytest.fixture
def serve(make_daemon: Callable[..., DaemonProcess]) -> Callable[..., tuple[DaemonProcess, Site]]:
    """Start daemons with an HTTP port."""

    def start(*arguments: str, well: bool = True) -> tuple[DaemonProcess, Site]:
        site = Site(free_port())
        address = f"127.0.0.1:{site.port}"
        daemon = make_daemon(host_bytes=16 << 20, arguments=["--http", address, *arguments])
        daemon.start(until="ready")
        if well:
            site.until(200)
        return daemon, site

    return start


def test_the_documents(serve: Callable[..., tuple[DaemonProcess, Site]]) -> None:
    """Each path gives its document under a policy that lets nothing run; nothing else is there."""
    _, site = serve()
    for path in PATHS:
        status, body = site.steady(path)
        assert status == 200, path
        assert body
        headers = site.get(path)[2]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; style-src 'self';")
        assert "script" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert site.steady(path, "HEAD") == (200, "")
    assert "<script" not in site.get("/")[1]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", site.get("/")[1]), "an outside asset"
    assert site.get("/../etc/passwd")[0] == 404
    assert site.get("/kvd")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"):
        assert site.get("/", method)[0] in {400, 501}, method
    assert site.get("/", **{"Content-Length": "3"})[0] == 400
    assert json.loads(site.get("/stat.json")[1])["state"] == "serving"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:80", 200),
        ("127.0.0.1:9810", 200),
        ("[::1]:9810", 200),
        ("gpu7.example:9810", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:9810", 421),
        ("", 421),
    ],
)
def test_only_this_host_s_names(
    serve: Callable[..., tuple[DaemonProcess, Site]], tmp_path: Path, host: str, status: int
) -> None:
    """A request for another name, as DNS rebinding makes them, is refused on every path."""
    file = tmp_path / "kvd.toml"
    file.write_text('[http]\nnames = ["gpu7.example"]\n')
    _, site = serve("--config", str(file))
    for path in PATHS:
        assert site.steady(path, Host=host)[0] == status, path


def test_a_stopped_daemon_is_red(serve: Callable[..., tuple[DaemonProcess, Site]]) -> None:
    """While the daemon is stopped its HTTP port answers and says failing; continued, it is ok."""
    daemon, site = serve()
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        said = site.until(503, "stopped")
        assert said["health"] == "failing"
        assert "kvd_up 1.0" in site.get("/metrics")[1], "it can still be scraped"
        assert 'class="health failing"' in site.get("/")[1]
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    site.until(200)


@pytest.mark.parametrize(
    ("point", "word"), [("loop.tick:9", "its loop is stuck"), ("mover.turn:9", "its mover hangs")]
)
def test_a_stuck_data_plane_is_red_within_the_watchdog_s_time(
    serve: Callable[..., tuple[DaemonProcess, Site]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    point: str,
    word: str,
) -> None:
    """A loop or task that hangs turns health red before systemd's watchdog would act."""
    monkeypatch.setenv("KVD_STALL", point)
    file = tmp_path / "kvd.toml"
    file.write_text('[nvme]\nbytes = "1GiB"\nform = "raw"\n')
    _, site = serve("--config", str(file), well=False)
    site.until(503, word)


def children(pid: int) -> list[int]:
    """Return a process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_process_goes_with_the_daemon_and_comes_back_alone(
    serve: Callable[..., tuple[DaemonProcess, Site]],
) -> None:
    """A killed HTTP process is started anew on the same port; a killed daemon takes its with it."""
    daemon, site = serve()
    (killed,) = children(daemon.pid)
    os.kill(killed, signal.SIGKILL)
    site.until(200)
    (child,) = children(daemon.pid)
    assert child != killed
    daemon.kill()
    site.until_refused()


def test_a_drain_ends_it(serve: Callable[..., tuple[DaemonProcess, Site]]) -> None:
    """An orderly stop takes the HTTP process along, without waiting for its clients."""
    daemon, site = serve()
    with closing(socket.create_connection(("127.0.0.1", site.port))):
        assert daemon.stop() == 0
    site.until_refused()


def test_many_silent_connections_do_not_keep_others_out(
    serve: Callable[..., tuple[DaemonProcess, Site]],
) -> None:
    """A hundred connections that say nothing cost the oldest their place, not a scrape its own."""
    _, site = serve()
    silent = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(100)]
    try:
        assert site.steady("/health")[0] == 200
    finally:
        for each in silent:
            each.close()


def test_a_taken_port_is_told_at_the_start(make_daemon: Callable[..., DaemonProcess]) -> None:
    """The daemon does not start without its port, and says which to change."""
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon = make_daemon(arguments=["--http", f"127.0.0.1:{taken.getsockname()[1]}"])
        daemon.start(until=None)
        assert daemon.process.wait(LIMIT_S) == 2
    assert "[http] listen" in daemon.log.read_text()


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ('listen = "9810"', "an IP address and a port"),
        ('listen = "localhost:9810"', "an IP address and a port"),
        ('listen = "127.0.0.1:99999"', "an IP address and a port"),
        ("listen = 9810", "an address and a port"),
        ('listen = "0.0.0.0:9810"', "list the names"),
        ('listen = "[::]:9810"', "list the names"),
        ('listen = "127.0.0.1:9810"\nnames = "gpu7"', "list up to 16"),
        ('listen = "127.0.0.1:9810"\nnames = ["a b"]', "list up to 16"),
    ],
)
def test_what_cannot_be_configured(tmp_path: Path, text: str, mend: str) -> None:
    """A wrong address is refused with what to write; an address for others needs names."""
    file = tmp_path / "kvd.toml"
    file.write_text(f"[http]\n{text}\n")
    with pytest.raises(ConfigError, match=re.escape(mend)):
        config.load(str(file), {"socket": str(tmp_path / "s"), "host.bytes": "1MiB"})


HOSTILE: Final = '"><script>alert(1)</script>\x1b[31m'


def test_texts_of_clients_do_nothing() -> None:
    """Names that clients choose are shown as text, whatever is in them."""
    stats: dict[str, Any] = {
        "version": HOSTILE,
        "socket": HOSTILE,
        "host": {"capacity_bytes": HOSTILE, "notes": [HOSTILE]},
        "nvme": {"state": HOSTILE, "form": HOSTILE, "capacity_bytes": 5, "live_bytes": 9},
        "tenants": [{"name": HOSTILE, "hit_tokens": HOSTILE}, HOSTILE],
        "spaces": [{"label": HOSTILE, "tenant": HOSTILE, "layout": HOSTILE, "gate": HOSTILE}] * 99,
    }
    shown = page.render(
        Snapshot(stats, 0.1, 1, alive=True, stopped=False),
        Health("degraded", (HOSTILE,)),
        History(),
        0.0,
    )
    assert "<script" not in shown
    assert "\x1b" not in shown
    assert "&lt;script&gt;" in shown
    assert "and 83 more" in shown


def test_rates_come_from_one_life_and_from_neighbours() -> None:
    """A curve has a gap where the daemon was away or began anew, and never a rate below 0."""
    history = History()
    for step, loaded, epoch in ((0, 0, 1), (1, 500, 1), (2, 0, 2), (3, 100, 2), (9, 900, 2)):
        history.note({"epoch": epoch, "counters": {"bytes_acquired": loaded}}, step * STEP_S)
    curves = history.curves("loaded", 9 * STEP_S)
    assert curves == [[(8 * STEP_S, 50.0)], [(6 * STEP_S, 10.0)]]
    assert history.recent("loaded", 3 * STEP_S) == 30.0, "600 bytes in two steps"
    assert history.recent("loaded", 9 * STEP_S) == 0.0, "not known for a minute"
    history.note({"epoch": 2}, 9.1 * STEP_S)
    assert len(history.curves("loaded", 9.1 * STEP_S)) == 2, "a point too early is not taken"


def test_by_hand_for_a_daemon_without_it(make_daemon: Callable[..., DaemonProcess]) -> None:
    """`kvd http` serves the same for a daemon that was started without, and outlives it in red."""
    daemon = make_daemon(host_bytes=16 << 20)
    daemon.start(until="ready")
    site = Site(free_port())
    address = f"127.0.0.1:{site.port}"
    process = subprocess.Popen(
        [*(sys.executable, "-m", "kvd", "http", "--socket", daemon.socket), "--listen", address],
        stderr=subprocess.DEVNULL,
    )
    try:
        site.until(200)
        daemon.kill()
        site.until(503, "gone")
        assert "kvd_up 0.0" in site.get("/metrics")[1]
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_in_a_container_the_daemon_is_process_1(tmp_path: Path) -> None:
    """Its HTTP process stays although its parent is process 1, as an orphan's would be."""
    site = Site(free_port())
    daemon = [sys.executable, "-m", "kvd", "serve", "--host-bytes", "16MiB"]
    process = subprocess.Popen(
        [
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *daemon),
            *("--socket", str(tmp_path / "kvd.sock"), "--state-dir", str(tmp_path / "state")),
            *("--http", f"127.0.0.1:{site.port}"),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        site.until(200)
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(180)
def test_a_browser_draws_it(
    serve: Callable[..., tuple[DaemonProcess, Site]], tmp_path: Path
) -> None:
    """Headless Chromium draws the page, with its style, and reports no fault of the policy."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    _, site = serve("--nvme-bytes", "1GiB")
    picture = tmp_path / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'browser'}"]
    command += ["--window-size=1280,1400", f"--screenshot={picture}", "--virtual-time-budget=2000"]
    command += [f"http://127.0.0.1:{site.port}/"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S + 30, check=False
    )
    assert picture.exists(), done.stderr[-2000:]
    assert "Content Security Policy" not in done.stderr
    from PIL import Image

    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(1 << 20) or []
    assert (0xF6, 0xF7, 0xF9) in {colour for _, colour in colours}, "the style sheet is not used"
    assert len(colours) > 50
