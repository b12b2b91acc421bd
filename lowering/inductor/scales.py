"""Inductor lowering of the scales of casts, of their factors for elements, and of their bytes.

scale    E8M0 byte: exponent arithmetic on the FP32 bits of amax        (numerics.scale_bytes)
         FP32: amax / max, or two levels                                (formats.encoding, formats.two_level)
factor   of a byte: 2^(127 − byte) to encode, 2^(byte − 127) to decode
         of an FP32 scale: the scale, by which a cast divides
"""

from __future__ import annotations

from typing import Any, cast

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering, view
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv

from mxcompile import ops
from mxcompile.formats import (
    BLOCK,
    SCALE_NAN,
    AmaxKind,
    Copy,
    CopyPart,
    ElemType,
    Format,
    Rounding,
    ScaleLayout,
    Tile,
)
from mxcompile.formats.encoding import extents
from mxcompile.formats.numerics import SMALLEST_NORMAL, added_to_amax
from mxcompile.lowering.inductor import elements, two_level
from mxcompile.lowering.inductor.blocks import Index, Load, ScaleBlocks, as_float, elementwise
from mxcompile.lowering.inductor.elements import f32, i32
from mxcompile.lowering.inductor.tiling import offset_of, tiled

_F32, _I32 = torch.float32, torch.int32
_AS_IT_IS = fallback_handler(ops.cast, add_to_fallback_set=False)


def scale_byte(amax: Any, elem: ElemType, mode: Rounding) -> Any:
    """Returns the scale byte of `amax`: `numerics.scale_bytes` in Inductor's operators."""
    bits = inductor.bitwise_and(inductor.to_dtype_bitcast(amax, _I32, _F32), i32(0x7FFFFFFF))
    mantissa = bits
    if elem.emax == 0:
        small = inductor.sub(inductor.add(bits, bits), i32(SMALLEST_NORMAL))
        mantissa = inductor.where(inductor.lt(bits, i32(SMALLEST_NORMAL)), small, bits)
    exponent = inductor.bitwise_right_shift(inductor.add(mantissa, i32(added_to_amax(elem, mode))), i32(23))
    byte = inductor.sub(exponent, i32(elem.emax))
    byte = inductor.minimum(inductor.maximum(byte, i32(0)), i32(254))
    return inductor.where(inductor.ge(bits, i32(0x7F800000)), i32(SCALE_NAN), byte)


def _power(byte: Any, bits: Any, edge: int) -> Any:
    """Returns the FP32 power of two with exponent field `bits`; 2^−127 for byte `edge`, NaN for 255."""
    bits = inductor.bitwise_left_shift(bits, i32(23))
    bits = inductor.where(inductor.eq(byte, i32(edge)), i32(0x00400000), bits)  # 2^−127 is subnormal
    bits = inductor.where(inductor.eq(byte, i32(SCALE_NAN)), i32(0x7FC00000), bits)  # the canonical NaN
    return inductor.to_dtype_bitcast(bits, _F32, _I32)


def scale_value(byte: Any) -> Any:
    """Returns 2^(byte − 127) in FP32, NaN for 255."""
    return _power(byte, byte, 0)


def inverse_scale_value(byte: Any) -> Any:
    """Returns 2^(127 − byte) in FP32, NaN for 255."""
    return _power(byte, inductor.sub(i32(254), byte), 254)


def fp32_scale_of(amax: Any, form: Format) -> Any:
    """Returns the FP32 scale of `amax`: `encoding.fp32_scale` in Inductor's operators."""
    if form.pow2:
        scale = scale_value(scale_byte(amax, form.elem, Rounding.RCEIL))
        return inductor.where(inductor.eq(amax, f32(0.0)), f32(1.0), scale)
    scale = elements.quotient(amax, f32(form.largest))
    scale = inductor.where(inductor.eq(scale, f32(0.0)), f32(1.0), scale)
    finite = inductor.lt(amax, f32(float("inf")))  # False for Inf and NaN
    return inductor.where(finite, scale, f32(float("nan")))


def scales(x: ir.TensorBox, copy: Copy, amax: ir.TensorBox | None = None) -> ir.TensorBox:
    """Returns a scale for every tile of `x`. amax: amax of the tensor, for two levels."""
    form = copy.format
    if form.amax.kind is AmaxKind.PERCENTILE:  # torch sorts: a format for studies, not for speed
        name = str(Copy(format=form, dim=copy.dim, part=CopyPart.SCALES))
        (result,) = _AS_IT_IS(x, [name], None, 0, None, None if amax is None else [amax])
        return cast(ir.TensorBox, result)
    x.realize()  # amax and elements both read it: without a buffer each would compute its producer
    blocks = ScaleBlocks(x, copy.dim, form.tile)
    largest = blocks.amax(as_float(x))
    largest.realize()
    load = largest.make_loader()
    if form.two_level:
        return two_level.scales(blocks, x, copy, load, amax)

    def scale(block: Index) -> Any:
        if form.rounding is not None:
            return inductor.to_dtype(scale_byte(load(block), form.elem, form.rounding), torch.uint8)
        return fp32_scale_of(load(block), form)

    per_block = blocks.per_block(form.scale.dtype, scale)
    per_block.realize()
    return per_block


