"""The demonstration's picture: losses on the left, gaps to the baseline on the right, one line per seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.compare import CONTROL, GAP_LIMIT, SeedComparison

_LINEAR = 0.5
"""Largest gap in % with a linear scale. Above it the scale is logarithmic, so that the control fits."""


def plot(comparison: SeedComparison, path: Path) -> None:
    """Draws `comparison` and writes a PNG to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained", dpi=130)
    loss_axes, gap_axes = figure.subplots(1, 2)
    for index, label in enumerate(comparison.labels):
        style = _style(label, index, comparison.baseline)
        for number, run in enumerate(comparison.of(label)):
            named = label if number == 0 else None
            steps = sorted(run.validation)
            loss_axes.plot(steps, [run.validation[step] for step in steps], label=named, **style)
            if label != comparison.baseline:
                gaps = [100 * comparison.gaps(label, step)[number] for step in steps]
                gap_axes.plot(steps, gaps, label=named, **style)
    loss_axes.set(xlabel="step", ylabel="nats per byte", title="Validation loss, a line for each seed")
    limit = 100 * GAP_LIMIT
    gap_axes.axhspan(-limit, limit, color="#8a8f98", alpha=0.2, label=f"±{limit:.2g} %")
    gap_axes.axhline(0, color="#8a8f98", linewidth=1)
    gap_axes.set_yscale("symlog", linthresh=_LINEAR)
    gap_axes.yaxis.set_major_formatter("{x:g}")
    gap_axes.set(xlabel="step", ylabel="%", title=f"Gap to {comparison.baseline} with the same seed")
    for axes in (loss_axes, gap_axes):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _style(label: str, index: int, baseline: str) -> dict[str, Any]:
    """Returns the line style: broad and pale for the baseline, below other lines; dotted for the control."""
    if label == baseline:
        return {"color": "#b8c4d6", "linewidth": 6, "solid_capstyle": "round"}
    if label == CONTROL:
        return {"color": "#d1495b", "linewidth": 1.3, "linestyle": ":", "marker": "x", "markersize": 4}
    return {"color": f"C{index - 1}", "linewidth": 1.6, "marker": "o", "markersize": 3}
