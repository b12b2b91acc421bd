"""The casts of any format in plain torch operations: the definition every kernel is held to.

    scale    E8M0: as in `numerics`. FP32: amax / max, 1 where that is 0, NaN where amax is not finite; or the
             least power of two ≥ amax / max, that of E8M0 under RCEIL, 1 where amax is 0
    element  E8M0: RNE(x · 2^(127 − byte)).  FP32: RNE(x / scale).  Both saturated to ±max. Of formats with
             stochastic elements rounded so instead (see `stochastic`), by the cast's seed and stream
    value    element · scale, in FP32

An amax may be a percentile of the tile (see `amax`), and a scale may come from calls before: then what is not
finite becomes NaN by itself, not by its scale.

One scale for every tile of the format; dimensions before the last two are not tiled together, but for tiles
that span the whole tensor. Sources wider than FP32 are rounded to it first. Elements that torch has no dtype
for are codes: sign, exponent field, mantissa, from the top of the low bits of a byte.

Source: OCP Microscaling Formats v1.0 §5.3 and §6.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mxcompile.errors import FormatError
from mxcompile.formats import stochastic
from mxcompile.formats.amax import AmaxKind
from mxcompile.formats.numerics import inverse_scale_value, scale_bytes, scale_value
from mxcompile.formats.types import WHOLE, ElemType, Format, Rounding, Tile


def extents(ndim: int, block_dim: int, tile: Tile) -> list[int]:
    """How many elements of each dimension share a scale; `WHOLE` for all."""
    dim = block_dim % ndim
    sizes = [WHOLE if tile == Tile.TENSOR else 1] * ndim
    sizes[dim] = tile.along
    if ndim > 1:
        sizes[ndim - 2 if dim == ndim - 1 else ndim - 1] = tile.across
    return sizes


def scale_shape(shape: Sequence[Any], block_dim: int, tile: Tile) -> list[Any]:
    """Shape of the scales of a tensor of `shape`, also of symbolic sizes."""
    every = extents(len(shape), block_dim, tile)
    return [
        1 if extent == WHOLE else (size + extent - 1) // extent
        for size, extent in zip(shape, every, strict=True)
    ]


def _tiled(x: Tensor, every: Sequence[int]) -> Tensor:
    """`x` with each dimension split in two, tiles and places in a tile, the last tiles padded with zeros."""
    pads: list[int] = []
    sizes: list[int] = []
    for size, extent in zip(x.shape, every, strict=True):
        length = extent or max(size, 1)
        count = 1 if extent == WHOLE else -(-size // length)
        sizes += [count, length]
        pads = [0, count * length - size, *pads]
    return F.pad(x, pads).reshape(sizes)


def _whole(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of `shape` that `_tiled` split."""
    sizes = [tiles.shape[2 * dim] * tiles.shape[2 * dim + 1] for dim in range(len(shape))]
    joined = tiles.reshape(sizes)
    for dim, size in enumerate(shape):
        joined = joined.narrow(dim, 0, size)
    return joined.contiguous()


def _spread(scale: Tensor) -> Tensor:
    """Scales with a dimension of 1 after each, as `_tiled` has places."""
    return scale.reshape([size for length in scale.shape for size in (length, 1)])


