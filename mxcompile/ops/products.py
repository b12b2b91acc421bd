"""Products, and their scales. Formats are words (`Format.parse`).

    scale_bytes         scales of qdata → the bytes that a product reads, one per block, in a layout. FP32
                        powers of two become E8M0 bytes, one per 32 elements (see `Format.mx_elem`)
    matmul              a[…, M, K] · b[…, K, N] (· tensors) (+ bias[N]), accumulated in FP32, rounded once
    grouped_matmul      one GEMM per group; `offs` has the ends of the groups, as in `aten._grouped_mm`
    grouped_mm          the same of operands in any floating-point dtype
    weight_only_mm      x[M, K] · decode(w[N, K])ᵀ (+ bias[N]), accumulated in FP32; w as for `decode`,
                        or, without scales, in the dtype of x
    quantize_mm         matmul(cast(x), b) (+ bias[N]) of matrices; the product's kernel casts x
    flatten             x → its elements in one dimension (see `passes/flatten.py`)

Scales are E8M0 bytes, FP32 or E4M3, one per tile: ⌈n/extent⌉ along a dimension, 1 along a dimension that the
tile spans. `block_dim` is the contraction dimension. Elements without a torch dtype are codes, one per byte.

`tensors` has the FP32 scales of both operands of a two-level product: [1], or one for each row of the operand
(`known_scale` of the amax), or 1 / global_scale for a weight stored in two levels. All broadcast to the
product.

Packed operands are bytes: a[…, M, K/2], and b[…, K/2, N] as the transpose of a copy with the contraction
innermost (`Copy.packed`). Their scales are bytes: tiled (`formats.scale_tiles`), for matrices only, or
row-major, […, M, blocks] for a and […, blocks, N] for b. `offs` counts elements, also along a packed K.

The implementations are the reference; compiled graphs run kernels of the lowering instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxcompile.formats import BLOCK, Format, ScaleLayout, Tile, num_blocks
from mxcompile.formats.encoding import encode_tensors, extents, scale_shape
from mxcompile.formats.scale_tiles import tile_scale, tiled_length
from mxcompile.ops.cast import decoded
from mxcompile.ops.define import Spec, define


def _scale_bytes(scale: Tensor, qdata: Tensor, block_dim: int, fmt: str, scale_layout: str) -> Tensor:
    form, dim = Format.parse(fmt), block_dim % qdata.ndim
    bytes_ = scale if form.packed else _block_bytes(scale, qdata, dim, form)
    if scale_layout == ScaleLayout.ROW_MAJOR:
        return bytes_.contiguous()
    return tile_scale(bytes_ if dim == qdata.ndim - 1 else bytes_.t())


def _block_bytes(scale: Tensor, qdata: Tensor, dim: int, form: Format) -> Tensor:
    """Returns power-of-two scales as E8M0 bytes, one for each block of 32 in each row."""
    bytes_ = scale if form.rounding is not None else (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    for axis, extent in enumerate(extents(qdata.ndim, dim, form.tile)):
        per, size = (BLOCK, num_blocks(qdata.shape[axis])) if axis == dim else (1, qdata.shape[axis])
        bytes_ = bytes_.repeat_interleave(extent // per, axis).narrow(axis, 0, size)
    return bytes_


def _spec_scale_bytes(
    scale: Tensor, qdata: Tensor, block_dim: int, fmt: str, scale_layout: str
) -> list[Spec]:
    packed = Format.parse(fmt).packed
    shape = scale.shape if packed else scale_shape(qdata.shape, block_dim, Tile(1, BLOCK))
    if scale_layout == ScaleLayout.TILED_128X4:
        shape = [tiled_length(shape[1 - block_dim % 2], shape[block_dim])]
    return [(shape, torch.uint8)]


def _values(qdata: Tensor, scale: Tensor, dim: int, fmt: str) -> Tensor:
    return decoded(qdata, scale, dim, fmt, torch.float32)


def _matmul(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensors: Sequence[Tensor] | None = None,
    *,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    out = multiply(_values(a, scale_a, -1, format_a), _values(b, scale_b, -2, format_b))
    return _rounded(out * functools.reduce(torch.mul, tensors) if tensors else out, out_dtype, bias)


def _grouped_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, *how: Any
) -> Tensor:
    multiply = functools.partial(grouped_product, offs=offs)
    return _matmul(a, scale_a, b, scale_b, None, *how, multiply=multiply)


def _rounded(out: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Returns the FP32 product `out` (+ bias), rounded once to `out_dtype`."""
    return (out if bias is None else out + bias).to(out_dtype)


