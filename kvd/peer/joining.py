"""Joins a fleet: makes the directory and the peers that the configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.errors import StartError

if TYPE_CHECKING:
    from kvd.catalog import Catalog
    from kvd.clock import Clock
    from kvd.config import Config
    from kvd.daemon import Daemon
    from kvd.peer.peers import Peers
    from kvd.peer.redis_directory import RedisDirectory


def join(config: Config, catalog: Catalog, clock: Clock, epoch: int) -> RedisDirectory | None:
    """Make the directory, which listens to the catalog from now on; None where there is none.

    It is told of what is shared; of everything where `shared` is empty, for people to look at.

    Raises:
        StartError: Redis's library or the password file is missing.
    """
    if not config.peer.directory:
        return None
    try:
        from kvd.peer.redis_directory import RedisDirectory
    except ImportError as error:
        msg = "peer.directory is set, but redis is not installed: pip install 'kvd[peer]'"
        raise StartError(msg) from error
    transfer = config.transfer
    return RedisDirectory(
        config.peer,
        catalog,
        clock,
        epoch,
        tells=lambda space: not transfer.shared or transfer.gives(space.tenant, space.label),
    )


def peers(daemon: Daemon) -> Peers | None:
    """Build what fetches from other hosts and gives to them, None for none.

    Raises:
        StartError: There is no directory to find them by.
    """
    config = daemon.config
    if not (config.peer.address and config.transfer.shared):
        return None
    from kvd.peer.peers import Peers

    if daemon.directory is None:
        raise StartError("[peer] shared is set without a directory: set [peer] directory")
    return Peers(
        daemon.loop,
        daemon.clock,
        daemon.catalog,
        daemon.tier,
        daemon.cold,
        epoch=daemon.epoch,
        peer=config.peer,
        transfer=config.transfer,
        directory=daemon.directory,
        verifier=daemon.verifier,
    )
