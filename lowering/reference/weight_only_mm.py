"""Weight-only matmul in torch: the dequantized weight and the activation as it is, multiplied in FP64."""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.lowering.reference.scaled_mm import values


def weight_only_mm(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """X · wᵀ (+ bias) in FP64 [M, N], and Σ |x · w| (+ |bias|), which error bounds are relative to."""
    left, right = x.to(torch.float64), values(w, w_scale).t()
    exact, magnitude = left @ right, left.abs() @ right.abs()
    if bias is not None:
        exact, magnitude = exact + bias.to(torch.float64), magnitude + bias.to(torch.float64).abs()
    return exact, magnitude
