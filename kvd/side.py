"""What runs beside the cache."""

from __future__ import annotations

from typing import Protocol


class Side(Protocol):
    """What runs beside the cache and has no say in it."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...

    def close(self) -> None:
        """Let go of what it took at its making."""
        ...