def fp32_scale(amax: Tensor, fmt: Format) -> Tensor:
    """FP32 scales of the maxima `amax`: amax / max or the next power of two, 1 for 0, NaN if not finite."""
    if fmt.pow2:
        scale = scale_value(scale_bytes(amax, fmt.elem, Rounding.RCEIL))
        return torch.where(amax == 0, 1.0, scale)
    scale = amax / fmt.elem.max
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def encode_tensors(
    x: Tensor,
    block_dim: int,
    fmt: Format,
    seed: Tensor | None = None,
    stream: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns qdata (shape of `x`) and scales (`scale_shape`) for `x` contracted along `block_dim`.

    seed, stream: see `encode_with`. scale: replaces the scale of `x`.
    """
    scale = scales_of(x, block_dim, fmt) if scale is None else scale.clone()
    return encode_with(x, scale, block_dim, fmt, seed, stream), scale


def scales_of(x: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """Scales of `x` contracted along `block_dim`."""
    tiles = _tiled(x.to(torch.float32), extents(x.ndim, block_dim, fmt.tile))
    inside = list(range(1, tiles.ndim, 2))
    amax = tiles.abs().amax(inside)
    if fmt.amax.kind is AmaxKind.PERCENTILE:
        reached = _percentile(x, block_dim, fmt)
        amax = torch.where(amax.isfinite(), reached, amax)
    if fmt.rounding is not None:
        return scale_bytes(amax, fmt.elem, fmt.rounding).to(torch.uint8)
    return fp32_scale(amax, fmt)


def _percentile(x: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """Returns the smallest magnitude of each tile that `fmt`'s share of its elements do not exceed."""
    every = extents(x.ndim, block_dim, fmt.tile)
    magnitudes = _tiled(x.to(torch.float32).abs(), every)
    held = _tiled(torch.ones_like(x, dtype=torch.bool), every)  # not what pads the last tiles
    outer, inside = list(range(0, magnitudes.ndim, 2)), list(range(1, magnitudes.ndim, 2))
    shape = [magnitudes.shape[dim] for dim in outer]
    rows = magnitudes.masked_fill(~held, -1.0).permute(*outer, *inside).flatten(len(shape))
    counts = held.permute(*outer, *inside).flatten(len(shape)).sum(-1)
    if rows.numel() == 0:
        return torch.zeros(shape, device=x.device)
    rank = (counts.to(torch.float64) * (fmt.amax.value / 100)).ceil().to(torch.int64).clamp(min=1)
    place = (rows.shape[-1] - counts + rank - 1).clamp(0, rows.shape[-1] - 1)
    return rows.sort(-1).values.gather(-1, place.unsqueeze(-1)).squeeze(-1).clamp(min=0.0)


def encode_with(
    x: Tensor, scale: Tensor, block_dim: int, fmt: Format, seed: Tensor | None = None, stream: int = 0
) -> Tensor:
    """Qdata of `x` over `scale`, whatever that was made from.

    seed: for formats with stochastic elements, int64 [1], 0 to 2^32 − 1; `FormatError` without it. stream:
    tells casts of one seed apart.
    """
    tiles = _tiled(x.to(torch.float32), extents(x.ndim, block_dim, fmt.tile))
    if fmt.rounding is not None:
        over = tiles * _spread(inverse_scale_value(scale.to(torch.int32)))
    else:
        over = tiles / _spread(scale)
    if fmt.amax.stateful:
        over = torch.where(tiles.isfinite(), over, torch.nan)
    y = _whole(over.clamp(-fmt.elem.max, fmt.elem.max), x.shape)
    if fmt.stochastic:
        if seed is None:
            raise FormatError(f"a cast to {fmt} needs a seed")
        y = stochastic.rounded(y, fmt.elem, stochastic.words(y.shape, stream, seed))
    return to_elements(y, fmt.elem)


def decode_tensors(qdata: Tensor, scale: Tensor, block_dim: int, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Returns the values of `qdata` and `scale`, rounded once from FP32 to `dtype`; contiguous."""
    tiles = _tiled(element_values(qdata, fmt.elem), extents(qdata.ndim, block_dim, fmt.tile))
    factor = scale_value(scale.to(torch.int32)) if fmt.rounding is not None else scale
    return _whole(tiles * _spread(factor), qdata.shape).to(dtype)


def to_elements(y: Tensor, elem: ElemType) -> Tensor:
    """Returns `y` (FP32, |y| ≤ max or NaN) to nearest even, as stored elements; NaN has the code of 0."""
    if not elem.is_coded:
        return y.to(elem.dtype)
    magnitude = y.abs().nan_to_num(0.0)
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=elem.min_exponent)
    ulp = ((exponent - elem.mantissa_bits + 127) << 23).view(torch.float32)
    steps = torch.round(magnitude / ulp).to(torch.int32)  # to even; up to 2^(mantissa_bits + 1)
    field = exponent - elem.min_exponent
    code = (field << elem.mantissa_bits) + steps  # a normal's leading bit counts as one more exponent
    code = code | (y.signbit().to(torch.int32) << (elem.bits - 1))
    return torch.where(y.isnan(), 0, code).to(torch.uint8)


def element_values(qdata: Tensor, elem: ElemType) -> Tensor:
    """FP32 values of stored elements."""
    if not elem.is_coded:
        return qdata.to(torch.float32)
    return _values(elem).to(qdata.device)[qdata.to(torch.int64)]


@functools.cache
def _values(elem: ElemType) -> Tensor:
    """The value of every code."""
    mantissas, fields = 1 << elem.mantissa_bits, 1 << (elem.bits - 1 - elem.mantissa_bits)
    step = 2.0 ** (elem.min_exponent - elem.mantissa_bits)
    positive = [
        (mantissa + mantissas * (field > 0)) * 2.0 ** (max(field, 1) - 1) * step
        for field in range(fields)
        for mantissa in range(mantissas)
    ]
    return torch.tensor(positive + [-value for value in positive])
