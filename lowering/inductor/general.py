"""Inductor lowering of casts to any format: scales, elements over scales, and decoding.

    scale    E8M0 byte of amax, or FP32: amax / max            (formats.encoding)
    y        x · 2^(127 − byte), or x / scale; two levels: x · 1/(scale · 1/G)
    q        round(y) to the element type          value = round(y) · scale

FP32 quotients are rounded to nearest on every chip, so that elements are bit-identical to the reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import ops as inductor
from torch.utils._sympy.functions import FloorDiv

from mxcompile import ops
from mxcompile.formats import (
    BLOCK,
    FNUZ,
    AmaxKind,
    Copy,
    CopyPart,
    ElemType,
    Format,
    Rounding,
    ScaleLayout,
    ScaleType,
    Tile,
    elem_type,
)
from mxcompile.formats.encoding import extents
from mxcompile.lowering.cpu import casts as cpp
from mxcompile.lowering.inductor import casts, elements, stochastic, two_level
from mxcompile.lowering.inductor.blocks import Index, Load, ScaleBlocks, as_float, elementwise
from mxcompile.lowering.inductor.casts import inverse_scale_value, scale_byte, scale_value
from mxcompile.lowering.inductor.elements import f32
from mxcompile.lowering.inductor.tiling import tiled
from mxcompile.lowering.targets import of_device

_F32, _I32 = torch.float32, torch.int32
_VIEW = lowerings[torch.ops.aten.view.default]
_AS_IT_IS = fallback_handler(ops.cast, add_to_fallback_set=False)


def scales(x: ir.TensorBox, copy: Copy, amax: ir.TensorBox | None = None) -> ir.TensorBox:
    """Returns a scale for every tile of `x`. amax: amax of the tensor, for two levels."""
    form = copy.format
    if form.amax.kind is AmaxKind.PERCENTILE:  # torch sorts: a format for studies, not for speed
        name = str(Copy(format=form, dim=copy.dim, part=CopyPart.SCALES))
        (result,) = _AS_IT_IS(x, [name], None, 0, None, None if amax is None else [amax])
        return cast(ir.TensorBox, result)
    x.realize()
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


def fp32_scale_of(amax: Any, form: Format) -> Any:
    """Returns the FP32 scale of `amax`: `encoding.fp32_scale` in Inductor's operators."""
    if form.pow2:
        scale = scale_value(scale_byte(amax, form.elem, Rounding.RCEIL))
        return inductor.where(inductor.eq(amax, f32(0.0)), f32(1.0), scale)
    scale = elements.quotient(amax, f32(form.largest))
    scale = inductor.where(inductor.eq(scale, f32(0.0)), f32(1.0), scale)
    finite = inductor.lt(amax, f32(float("inf")))  # False for Inf and NaN
    return inductor.where(finite, scale, f32(float("nan")))


class Scaled:
    """Elements of `x` over its scales, for `copy`. seed, stream, amax: see `ops.cast`."""

    def __init__(
        self,
        x: ir.TensorBox,
        scale: ir.TensorBox,
        copy: Copy,
        seed: ir.TensorBox | None = None,
        stream: int = 0,
        amax: ir.TensorBox | None = None,
    ) -> None:
        x.realize()
        self._amax = amax
        self._copy, self.form = copy, copy.format
        self.blocks = ScaleBlocks(x, copy.dim, self.form.tile)
        self.target = of_device(x.get_device_or_error())
        self._load = as_float(x)
        self._scale = scale
        self._half = None if seed is None else stochastic.halves(self.blocks.shape, copy.dim, seed, stream)

    def factor(self, inverse: bool) -> Load:
        """Returns a loader of each block's FP32 factor or, with FP32 scales, divisor; `inverse` to encode."""
        if self.form.two_level and inverse:
            factors = two_level.encoding_factors(self.blocks, self._scale, self._amax, self.form)
        elif self.form.two_level:
            factors = two_level.decoding_factors(self.blocks, self._scale)
        elif self.form.rounding is None:
            return self._scale.make_loader()
        else:
            load, value = self._scale.make_loader(), inverse_scale_value if inverse else scale_value
            factors = self.blocks.per_block(_F32, lambda block: value(inductor.to_dtype(load(block), _I32)))
        if self.blocks.across_rows:
            factors.realize()
        return factors.make_loader()

    def rounded(self, index: Index, factor: Any) -> Any:
        """Returns the rounded element at `index`, in FP32."""
        value = self.blocks.guarded(index, lambda: self._load(index))
        divides = self.form.scale is ScaleType.FP32
        y = elements.quotient(value, factor) if divides else inductor.mul(value, factor)
        y = elements.clamped(y, self.form.elem.max)
        if self.form.amax.stateful:  # a delayed scale is finite even if x is not
            finite = inductor.lt(inductor.abs(value), f32(float("inf")))
            y = inductor.where(finite, y, f32(float("nan")))
        if self.form.stochastic:
            assert self._half is not None, f"a cast to {self.form} rounds stochastically: pass seed"
            return stochastic.rounded(y, self.form.elem, self._half(index))
        return elements.rounded(y, self.form.elem, self.target)

    def stored(self) -> ir.TensorBox:
        """Returns the stored elements."""
        factor, elem, target = self.factor(inverse=True), self.form.elem, self.target
        stored = self.blocks.pointwise(
            elements.stored_dtype(elem, target),
            lambda index, block: elements.store(self.rounded(index, factor(block)), elem, target),
        )
        return elements.as_fp8(stored, elem, target)

    def values(self) -> ir.TensorBox:
        """Returns the elements in the copy's dtype, times scales unless the copy has only elements."""
        dtype = self._copy.dtype
        assert dtype is not None, f"{self._copy} has no values"
        encode = self.factor(inverse=True)
        decode = self.factor(inverse=False) if self._copy.part is CopyPart.CODES else None

        def value(index: Index, block: Index) -> Any:
            element = self.rounded(index, encode(block))
            return inductor.to_dtype(inductor.mul(element, decode(block)) if decode else element, dtype)

        return self.blocks.pointwise(dtype, value)


