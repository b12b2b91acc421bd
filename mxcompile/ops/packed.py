"""Operators of FP4: the cast in the layout that an FP4 GEMM reads, and that GEMM.

    encode_packed        x[…, M, N] → bytes, scale     bytes […, M, N/2] along rows, […, N, M/2] along columns
    encode_packed_both   x[…, M, N] → both of each     along rows, then along columns; not of random elements
    packed_mm            bytes_a[M, K/2] · bytes_b[N, K/2]ᵀ (+ bias[N])      FP32 accumulation, rounded once

A byte holds two codes that follow each other along the contraction, the first in its low half, as in
`torch.float4_e2m1fn_x2`. The contraction is innermost in memory, whichever dimension it is of the source. If
its length is odd, the high half of the last byte is 0. Matrices of a batch are cast one by one.

Scales are bytes, one for each block along the contraction: E8M0, or E4M3 with an FP32 scale of each tensor
beside it (`known_scale` of its amax). They are tiled (`formats.scale_tiles`), of matrices alone, or
row-major, […, rows, blocks]. A format with a transform transforms x along columns first (`formats.hadamard`);
the amax is the transformed tensor's. Along rows such a format is a `FormatError`.

The lowering makes these of `encode` and `encoded_mm`; the implementations are the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mxcompile.errors import FormatError
from mxcompile.formats import Format, ScaleLayout, Tile, num_blocks
from mxcompile.formats.encoding import decode_tensors, encode_tensors, extents, pack, unpack
from mxcompile.formats.hadamard import num_transformed, transformed
from mxcompile.formats.scale_tiles import tile_scale, tiled_length, untile_scale
from mxcompile.ops.define import Spec, define
from mxcompile.ops.mx import is_tiled, product


def _encode_packed(
    x: Tensor,
    block_dim: int,
    fmt: str,
    seed: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
    scale_layout: str = ScaleLayout.TILED_128X4,
) -> tuple[Tensor, Tensor]:
    form, tiled, dim = Format.of(fmt), is_tiled(x, scale_layout), block_dim % x.ndim
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
    scale = [tiled_length(rows, blocks)] if is_tiled(x, scale_layout) else [*batch, rows, blocks]
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
    left, right = _values(a, scale_a, format_a), _values(b, scale_b, format_b)
    alpha = None if tensor_a is None or tensor_b is None else tensor_a * tensor_b
    return product(left, right.t(), bias, out_dtype, alpha)


def _values(packed: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """FP32 [rows, K], without the scale of the tensor."""
    form = Format.of(fmt)
    codes = unpack(packed, -1, form.elem)
    blocks = -(-codes.shape[1] // form.tile.along)
    rows = untile_scale(scale, codes.shape[0], blocks).contiguous().view(form.scale.dtype)
    return decode_tensors(codes, rows, -1, replace(form, tile=Tile(1, form.tile.along)), torch.float32)


def _spec_packed_mm(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *_: object,
) -> list[Spec]:
    return [((a.shape[0], b.shape[0]), out_dtype)]


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
packed_mm = define(
    "packed_mm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " str format_a, str format_b, Tensor? tensor_a=None, Tensor? tensor_b=None) -> Tensor",
    _packed_mm,
    _spec_packed_mm,
)
