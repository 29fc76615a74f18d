"""Checks of kvd itself: the configuration, the daemon, and what earlier ones left behind."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from kvd.doctor.base import Finding, Host, check, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.statpage import Snapshot


@check("configuration", "kvd", "kvd.toml")
def configuration(host: Host) -> Finding:
    """It loads."""
    if host.config is None:
        return fail(host.config_error, "kvd serve --check")
    file = host.options.get("config")
    return ok(f"{file or 'no file: the defaults'}; {len(host.config.tenants)} tenants")


@check("daemon", "kvd", "is one running, and of this release")
def daemon(host: Host) -> Finding:
    """A daemon answers; that none runs is no fault."""
    from kvd import statpage
    from kvd_client.paths import stat_page_name

    if host.config is None:
        return ok("not looked for: no configuration")
    socket = host.config.socket
    try:
        return _running(socket, statpage.read(stat_page_name(socket)))
    except statpage.NoStatPage as error:
        if "no daemon" in str(error):
            return ok(f"none at {socket}")
        return warn(f"{socket}: {error}", "run it as the daemon's user or root")


def _running(socket: str, snapshot: Snapshot) -> Finding:
    """Judge a daemon by its page."""
    from kvd import __version__

    who = f"pid {snapshot.pid} at {socket}"
    if not snapshot.alive:
        return warn(
            f"{who} is dead, its page is left",
            "kvd serve (it clears up), or systemctl restart kvd",
        )
    if snapshot.stopped:
        return fail(f"{who} is stopped", f"kill -CONT {snapshot.pid}")
    version = snapshot.stats.get("version")
    if version != __version__:
        return warn(
            f"{who} is release {version}, this is {__version__}",
            "systemctl restart kvd, or use the kvd it was started with",
        )
    return ok(f"{who}, release {version}")


@check("state", "kvd", "what earlier daemons left")
def state(host: Host) -> Iterator[Finding]:
    """State directory and socket belong to the daemon's user, and nothing stale is in the way."""
    if host.config is None:
        yield ok("not looked for: no configuration")
        return
    folder = host.path(host.config.state_dir)
    if folder.exists():
        here = folder.stat()
        if here.st_uid != os.geteuid() and os.geteuid() != 0:
            yield fail(
                f"{host.config.state_dir} belongs to uid {here.st_uid}",
                f"chown -R {os.geteuid()} {host.config.state_dir}",
            )
        elif here.st_mode & 0o022:
            yield warn(
                f"{host.config.state_dir} may be written by others",
                f"chmod go-w {host.config.state_dir}",
            )
        else:
            yield ok(f"{host.config.state_dir} is there")
    else:
        yield ok(f"{host.config.state_dir} is made at the first start")
    path = host.path(host.config.socket)
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        yield fail(f"{host.config.socket} is no socket", f"rm {host.config.socket}")
