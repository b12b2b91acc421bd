"""Products that fuse a cast or a decode, grouped products without a quantized operand, and `flatten`.

    weight_only_mm       x[M, K] · decode(w[N, K])ᵀ (+ bias[N]), accumulated in FP32; w as for `decode`
    quantize_mm          matmul(cast(x), b) (+ bias[N]) of matrices; the product's kernel casts x
    grouped_mm           one GEMM per group of operands in any floating-point dtype
    flatten              x → its elements in one dimension (see `passes/flatten.py`)

The implementations are the reference; compiled graphs run kernels of the lowering instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import Format
from mxcompile.formats.encoding import encode_tensors
from mxcompile.ops.cast import decoded
from mxcompile.ops.define import Spec, define


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, alpha: Tensor | None = None
) -> Tensor:
    """Returns the product of FP32 operands (· alpha) (+ bias), rounded once to `out_dtype`."""
    out = a @ b if alpha is None else a @ b * alpha
    return (out if bias is None else out + bias).to(out_dtype)


def spec_matmul(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *_: Any,
) -> list[Spec]:
    """Returns the `Spec` of the product of matrices or of batches."""
    return [((*a.shape[:-1], b.shape[-1]), out_dtype)]


def _weight_only_mm(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fmt: str,
    global_scale: Tensor | None = None,
) -> Tensor:
    weight = decoded(qdata, scale, -1, fmt, torch.float32, global_scale=global_scale)
    return product(x.to(torch.float32), weight.t(), bias, out_dtype)


def _spec_weight_only_mm(
    x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *_: Any
) -> list[Spec]:
    return [((x.shape[0], qdata.shape[0]), out_dtype)]


def _quantize_mm(
    x: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    format_x: str,
    format_b: str,
    qdata: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Multiplies `x`, cast along K, by `b`. qdata, scale: the cast of x, for kernels that read it."""
    values = decoded(*encode_tensors(x, -1, Format.parse(format_x)), -1, format_x, torch.float32)
    return product(values, decoded(b, scale_b, -2, format_b, torch.float32), bias, out_dtype)


def _spec_quantize_mm(
    x: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *_: Any
) -> list[Spec]:
    return [((x.shape[0], b.shape[1]), out_dtype)]


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Returns one product per group; `offs` has the ends of the groups, as in `aten._grouped_mm`.

    Rows and columns of the result past the last group are 0.
    """
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    match a.ndim, b.ndim:
        case 2, 2:
            out = torch.stack([a[:, span] @ b[span] for span in spans])
        case 2, 3:
            out = a.new_zeros(a.shape[0], b.shape[-1])
            for group, span in enumerate(spans):
                out[span] = a[span] @ b[group]
        case 3, 2:
            out = a.new_zeros(a.shape[1], b.shape[-1])
            for group, span in enumerate(spans):
                out[:, span] = a[group] @ b[:, span]
        case _:
            out = a @ b
    return out


def spec_grouped_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype, *_: Any
) -> list[Spec]:
    """Returns the `Spec` of the products of groups."""
    return [(_grouped_shape(a, b, offs), out_dtype)]


def _grouped_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[Any, ...]:
    match a.ndim, b.ndim:
        case 2, 2:
            return (offs.shape[0], a.shape[0], b.shape[1])
        case 2, 3:
            return (a.shape[0], b.shape[-1])
        case 3, 2:
            return (a.shape[1], b.shape[-1])
        case _:
            return (*a.shape[:-1], b.shape[-1])


def _spec_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> list[Spec]:
    return [(_grouped_shape(a, b, offs), a.dtype)]


def _flatten(x: Tensor) -> Tensor:
    return x.flatten().clone()


def _spec_flatten(x: Tensor) -> list[Spec]:
    return [([math.prod(x.shape)], x.dtype)]


weight_only_mm = define(
    "weight_only_mm(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, ScalarType out_dtype, str fmt,"
    " Tensor? global_scale=None) -> Tensor",
    _weight_only_mm,
    _spec_weight_only_mm,
)
quantize_mm = define(
    "quantize_mm(Tensor x, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str format_x,"
    " str format_b, Tensor? qdata=None, Tensor? scale=None) -> Tensor",
    _quantize_mm,
    _spec_quantize_mm,
)
grouped_mm = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", grouped_product, _spec_grouped_mm
)
flatten = define("flatten(Tensor x) -> Tensor", _flatten, _spec_flatten)
