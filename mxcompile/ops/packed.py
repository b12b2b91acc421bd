"""Operators of packed FP4: casts in the layout that the chip's FP4 instruction reads, and products.

    encode_packed        x[…, M, N] → bytes, scale     bytes […, M, N/2] along rows, […, N, M/2] along columns
    encode_packed_both   x[…, M, N] → both of each     along rows, then along columns; not of random elements
    tile_scales          scale bytes [rows, blocks] → the same tiled
    packed_mm            a[…, M, K] · b[…, K, N] (· alpha) (+ bias)          FP32 accumulation, rounded once
    packed_grouped_mm    one GEMM per group, the groups given by `offs` as in `aten._grouped_mm`

A byte holds two codes that follow each other along the contraction, the first in its low half, as in
`torch.float4_e2m1fn_x2`. The contraction is innermost in memory, whichever dimension it is of the source. If
its length is odd, the high half of the last byte is 0. Matrices of a batch are cast one by one. Products take
bytes a […, M, K/2] and b […, K/2, N], the transpose of a cast; groups of K end where `offs` counts elements.

Scales are bytes, one for each block along the contraction: E8M0, or E4M3 with an FP32 scale of each tensor
beside it (`known_scale` of its amax), whose product alpha is. They are tiled (`formats.scale_tiles`), of
matrices alone, or row-major, […, rows, blocks] of a cast and of a, […, blocks, N] of b. The scale of a tensor
is one number, or of matrices and batches one for each row of a or column of b. A format with a transform
transforms x along columns first (`formats.hadamard`); the amax is the transformed tensor's. Along rows such a
format is a `FormatError`.

The lowering makes these of `cast`, `matmul` and `grouped_matmul`; the implementations are the
reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mxcompile.errors import FormatError
from mxcompile.formats import Format, ScaleLayout, Tile, num_blocks
from mxcompile.formats import scale_layout as scale_layout_called
from mxcompile.formats.encoding import decode_tensors, encode_tensors, extents, pack, unpack
from mxcompile.formats.hadamard import num_transformed, transformed
from mxcompile.formats.scale_tiles import tile_scale, tiled_length, untile_scale
from mxcompile.ops.define import Spec, define
from mxcompile.ops.mx import (
    grouped_product,
    product,
    spec_grouped_matmul,
    spec_matmul,
)


def _is_tiled(x: Tensor, word: str) -> bool:
    """Whether the scales of `x` are to be tiled; `FormatError` for a tensor that is not a matrix."""
    tiled = scale_layout_called(word) is ScaleLayout.TILED_128X4
    if tiled and x.ndim != 2:
        raise FormatError(
            f"scales of a tensor of {x.ndim} dimensions cannot be tiled: only those of a matrix"
        )
    return tiled


def _encode_packed(
    x: Tensor,
    block_dim: int,
    fmt: str,
    seed: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
    scale_layout: str = ScaleLayout.TILED_128X4,
) -> tuple[Tensor, Tensor]:
    form, tiled, dim = Format.of(fmt), _is_tiled(x, scale_layout), block_dim % x.ndim
    _spec_encode_packed(x, dim, fmt, scale_layout=scale_layout)  # whose errors are this one's
    if form.hadamard is not None:
        x, form = transformed(x, dim, form.hadamard), form.untransformed
    qdata, scale = encode_tensors(x, dim, form, seed, stream, amax=amax)
    across = 2 * x.ndim - 3 - dim
    scale = scale.view(torch.uint8).repeat_interleave(extents(x.ndim, dim, form.tile)[across], across)
    scale = scale.narrow(across, 0, x.shape[across])
    if dim == x.ndim - 2:
        qdata, scale = qdata.mT, scale.mT
    packed = pack(F.pad(qdata, (0, qdata.shape[-1] % form.elem.per_byte)), -1, form.elem)
    return packed, tile_scale(scale) if tiled else scale.contiguous()


def _spec_encode_packed(
    x: Tensor,
    block_dim: int,
    fmt: str,
    seed: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
    scale_layout: str = ScaleLayout.TILED_128X4,
) -> list[Spec]:
    form, along_rows = Format.of(fmt), block_dim % x.ndim == x.ndim - 1
    if along_rows and form.hadamard is not None:
        raise FormatError(f"a cast along rows to {form}: its transform runs along columns")
    *batch, rows, length = x.shape if along_rows else x.mT.shape
    length = length if form.hadamard is None else num_transformed(length)
    blocks = num_blocks(length, form.tile.along)
    scale = [tiled_length(rows, blocks)] if _is_tiled(x, scale_layout) else [*batch, rows, blocks]
    return [((*batch, rows, num_blocks(length, form.elem.per_byte)), torch.uint8), (scale, torch.uint8)]


def _encode_packed_both(
    x: Tensor,
    row_fmt: str,
    column_fmt: str,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    scale_layout: str = ScaleLayout.TILED_128X4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _encode_packed(x, -1, row_fmt, amax=row_amax, scale_layout=scale_layout)
    return *rows, *_encode_packed(x, -2, column_fmt, amax=column_amax, scale_layout=scale_layout)


def _spec_encode_packed_both(
    x: Tensor,
    row_fmt: str,
    column_fmt: str,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    scale_layout: str = ScaleLayout.TILED_128X4,
) -> list[Spec]:
    rows = _spec_encode_packed(x, -1, row_fmt, scale_layout=scale_layout)
    return rows + _spec_encode_packed(x, -2, column_fmt, scale_layout=scale_layout)


def _tile_scales(scale: Tensor) -> Tensor:
    return tile_scale(scale)


def _spec_tile_scales(scale: Tensor) -> list[Spec]:
    return [((tiled_length(*scale.shape),), torch.uint8)]


def _packed_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensor_a: Tensor | None = None,
    tensor_b: Tensor | None = None,
) -> Tensor:
    left, right = _values(a, scale_a, format_a), _values(b.mT, _rows(scale_b), format_b)
    return product(left, right.mT, bias, out_dtype, _alpha(tensor_a, tensor_b))


def _packed_grouped_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    format_a: str,
    format_b: str,
    tensor_a: Tensor | None = None,
    tensor_b: Tensor | None = None,
) -> Tensor:
    left, right = _values(a, scale_a, format_a), _values(b.mT, _rows(scale_b), format_b)
    out, alpha = grouped_product(left, right.mT, offs), _alpha(tensor_a, tensor_b)
    return (out if alpha is None else out * alpha).to(out_dtype)


def _alpha(tensor_a: Tensor | None, tensor_b: Tensor | None) -> Tensor | None:
    return None if tensor_a is None or tensor_b is None else tensor_a * tensor_b


def _rows(scale: Tensor) -> Tensor:
    """The scales of b, one row for each of its columns."""
    return scale if scale.ndim == 1 else scale.mT


def _values(packed: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """FP32 [.., rows, K], without the scale of the tensor."""
    form = Format.of(fmt)
    codes = unpack(packed, -1, form.elem)
    if scale.ndim == 1:
        scale = untile_scale(scale, codes.shape[0], num_blocks(codes.shape[1], form.tile.along))
    rows = scale.contiguous().view(form.scale.dtype)
    return decode_tensors(codes, rows, -1, replace(form, tile=Tile(1, form.tile.along)), torch.float32)


encode_packed = define(
    "encode_packed(Tensor x, int block_dim, str fmt, Tensor? seed=None, int stream=0, Tensor? amax=None,"
    " str scale_layout='128x4') -> (Tensor packed, Tensor scale)",
    _encode_packed,
    _spec_encode_packed,
)
encode_packed_both = define(
    "encode_packed_both(Tensor x, str row_fmt, str column_fmt, Tensor? row_amax=None,"
    " Tensor? column_amax=None, str scale_layout='128x4')"
    " -> (Tensor rows, Tensor row_scale, Tensor columns, Tensor column_scale)",
    _encode_packed_both,
    _spec_encode_packed_both,
)
tile_scales = define("tile_scales(Tensor scale) -> Tensor", _tile_scales, _spec_tile_scales)
packed_mm = define(
    "packed_mm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " str format_a, str format_b, Tensor? tensor_a=None, Tensor? tensor_b=None) -> Tensor",
    _packed_mm,
    spec_matmul,
)
packed_grouped_mm = define(
    "packed_grouped_mm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor offs, ScalarType out_dtype,"
    " str format_a, str format_b, Tensor? tensor_a=None, Tensor? tensor_b=None) -> Tensor",
    _packed_grouped_mm,
    spec_grouped_matmul,
)
