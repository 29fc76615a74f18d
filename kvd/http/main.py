"""`kvd http`: a daemon's metrics and status page, from a process that only reads its page.

`kvd serve --http` runs it as its child, on a socket that it has bound already; by hand it is for a
daemon that was started without.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvd import config_http
from kvd.errors import StartError

if TYPE_CHECKING:
    import argparse

EPILOG: Final = f"""\
examples:
  kvd http                            at {config_http.DEFAULT}
  kvd http --listen 127.0.0.1:9999 --socket /run/kvd/kvd.sock
  kvd http --listen 127.0.0.1:0 --json    at a free port, and say which
  curl -s http://{config_http.DEFAULT}/metrics

Serves / (for a browser), /metrics (for Prometheus), /health (200, or 503 when the daemon fails) and
/stat.json, on this host only. `kvd serve --http` does the same from the daemon's start on.

exit codes:
  0    ended by SIGTERM
  2    wrong option, or the port is taken; stderr says what to change
  130  ended by Ctrl-C
"""
_PR_SET_DUMPABLE: Final = 4
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_FILES_MAX: Final = 128
PARENT: Final = "KVD_PARENT"
"""Environment variable of a child of the daemon: the daemon's process id, 1 in a container."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default=config_http.DEFAULT,
        help=f"loopback address and port (default: {config_http.DEFAULT})",
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's (default: $KVD_SOCKET, else the usual one)"
    )
    parser.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name, beside the loopback's, by which clients may call it; may be repeated",
    )
    parser.add_argument(
        "--fd", metavar="N", type=int, help="serve on an inherited listening socket instead"
    )
    parser.add_argument(
        "--json", action="store_true", help="once it serves, print where, as one JSON object"
    )


def bind(listen: str) -> socket.socket:
    """Return a listening socket at an address and port.

    Raises:
        StartError: It cannot be had; the text says what to change.
    """
    host, port = config_http.parse(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(64)
    except OSError as error:
        made.close()
        raise StartError(
            f"cannot serve HTTP at {listen}: {error.strerror}; stop what is there, or choose"
            " another port with [http] listen"
        ) from error
    return made


def _confine(*, child: bool) -> None:
    """Give up what a reader of one page needs not, and go when the daemon does."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if child:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.environ.get(PARENT, "") != str(os.getppid()):  # it went before that was asked for
            raise SystemExit(0)
    for what, most in ((resource.RLIMIT_NOFILE, _FILES_MAX), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit code.

    Raises:
        StartError: It cannot start; the text says what to change.
    """
    from kvd.http import exposition  # before the first scrape, not in it
    from kvd.http.history import STEP_S
    from kvd.http.server import Figures, Server
    from kvd_client.paths import default_socket, stat_page_name

    assert exposition.OWN
    if options.fd is not None:
        listening = socket.socket(fileno=options.fd)
    else:
        try:
            loopback = config_http.is_loopback(options.listen)
        except ValueError:
            text = f"--listen {options.listen}: write an IP address and a port"
            raise StartError(f"{text}, as in {config_http.DEFAULT}") from None
        if not loopback and not options.allow_host:
            raise StartError(
                f"--listen {options.listen}: others can reach it; if you want that, say by which"
                " name they call it with --allow-host"
            )
        listening = bind(options.listen)
    _confine(child=options.fd is not None)
    figures = Figures(stat_page_name(options.socket or default_socket()))
    server = Server(listening, figures, frozenset(name.lower() for name in options.allow_host))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = server.server_address[:2]
    url = f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"
    if options.json:
        sys.stdout.write(f'{{"url": "{url}", "pid": {os.getpid()}}}\n')
        sys.stdout.flush()
    elif options.fd is None:
        sys.stderr.write(f"kvd: {url}\n")
    figures.note()
    while not ended.wait(STEP_S):
        figures.note()
    server.shutdown()
    return 0
