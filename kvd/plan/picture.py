"""The plan as a picture: time to load and to compute by prefix length, and the fleet's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvd.plan.shape import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.plan.capacity import Budget
    from kvd.plan.loading import Prefill, Source
    from kvd.plan.shape import Shape

_PARTS: Final = ("payload", "metadata", "staging", "quarantine", "lost hosts")
_TIB: Final = 1 << 40
_LENGTHS: Final = [1 << bits for bits in range(8, 18)]


def draw(
    path: str,
    *,
    title: str,
    shape: Shape,
    sources: Sequence[Source],
    prefill: Prefill | None,
    held: Budget | None,
) -> None:
    """Write the picture to a file; its suffix names the format.

    Raises:
        PlanError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise PlanError("--plot needs matplotlib: pip install 'kvd[plot]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 1 + (held is not None), figsize=(11, 4.5), squeeze=False)
    try:
        _times(axes[0][0], shape, sources, prefill)
        if held is not None:
            _bytes(axes[0][1], held)
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {path}: {error}") from error
    finally:
        plt.close(figure)


def _times(axis: Any, shape: Shape, sources: Sequence[Source], prefill: Prefill | None) -> None:  # noqa: ANN401 - matplotlib's
    if prefill is not None:
        times = [prefill.seconds(n) * 1e3 for n in _LENGTHS]
        axis.plot(_LENGTHS, times, "k-", label="compute")
    for source in sources:
        for ahead, style in ((0, "-"), (4, "--")):
            times = [source.seconds(shape.load_bytes(n), ahead) * 1e3 for n in _LENGTHS]
            what = f"load, {source.name}" + (f", {ahead} ahead" if ahead else "")
            axis.plot(_LENGTHS, times, style, label=what)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("prefix, tokens")
    axis.set_ylabel("ms")
    axis.grid(visible=True, alpha=0.3)
    if sources or prefill is not None:
        axis.legend()


def _bytes(axis: Any, held: Budget) -> None:  # noqa: ANN401 - matplotlib's
    below = 0.0
    for name, size in zip(_PARTS, held, strict=False):
        axis.bar(["needed"], [size / _TIB], bottom=[below], label=name)
        below += size / _TIB
    axis.bar(["there"], [held.usable_bytes / _TIB], color="lightgrey")
    axis.set_ylabel("TiB")
    axis.set_title(f"{held.hosts_needed:,} hosts hold it", fontsize=10)
    axis.legend()
