"""The casts of any format in plain torch operations: the definition every kernel is held to.

    scale    E8M0: as in `numerics`. FP32: amax / max, 1 where that is 0, NaN where amax is not finite; or the
             least power of two ≥ amax / max, that of E8M0 under RCEIL, 1 where amax is 0. Two levels: E4M3 of
             amax · (G · 1/max), saturated, where G = 448 · max / the amax of the tensor; NaN where that is
             not finite
    element  E8M0: RNE(x · 2^(127 − byte)).  FP32: RNE(x / scale).  Two levels: RNE(x · 1/(scale · 1/G)).
             All saturated to ±max. Of formats with stochastic elements rounded so instead (see `stochastic`),
             by the cast's seed and stream
    value    element · scale, in FP32; of two levels times the scale of the tensor, its amax / (448 · max); of
             a weight stored in two levels element · (scale / G), since G is what is stored

An amax may be a percentile of the tile (see `amax`), and a scale may come from calls before: then what is not
finite becomes NaN by itself, not by its scale.

One scale for every tile of the format; dimensions before the last two are not tiled together, but for tiles
that span the whole tensor. Sources wider than FP32 are rounded to it first. Elements that torch has no dtype
for are codes: sign, exponent field, mantissa, from the top of the low bits of a byte. Stored weights pack
codes of four bits, two a byte, the first in the low half, as `torch.float4_e2m1fn_x2` does.

Source: OCP Microscaling Formats v1.0 §5.3 and §6.3; of two levels arXiv 2509.25149 appendix C, with the
order of operations of Transformer Engine's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mxcompile.errors import FormatError
from mxcompile.formats import stochastic
from mxcompile.formats.amax import AmaxKind
from mxcompile.formats.numerics import inverse_scale_value, scale_bytes, scale_value
from mxcompile.formats.types import (
    BLOCK,
    E4M3,
    FNUZ,
    WHOLE,
    ElemType,
    Format,
    Rounding,
    Tile,
    elem_type,
    rounding,
)

FP32_MAX = torch.finfo(torch.float32).max


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
    return (F.pad(x, pads) if any(pads) else x).reshape(sizes)


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
    scale = amax / fmt.largest
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def tensor_amax(x: Tensor) -> Tensor:
    """The largest magnitude of `x`, FP32 [1]; 0 of no elements."""
    return x.to(torch.float32).abs().amax().reshape(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)


def gain(amax: Tensor, fmt: Format) -> Tensor:
    """G of a tensor: the largest value of two levels / amax, 1 where that is 0, NaN where not finite."""
    largest = torch.full_like(amax, fmt.largest)  # a number over a tensor is its reciprocal, times that
    over = (largest / amax).clamp(max=FP32_MAX)
    return torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, over), torch.nan)


def e4m3_scale(tile_amax: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """E4M3 scales of the maxima `tile_amax` in a tensor whose largest magnitude is `amax`, [1]."""
    over = tile_amax * (gain(amax, fmt) * (1 / fmt.elem.max))
    return over.clamp(max=E4M3.max).to(E4M3.dtype)


def inverse_e4m3_scale(scale: Tensor, amax: Tensor, fmt: Format) -> Tensor:
    """Returns the FP32 factors of elements under E4M3 scales, to be rounded after that."""
    return (1.0 / (scale.to(torch.float32) * (1.0 / gain(amax, fmt)))).clamp(max=FP32_MAX)


def scale_factors(
    scale: Tensor, fmt: Format, amax: Tensor | None = None, global_scale: Tensor | None = None
) -> Tensor:
    """Returns the FP32 factors that elements under `scale` have in values.

    amax: of the tensor, for formats of two levels; or global_scale: G of one that is stored, of as many
    dimensions as `scale`, of the same sizes or 1. Without either the factors lack the scale of the tensor.
    """
    if fmt.rounding is not None:
        return scale_value(scale.to(torch.int32))
    factors = scale.to(torch.float32)
    if global_scale is not None:
        return factors / global_scale
    return factors if amax is None else factors * fp32_scale(amax, fmt)


def encode_tensors(
    x: Tensor,
    block_dim: int,
    fmt: Format,
    seed: Tensor | None = None,
    stream: int = 0,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns qdata (shape of `x`) and scales (`scale_shape`) for `x` contracted along `block_dim`.

    seed, stream, amax: see `encode_with`. scale: replaces the scale of `x`.
    """
    tiles = _tiles(x, block_dim, fmt)
    scale = _scales(tiles, x, block_dim, fmt, amax) if scale is None else scale.clone()
    return _elements(tiles, x.shape, scale, block_dim, fmt, seed, stream, amax), scale


