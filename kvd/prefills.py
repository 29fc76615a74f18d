"""How fast engines compute, remembered over restarts: what a namespace's cost gate begins with.

Engines report it with each prompt they compute. The file `prefills.json` in the state directory
keeps the last of it, so that a daemon that comes back weighs the first look-up already. A file that
makes no sense counts as none: not to know is what the gate can do without.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from typing import TYPE_CHECKING, Final

from kvd import log
from kvd.rates import RATE_MAX, replace_json

if TYPE_CHECKING:
    from kvd.catalog import Catalog
    from kvd.entry import Space

_LOG = log.get("prefills")
NAME: Final = "prefills.json"
VERSION: Final = 1
SPACES_MAX: Final = 512
"""Remembered; of more, those that were stored longest ago are forgotten."""
FILE_BYTES_MAX: Final = 128 * SPACES_MAX
SAVE_S: Final = 60.0
CLOSE_S: Final = 2.0
CHANGE: Final = 0.1
"""A rate that has changed by less than this share is not worth a write."""


class Prefills:
    """What the namespaces' engines were measured to compute. On the loop, but for writing."""

    def __init__(self, state_dir: str, catalog: Catalog) -> None:
        """Read what was stored."""
        self._path = os.path.join(state_dir, NAME)  # noqa: PTH118 - light
        self._catalog = catalog
        self._stored = _read(self._path)

    def recall(self, space: Space) -> None:
        """Let a space's gate begin with what is remembered, if it knows nothing yet."""
        tokens_s = self._stored.get(_name(space))
        if tokens_s and not space.gate.prefill.samples:
            space.gate.prefill.observe(tokens_s, 1.0)

    async def run(self) -> None:
        """Store what has changed, again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            if self._take_in():
                await asyncio.to_thread(self._save)

    def close(self) -> None:
        """Store what has changed; a disk that hangs holds the daemon's end up for CLOSE_S only."""
        if self._take_in():
            saving = threading.Thread(target=self._save, name="prefills", daemon=True)
            saving.start()
            saving.join(CLOSE_S)

    def _take_in(self) -> bool:
        """Bring the table up to date; tell whether it is worth a write."""
        changed = False
        for space in self._catalog.spaces.values():
            rate = space.gate.prefill
            if rate.samples:
                name, tokens_s = _name(space), round(rate.per_s, 3)
                before = self._stored.pop(name, 0.0)
                self._stored[name] = tokens_s
                changed |= abs(tokens_s - before) > CHANGE * tokens_s
        while len(self._stored) > SPACES_MAX:
            del self._stored[next(iter(self._stored))]
        return changed

    def _save(self) -> None:
        try:
            replace_json(self._path, {"version": VERSION, "tokens_s": dict(self._stored)})
        except OSError as error:
            _LOG.limited("prefill rates not stored", why=error.strerror)


def _name(space: Space) -> str:
    """Name a space without saying whose or what it is."""
    parts = (space.tenant.encode(), space.namespace, space.layout.id)
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def _read(path: str) -> dict[str, float]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - light
            stored = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    found = stored.get("tokens_s") if isinstance(stored, dict) else None
    if not isinstance(found, dict) or stored.get("version") != VERSION:
        return {}
    return {
        name: float(rate)
        for name, rate in found.items()
        if isinstance(rate, int | float) and 0 < rate < RATE_MAX
    }
