"""Operators of FP4: the cast in the layout that an FP4 GEMM reads, and that GEMM.

    encode_packed   x[M, N] → bytes, scale                 bytes [M, N/2] along rows, [N, M/2] along columns
    packed_mm       bytes_a[M, K/2] · bytes_b[N, K/2]ᵀ (+ bias[N])      FP32 accumulation, rounded once

A byte holds two codes that follow each other along the contraction, the first in its low half, as in
`torch.float4_e2m1fn_x2`. The contraction is innermost in memory, whichever dimension it is of the source.
Scales are the bytes of `formats.scale_tiles`, one for each block along the contraction: E8M0, or E4M3 with
an FP32 scale of each tensor beside it (`known_scale` of its amax). A format with a transform transforms x
along the contraction first (`formats.hadamard`); the amax is the transformed tensor's.

The lowering makes these of `encode` and `encoded_mm`; the implementations are the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mxcompile.formats import Format, Tile
from mxcompile.formats.encoding import decode_tensors, encode_tensors, extents, pack, unpack
from mxcompile.formats.hadamard import transformed
from mxcompile.formats.scale_tiles import tile_scale, tiled_length, untile_scale
from mxcompile.ops.define import Spec, define
from mxcompile.ops.mx import product


def _encode_packed(
    x: Tensor,
    block_dim: int,
    fmt: str,
    seed: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    form = Format.of(fmt)
    if form.hadamard is not None:
        x, form = transformed(x, block_dim, form.hadamard), form.untransformed
    qdata, scale = encode_tensors(x, block_dim, form, seed, stream, amax=amax)
    across = 1 - block_dim % 2
    scale = scale.repeat_interleave(extents(2, block_dim, form.tile)[across], across)
    scale = scale.narrow(across, 0, x.shape[across])
    if block_dim % 2 == 0:
        qdata, scale = qdata.t(), scale.t()
    return pack(qdata, -1, form.elem), tile_scale(scale.view(torch.uint8))


def _spec_encode_packed(x: Tensor, block_dim: int, fmt: str, *_: object) -> list[Spec]:
    rows, length = x.shape if block_dim % 2 else (x.shape[1], x.shape[0])
    along = Format.of(fmt).tile.along
    tiles = tiled_length(rows, (length + along - 1) // along)
    return [((rows, length // 2), torch.uint8), ((tiles,), torch.uint8)]


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
    "encode_packed(Tensor x, int block_dim, str fmt, Tensor? seed=None, int stream=0, Tensor? amax=None)"
    " -> (Tensor packed, Tensor scale)",
    _encode_packed,
    _spec_encode_packed,
)
packed_mm = define(
    "packed_mm(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor? bias, ScalarType out_dtype,"
    " str format_a, str format_b, Tensor? tensor_a=None, Tensor? tensor_b=None) -> Tensor",
    _packed_mm,
    _spec_packed_mm,
)