def encoding_factors(
    blocks: ScaleBlocks, scale: ir.TensorBox, form: Format, amax: ir.TensorBox | None
) -> Load:
    """Returns a loader of each block's FP32 factor or, with FP32 scales, divisor. amax: see `scales`."""
    if form.two_level:
        return _loaded(blocks, two_level.encoding_factors(blocks, scale, amax, form))
    return _factors(blocks, scale, form, inverse=True)


def decoding_factors(blocks: ScaleBlocks, scale: ir.TensorBox, form: Format) -> Load:
    """Returns a loader of each block's FP32 factor. scale: bytes may be tiled."""
    if form.two_level:
        return _loaded(blocks, two_level.decoding_factors(blocks, scale))
    return _factors(blocks, scale, form, inverse=False)


def _factors(blocks: ScaleBlocks, scale: ir.TensorBox, form: Format, *, inverse: bool) -> Load:
    if form.rounding is None:
        return scale.make_loader()
    load, value = scale.make_loader(), inverse_scale_value if inverse else scale_value
    is_tiled = len(scale.get_size()) < len(blocks.shape)

    def factor(block: Index) -> Any:
        if is_tiled:
            row, column = block if blocks.dims == [1] else reversed(block)
            block = [offset_of(row, column, blocks.scale_shape[blocks.dims[0]])]
        return value(inductor.to_dtype(load(block), _I32))

    return _loaded(blocks, blocks.per_block(_F32, factor))


def _loaded(blocks: ScaleBlocks, factors: ir.TensorBox) -> Load:
    if blocks.device.type == "cpu" and blocks.extents[-1] == 1:
        factors.realize()  # each column has a factor: loading it is faster than computing it
    return factors.make_loader()


@register_lowering(ops.scale_bytes, type_promotion_kind=None)
def lower_scale_bytes(
    scale: ir.TensorBox, qdata: ir.TensorBox, block_dim: int, fmt: str, scale_layout: str
) -> ir.TensorBox:
    """Lowers ``mx.scale_bytes``: scales as a byte per block of each row. qdata: gives the shape."""
    form = Format.parse(fmt)
    result = scale if form.packed else _block_bytes(scale, list(qdata.get_size()), block_dim, form)
    return result if scale_layout == ScaleLayout.ROW_MAJOR else tiled(result, block_dim)


def _block_bytes(scale: ir.TensorBox, shape: list[Any], block_dim: int, form: Format) -> ir.TensorBox:
    """Returns power-of-two scales of a tensor of `shape` as a byte per block of 32."""
    load = scale.make_loader()
    every, dim = extents(len(shape), block_dim, form.tile), block_dim % len(shape)
    shape[dim], every[dim] = FloorDiv(shape[dim] + (BLOCK - 1), BLOCK), every[dim] // BLOCK

    def byte(index: Index) -> Any:
        value = load([FloorDiv(position, extent) for position, extent in zip(index, every, strict=True)])
        if form.rounding is not None:
            return value
        bits = inductor.bitwise_right_shift(inductor.to_dtype_bitcast(value, _I32, _F32), i32(23))
        return inductor.to_dtype(inductor.bitwise_and(bits, i32(0xFF)), torch.uint8)

    return elementwise(scale.get_device_or_error(), torch.uint8, byte, shape)


def lower_largest(x: ir.TensorBox, dim: int | None = None) -> ir.TensorBox:
    """Lowers ``mx.largest``: the largest magnitude of a tensor, or of each row along `dim`."""
    x.realize()
    tile = Tile.TENSOR if dim is None else Tile.CHANNEL
    amax = ScaleBlocks(x, -1 if dim is None else dim, tile).amax(as_float(x))
    amax.realize()
    result: ir.TensorBox = view(amax, [1]) if dim is None else amax
    return result


@register_lowering(ops.known_scale, type_promotion_kind=None)
def lower_known_scale(state: ir.TensorBox, row: int, fmt: str, ndim: int) -> ir.TensorBox:
    """Lowers ``mx.known_scale``: the scale for the amax in row `row` of `state`."""
    form, load = Format.parse(fmt), state.make_loader()
    margin = 2.0**form.amax.margin if form.amax.kind is AmaxKind.DELAYED else 1.0
    sizes = list(state.get_size()[1:])
    ones = ndim - len(sizes)

    def scale(index: Index) -> Any:
        amax = inductor.mul(load([sympy.Integer(row), *index[ones:]]), f32(margin))
        return fp32_scale_of(amax, form)

    result = elementwise(state.get_device_or_error(), _F32, scale, [sympy.S.One] * ones + sizes)
    result.realize()
    return result


@register_lowering(ops.flatten, type_promotion_kind=None)
def lower_flatten(x: ir.TensorBox) -> ir.TensorBox:
    """Lowers ``mx.flatten``: stores `x` and returns a view. For other views Inductor would compare sizes."""
    x.realize()
    whole: ir.TensorBox = view(x, [sympy.prod(x.get_size())])
    return whole
