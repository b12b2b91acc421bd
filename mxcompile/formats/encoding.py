"""Casts to every format in plain torch operations. Every kernel returns the same bits.

    scale    E8M0: see `numerics`.
             FP32: amax / max, 1 if that is 0, NaN if amax is not finite. As a power of two: the E8M0 scale
             under RCEIL, 1 if amax is 0.
             Two levels: see `two_level`.
    element  E8M0: RNE(x · 2^(127 − byte)).  FP32: RNE(x / scale).  Two levels: RNE(x · 1/(scale · 1/G)).
             All saturate to ±max. Stochastic rounding may replace RNE (see `stochastic`).
    value    element · scale, in FP32. Two levels: element · (scale · (amax of the tensor or row / (bound ·
             max))), or for a stored weight element · (scale / G), because G is stored.

max is the largest element, RNE rounds to nearest even. A percentile may replace the amax of a tile (see
`amax`). A tile with NaN or Inf has a NaN scale. Under a scale of earlier calls only the elements that are not
finite become NaN; codes have no NaN, so `Format` refuses codes there. Only tiles of the whole tensor span
dimensions before the last two. Sources wider than FP32 are rounded to FP32 first. Stored weights have two
4-bit codes per byte, the first in the low half, as in `torch.float4_e2m1fn_x2`.

Source: OCP Microscaling Formats v1.0 §5.3 and §6.3.
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
from mxcompile.formats.elements import FNUZ, ElemType
from mxcompile.formats.numerics import inverse_scale_value, scale_bytes, scale_value
from mxcompile.formats.two_level import better, e4m3_scale, gain, inverse_e4m3_scale, tile_error
from mxcompile.formats.types import WHOLE, Format, Rounding, Tile


def extents(ndim: int, block_dim: int, tile: Tile) -> list[int]:
    """Returns for each dimension how many elements along it share a scale; `WHOLE` means all."""
    dim = block_dim % ndim
    sizes = [WHOLE if tile == Tile.TENSOR else 1] * ndim
    sizes[dim] = tile.along
    if ndim > 1:
        sizes[ndim - 2 if dim == ndim - 1 else ndim - 1] = tile.across
    return sizes


def scale_shape(shape: Sequence[Any], block_dim: int, tile: Tile) -> list[Any]:
    """Returns the shape of the scales of a tensor of `shape`; sizes may be symbolic."""
    every = extents(len(shape), block_dim, tile)
    return [
        1 if extent == WHOLE else (size + extent - 1) // extent
        for size, extent in zip(shape, every, strict=True)
    ]


def _tiled(x: Tensor, every: Sequence[int]) -> Tensor:
    """Splits each dimension of `x` in two: tiles, and elements of a tile. Pads the last tiles with zeros."""
    pads: list[int] = []
    sizes: list[int] = []
    for size, extent in zip(x.shape, every, strict=True):
        length = extent or max(size, 1)
        count = 1 if extent == WHOLE else -(-size // length)
        sizes += [count, length]
        pads = [0, count * length - size, *pads]
    return (F.pad(x, pads) if any(pads) else x).reshape(sizes)


def _whole(tiles: Tensor, shape: Sequence[int]) -> Tensor:
    """Joins the dimensions that `_tiled` has split, and removes its padding."""
    sizes = [tiles.shape[2 * dim] * tiles.shape[2 * dim + 1] for dim in range(len(shape))]
    joined = tiles.reshape(sizes)
    for dim, size in enumerate(shape):
        joined = joined.narrow(dim, 0, size)
    return joined.contiguous()


def _spread(scale: Tensor) -> Tensor:
    """Inserts a dimension of 1 after each dimension of `scale`, to broadcast it over `_tiled` elements."""
    return scale.reshape([size for length in scale.shape for size in (length, 1)])


def fp32_scale(amax: Tensor, fmt: Format) -> Tensor:
    """Returns FP32 scales, or powers of two, for the FP32 maxima `amax`: 1 for 0, NaN if not finite."""
    if fmt.pow2:
        scale = scale_value(scale_bytes(amax, fmt.elem, Rounding.RCEIL))
        return torch.where(amax == 0, 1.0, scale)
    scale = amax / fmt.largest
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def tensor_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Returns the largest magnitude of `x`, FP32 [1]; with `dim`, the largest of each row, and size 1 there.

    The magnitude is 0 if there are no elements.
    """
    size = [1] if dim is None else scale_shape(x.shape, dim, Tile.CHANNEL)
    dims = list(range(x.ndim)) if dim is None else [dim]
    if not x.numel():
        return x.new_zeros(size, dtype=torch.float32)
    return x.to(torch.float32).abs().amax(dims).reshape(size)


