"""The vendor's products of MX operands, as choices beside the templates (see `defaults`).

    matrices          ``torch._scaled_mm``
    packed FP4        ``torch._scaled_mm_v2``: NVFP4 by cuBLAS, MXFP4 by MSLK
    groups of rows    ``torch._scaled_grouped_mm``, which leaves rows past the last group uninitialized;
                      `zero_rows` then makes them 0

Matrices need a chip with tensor memory, tiled scales, strides and N that are multiples of 16, K that is a
multiple of a block, results in BF16, and an operand in E4M3. Such chips take all four layouts, so fprop,
dgrad and wgrad have this choice. Before cuBLAS 13.6 sm_120 takes only K-major operands.

Packed FP4 needs tiled scales, K that is a multiple of 32, N that is a multiple of 16, and results in BF16 or
FP16. NVFP4 also needs one scale for each tensor, and a bias in the dtype of the result. MXFP4 also needs
`sm_100` or `sm_103`, a build of PyTorch with MSLK, and no bias.

Groups of rows need E4M3 operands that are K-major, K that is a multiple of 32 (MSLK finds rows of scales by
K ÷ 32), scales of `group_scales`, and a build with MSLK. Groups of columns have no such product. Groups of K
would need whole blocks, which depends on data.

Source: ``_scaled_mm_out_cuda``, ``_scaled_gemm`` in PyTorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``,
``_scaled_nvfp4_nvfp4`` and ``_scaled_mxfp4_mxfp4`` there; ``meta_scaled_mm_v2`` and
``_meta_grouped_mm_common`` in its ``torch/_meta_registrations.py``; MSLK's ``mx8mx8bf16_grouped_mm``; for
sm_120 pytorch/pytorch #198126.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.utils import use_aten_gemm_kernels
from torch._inductor.virtualized import V
from torch.nn import functional as F

from mxcompile.formats import BLOCK, ScaleType
from mxcompile.lowering import optional
from mxcompile.lowering.choices import configs
from mxcompile.lowering.kernels.zero_rows import zero_rows
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates.coding import Coding

_MULTIPLE = 16
"""Strides and packed K, in bytes, and N, in elements, are multiples of this."""


def mx_vendor_scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None, *, out: Tensor
) -> Tensor:
    """Writes a [M, K] · b [K, N] (+ bias [N]) to `out` and returns it. a, b: FP8. Scales: tiled bytes."""
    e8m0 = torch.float8_e8m0fnu
    torch._scaled_mm(a, b, scale_a.view(e8m0), scale_b.view(e8m0), bias, out_dtype=out.dtype, out=out)
    return out


def mx_vendor_scaled_grouped_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor
) -> Tensor:
    """Returns a [M, K] · b [G, K, N] of groups of rows, BF16 [M, N]; rows past the last group are 0.

    a, b: E4M3, K-major. Scales: rows of tiles of each group and of each matrix. offs: int32 [G].
    """
    e8m0 = torch.float8_e8m0fnu
    scales = scale_a.view(e8m0), scale_b.view(b.shape[0], -1).view(e8m0)
    out: Tensor = torch._scaled_grouped_mm(a, b, *scales, offs, out_dtype=torch.bfloat16)
    zero_rows(out, offs)
    return out


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
    """Returns a [M, K/2] · b [K/2, N] (+ bias [N]). a, b: bytes. Scales: tiled bytes.

    tensor_a, tensor_b: FP32 tensor scales of any shape with one number in memory.
    """
    recipe = [F.ScalingType.BlockWise1x16.value, F.ScalingType.TensorWise.value]
    scales = [
        [scale.view(torch.float8_e4m3fn), tensor.as_strided([1], [1])]
        for scale, tensor in ((scale_a, tensor_a), (scale_b, tensor_b))
    ]
    return _packed_mm(a, b, scales, recipe, bias, out_dtype)


def mx_vendor_mxfp4_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """Returns a [M, K/2] · b [K/2, N]. a, b: bytes. Scales: tiled bytes."""
    scales = [[scale.view(torch.float8_e8m0fnu)] for scale in (scale_a, scale_b)]
    return _packed_mm(a, b, scales, [F.ScalingType.BlockWise1x32.value], None, out_dtype)


def _packed_mm(
    a: Tensor,
    b: Tensor,
    scales: list[list[Tensor]],
    recipe: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4.value, F.SwizzleType.NO_SWIZZLE.value][: len(recipe)]
    lhs, rhs = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    product: Tensor = torch.ops.aten._scaled_mm_v2(
        lhs, rhs, scales[0], recipe, swizzle, scales[1], recipe, swizzle, bias, out_dtype
    )
    return product


CHOICE = ExternKernelChoice(mx_vendor_scaled_mm)
GROUPED = ExternKernelChoice(mx_vendor_scaled_grouped_mm, has_out_variant=False)
NVFP4 = ExternKernelChoice(mx_vendor_nvfp4_mm, has_out_variant=False)
MXFP4 = ExternKernelChoice(mx_vendor_mxfp4_mm, has_out_variant=False)


def choice(
    operands: Sequence[Any], out_dtype: torch.dtype, target: Target, coding: Coding, *, biased: bool
) -> tuple[Any, dict[str, Any]] | None:
    """Returns the vendor's product of matrices with its arguments; None if it cannot run.

    operands: a [M, K], its scale, b [K, N], its scale, the scales of both tensors, the bias.
    """
    if V.graph.cpp_wrapper or not use_aten_gemm_kernels():
        return None
    if any(len(scale.get_size()) != 1 for scale in (operands[1], operands[3])):
        return None
    bias = operands[-1] if biased else None
    if coding.per_byte == 1:
        return (CHOICE, {}) if fits_fp8(operands, out_dtype, target, bias) else None
    if not fits_packed(operands, out_dtype, target, coding, bias):
        return None
    return (NVFP4 if coding.tensors else MXFP4), {"out_dtype": out_dtype}


def fits_fp8(operands: Sequence[Any], out_dtype: torch.dtype, target: Target, bias: Any | None) -> bool:
    """Whether the vendor's product of FP8 can run."""
    a, _, b, *_ = operands
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    k, n = b.get_size()
    return (
        target.has_library_mx
        and None not in (configs.contiguous(a.get_stride()), configs.contiguous(b.get_stride()))
        and is_multiple(k, BLOCK)
        and is_multiple(n, _MULTIPLE)
        and out_dtype is torch.bfloat16
        and (bias is None or bias.get_dtype() is torch.bfloat16)
        and torch.float8_e4m3fn in (a.get_dtype(), b.get_dtype())
    )


