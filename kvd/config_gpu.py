"""The [gpu] table of the configuration: the tier above host memory, off unless it has a size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvd.sizes import MIB, format_size

if TYPE_CHECKING:
    from kvd.config_source import Table

STEP: Final = 2 * MIB
ON_OFF = ("on", "off")
EVERY: Final = {"off": 0, "sampled": 64, "always": 1}
"""What `verify` says, here and for host memory, to of how many one is verified."""
KEYS = ("bytes", "device", "slab_bytes", "promote", "verify")


@dataclass(frozen=True, slots=True)
class GpuKnobs:
    """The GPU tier.

    Attributes:
        size_bytes: Of all slabs; 0 for no such tier.
        device: CUDA index of the GPU, as this process sees it.
        slab_bytes: Of one slab, a multiple of 2 MiB.
        promote: Whether the daemon brings up what engines ask for again.
        verify: Of how many copies one is read back and compared; 0 for none.
    """

    size_bytes: int = 0
    device: int = 0
    slab_bytes: int = 256 * MIB
    promote: bool = True
    verify: int = 64

    @property
    def slab_count(self) -> int:
        """How many slabs there are."""
        return self.size_bytes // self.slab_bytes


def read(table: Table) -> GpuKnobs:
    """Check the table; raises ConfigError saying where and what to change."""
    size_bytes = table.size("bytes", 0)
    slab_bytes = table.size("slab_bytes", 256 * MIB)
    if slab_bytes < STEP or slab_bytes % STEP:
        raise table.error("slab_bytes", "write a multiple of 2MiB, as in 256MiB")
    if size_bytes % slab_bytes:
        size = format_size(slab_bytes)
        raise table.error("bytes", f"write a multiple of slab_bytes, which is {size}")
    return GpuKnobs(
        size_bytes=size_bytes,
        device=table.integer("device", 0, 0, 63),
        slab_bytes=slab_bytes,
        promote=table.choice("promote", "on", ON_OFF) == "on",
        verify=EVERY[table.choice("verify", "sampled", EVERY)],
    )


def word_of(verify: int) -> str:
    """Return what the configuration says for one of so many."""
    return next(word for word, every in EVERY.items() if every == verify)


def dump(knobs: GpuKnobs) -> list[str]:
    """Return the table's lines."""
    return [
        "[gpu]",
        f'bytes = "{format_size(knobs.size_bytes)}"',
        f"device = {knobs.device}",
        f'slab_bytes = "{format_size(knobs.slab_bytes)}"',
        f'promote = "{"on" if knobs.promote else "off"}"',
        f'verify = "{word_of(knobs.verify)}"',
    ]
