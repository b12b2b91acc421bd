"""Casts of weights whose results are kept from call to call.

    quantize_cached             w → as quantize
    quantize_dequantize_cached  w → as quantize_dequantize

They say the same of the same values as the operators they are named after, and are functional: nobody may
write to their results, which a later call may return again. The implementations here keep nothing;
`lowering.cpu.copies` has those that do.
"""

from __future__ import annotations

from mxcompile.ops import mx
from mxcompile.ops.define import SPECS, define

quantize_cached = define(
    "quantize_cached(Tensor x, int block_dim, ScalarType elem_dtype, str rounding, bool square)"
    " -> (Tensor qdata, Tensor scale)",
    mx.quantize,
    SPECS[mx.quantize],
)
quantize_dequantize_cached = define(
    "quantize_dequantize_cached(Tensor x, int block_dim, ScalarType elem_dtype, str rounding, bool square,"
    " ScalarType dtype) -> Tensor",
    mx.quantize_dequantize,
    SPECS[mx.quantize_dequantize],
)