def outer_amax(x: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """Returns the amax of the tensor, or of its rows, from which the FP32 scales of two levels follow."""
    return tensor_amax(x, block_dim if fmt.row_scaled else None)


def scale_factors(
    scale: Tensor, fmt: Format, amax: Tensor | None = None, global_scale: Tensor | None = None
) -> Tensor:
    """Returns the FP32 factors by which decoding multiplies elements with scales `scale`.

    amax: `outer_amax`, for two-level formats. global_scale: G of a stored two-level weight, FP32, broadcast
    to `scale`. Without both, two-level factors are not multiplied by the outer scale.
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
    """Returns elements (shape of `x`) and scales (`scale_shape`) of `x` for a contraction along `block_dim`.

    seed: int64 [1], 0 to 2^32 − 1, for stochastic elements. stream: number of the cast among the casts with
    this seed. scale: replaces the scales derived from `x`. amax: `outer_amax`, for two-level formats. Raises
    `FormatError` if the format needs a seed or an amax and has none.
    """
    tiles = _tiles(x, block_dim, fmt)
    scale = _scales(tiles, x, block_dim, fmt, amax) if scale is None else scale.clone()
    return _elements(tiles, x.shape, scale, block_dim, fmt, seed, stream, amax), scale


def scales_of(x: Tensor, block_dim: int, fmt: Format, amax: Tensor | None = None) -> Tensor:
    """Returns the scales of `x` for a contraction along `block_dim`. amax: see `encode_tensors`."""
    return _scales(_tiles(x, block_dim, fmt), x, block_dim, fmt, amax)


def _tiles(x: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """Splits `x`, in FP32, into the tiles of `fmt`."""
    return _tiled(x.to(torch.float32), extents(x.ndim, block_dim, fmt.tile))


def _scales(tiles: Tensor, x: Tensor, block_dim: int, fmt: Format, amax: Tensor | None) -> Tensor:
    """Returns the scales of `x`. tiles: `x`, split by `_tiles`."""
    inside = list(range(1, tiles.ndim, 2))
    tile_amax = tiles.abs().amax(inside)
    if fmt.amax.kind is AmaxKind.PERCENTILE:
        reached = _percentile(x, block_dim, fmt)
        tile_amax = torch.where(tile_amax.isfinite(), reached, tile_amax)
    if fmt.two_level:
        return _two_level_scale(tiles, tile_amax, _required_amax(amax, fmt), block_dim, fmt)
    if fmt.rounding is not None:
        return scale_bytes(tile_amax, fmt.elem, fmt.rounding).to(torch.uint8)
    return fp32_scale(tile_amax, fmt)


def _two_level_scale(tiles: Tensor, tile_amax: Tensor, amax: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """Returns the E4M3 scales of `tiles`, whose maxima are `tile_amax`. amax: `outer_amax`."""
    if fmt.four_over_six is None:
        return e4m3_scale(tile_amax, amax, fmt)
    ndim = tiles.ndim // 2
    dim = block_dim % ndim
    across = dim if ndim == 1 else ndim - 2 if dim == ndim - 1 else ndim - 1
    outer = _spread(amax)
    divisor = torch.full_like(outer, fmt.largest)  # a tensor: CUDA divides by a number via its reciprocal

    def error(scale: Tensor) -> Tensor:
        over = tiles * _spread(inverse_e4m3_scale(scale, amax, fmt))
        elements = to_elements(over.clamp(-fmt.elem.max, fmt.elem.max), fmt.elem)
        values = element_values(elements, fmt.elem) * _spread(scale.to(torch.float32)) * outer / divisor
        return tile_error(tiles, values, fmt, 2 * dim + 1, 2 * across + 1).reshape(scale.shape)

    return better(tile_amax, amax, fmt, error)


def _required_amax(amax: Tensor | None, fmt: Format) -> Tensor:
    if amax is None:
        raise FormatError(f"a cast to {fmt} needs the largest magnitude of the tensor: pass amax")
    return amax


def _percentile(x: Tensor, block_dim: int, fmt: Format) -> Tensor:
    """Returns for each tile the smallest magnitude that `fmt.amax.value` % of its elements do not exceed."""
    every = extents(x.ndim, block_dim, fmt.tile)
    magnitudes = _tiled(x.to(torch.float32).abs(), every)
    is_element = _tiled(torch.ones_like(x, dtype=torch.bool), every)  # False for padding
    outer, inside = list(range(0, magnitudes.ndim, 2)), list(range(1, magnitudes.ndim, 2))
    shape = [magnitudes.shape[dim] for dim in outer]
    rows = magnitudes.masked_fill(~is_element, -1.0).permute(*outer, *inside).flatten(len(shape))
    counts = is_element.permute(*outer, *inside).flatten(len(shape)).sum(-1)
    if rows.numel() == 0:
        return torch.zeros(shape, device=x.device)
    rank = (counts.to(torch.float64) * (fmt.amax.value / 100)).ceil().to(torch.int64).clamp(min=1)
    index = (rows.shape[-1] - counts + rank - 1).clamp(0, rows.shape[-1] - 1)
    return rows.sort(-1).values.gather(-1, index.unsqueeze(-1)).squeeze(-1).clamp(min=0.0)


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
    """Returns the elements of a tensor of `shape` that `_tiles` has split into `tiles`."""
    if fmt.two_level:
        over = tiles * _spread(inverse_e4m3_scale(scale, _required_amax(amax, fmt), fmt))
    elif fmt.rounding is not None:
        over = tiles * _spread(inverse_scale_value(scale.to(torch.int32)))
    else:
        over = tiles / _spread(scale)
    if fmt.amax.stateful:
        over = torch.where(tiles.isfinite(), over, torch.nan)
    y = _whole(over.clamp(-fmt.elem.max, fmt.elem.max), shape)
    if fmt.stochastic:
        if seed is None:
            raise FormatError(f"a cast to {fmt} rounds stochastically: pass seed")
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


def pack(codes: Tensor, dim: int, elem: ElemType) -> Tensor:
    """Packs `elem.per_byte` codes into each byte, along `dim`, the first in the lowest bits; contiguous.

    Raises `FormatError` if the length along `dim` is not a multiple of `elem.per_byte`.
    """
    if reason := elem.unstorable(codes.shape[dim]):
        raise FormatError(reason)
    at = dim % codes.ndim
    parts = codes.unflatten(at, (codes.shape[at] // elem.per_byte, elem.per_byte)).unbind(at + 1)
    packed: Tensor = parts[0].clone(memory_format=torch.contiguous_format)
    for index, part in enumerate(parts[1:], 1):
        packed |= part << (index * elem.bits)
    return packed


def unpack(packed: Tensor, dim: int, elem: ElemType) -> Tensor:
    """Returns the codes that `pack` has packed, one per byte; contiguous."""
    at, mask = dim % packed.ndim, (1 << elem.bits) - 1
    parts = [(packed >> (index * elem.bits)) & mask for index in range(elem.per_byte)]
    codes: Tensor = torch.stack(parts, at + 1).flatten(at, at + 1)
    return codes


class Encoded(NamedTuple):
    """The tensors of a stored weight.

    elements: elements, packed if the type has `packed`. scale_bytes: scales, FP32 or as uint8.
    global_scale: G of two levels, FP32, with the rank of the weight and all sizes 1; None for other formats.
    """

    elements: Tensor
    scale_bytes: Tensor
    global_scale: Tensor | None = None


def encode_stored(x: Tensor, block_dim: int, form: Format, amax: Tensor | None = None) -> Encoded:
    """Returns the tensors of the weight `x`, stored in `form`.

    amax: amax of the weight if `x` is a part of it, for two levels. Raises `FormatError` for a length for
    which `ElemType.unstorable` returns a reason.
    """
    if form.two_level and amax is None:
        amax = tensor_amax(x)
    codes, scale = encode_tensors(x, block_dim, form, amax=amax)
    whole = None if amax is None else gain(amax, form).reshape([1] * x.ndim)
    elements = codes if form.elem.packed is None else pack(codes, block_dim, form.elem)
    return Encoded(elements, scale if scale.itemsize > 1 else scale.view(torch.uint8), whole)


def to_elements(y: Tensor, elem: ElemType) -> Tensor:
    """Rounds `y` (FP32, |y| ≤ max or NaN) to elements, to nearest even; codes have no NaN: it becomes 0."""
    if not elem.is_coded:
        return y.to(elem.dtype)
    if elem.is_integer:
        return torch.round(y / elem.step).nan_to_num(0.0).to(elem.dtype)
    magnitude = y.abs().nan_to_num(0.0)
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=elem.min_exponent)  # subnormals
    ulp = ((exponent - elem.mantissa_bits + 127) << 23).view(torch.float32)  # a power of two, by its bits
    steps = torch.round(magnitude / ulp).to(torch.int32)  # to even; up to 2^(mantissa_bits + 1)
    field = exponent - elem.min_exponent
    code = (field << elem.mantissa_bits) + steps  # the leading bit of a normal adds 1 to the exponent field
    code = code | (y.signbit().to(torch.int32) << (elem.bits - 1))
    return torch.where(y.isnan(), 0, code).to(elem.dtype)


def as_fnuz(qdata: Tensor) -> Tensor:
    """Returns the bits of E4M3 or E5M2 in MI300's types, which halves values; −0 → 0, Inf and NaN → NaN."""
    values = qdata.to(torch.float32)
    codes = torch.where(values == 0, 0, qdata.view(torch.uint8))
    return torch.where(values.isfinite(), codes, 0x80).view(FNUZ[qdata.dtype])


def element_values(qdata: Tensor, elem: ElemType) -> Tensor:
    """Returns the FP32 values of elements or codes."""
    if not elem.is_coded:
        return qdata.to(torch.float32)
    if elem.is_integer:
        return qdata.to(torch.float32) * elem.step
    return _values(elem).to(qdata.device)[qdata.to(torch.int64)]


@functools.cache
def _values(elem: ElemType) -> Tensor:
    """Returns the FP32 value of every code, [2^bits]."""
    mantissas, fields = 1 << elem.mantissa_bits, 1 << (elem.bits - 1 - elem.mantissa_bits)
    positive = [
        (mantissa + mantissas * (field > 0)) * 2.0 ** (max(field, 1) - 1) * elem.step
        for field in range(fields)
        for mantissa in range(mantissas)
    ]
    return torch.tensor(positive + [-value for value in positive])