def fits_packed(
    operands: Sequence[Any], out_dtype: torch.dtype, target: Target, coding: Coding, bias: Any | None
) -> bool:
    """Whether the vendor's product of packed FP4 can run."""
    a, _, b, *_ = operands
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    k, n = b.get_size()
    shared = all(coding.arguments.get(name, True) for name in ("SHARED_A", "SHARED_B"))
    return (
        hasattr(torch.ops.aten, "_scaled_mm_v2")
        and (ScaleType.E4M3 if coding.tensors else ScaleType.E8M0) in target.library_fp4
        and (bool(coding.tensors) or (bias is None and optional.has_mslk()))
        and (configs.contiguous(a.get_stride()), configs.contiguous(b.get_stride())) == (1, 0)
        and is_multiple(k, _MULTIPLE)
        and is_multiple(n, _MULTIPLE)
        and out_dtype in (torch.bfloat16, torch.float16)
        and (bias is None or bias.get_dtype() is out_dtype)
        and shared
    )


def fits_groups(operands: Sequence[Any], out_dtype: torch.dtype) -> bool:
    """Whether the vendor's product of groups of rows can run.

    operands: a [M, K], its tiles, b [G, K, N], its tiles, offs.
    """
    a, _, b, _, offs = operands
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    _, k, n = b.get_size()
    return (
        optional.has_mslk()
        and use_aten_gemm_kernels()
        and not V.graph.cpp_wrapper
        and configs.contiguous(a.get_stride()) == 1
        and configs.contiguous(b.get_stride()[1:]) == 0
        and is_multiple(k, BLOCK)
        and is_multiple(n, _MULTIPLE)
        and out_dtype is torch.bfloat16
        and {a.get_dtype(), b.get_dtype()} == {torch.float8_e4m3fn}
        and offs.get_dtype() is torch.int32
    )