def scales_of(x: Tensor, block_dim: int, fmt: Format, amax: Tensor | None = None) -> Tensor:
    """Scales of `x` contracted along `block_dim`. amax: see `encode_with`."""
    return _scales(_tiles(x, block_dim, fmt), x, block_dim, fmt, amax)


def _tiles(x: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """`x` in FP32, split into the tiles of `fmt`."""
    return _tiled(x.to(torch.float32), extents(x.ndim, block_dim, fmt.tile))


def _scales(tiles: Tensor, x: Tensor, block_dim: int, fmt: Format, amax: Tensor | None) -> Tensor:
    """Scales of `x`, of which `tiles` are."""
    inside = list(range(1, tiles.ndim, 2))
    tile_amax = tiles.abs().amax(inside)
    if fmt.amax.kind is AmaxKind.PERCENTILE:
        reached = _percentile(x, block_dim, fmt)
        tile_amax = torch.where(tile_amax.isfinite(), reached, tile_amax)
    if fmt.two_level:
        return e4m3_scale(tile_amax, _given(amax, fmt), fmt)
    if fmt.rounding is not None:
        return scale_bytes(tile_amax, fmt.elem, fmt.rounding).to(torch.uint8)
    return fp32_scale(tile_amax, fmt)


def _given(amax: Tensor | None, fmt: Format) -> Tensor:
    if amax is None:
        raise FormatError(f"a cast to {fmt} needs the amax of the tensor")
    return amax


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
    x: Tensor,
    scale: Tensor,
    block_dim: int,
    fmt: Format,
    seed: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
) -> Tensor:
    """Qdata of `x` over `scale`, whatever that was made from.

    seed: for formats with stochastic elements, int64 [1], 0 to 2^32 − 1; `FormatError` without it. stream:
    tells casts of one seed apart. amax: of the tensor, FP32 [1], for formats of two levels; `FormatError`
    without it.
    """
    return _elements(_tiles(x, block_dim, fmt), x.shape, scale, block_dim, fmt, seed, stream, amax)


def _elements(
    tiles: Tensor,
    shape: Sequence[int],
    scale: Tensor,
    block_dim: int,
    fmt: Format,
    seed: Tensor | None,
    stream: int,
    amax: Tensor | None,
) -> Tensor:
    """Qdata of a tensor of `shape`, split into `tiles`."""
    if fmt.two_level:
        over = tiles * _spread(inverse_e4m3_scale(scale, _given(amax, fmt), fmt))
    elif fmt.rounding is not None:
        over = tiles * _spread(inverse_scale_value(scale.to(torch.int32)))
    else:
        over = tiles / _spread(scale)
    if fmt.amax.stateful:
        over = torch.where(tiles.isfinite(), over, torch.nan)
    y = _whole(over.clamp(-fmt.elem.max, fmt.elem.max), shape)
    if fmt.stochastic:
        if seed is None:
            raise FormatError(f"a cast to {fmt} needs a seed")
        y = stochastic.rounded(y, fmt.elem, stochastic.halves(y.shape, block_dim, stream, seed))
    return to_elements(y, fmt.elem)


