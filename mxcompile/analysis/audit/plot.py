"""Plots of an audit: SQNR of GEMMs (by depth if the model has blocks), errors of casts, and scales.

The plot by depth has a row for each block of a model and a column for each kind of GEMM in a block:

    layers.7.mlp.up_proj, dgrad    →    row layers.7, column "mlp.up_proj dgrad"

Layers that differ in numbers inside a block, such as experts, share a column. A cell has the lowest SQNR of
its GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcompile.analysis.study.stats import lowest_by
from mxcompile.report import GemmNumerics, Numerics, TensorNumerics
from mxcompile.report.data.outline import inner_block
from mxcompile.report.forms import plots

_STYLES = {
    "fprop": ("o", "#2a6f97"), "dgrad": ("v", "#d1495b"), "wgrad": ("s", "#edae49"),
    "x": ("o", "#2a6f97"), "w": ("s", "#5f7a61"), "dy": ("v", "#d1495b"),
}  # fmt: skip
"""Mark and colour of each kind of GEMM and of each operand."""
_KINDS = ("fprop", "dgrad", "wgrad")
_MOST_COLUMNS, _MOST_ROWS = 60, 60


def plot(numerics: Numerics, folder: Path) -> list[Path]:
    """Draws `numerics` into `folder`. Returns the files; there is none for data that was not measured."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"gemms.png": _gemms} if numerics.gemms else {}
    drawings |= {"tensors.png": _tensors, "scales.png": _scales} if numerics.tensors else {}
    for name, draw in drawings.items():
        figure = plots.figure()
        draw(figure, numerics)
        figure.savefig(folder / name)
    return [folder / name for name in drawings]


def _gemms(figure: Any, numerics: Numerics) -> None:
    """Draws a row per block and a column per kind of GEMM, or a row per layer if there are no blocks."""
    title = f"GEMMs in {numerics.precision}"
    by_depth = grid(numerics.gemms)
    if by_depth is not None:
        _draw_by_depth(figure, by_depth, title)
        _leaves_out(figure, [_unplotted(numerics.gemms)])
        return
    layers = list(dict.fromkeys(gemm.name for gemm in numerics.worst_gemms()))
    axes = _rows(figure, layers, "layers, most harm first")
    row = {name: number for number, name in enumerate(layers)}
    for which in _KINDS:
        _marks(axes, [(g.sqnr_db, row[g.name]) for g in numerics.worst_gemms() if g.gemm == which], which)
    axes.set_xlabel("SQNR of the output against FP32, dB")
    axes.set_title(title)
    hidden = len(layers) - len(range(0, len(layers), math.ceil(len(layers) / _MOST_ROWS)))
    unlabelled = f"names of {hidden} of {len(layers)} layers" if hidden else ""
    _leaves_out(figure, [_unplotted(numerics.gemms), unlabelled])


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Names of rows and columns, and the SQNR of cells in dB."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], float]


def grid(gemms: Iterable[GemmNumerics]) -> Grid | None:
    """Returns the grid of `gemms`; None for fewer than two blocks, or for too many kinds of GEMMs."""
    cells = []
    for gemm in gemms:  # the row, and as its column the layer's path below the block, with * for numbers
        block = inner_block(gemm.name)
        steps = gemm.name.removeprefix(block).removeprefix(".").split(".") if block else []
        column = ".".join("*" if step.isdecimal() else step for step in steps), gemm.gemm
        cells.append(((block or gemm.name, column), gemm.sqnr_db))
    lowest = lowest_by(cells)
    rows = list(dict.fromkeys(row for row, _ in lowest))
    kinds = list(dict.fromkeys(kind for _, kind in lowest))
    kinds.sort(key=lambda kind: _KINDS.index(kind[1]))
    if sum(bool(inner_block(row)) for row in rows) < 2 or len(kinds) > _MOST_COLUMNS:
        return None
    row_at, column_at = ({name: index for index, name in enumerate(names)} for names in (rows, kinds))
    return Grid(
        rows=tuple(rows),
        columns=tuple(f"{name} {which}".lstrip() for name, which in kinds),
        cells={(row_at[row], column_at[kind]): sqnr for (row, kind), sqnr in lowest.items()},
    )


