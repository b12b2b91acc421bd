"""Quantize in torch: the same copies as ``kernels/quantize.py``, through ``mxcompile.formats.numerics``."""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats import Format, ScaleLayout, Tile
from mxcompile.formats.numerics import quantize_tensors
from mxcompile.formats.scale_tiles import tile_scale


def rowwise(x: Tensor, fmt: Format, scales: ScaleLayout) -> tuple[Tensor, Tensor]:
    """FP8 elements [M, N] and scale bytes of `x` [M, N] along N."""
    qdata, scale = quantize_tensors(x, -1, fmt.elem.dtype, fmt.derivation, fmt.tile == Tile.SQUARE)
    return qdata, scale if scales is ScaleLayout.ROW_MAJOR else tile_scale(scale)


def columnwise(x: Tensor, fmt: Format, scales: ScaleLayout) -> tuple[Tensor, Tensor]:
    """FP8 elements [M, N] and scale bytes of `x` [M, N] along M; tiled, a row is a column of `x`."""
    qdata, scale = quantize_tensors(x, -2, fmt.elem.dtype, fmt.derivation, fmt.tile == Tile.SQUARE)
    return qdata, scale if scales is ScaleLayout.ROW_MAJOR else tile_scale(scale.t())


def quantize(x: Tensor, fmt: Format, scales: ScaleLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both copies: rowwise elements and scales, then columnwise."""
    return *rowwise(x.to(torch.float32), fmt, scales), *columnwise(x.to(torch.float32), fmt, scales)
