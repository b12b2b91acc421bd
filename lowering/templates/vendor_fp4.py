"""The vendor's product of packed FP4 operands: the one kernel of `packed_mm` on a GPU.

nvfp4   cuBLAS, by ``torch._scaled_mm_v2``: an FP32 scale of each tensor multiplies what is accumulated
mxfp4   the same operator, which calls MSLK; the bias is added behind it
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.select_algorithm import ExternKernelChoice, realize_inputs
from torch.nn.functional import ScalingType, SwizzleType

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.lowering.templates import call

_ADD = lowerings[torch.ops.aten.add.Tensor]
_FP4 = torch.float4_e2m1fn_x2
_TILES = SwizzleType.SWIZZLE_32_4_4.value


def mx_vendor_nvfp4_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    tensor_a: Tensor,
    tensor_b: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product a [M, K] · bᵀ [K, N] (+ bias [N]). a, b: bytes; scales: tiled bytes, and FP32 [1]."""
    recipe, swizzle = [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value], [_TILES, 0]
    e4m3 = torch.float8_e4m3fn
    left, right = [scale_a.view(e4m3), tensor_a], [scale_b.view(e4m3), tensor_b]
    product: Tensor = torch.ops.aten._scaled_mm_v2(
        a.view(_FP4), b.view(_FP4).t(), left, recipe, swizzle, right, recipe, swizzle, bias, out_dtype
    )
    return product


def mx_vendor_mxfp4_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """The product a [M, K] · bᵀ [K, N]. a, b: bytes; scales: tiled bytes."""
    recipe, swizzle, e8m0 = [ScalingType.BlockWise1x32.value], [_TILES], torch.float8_e8m0fnu
    left, right = [scale_a.view(e8m0)], [scale_b.view(e8m0)]
    product: Tensor = torch.ops.aten._scaled_mm_v2(
        a.view(_FP4), b.view(_FP4).t(), left, recipe, swizzle, right, recipe, swizzle, None, out_dtype
    )
    return product


NVFP4 = ExternKernelChoice(mx_vendor_nvfp4_mm, has_out_variant=False)
MXFP4 = ExternKernelChoice(mx_vendor_mxfp4_mm, has_out_variant=False)


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
    """The product."""
    two_level = Format.of(format_a).two_level
    added = [bias] if two_level and bias is not None else []
    given = [tensor_a, tensor_b] if two_level else []
    operands: list[Any] = [realize_inputs(each) for each in (a, scale_a, b, scale_b, *given, *added)]
    layout = ir.FixedLayout(a.get_device_or_error(), out_dtype, [a.get_size()[0], b.get_size()[0]])
    choice = NVFP4 if two_level else MXFP4
    result = call.best(choice.name, operands, layout, [(choice, {"out_dtype": out_dtype})])
    if bias is not None and not added:
        result = _ADD(result, bias)
    return result
