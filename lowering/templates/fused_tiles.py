"""Which tiles the fused cast and product is tried with (see `fused_quantize_mm`)."""

from __future__ import annotations

from mxcompile.lowering.chips.tiles import MatmulConfig, Unsupported
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates.configs import autotuning

NARROW = 1024
"""Most columns for which many rows are tried: 8 tiles of 128, so often is each row quantized; 16 of 64."""

Choices = list[tuple[bool, MatmulConfig]]


def tiles(target: Target, rows: int, columns: int) -> Choices:
    """Whether to swap the operands, and the tile, of each form worth trying on `target`.

    For a product with `rows` rows and `columns` columns; one where nothing is timed, none where the cast of
    its own is better.
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
