"""Inductor lowering of casts whose results are kept: a call of the operator, into whose result nobody writes.

The operator looks at the weight and at what it has kept (see `cpu.copies`), so it stays one. Inductor may use
the memory of a result it is done with for the next; what is returned here belongs to a later call too.
"""

from __future__ import annotations

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from mxcompile import ops
from mxcompile.lowering.cpu import copies

_OPERATOR = ops.quantize_dequantize_cached
_CALL = fallback_handler(_OPERATOR, add_to_fallback_set=False)


@register_lowering(_OPERATOR, type_promotion_kind=None)
def lower_quantize_dequantize_cached(
    w: ir.TensorBox, block_dim: int, elem_dtype: torch.dtype, rounding: str, square: bool, dtype: torch.dtype
) -> ir.TensorBox:
    """The copy of `w`; what makes it is compiled now."""
    rank = len(w.get_size())
    copies.build(w.get_dtype(), copies.cast_of(rank, block_dim, elem_dtype, rounding, square, dtype))
    made: ir.TensorBox = _CALL(w, block_dim, elem_dtype, rounding, square, dtype)
    V.graph.never_reuse_buffers.add(made.get_name())
    return made
