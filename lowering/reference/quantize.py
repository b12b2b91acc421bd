"""Quantize in torch: the same copies as ``kernels/quantize.py``, through ``mxcompile.numerics``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mxcompile.formats import Format, Tile
from mxcompile.lowering.targets import ScaleLayout
from mxcompile.numerics import quantize_tensors


def swizzled(scale: Tensor) -> Tensor:
    """Scale bytes [rows, blocks] in the 128×4 tiled layout: flat, padded with zeros."""
    rows, blocks = scale.shape
    padded = F.pad(scale, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def rowwise(x: Tensor, fmt: Format, scales: ScaleLayout) -> tuple[Tensor, Tensor]:
    """FP8 elements [M, N] and scale bytes of `x` [M, N] along N."""
    qdata, scale = quantize_tensors(x, -1, fmt.elem.dtype, fmt.rounding, fmt.tile is Tile.SQUARE)
    return qdata, scale if scales is ScaleLayout.ROW_MAJOR else swizzled(scale)


def columnwise(x: Tensor, fmt: Format, scales: ScaleLayout) -> tuple[Tensor, Tensor]:
    """FP8 elements [M, N] and scale bytes of `x` [M, N] along M; tiled, a row is a column of `x`."""
    qdata, scale = quantize_tensors(x, -2, fmt.elem.dtype, fmt.rounding, fmt.tile is Tile.SQUARE)
    return qdata, scale if scales is ScaleLayout.ROW_MAJOR else swizzled(scale.t())


def quantize(x: Tensor, fmt: Format, scales: ScaleLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both copies: rowwise elements and scales, then columnwise."""
    return *rowwise(x.to(torch.float32), fmt, scales), *columnwise(x.to(torch.float32), fmt, scales)