def decode_tensors(
    qdata: Tensor,
    scale: Tensor,
    block_dim: int,
    fmt: Format,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Returns the values of `qdata` and `scale`, rounded once from FP32 to `dtype`; contiguous.

    amax, global_scale: see `scale_factors`.
    """
    tiles = _tiled(element_values(qdata, fmt.elem), extents(qdata.ndim, block_dim, fmt.tile))
    return _whole(tiles * _spread(scale_factors(scale, fmt, amax, global_scale)), qdata.shape).to(dtype)


def quantize_tensors(
    x: Tensor, block_dim: int, elem_dtype: torch.dtype, mode: str, square: bool = False
) -> tuple[Tensor, Tensor]:
    """`encode_tensors` to MXFP8, scales rounded by `mode`.

    With `square` one scale is shared by 32×32 elements of the last two dimensions; its bytes are repeated so
    that they have the shape they have without.
    """
    tile = Tile.SQUARE if square else Tile.ROW
    fmt = Format(elem=elem_type(elem_dtype), rounding=rounding(mode), tile=tile)
    qdata, scale = encode_tensors(x, block_dim, fmt)
    if square:
        other = -3 - (block_dim % x.ndim - x.ndim)
        scale = scale.repeat_interleave(BLOCK, other).narrow(other, 0, x.shape[other]).contiguous()
    return qdata, scale


def dequantize_tensors(qdata: Tensor, scale: Tensor, block_dim: int, dtype: torch.dtype) -> Tensor:
    """`decode_tensors` of MXFP8 with a scale for every row of a block."""
    return decode_tensors(qdata, scale, block_dim, Format(), dtype)


def pack(codes: Tensor, dim: int, elem: ElemType) -> Tensor:
    """Bytes of `elem.per_byte` codes each along `dim`, the first in the lowest bits; contiguous.

    Raises `FormatError` where the length along `dim` is not a multiple.
    """
    if reason := elem.unstorable(codes.shape[dim]):
        raise FormatError(reason)
    at = dim % codes.ndim
    parts = codes.unflatten(at, (codes.shape[at] // elem.per_byte, elem.per_byte)).unbind(at + 1)
    packed: Tensor = parts[0].clone(memory_format=torch.contiguous_format)
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (place * elem.bits)
    return packed


def unpack(packed: Tensor, dim: int, elem: ElemType) -> Tensor:
    """The codes that `pack` put into bytes, one a byte; contiguous."""
    at, mask = dim % packed.ndim, (1 << elem.bits) - 1
    parts = [(packed >> (place * elem.bits)) & mask for place in range(elem.per_byte)]
    codes: Tensor = torch.stack(parts, at + 1).flatten(at, at + 1)
    return codes


class Encoded(NamedTuple):
    """A weight as it is stored.

    elements: packed where the type has `packed`. scale_bytes: uint8. global_scale: G of two levels, FP32, of
    as many dimensions as the weight, all of size 1; None for other formats.
    """

    elements: Tensor
    scale_bytes: Tensor
    global_scale: Tensor | None = None


def encode_stored(x: Tensor, block_dim: int, form: Format, amax: Tensor | None = None) -> Encoded:
    """A weight as it is stored in `form`. amax: of two levels, where `x` is a part of the weight.

    Raises `FormatError` for a length that `ElemType.unstorable` refuses.
    """
    if form.two_level and amax is None:
        amax = tensor_amax(x)
    codes, scale = encode_tensors(x, block_dim, form, amax=amax)
    whole = None if amax is None else gain(amax, form).reshape([1] * x.ndim)
    elements = codes if form.elem.packed is None else pack(codes, block_dim, form.elem)
    return Encoded(elements, scale.view(torch.uint8), whole)


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


def as_fnuz(qdata: Tensor) -> Tensor:
    """Stored E4M3 or E5M2 as elements of half the value, in the types of AMD's MI300."""
    values = qdata.to(torch.float32)
    codes = torch.where(values == 0, 0, qdata.view(torch.uint8))
    return torch.where(values.isfinite(), codes, 0x80).view(FNUZ[qdata.dtype])


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
