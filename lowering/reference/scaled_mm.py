"""Scaled matmul in torch: dequantize in FP64, multiply in FP64; what kernels are within a bound of."""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats import num_blocks
from mxcompile.formats.numerics import dequantize_tensors
from mxcompile.formats.scale_tiles import untile_scale


def values(qdata: Tensor, scale: Tensor) -> Tensor:
    """FP64 values of an operand [rows, K]; scale row-major [rows, ⌈K/32⌉] or flat, tiled."""
    if scale.ndim == 1:
        scale = untile_scale(scale, qdata.shape[0], num_blocks(qdata.shape[1]))
    return dequantize_tensors(qdata, scale, -1, torch.float64)


def scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A · bᵀ (+ bias) in FP64 [M, N], and Σ |a · b| (+ |bias|), which error bounds are relative to."""
    left, right = values(a, a_scale), values(b, b_scale).t()
    exact, magnitude = left @ right, left.abs() @ right.abs()
    if bias is not None:
        exact, magnitude = exact + bias.to(torch.float64), magnitude + bias.to(torch.float64).abs()
    return exact, magnitude