def _weight_only_mm(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fmt: str,
    global_scale: Tensor | None = None,
) -> Tensor:
    weight = qdata.to(torch.float32)
    if scale is not None:
        weight = decoded(qdata, scale, -1, fmt, torch.float32, global_scale=global_scale)
    return _rounded(x.to(torch.float32) @ weight.t(), out_dtype, bias)


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
    return _rounded(values @ _values(b, scale_b, -2, format_b), out_dtype, bias)


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Returns one product per group; `offs` has the ends of the groups, as in `aten._grouped_mm`.

    Rows and columns of the result past the last group are 0.
    """
    ends = offs.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    match a.ndim, b.ndim:
        case 2, 2:
            return torch.stack([a[:, span] @ b[span] for span in spans])
        case 3, 3:
            return a @ b
    out = a.new_zeros(_grouped_shape(a, b, offs))
    for group, span in enumerate(spans):
        if a.ndim == 2:
            out[span] = a[span] @ b[group]
        else:
            out[:, span] = a[group] @ b[:, span]
    return out


def _grouped_shape(a: Tensor, b: Tensor, offs: Tensor) -> tuple[Any, ...]:
    match a.ndim, b.ndim:
        case 2, 2:
            return (offs.shape[0], a.shape[0], b.shape[1])
        case 3, 2:
            return (a.shape[1], b.shape[-1])
        case _:
            return (*a.shape[:-1], b.shape[-1])


scale_bytes = define(
    "scale_bytes(Tensor scale, Tensor qdata, int block_dim, str fmt, str scale_layout) -> Tensor",
    _scale_bytes,
    _spec_scale_bytes,
)
matmul = define(
    "matmul(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " str format_a, str format_b, Tensor[]? tensors=None) -> Tensor",
    _matmul,
    lambda a, scale_a, b, scale_b, bias, out_dtype, *_: [((*a.shape[:-1], b.shape[-1]), out_dtype)],
)
grouped_matmul = define(
    "grouped_matmul(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor offs,"
    " ScalarType out_dtype, str format_a, str format_b, Tensor[]? tensors=None) -> Tensor",
    _grouped_matmul,
    lambda a, scale_a, b, scale_b, offs, out_dtype, *_: [(_grouped_shape(a, b, offs), out_dtype)],
)
weight_only_mm = define(
    "weight_only_mm(Tensor x, Tensor qdata, Tensor? scale, Tensor? bias, ScalarType out_dtype, str fmt,"
    " Tensor? global_scale=None) -> Tensor",
    _weight_only_mm,
    lambda x, qdata, scale, bias, out_dtype, *_: [((x.shape[0], qdata.shape[0]), out_dtype)],
)
quantize_mm = define(
    "quantize_mm(Tensor x, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype, str format_x,"
    " str format_b, Tensor? qdata=None, Tensor? scale=None) -> Tensor",
    _quantize_mm,
    lambda x, b, scale_b, bias, out_dtype, *_: [((x.shape[0], b.shape[1]), out_dtype)],
)
grouped_mm = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor",
    grouped_product,
    lambda a, b, offs: [(_grouped_shape(a, b, offs), a.dtype)],
)
flatten = define(
    "flatten(Tensor x) -> Tensor", lambda x: x.flatten().clone(), lambda x: [([math.prod(x.shape)], x.dtype)]
)
