"""The lowering of products of packed FP4 operands: those of MX operands, told of another coding.

packed_mm            ``scaled_mm``, ``scaled_mm_tiled``, ``scaled_bmm``, and the vendor's
packed_grouped_mm    ``scaled_grouped_mm``, ``scaled_grouped_mm_tiled``
tile_scales          Inductor's own kernel, which its freezing of parameters computes once
"""

from __future__ import annotations

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.lowering.inductor.tiling import tiled
from mxcompile.lowering.templates import scaled_grouped_mm, scaled_mm
from mxcompile.lowering.templates.coding import Coding

register_lowering(ops.tile_scales, type_promotion_kind=None)(lambda scale: tiled(scale, -1))


@register_lowering(ops.packed_mm, type_promotion_kind=None)
def lower_packed_mm(
    a: ir.TensorBox,
    scale_a: ir.TensorBox,
    b: ir.TensorBox,
    scale_b: ir.TensorBox,
    bias: ir.TensorBox | None,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensor_a: ir.TensorBox | None = None,
    tensor_b: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """The product of matrices or of batches."""
    size = [*a.get_size()[:-1], b.get_size()[-1]]
    coding = Coding.packed(Format.of(format_a), (tensor_a, tensor_b), size)
    return scaled_mm.lower([a, scale_a, b, scale_b], bias, out_dtype, coding)


@register_lowering(ops.packed_grouped_mm, type_promotion_kind=None)
def lower_packed_grouped_mm(
    a: ir.TensorBox,
    scale_a: ir.TensorBox,
    b: ir.TensorBox,
    scale_b: ir.TensorBox,
    offs: ir.TensorBox,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensor_a: ir.TensorBox | None = None,
    tensor_b: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """The products of all groups, in any form of the operator."""
    size = [a.get_size()[-2], b.get_size()[-1]]
    if len(a.get_size()) == len(b.get_size()):  # of groups of K, and of batches
        size = [offs.get_size()[0], *size]
    coding = Coding.packed(Format.of(format_a), (tensor_a, tensor_b), size)
    return scaled_grouped_mm.lower([a, scale_a, b, scale_b], offs, out_dtype, coding)
