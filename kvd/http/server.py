"""The HTTP side: a few fixed documents, for loopback, by name, and nothing else.

S1. Only GET and HEAD, only the paths in `ROUTES`, no request body, nothing is run or changed.
S2. The Host header must name this host: a page of another site, whose name was made to point here
    (DNS rebinding), is refused before anything is read.
S3. Connections, their number and their age have a bound; the oldest goes for a new one.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd import health, statpage
from kvd.http import page
from kvd.http.history import STEP_S, History

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

CONNECTIONS_MAX: Final = 32
REQUEST_S: Final = 5.0
"""How long a client may take over a line of its request, or over taking the answer."""
STYLE: Final = Path(__file__).with_name("style.css")
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Answer(NamedTuple):
    """What a path gives."""

    status: HTTPStatus
    kind: str
    body: bytes


class Figures:
    """The daemon's page, its verdict and its last hour. Any thread."""

    def __init__(self, name: str) -> None:
        """Read the page of this POSIX name."""
        self._name = name
        self._lock = threading.Lock()
        self._history = History()

    def read(self) -> tuple[statpage.Snapshot | None, health.Health]:
        """Return the page, if there is one, and what it says about the daemon."""
        try:
            found = statpage.read(self._name)
        except statpage.NoStatPage as error:
            return None, health.Health("failing", (str(error),))
        verdict = health.judge(
            found.stats, age_s=found.age_s, pid=found.pid, alive=found.alive, stopped=found.stopped
        )
        return found, verdict

    def note(self) -> None:
        """Take the figures down for the curves; call it every `STEP_S`."""
        found, _ = self.read()
        if found is not None and found.alive and found.age_s < STEP_S:
            with self._lock:
                self._history.note(found.stats, time.monotonic() - found.age_s)

    def document(self) -> bytes:
        """Return the status page."""
        found, verdict = self.read()
        with self._lock:
            return page.render(found, verdict, self._history, time.monotonic()).encode()


def _index(figures: Figures) -> Answer:
    return Answer(HTTPStatus.OK, "text/html; charset=utf-8", figures.document())


def _style(figures: Figures) -> Answer:  # noqa: ARG001 - all routes are called alike
    return Answer(HTTPStatus.OK, "text/css; charset=utf-8", STYLE.read_bytes())


def _metrics(figures: Figures) -> Answer:
    from kvd.http import exposition  # the library is slow to import: not before it is needed

    return Answer(HTTPStatus.OK, exposition.CONTENT_TYPE, exposition.expose(*figures.read()))


def _health(figures: Figures) -> Answer:
    _, verdict = figures.read()
    failing = verdict.level == "failing"
    status = HTTPStatus.SERVICE_UNAVAILABLE if failing else HTTPStatus.OK
    return _json(status, {"health": verdict.level, "why": list(verdict.why)})


def _stat(figures: Figures) -> Answer:
    found, verdict = figures.read()
    if found is None:
        return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": verdict.why[0]})
    about = {"age_s": round(found.age_s, 3), "pid": found.pid, "alive": found.alive}
    return _json(HTTPStatus.OK, {**found.stats, "page": {**about, "stopped": found.stopped}})


def _json(status: HTTPStatus, content: dict[str, Any]) -> Answer:
    return Answer(status, "application/json", json.dumps(content).encode() + b"\n")


ROUTES: Final[dict[str, Callable[[Figures], Answer]]] = {
    "/": _index,
    "/style.css": _style,
    "/metrics": _metrics,
    "/health": _health,
    "/stat.json": _stat,
}


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "kvd"
    sys_version = ""
    timeout = REQUEST_S
    server: Server

    def do_GET(self) -> None:
        """Answer with a document."""
        self._answer(self._found())

    do_HEAD = do_GET  # noqa: N815 - the library's names

    def _found(self) -> Answer:
        if not self._named_right():
            text = b"this host is not called that: see [http] names\n"
            return Answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", text)
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            return Answer(HTTPStatus.BAD_REQUEST, "text/plain", b"a request has no body here\n")
        route = ROUTES.get(self.path.partition("?")[0])
        if route is None:
            text = f"there is: {' '.join(ROUTES)}\n".encode()
            return Answer(HTTPStatus.NOT_FOUND, "text/plain", text)
        return route(self.server.figures)

    def _named_right(self) -> bool:
        """Tell whether the request is for a name of this host (S2)."""
        named = self.headers.get_all("Host") or []
        if len(named) != 1:
            return False
        host, colon, port = named[0].lower().rpartition(":")
        if not colon or not port.isdecimal():  # without a port
            host = named[0].lower()
        return host in self.server.hosts

    def _answer(self, answer: Answer) -> None:
        self.close_connection = answer.status >= HTTPStatus.BAD_REQUEST
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Write nothing: a request's text is its sender's, and scrapes come every few seconds."""


class Server(ThreadingHTTPServer):
    """Serves on a socket that is bound already; a thread a connection, bounded (S3)."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, figures: Figures, hosts: frozenset[str]) -> None:
        """Take over the socket; `hosts` are the names it may be called by, beside its address."""
        address = listening.getsockname()[:2]
        super().__init__(address, _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.figures = figures
        own = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.hosts = LOOPBACK | hosts | {own}
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the library's
        """Start a connection's thread; the oldest connection makes room where there is none."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                oldest = min(self._open, key=lambda each: self._open[each])
                with suppress(OSError):
                    oldest.shutdown(2)
                del self._open[oldest]
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - as above
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Let a client that breaks off go in silence; what is our own fault is told."""
        import sys
        import traceback

        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()
