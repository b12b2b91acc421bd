"""Casts of weights whose results are kept from call to call.

    quantize_cached             w → as quantize
    quantize_dequantize_cached  w → as quantize_dequantize

They say the same of the same values as the operators they are named after, and are functional: nobody may
write to their results, which a later call may return again. The implementations here keep nothing;
`lowering.cpu.copies` has those that do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxcompile.ops import mx
from mxcompile.ops.define import SPECS, Spec, define


def _quantize(
    w: Tensor, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool
) -> tuple[Tensor, Tensor]:
    qdata, scale = mx.quantize(w, block_dim, elem_dtype, rounding, square)
    return qdata, scale


def _spec_quantize(w: Tensor, *arguments: Any) -> list[Spec]:
    return SPECS[mx.quantize](w, *arguments)


def _quantize_dequantize(
    w: Tensor, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool, dtype: torch.dtype
) -> Tensor:
    values: Tensor = mx.quantize_dequantize(w, block_dim, elem_dtype, rounding, square, dtype)
    return values


def _spec_quantize_dequantize(w: Tensor, *arguments: Any) -> list[Spec]:
    return SPECS[mx.quantize_dequantize](w, *arguments)


quantize_cached = define(
    "quantize_cached(Tensor w, int block_dim, ScalarType elem_dtype, str rounding, bool square)"
    " -> (Tensor qdata, Tensor scale)",
    _quantize,
    _spec_quantize,
)
quantize_dequantize_cached = define(
    "quantize_dequantize_cached(Tensor w, int block_dim, ScalarType elem_dtype, str rounding, bool square,"
    " ScalarType dtype) -> Tensor",
    _quantize_dequantize,
    _spec_quantize_dequantize,
)
