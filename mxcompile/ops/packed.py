"""Products of packed FP4 operands, as a cast makes them with the contraction innermost (`Copy.packed`).

    tile_scales          scale bytes [rows, blocks] → the same tiled
    packed_mm            a[…, M, K] · b[…, K, N] (· alpha) (+ bias)          FP32 accumulation, rounded once
    packed_grouped_mm    one GEMM per group, the groups given by `offs` as in `aten._grouped_mm`

Products take bytes a […, M, K/2] and b […, K/2, N], the transpose of a cast; groups of K end where `offs`
counts elements. Scales are bytes: E8M0, or E4M3 with an FP32 scale of each tensor beside it (`known_scale` of
its amax), whose product alpha is. They are tiled (`formats.scale_tiles`), of matrices alone, or row-major,
[…, rows, blocks] of a and […, blocks, N] of b. The scale of a tensor is one number, or of matrices and
batches one for each row of a or column of b.

The lowering makes these of `matmul` and `grouped_matmul`; the implementations are the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mxcompile.formats import Format, Tile, num_blocks
from mxcompile.formats.encoding import decode_tensors, unpack
from mxcompile.formats.scale_tiles import tile_scale, tiled_length, untile_scale
from mxcompile.ops.define import Spec, define
from mxcompile.ops.mx import (
    grouped_product,
    product,
    spec_grouped_matmul,
    spec_matmul,
)


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
