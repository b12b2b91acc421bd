"""Which tiles the fused cast and product is tried with (see `fused_quantize_mm`)."""

from __future__ import annotations

from mxcompile.lowering.kernels.configs import FUSED_QUANTIZE_MM, Absent, MatmulConfig
from mxcompile.lowering.templates.configs import autotuning

NARROW = 1024
"""Most columns for which many rows are tried: 8 tiles of 128, so often is each row quantized; 16 of 64."""

_FEW = MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=4)
_MANY = MatmulConfig(block_m=128, block_n=64, block_k=128, num_warps=8, num_stages=3)
_WIDER = MatmulConfig(block_m=32, block_n=128, block_k=128, num_warps=4, num_stages=2)

_MORE: dict[str, dict[str, tuple[MatmulConfig, ...]]] = {
    "sm_100": {"few": (_FEW,), "many": (_MANY,)},
    "sm_103": {"few": (_FEW,), "many": (_MANY,)},
    "sm_120": {"few": (_WIDER,)},
    "gfx950": {"few": (_WIDER,)},
}
"""What autotuning tries beside the defaults."""

Tiles = list[tuple[bool, MatmulConfig]]


def tiles(name: str, rows: int, columns: int) -> Tiles:
    """Whether to swap the operands, and the tile, of each form worth trying on the target called `name`.

    For a product with `rows` rows and `columns` columns; one where nothing is timed, none where the cast of
    its own is better.
    """
    row = FUSED_QUANTIZE_MM.get(name)
    if row is None or isinstance(row, Absent):
        return []
    more = _MORE.get(name, {}) if autotuning() else {}
    if rows <= row.few_rows:
        return [(row.swap_few, tile) for tile in (row.few, *more.get("few", ()))]
    if autotuning() and columns <= NARROW:
        return [(False, tile) for tile in (row.many, *more.get("many", ()))]
    return []
