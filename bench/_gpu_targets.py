"""What the figures of a GPU run are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

TOTAL_S: Final = 300.0
"""Everything together takes less."""


class Target(NamedTuple):
    """A figure of a part's result, and what is wanted of it."""

    part: str
    figure: str
    least: float | None = None
    most: float | None = None

    @property
    def wanted(self) -> str:
        """As people read it."""
        if self.least is None and self.most is None:
            return "ok"
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def met(self, value: object) -> bool:
        """Tell whether a value is as wanted; a check's value is its outcome."""
        if self.least is None and self.most is None:
            return value == "ok"
        if not isinstance(value, (int, float)):
            return False
        return value >= self.least if self.least is not None else value <= self.most  # type: ignore[operator]


TARGETS: Final = (
    Target("check", "kernels"),
    Target("check", "pinning"),
    Target("check", "round_trip"),
    Target("check", "gpu_tier"),
    Target("check", "engines_killed"),
    Target("check", "daemon_killed"),
    Target("check", "handles"),
    Target("check", "pinned_in_parts"),
    Target("bench", "load_to_raw", least=0.95),
    Target("bench", "store_to_raw", least=0.95),
    Target("bench", "load_fp8_to_raw", least=1.8),
    Target("bench", "store_fp8_to_raw", least=1.8),
    Target("bench", "gpu_tier_gbps", least=3000),
    Target("ttft", "speedup_32768", least=12),
    Target("ttft", "warm_to_limit_32768", most=1.15),
    Target("all", "seconds", most=TOTAL_S),
)


def judge(found: Mapping[str, Mapping[str, Any]], *, dry_run: bool = False) -> list[dict[str, Any]]:
    """Give a row a target: figure, wanted, found, verdict.

    Args:
        found: Each part's result.
        dry_run: Judge nothing: the figures mean nothing.
    """
    rows = []
    for target in TARGETS:
        value: Any = (found.get(target.part) or {}).get(target.figure)
        if isinstance(value, dict):
            value = value.get("outcome")
        verdict = "met" if target.met(value) else "MISSED"
        if value is None:
            verdict = "not measured"
        elif dry_run:
            verdict = "dry run"
        rows.append(
            {
                "part": target.part,
                "figure": target.figure,
                "wanted": target.wanted,
                "found": value,
                "verdict": verdict,
            }
        )
    return rows
