"""Inductor lowering of ``mx.cast_statistics``: a kernel that reads a tensor once.

MXFP8 from BF16 and FP32 on CPUs               ``lowering.cpu.statistics``
MXFP8 from BF16, FP16 and FP32 on GPUs         ``lowering.templates.statistics``
other formats and dtypes, or a known scale     the operator's eager implementation
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, full, register_lowering

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES, Format, Tile
from mxcompile.lowering import candidates, optional

_AS_IT_IS = fallback_handler(ops.cast_statistics, add_to_fallback_set=False)


@register_lowering(ops.cast_statistics, type_promotion_kind=None)
def lower_cast_statistics(x: ir.TensorBox, block_dim: int, fmt: str, keep: int, *options: Any) -> Any:
    """Returns statistics, FP64, and a part of the cast, FP32. options: seed, stream and scale."""
    form, rank = Format.parse(fmt) if fmt else None, len(x.get_size())
    results, is_of_matrices = None, rank > 1 and block_dim % rank >= rank - 2
    is_mxfp8 = form and form.is_mx and form.elem in ELEM_TYPES.values() and not form.stochastic
    if form and is_mxfp8 and not any(options) and (form.tile == Tile.ROW or is_of_matrices):
        if x.get_device_or_error().type == "cuda":
            optional.obstacle("templates.statistics")  # imports the template
        results = candidates.first("cast_statistics", x, block_dim, form, keep)
    if results is None:
        return _AS_IT_IS(x, block_dim, fmt, keep, *options)
    numbers, kept = results
    if kept is None:
        kept = full([0], 0.0, dtype=torch.float32, device=x.get_device_or_error())
    return numbers, kept
