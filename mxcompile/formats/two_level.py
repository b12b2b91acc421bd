"""Scales of two levels: E4M3 for a tile, times an FP32 number for the tensor or for each row (`row_scaled`).

    G        bound · max / amax of the tensor or row; 1 if amax is 0, NaN if it is not finite. bound is 448
    scale    E4M3(amax of the tile · (G · 1/max)), saturated
    factor   1/(scale · 1/G), by which a cast multiplies elements

With `FourOverSix` the tile has two candidates, and G has the bound 256 or 448:

    scale6   E4M3(amax of the tile / 6 · G), saturated
    scale4   E4M3(amax of the tile / 6 · G · 1.5), saturated
    error    Σ |d| or Σ d² over the tile, d = element · scale · amax of the tensor or row / (6 · bound) − x

The scale is scale4 if its error is smaller than the error of scale6. All operations are FP32, from left to
right. Elements of the error are rounded to nearest, also if the cast rounds them stochastically. An error is
summed along the contraction, element by element; then rows of a square tile are summed in halves: row i and
row i + 8, then i + 4, i + 2 and i + 1.

Source: arXiv 2509.25149 appendix C and arXiv 2512.02010, with the order of operations of Transformer Engine's
kernels and of its `NVFP4QuantizerRef`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxcompile.formats.elements import E4M3
from mxcompile.formats.four_over_six import BlockError
from mxcompile.formats.types import Format

FP32_MAX = torch.finfo(torch.float32).max
WIDER = 1.5
"""Ratio of the scales under which the largest magnitude becomes 4 and 6."""


def gain(amax: Tensor, fmt: Format) -> Tensor:
    """Returns G for `amax`, the amax of the tensor, [1], or of its rows."""
    largest = torch.full_like(amax, fmt.largest)  # torch rounds number / tensor twice, by a reciprocal
    over = (largest / amax).clamp(max=FP32_MAX)
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, over), torch.nan)


def e4m3_scale(tile_amax: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """Returns E4M3 scales for the maxima `tile_amax` of tiles. amax: see `gain`."""
    return _e4m3(tile_amax * (gain(amax, fmt) * (1 / fmt.elem.max)))


def inverse_e4m3_scale(scale: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """Returns the FP32 factors 1/(scale · 1/G), by which a cast to two levels multiplies `x`."""
    return (1.0 / (scale.to(torch.float32) * (1.0 / gain(amax, fmt)))).clamp(max=FP32_MAX)


def better(tile_amax: Tensor, amax: Tensor, fmt: Format, error: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns for each tile the candidate with the smaller error.

    tile_amax: maxima of tiles. amax: see `gain`. error: maps scales to errors of tiles.
    """
    over = tile_amax / torch.full_like(tile_amax, fmt.elem.max) * gain(amax, fmt)
    six, four = _e4m3(over), _e4m3(over * WIDER)
    chosen = torch.where(error(four) < error(six), four.to(torch.float32), six.to(torch.float32))
    return chosen.to(E4M3.dtype)


def tile_error(tiles: Tensor, values: Tensor, fmt: Format, along: int, across: int) -> Tensor:
    """Returns Σ |values − tiles|, or Σ (values − tiles)², over the dimensions `along` and `across`.

    Both dimensions stay, with size 1. The size of `across` must be a power of two.
    """
    assert fmt.four_over_six is not None
    difference = values - tiles
    squared = fmt.four_over_six.error is BlockError.MSE
    parts = (difference * difference if squared else difference.abs()).split(1, along)
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    while total.shape[across] > 1:
        first, second = total.chunk(2, across)
        total = first + second
    return total


def _e4m3(over: Tensor) -> Tensor:
    return over.clamp(max=E4M3.max).to(E4M3.dtype)
