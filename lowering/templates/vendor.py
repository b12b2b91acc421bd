"""The vendor's products of MX operands, beside the templates: `defaults` says which run unmeasured.

    matrices          ``torch._scaled_mm``
    groups of rows    ``torch._scaled_grouped_mm``; rows past the last group, which it leaves as memory has
                      them, are made 0 behind it

Offered where its static conditions hold (`fits`): a chip with tensor memory, both scales tiled, strides and N
that are multiples of 16, K of a block, results in BF16, not both operands E5M2. Such chips take all four
layouts, so dgrad and wgrad have this choice as fprop has; sm_120 takes K-major operands alone before cuBLAS
13.6.

Groups have it where `fits_groups`: both operands E4M3 and K-major, K a multiple of 32 (its scales' rows are
found by K ÷ 32), the scales those of `group_scales`, PyTorch built with the library that has it. Not groups
of columns or of K: of K it wants whole blocks in every group, which only the data says.

Source: ``_scaled_mm_out_cuda``, ``_scaled_gemm`` in PyTorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``,
``_meta_grouped_mm_common`` in its ``torch/_meta_registrations.py``; MSLK's ``mx8mx8bf16_grouped_mm``; of
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

from mxcompile.formats import BLOCK
from mxcompile.lowering import optional
from mxcompile.lowering.kernels.zero_rows import zero_rows
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates import configs

_MULTIPLE = 16
"""Elements: of strides and of N."""


def mx_vendor_scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None, *, out: Tensor
) -> Tensor:
    """The product a [M, K] · b [K, N] (+ bias [N]) into `out`. a, b: FP8; scales: tiled bytes."""
    e8m0 = torch.float8_e8m0fnu
    torch._scaled_mm(a, b, scale_a.view(e8m0), scale_b.view(e8m0), bias, out_dtype=out.dtype, out=out)
    return out


def mx_vendor_scaled_grouped_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor
) -> Tensor:
    """The products a [M, K] · b [G, K, N] of groups of rows, BF16 [M, N]; rows past the last group are 0.

    a, b: E4M3, K-major. Scales: rows of tiles, of each group and of each matrix. offs: int32 [G].
    """
    e8m0 = torch.float8_e8m0fnu
    scales = scale_a.view(e8m0), scale_b.view(b.shape[0], -1).view(e8m0)
    out: Tensor = torch._scaled_grouped_mm(a, b, *scales, offs, out_dtype=torch.bfloat16)
    zero_rows(out, offs)
    return out


CHOICE = ExternKernelChoice(mx_vendor_scaled_mm)
GROUPED = ExternKernelChoice(mx_vendor_scaled_grouped_mm, has_out_variant=False)


def fits(operands: Sequence[Any], out_dtype: torch.dtype, target: Target) -> bool:
    """Whether the vendor's product can run. operands: a [M, K], its scale, b [K, N], its scale, the bias."""
    a, scale_a, b, scale_b, *bias = operands
    known = V.graph.sizevars.statically_known_multiple_of
    k, n = b.get_size()
    return (
        use_aten_gemm_kernels()
        and not V.graph.cpp_wrapper
        and target.has_library_mx
        and all(len(scale.get_size()) == 1 for scale in (scale_a, scale_b))
        and None not in (configs.contiguous(a.get_stride()), configs.contiguous(b.get_stride()))
        and known(k, BLOCK)
        and known(n, _MULTIPLE)
        and out_dtype is torch.bfloat16
        and all(added.get_dtype() is torch.bfloat16 for added in bias)
        and torch.float8_e4m3fn in (a.get_dtype(), b.get_dtype())
    )


def fits_groups(operands: Sequence[Any], out_dtype: torch.dtype) -> bool:
    """The same of groups of rows. operands: a [M, K], its tiles, b [G, K, N], its tiles, offs."""
    a, _, b, _, offs = operands
    known = V.graph.sizevars.statically_known_multiple_of
    _, k, n = b.get_size()
    return (
        optional.has_mslk()
        and use_aten_gemm_kernels()
        and not V.graph.cpp_wrapper
        and configs.contiguous(a.get_stride()) == 1
        and configs.contiguous(b.get_stride()[1:]) == 0
        and known(k, BLOCK)
        and known(n, _MULTIPLE)
        and out_dtype is torch.bfloat16
        and {a.get_dtype(), b.get_dtype()} == {torch.float8_e4m3fn}
        and offs.get_dtype() is torch.int32
    )
