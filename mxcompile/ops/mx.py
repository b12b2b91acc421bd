"""Operators of stored weights, and of MXFP8 where a kernel of its own does more than a cast or a product.

All are functional and return contiguous tensors. Scales are E8M0 bytes as uint8, one a block, row-major.
Those of a matrix may be tiled instead (see `scale_tiles`): a vector, which products and `dequantize` know by
its rank. The implementations here are the reference; a compiled graph runs what `lowering` makes of the
operators instead.

    dequantize           qdata, scale → x; of a weight stored in another format, with its word, packed → x;
                         one of two levels has a global scale, without which x is that many times as large
    dequantize_tiles     qdata, scale of 32×32 tiles → x
    weight_only_mm       x[M, K] · dequantize(w[N, K])ᵀ (+ bias[N]), FP32 accumulation; w as for dequantize
    quantize_mm          matmul(cast(x), b) (+ bias[N]) of matrices, x cast where it is multiplied
    grouped_mm           one GEMM per group of operands that are not MX data, in any floating-point dtype
    flatten              x → the same elements, one dimension (see `passes/flatten.py`)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mxcompile import formats
from mxcompile.formats import Format, num_blocks
from mxcompile.formats.encoding import decode_tensors, dequantize_tensors, quantize_tensors, unpack
from mxcompile.formats.scale_tiles import untile_scale
from mxcompile.ops.define import Spec, define


def _dequantize(
    qdata: Tensor,
    scale: Tensor,
    block_dim: int,
    dtype: torch.dtype,
    fmt: str = "",
    global_scale: Tensor | None = None,
) -> Tensor:
    if fmt:
        form = Format.of(fmt)
        codes = unpack(qdata, block_dim, form.elem)
        return decode_tensors(codes, scale, block_dim, form, dtype, global_scale=global_scale)
    if qdata.ndim == 2 and scale.ndim == 1:
        rows, blocks = qdata.shape[1 - block_dim % 2], num_blocks(qdata.shape[block_dim])
        scale = untile_scale(scale, rows, blocks)
        scale = scale if block_dim % 2 == 1 else scale.t()
    return dequantize_tensors(qdata, scale, block_dim, dtype)


def unpacked_shape(packed: Tensor, dim: int, fmt: str) -> list[Any]:
    """Shape of the elements of `packed`, in the format `fmt`, bytes of several along `dim`."""
    shape = list(packed.shape)
    shape[dim] = shape[dim] * Format.of(fmt).elem.per_byte
    return shape


def _spec_dequantize(
    qdata: Tensor, scale: Tensor, block_dim: int, dtype: torch.dtype, fmt: str = "", *_: Any
) -> list[Spec]:
    return [(unpacked_shape(qdata, block_dim, fmt) if fmt else qdata.shape, dtype)]


def _dequantize_tiles(qdata: Tensor, scale: Tensor, rounding: str, dtype: torch.dtype) -> Tensor:
    rows = scale.repeat_interleave(formats.BLOCK, -2).narrow(-2, 0, qdata.shape[-2])
    return dequantize_tensors(qdata, rows, -1, dtype)


def _spec_dequantize_tiles(qdata: Tensor, scale: Tensor, rounding: str, dtype: torch.dtype) -> list[Spec]:
    return [(qdata.shape, dtype)]


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, alpha: Tensor | None = None
) -> Tensor:
    """The product of FP32 operands (· alpha) (+ bias), rounded once."""
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
    """The product of matrices or batches of them."""
    return [((*a.shape[:-1], b.shape[-1]), out_dtype)]


def _weight_only_mm(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fmt: str = "",
    global_scale: Tensor | None = None,
) -> Tensor:
    weight = _dequantize(qdata, scale, -1, torch.float32, fmt, global_scale)
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
    elem_dtype: torch.dtype,
    rounding: str,
    out_dtype: torch.dtype,
    qdata: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The product of `x`, cast along K. qdata, scale: that cast, if the lowering may read it instead."""
    left = dequantize_tensors(*quantize_tensors(x, -1, elem_dtype, rounding), -1, torch.float32)
    return product(left, dequantize(b, scale_b, -2, torch.float32), bias, out_dtype)


def _spec_quantize_mm(
    x: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    elem_dtype: torch.dtype,
    rounding: str,
    out_dtype: torch.dtype,
    *_: Any,
) -> list[Spec]:
    return [((x.shape[0], b.shape[1]), out_dtype)]


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """One product per group of the operands, the groups given by `offs` as in `aten._grouped_mm`.

    Rows and columns past the last group are 0.
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
    """The products of groups."""
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


dequantize = define(
    "dequantize(Tensor qdata, Tensor scale, int block_dim, ScalarType dtype, str fmt='',"
    " Tensor? global_scale=None) -> Tensor",
    _dequantize,
    _spec_dequantize,
)
dequantize_tiles = define(
    "dequantize_tiles(Tensor qdata, Tensor scale, str rounding, ScalarType dtype) -> Tensor",
    _dequantize_tiles,
    _spec_dequantize_tiles,
)
weight_only_mm = define(
    "weight_only_mm(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, ScalarType out_dtype, str fmt='',"
    " Tensor? global_scale=None) -> Tensor",
    _weight_only_mm,
    _spec_weight_only_mm,
)
quantize_mm = define(
    "quantize_mm(Tensor x, Tensor b, Tensor scale_b, Tensor? bias, ScalarType elem_dtype, str rounding,"
    " ScalarType out_dtype, Tensor? qdata=None, Tensor? scale=None) -> Tensor",
    _quantize_mm,
    _spec_quantize_mm,
)
grouped_mm = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", grouped_product, _spec_grouped_mm
)
flatten = define("flatten(Tensor x) -> Tensor", _flatten, _spec_flatten)