@register_lowering(ops.decode, type_promotion_kind=None)
def lower_decode(
    qdata: ir.TensorBox,
    scale: ir.TensorBox | None,
    block_dim: int,
    fmt: str,
    dtype: torch.dtype,
    amax: ir.TensorBox | None = None,
    global_scale: ir.TensorBox | None = None,
) -> ir.TensorBox:
    """Lowers ``mx.decode``: elements times scales; without `scale`, the elements.

    dtype: also a FNUZ type, or uint8 for the codes of packed data.
    amax: amax of the tensor, for its FP32 scale. global_scale: divisor of a stored weight's values.
    """
    form = Format.parse(fmt)
    if dtype in FNUZ.values():
        return _as_fnuz(qdata)
    if scale is not None:
        values = cpp.decoded(qdata, scale, block_dim, form, dtype, global_scale) if amax is None else None
        if values is not None:
            return values
        if form.is_mx and form.tile == Tile.ROW:
            return casts.decoded(qdata, scale, block_dim, dtype)
    if form.packed:
        qdata = _unpacked(qdata, block_dim, form.elem)
        if dtype is torch.uint8:
            return qdata
        form = replace(form, tile=Tile(1, form.tile.along))  # a square tile has a scale for each row
    blocks, copy = ScaleBlocks(qdata, block_dim, form.tile), Copy(format=form, dim=block_dim)
    element = elements.loader(qdata, form.elem, of_device(blocks.device))
    times = None if scale is None else Scaled(qdata, scale, copy).factor(inverse=False)
    if times is not None and amax is not None:
        times = _multiplied(times, amax, form)
    if times is not None and global_scale is not None:
        times = _divided(times, global_scale)

    def value(index: Index, block: Index) -> Any:
        element_value = blocks.guarded(index, lambda: element(index))
        return inductor.to_dtype(inductor.mul(element_value, times(block)) if times else element_value, dtype)

    return blocks.pointwise(dtype, value)


def _multiplied(times: Load, amax: ir.TensorBox, form: Format) -> Load:
    """Returns a loader of each block's factor: `times`, multiplied by the FP32 scale that `amax` gives."""
    load = two_level.outer_loader(amax)
    return lambda block: inductor.mul(times(block), fp32_scale_of(load(block), form))


def _divided(times: Load, global_scale: ir.TensorBox) -> Load:
    """Returns a loader of each block's factor: `times`, divided by `global_scale`."""
    load = two_level.outer_loader(global_scale)
    return lambda block: elements.quotient(times(block), load(block))


def _unpacked(packed: ir.TensorBox, dim: int, elem: ElemType) -> ir.TensorBox:
    """Returns the codes of `packed`, one code per byte, along dimension `dim`."""
    load = packed.make_loader()
    shape = list(packed.get_size())
    at = dim % len(shape)

    def code(index: Index) -> Any:
        byte = inductor.to_dtype(load([*index[: at + 1], *index[at + 2 :]]), _I32)
        shift = inductor.index_expr(index[at + 1] * elem.bits, _I32)
        shifted = inductor.bitwise_right_shift(byte, shift)
        return inductor.to_dtype(
            inductor.bitwise_and(shifted, elements.i32((1 << elem.bits) - 1)), torch.uint8
        )

    ranges = [*shape[: at + 1], sympy.Integer(elem.per_byte), *shape[at + 1 :]]
    codes = elementwise(packed.get_device_or_error(), torch.uint8, code, ranges)
    if packed.get_device_or_error().type == "cpu":  # C++ loops must not divide an index (see `ScaleBlocks`)
        codes.realize()
    result: ir.TensorBox = _VIEW(codes, [*shape[:at], shape[at] * elem.per_byte, *shape[at + 1 :]])
    return result


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
        bits = inductor.bitwise_right_shift(inductor.to_dtype_bitcast(value, _I32, _F32), elements.i32(23))
        return inductor.to_dtype(inductor.bitwise_and(bits, elements.i32(0xFF)), torch.uint8)

    return elementwise(scale.get_device_or_error(), torch.uint8, byte, shape)


def _as_fnuz(qdata: ir.TensorBox) -> ir.TensorBox:
    """Returns OCP elements as FNUZ elements of half the value."""
    elem = elem_type(qdata.get_dtype())
    load = qdata.make_loader()

    def code(index: Index) -> Any:
        stored = load(index)
        bits = inductor.to_dtype(inductor.to_dtype_bitcast(stored, torch.uint8, elem.dtype), _I32)
        return elements.fnuz_code(inductor.to_dtype(stored, _F32), bits, elem)

    codes = elementwise(qdata.get_device_or_error(), torch.uint8, code, list(qdata.get_size()))
    codes.realize()
    codes.freeze_layout()  # contiguous like its fake tensor; else Inductor may take the layout of its input
    return elements.as_dtype(codes, FNUZ[elem.dtype])


def lower_largest(x: ir.TensorBox, dim: int | None = None) -> ir.TensorBox:
    """Lowers ``mx.largest``: the largest magnitude of a tensor, or of each row along `dim`."""
    x.realize()
    tile = Tile.TENSOR if dim is None else Tile.CHANNEL
    amax = ScaleBlocks(x, -1 if dim is None else dim, tile).amax(as_float(x))
    amax.realize()
    result: ir.TensorBox = _VIEW(amax, [1]) if dim is None else amax
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
