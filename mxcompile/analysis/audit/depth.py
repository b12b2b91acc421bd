"""The SQNR of GEMMs by depth: a row for each block of a model, a column for each kind of GEMM in a block.

    layers.7.mlp.up_proj, dgrad    →    row layers.7, column "mlp.up_proj dgrad"

Layers that differ in numbers inside a block, such as experts, share a column. A cell has the lowest SQNR of
its GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mxcompile.report import GemmNumerics
from mxcompile.report.outline import inner_block

_GEMMS = ("fprop", "dgrad", "wgrad")
_MOST_COLUMNS = 60
_MOST_LABELS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Names of rows and columns, and the SQNR of cells in dB."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, int], float]


def grid(gemms: Iterable[GemmNumerics]) -> Grid | None:
    """Returns the grid of `gemms`; None for fewer than two blocks, or for too many kinds of GEMMs."""
    lowest: dict[tuple[str, tuple[str, str]], float] = {}
    for gemm in gemms:
        block = inner_block(gemm.name)
        kind = _inside(gemm.name, block) if block else ""
        key = block or gemm.name, (kind, gemm.gemm)
        lowest[key] = min(lowest.get(key, math.inf), gemm.sqnr_db, key=_nan_first)
    rows = list(dict.fromkeys(row for row, _ in lowest))
    kinds = list(dict.fromkeys(kind for _, kind in lowest))
    kinds.sort(key=lambda kind: _GEMMS.index(kind[1]))
    if sum(bool(inner_block(row)) for row in rows) < 2 or len(kinds) > _MOST_COLUMNS:
        return None
    row_at, column_at = ({name: index for index, name in enumerate(names)} for names in (rows, kinds))
    return Grid(
        rows=tuple(rows),
        columns=tuple(f"{name} {which}".lstrip() for name, which in kinds),
        cells={(row_at[row], column_at[kind]): sqnr for (row, kind), sqnr in lowest.items()},
    )


def draw(figure: Any, by_depth: Grid, title: str) -> None:
    """Draws `by_depth` as a heat map, the first block on top. Cells without a finite SQNR stay white."""
    height, width = len(by_depth.rows), len(by_depth.columns)
    image = [[math.nan] * width for _ in range(height)]
    for (row, column), sqnr in by_depth.cells.items():
        image[row][column] = sqnr if math.isfinite(sqnr) else math.nan
    figure.set_size_inches(4 + 0.28 * width, 3.2 + 0.22 * min(height, _MOST_LABELS))
    axes = figure.add_subplot(1, 1, 1)
    shown = axes.imshow(image, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(shown, ax=axes, label="SQNR of the output against FP32, dB")
    every = math.ceil(height / _MOST_LABELS)
    axes.set_yticks(range(0, height, every), by_depth.rows[::every], fontsize=7)
    axes.set_xticks(range(width), by_depth.columns, fontsize=7, rotation=90)
    axes.set_ylabel("blocks, by depth")
    axes.set_title(title)


def _inside(name: str, block: str) -> str:
    """Returns the path of the layer `name` below `block`, with * for numbers."""
    steps = name.removeprefix(block).removeprefix(".").split(".")
    return ".".join("*" if step.isdecimal() else step for step in steps)


def _nan_first(sqnr: float) -> float:
    return -math.inf if math.isnan(sqnr) else sqnr
