"""The [nvme] table of the configuration: the tier below host memory, off unless it has a size."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvd.sizes import MIB, format_size

if TYPE_CHECKING:
    from kvd.config_source import Table
    from kvd.tiers.nvme_types import NvmeConfig

Form = Literal["fp8", "lossless", "raw"]
FORMS: dict[str, Form] = {"fp8": "fp8", "lossless": "lossless", "raw": "raw"}
ON_OFF = ("on", "off")
ADMISSIONS = ("all", "second-touch", "predicted")


@dataclass(frozen=True, slots=True)
class NvmeKnobs:
    """The NVMe tier.

    Attributes:
        size_bytes: Of all regions; 0 for no such tier.
        directory: Of this tier alone.
        region_bytes: Of one region file; a chunk has to fit.
        form: What objects become: fp8 where the namespace is lossy (else lossless), lossless, raw.
        threads: For reads and writes.
        codec_threads: For changing the form.
        dirty_share: Of a tenant's host memory, what may be the only copy before it is pressing.
        write_behind: Write down whenever the disk is idle, not only under pressure.
        admission: Which chunks are written at all, see `kvd.policies.admission`.
        admission_threshold: For `predicted`: the least chance of being used again.
        flush_s: What the last writes get when the daemon goes down.
        slow_s: A call that takes longer makes the tier slow: it takes nothing in until it returns.
    """

    size_bytes: int
    directory: str
    region_bytes: int = 256 * MIB
    form: Form = "fp8"
    threads: int = 4
    codec_threads: int = 2
    dirty_share: float = 0.5
    write_behind: bool = True
    admission: str = "all"
    admission_threshold: float = 0.1
    flush_s: float = 30.0
    slow_s: float = 1.0

    def store(self) -> NvmeConfig:
        """Return what the store below the tier is made of."""
        from kvd.tiers.nvme_types import NvmeConfig  # what has no NVMe tier needs none of it

        return NvmeConfig(
            Path(self.directory),
            self.size_bytes,
            self.region_bytes,
            threads=self.threads,
            slow_s=self.slow_s,
        )


KEYS = ("bytes", *(field.name for field in fields(NvmeKnobs) if field.name != "size_bytes"))


def read(table: Table, state_dir: str) -> NvmeKnobs:
    """Check the table; raises ConfigError saying where and what to change."""
    size_bytes = table.size("bytes", 0)
    region_bytes = table.size("region_bytes", 256 * MIB)
    if region_bytes < MIB or region_bytes % MIB:
        raise table.error("region_bytes", "write a multiple of 1MiB, as in 256MiB")
    if size_bytes and size_bytes < 4 * region_bytes:
        least = format_size(4 * region_bytes)
        raise table.error("bytes", f"is less than four regions; set it to {least} or more, or 0")
    threads = 0 if table.values.get("codec_threads") == "auto" else None
    if threads is None:
        threads = table.integer("codec_threads", 0, 0, 64)
    return NvmeKnobs(
        size_bytes=size_bytes,
        directory=table.file_path("directory", f"{state_dir}/nvme"),
        region_bytes=region_bytes,
        form=FORMS[table.choice("form", "fp8", FORMS)],
        threads=table.integer("threads", 4, 1, 64),
        codec_threads=threads or min(4, len(os.sched_getaffinity(0))),
        dirty_share=table.number("dirty_share", 0.5, 0, 1),
        write_behind=table.choice("write_behind", "on", ON_OFF) == "on",
        admission=table.choice("admission", "all", ADMISSIONS),
        admission_threshold=table.number("admission_threshold", 0.1, 0, 1),
        flush_s=table.number("flush_s", 30.0, 0, 3600),
        slow_s=table.number("slow_s", 1.0, 0.01, 3600),
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def dump(knobs: NvmeKnobs) -> list[str]:
    """Return the table's lines."""
    return [
        "[nvme]",
        f'bytes = "{format_size(knobs.size_bytes)}"',
        f"directory = {_quoted(knobs.directory)}",
        f'region_bytes = "{format_size(knobs.region_bytes)}"',
        f'form = "{knobs.form}"',
        f"threads = {knobs.threads}",
        f"codec_threads = {knobs.codec_threads}",
        f"dirty_share = {knobs.dirty_share!r}",
        f'write_behind = "{"on" if knobs.write_behind else "off"}"',
        f'admission = "{knobs.admission}"',
        f"admission_threshold = {knobs.admission_threshold!r}",
        f"flush_s = {knobs.flush_s!r}",
        f"slow_s = {knobs.slow_s!r}",
    ]
