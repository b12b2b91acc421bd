"""Fused quantize + matmul in torch: the cast of ``quantize``, then the product of ``scaled_mm``."""

from __future__ import annotations

from torch import Tensor

from mxcompile.formats import Format, ScaleLayout
from mxcompile.lowering.reference.quantize import rowwise
from mxcompile.lowering.reference.scaled_mm import scaled_mm


def fused_quantize_mm(
    x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, fmt: Format
) -> tuple[Tensor, Tensor]:
    """quantize(x) · wᵀ (+ bias) in FP64 [M, N], and the magnitude that error bounds are relative to."""
    qdata, scale = rowwise(x, fmt, ScaleLayout.ROW_MAJOR)
    return scaled_mm(qdata, scale, w, w_scale, bias)
