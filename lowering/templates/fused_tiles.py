"""The tiles of the fused cast and product (see `fused_quantize_mm`)."""

from __future__ import annotations

from mxcompile.lowering.chips.tiles import MatmulConfig, Unsupported
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates.configs import autotuning

NARROW = 1024
"""Most columns for which many rows are tried. Each row is quantized for all 8 tiles of 128, or 16 of 64."""

Choices = list[tuple[bool, MatmulConfig]]


def tiles(target: Target, rows: int, columns: int) -> Choices:
    """Returns whether to swap the operands, and the tile, of each form to try on `target`.

    rows, columns: sizes of the product. The result has one form without autotuning, and none if a separate
    cast is better.
    """
    row = target.tiles.fused_quantize_mm
    if isinstance(row, Unsupported):
        return []
    if rows <= row.few_rows:
        more = target.tiles.more_fused_few if autotuning() else ()
        return [(row.swap_few, tile) for tile in (row.few, *more)]
    if autotuning() and columns <= NARROW:
        return [(False, tile) for tile in (row.many, *target.tiles.more_fused_many)]
    return []