def _draw_by_depth(figure: Any, by_depth: Grid, title: str) -> None:
    """Draws `by_depth` as a heat map, the first block on top. Cells without a finite SQNR stay white."""
    height, width = len(by_depth.rows), len(by_depth.columns)
    image = [[math.nan] * width for _ in range(height)]
    for (row, column), sqnr in by_depth.cells.items():
        image[row][column] = sqnr if math.isfinite(sqnr) else math.nan
    figure.set_size_inches(4 + 0.28 * width, 3.2 + 0.22 * min(height, _MOST_ROWS))
    axes = figure.add_subplot(1, 1, 1)
    shown = axes.imshow(image, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(shown, ax=axes, label="SQNR of the output against FP32, dB")
    every = math.ceil(height / _MOST_ROWS)
    axes.set_yticks(range(0, height, every), by_depth.rows[::every], fontsize=7)
    axes.set_xticks(range(width), by_depth.columns, fontsize=7, rotation=90)
    axes.set_ylabel("blocks, by depth")
    axes.set_title(title)


def _tensors(figure: Any, numerics: Numerics) -> None:
    """Draws the SQNR of casts on the left, the shares of elements cast to zero or saturated on the right."""
    tensors = numerics.worst_tensors()[:_MOST_ROWS]
    labels = [_label(tensor) for tensor in tensors]
    sqnr_axes = _rows(figure, labels, "casts, most harm first", columns=2)
    for which in ("x", "w", "dy"):
        _marks(sqnr_axes, [(t.sqnr_db, row) for row, t in enumerate(tensors) if t.operand == which], which)
    sqnr_axes.set_xlabel("SQNR, dB")
    underflow_axes = figure.add_subplot(1, 2, 2, sharey=sqnr_axes)
    rows, zeros = range(len(tensors)), [100 * t.underflow for t in tensors]
    saturated = [100 * t.saturation for t in tensors]
    underflow_axes.barh(rows, zeros, color="#7f8c8d", label="cast to zero")
    underflow_axes.barh(rows, saturated, left=zeros, color="#c0392b", label="saturated")
    underflow_axes.tick_params(labelleft=False)
    underflow_axes.set_xlabel("share of elements (cast to zero: share of the nonzero elements), %")
    underflow_axes.legend()
    figure.suptitle("Cast tensors")
    _leaves_out(figure, [_unplotted(tensors), _beyond(numerics.tensors)])


def _scales(figure: Any, numerics: Numerics) -> None:
    """Draws a row per cast with the share of blocks per scale exponent, darker for more."""
    tensors = numerics.worst_tensors()[:_MOST_ROWS]
    used = {byte for tensor in tensors for byte, _ in tensor.scale_histogram} - {0, 255}
    low, high = (min(used), max(used)) if used else (127, 127)
    image = []
    for tensor in tensors:
        counts = dict(tensor.scale_histogram)
        total = sum(counts.values()) or 1
        image.append([counts.get(byte, 0) / total for byte in range(low, high + 1)])
    axes = _rows(figure, [_label(tensor) for tensor in tensors], "casts, most harm first")
    edges = (low - 127 - 0.5, high - 127 + 0.5, len(tensors) - 0.5, -0.5)
    shown = axes.imshow(image, aspect="auto", cmap="Blues", extent=edges, vmin=0)
    figure.colorbar(shown, ax=axes, label="share of blocks")
    axes.set_xlabel("exponent of the scale")
    axes.set_title("Scales")
    blocks = sum(number for tensor in tensors for byte, number in tensor.scale_histogram if byte in (0, 255))
    special = f"{blocks:,} blocks of zeros or NaN" if blocks else ""
    _leaves_out(figure, [special, _beyond(numerics.tensors)])


def _leaves_out(figure: Any, omissions: Sequence[str]) -> None:
    """Writes below the plot which data it omits."""
    text = "; ".join(filter(None, omissions))
    if text:
        figure.supxlabel(f"not drawn: {text}", fontsize=8, color="#555555")


def _unplotted(measured: Sequence[GemmNumerics | TensorNumerics]) -> str:
    """Returns the number of items whose SQNR is infinite or NaN, as text."""
    exact = sum(math.isinf(item.sqnr_db) for item in measured)
    missing = sum(math.isnan(item.sqnr_db) for item in measured)
    words = [(exact, "without any error"), (missing, "with NaN")]
    return ", ".join(f"{number} {word}" for number, word in words if number)


def _beyond(tensors: Sequence[TensorNumerics]) -> str:
    more = len(tensors) - _MOST_ROWS
    return f"{more} of {len(tensors)} casts, with less harm" if more > 0 else ""


def _label(tensor: TensorNumerics) -> str:
    return f"{tensor.name} {tensor.operand} {tensor.layout.removesuffix('wise')}"


def _rows(figure: Any, labels: Sequence[str], title: str, columns: int = 1) -> Any:
    """Returns axes with a row per item, the first on top, and at most `_MOST_ROWS` labels."""
    figure.set_size_inches(6 + 3 * columns, 1.6 + 0.22 * min(len(labels), _MOST_ROWS))
    axes = figure.add_subplot(1, columns, 1)
    every = math.ceil(len(labels) / _MOST_ROWS)
    ticks = range(0, len(labels), every)
    axes.set_yticks(ticks, [labels[tick] for tick in ticks], fontsize=7)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    return axes


def _marks(axes: Any, points: Sequence[tuple[float, int]], which: str) -> None:
    finite = [(value, row) for value, row in points if math.isfinite(value)]
    if finite:
        values, rows = zip(*finite, strict=True)
        mark, colour = _STYLES[which]
        axes.plot(values, rows, mark, color=colour, label=which, markersize=4)
        axes.legend()
