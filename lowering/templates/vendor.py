"""The vendor's product of MX operands, as a choice among those that are timed: ``torch._scaled_mm``.

Offered where its static conditions hold (`fits`): both scales tiled, sizes and strides that are multiples of
16, results in BF16, not both operands E5M2. Chips whose scales are tiled take all four layouts, so dgrad and
wgrad have this choice as fprop has. Never a default: that takes a measurement.

Source: ``_scaled_mm_out_cuda``, ``_scaled_gemm`` in PyTorch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.utils import use_aten_gemm_kernels
from torch._inductor.virtualized import V

from mxcompile.lowering.templates import configs

_MULTIPLE = 16
"""Elements: of K and N."""


def mx_vendor_scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None = None, *, out: Tensor
) -> Tensor:
    """The product a [M, K] · b [K, N] (+ bias [N]) into `out`. a, b: FP8; scales: tiled bytes."""
    e8m0 = torch.float8_e8m0fnu
    torch._scaled_mm(a, b, scale_a.view(e8m0), scale_b.view(e8m0), bias, out_dtype=out.dtype, out=out)
    return out


CHOICE = ExternKernelChoice(mx_vendor_scaled_mm)


def fits(operands: Sequence[Any], out_dtype: torch.dtype) -> bool:
    """Whether the vendor's product can run. operands: a [M, K], its scale, b [K, N], its scale, the bias."""
    a, scale_a, b, scale_b, *bias = operands
    known = V.graph.sizevars.statically_known_multiple_of
    return (
        use_aten_gemm_kernels()
        and not V.graph.cpp_wrapper
        and all(len(scale.get_size()) == 1 for scale in (scale_a, scale_b))
        and None not in (configs.contiguous(a.get_stride()), configs.contiguous(b.get_stride()))
        and all(known(size, _MULTIPLE) for size in b.get_size())
        and out_dtype is torch.bfloat16
        and all(added.get_dtype() is torch.bfloat16 for added in bias)
        and torch.float8_e4m3fn in (a.get_dtype(), b.get_dtype())
    )
